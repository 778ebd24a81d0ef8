"""Classification of git's stderr, since its exit status does not tell failures apart.

The patterns are the messages of LC_ALL=C, which hardly change from version to version. A line that
begins with `remote:` was written by the server, and tells nothing about this machine.

Of each function the parameter `stderr` is what git printed, already decoded; `status` is the exit
status of `command.GitResult`.
"""

from __future__ import annotations

import re

_EXCERPT = 300  # characters of git's reason
# GitHub and GitLab ask for credentials for a repository that does not exist.
_UNAUTHORIZED = re.compile(
    r"could not read Username|Authentication failed|repository .* not found|"
    r"Permission denied \("
)
_FATAL = re.compile("^(?:fatal|error): (.+)$", re.MULTILINE)
_OUT_OF_MEMORY = "out of memory|cannot allocate memory|unable to create thread"
_OUT_OF_MEMORY_ANYWHERE = re.compile(_OUT_OF_MEMORY, re.IGNORECASE)
_OUT_OF_MEMORY_HERE = re.compile(rf"^(?!remote:).*({_OUT_OF_MEMORY})", re.IGNORECASE | re.MULTILINE)
_DISK_ERROR = re.compile(
    "^(?!remote:).*(no space left on device|disk quota exceeded|read-only file system|"
    "too many open files|input/output error)",
    re.IGNORECASE | re.MULTILINE,
)
_SIGBUS, _SIGKILL = 7, 9  # the first where a disk fails whose files are mapped
_CHILD_KILLED = re.compile("^(?!remote:).*died of signal [79]$", re.MULTILINE)
# git does not report how index-pack(1) ended; if it was killed nothing else is printed.
_PACK_READER_KILLED = re.compile("(remote:.*\n)*fatal: fetch-pack: invalid index-pack output")
_UNADVERTISED = re.compile(
    "does not allow request for unadvertised object|find remote ref|dumb http transport|"
    "does not support shallow"
)
_MISSING = re.compile("not our ref|want [0-9a-f]{40} not valid|missing object referenced")
_CORRUPT = re.compile(
    r"^(?!remote:).*(corrupt(?!ion on the remote)|unable to read|could not read [0-9a-f]{40}|"
    r"failed to unpack tree|not a tree object|bad (tree|commit) object|not a git repository|"
    r"bad config|does not match index|far too short|is too small|necessary objects|inflate)",
    re.IGNORECASE | re.MULTILINE,
)


def explain_fetch_failure(stderr: str) -> str:
    """Return the message about a failed fetch, with git's reason."""
    if _UNAUTHORIZED.search(stderr):
        return (
            "the repository does not exist, or needs credentials; check repository[url], or ask the"
            " operator (repositories.credentials)"
        )
    found = _FATAL.search(stderr)
    reason = f": {found[1][:_EXCERPT]}" if found else "; see stderr"
    return f"git could not fetch the repository{reason}"


def is_commit_unadvertised(stderr: str) -> bool:
    """Tell whether the server refused the commit, which it may have, by this way to ask for it."""
    return _UNADVERTISED.search(stderr) is not None


def is_commit_missing(stderr: str) -> bool:
    """Tell whether the server hands out any commit by its OID, and does not have this one."""
    return _MISSING.search(stderr) is not None


def is_repository_corrupt(stderr: str) -> bool:
    """Tell whether the repository on this disk is damaged or incomplete.

    The daemon does not leave it so; but disks fail, and people remove files.
    """
    return _CORRUPT.search(stderr) is not None


def find_disk_error(stderr: str) -> str | None:
    """Return the error of this machine's disk, as strerror(3) words it; None without one."""
    found = _DISK_ERROR.search(stderr)
    return found and found[1]


def is_git_killed_by_kernel(status: int, stderr: str) -> bool:
    """Tell whether the kernel killed git, or a child of git, for want of memory or a failing disk.

    `status` is negative after a signal, and 128 + the signal's number if a shell or a sandbox
    reported it.
    """
    if any(status in (-number, 128 + number) for number in (_SIGBUS, _SIGKILL)):
        return True
    return bool(_CHILD_KILLED.search(stderr) or _PACK_READER_KILLED.fullmatch(stderr))


def is_git_memory_exhausted(stderr: str, *, serving: bool) -> bool:
    """Tell whether git got no more memory.

    `serving`: git served a repository of this machine to itself, so `remote:` lines are its own.
    """
    return (_OUT_OF_MEMORY_ANYWHERE if serving else _OUT_OF_MEMORY_HERE).search(stderr) is not None
