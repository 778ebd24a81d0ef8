"""What git's words mean: its exit status does not tell one failure from another.

They are those of LC_ALL=C, which hardly change from version to version. A line that begins
with `remote:` is another machine's, and says nothing of this one.
"""

from __future__ import annotations

import re

_STARVED = "out of memory|cannot allocate memory|unable to create thread"
_STARVED_ANYWHERE = re.compile(_STARVED, re.IGNORECASE)
_STARVED_HERE = re.compile(rf"^(?!remote:).*({_STARVED})", re.IGNORECASE | re.MULTILINE)
_HINDERED = re.compile(
    "^(?!remote:).*(no space left on device|disk quota exceeded|read-only file system|"
    "too many open files|input/output error)",
    re.IGNORECASE | re.MULTILINE,
)
_SIGBUS, _SIGKILL = 7, 9  # the first where a disk fails whose files are mapped
_KILLED = re.compile("^(?!remote:).*died of signal [79]$", re.MULTILINE)
# Git does not tell how the program ended that takes a pack; it is silent if it was killed.
_SILENTLY = re.compile("(remote:.*\n)*fatal: fetch-pack: invalid index-pack output")
_NOT_OFFERED = re.compile(
    "does not allow request for unadvertised object|find remote ref|dumb http transport|"
    "does not support shallow"
)
_NOT_THERE = re.compile("not our ref|want [0-9a-f]{40} not valid|missing object referenced")
_DAMAGED = re.compile(
    r"^(?!remote:).*(corrupt(?!ion on the remote)|unable to read|could not read [0-9a-f]{40}|"
    r"failed to unpack tree|not a tree object|bad (tree|commit) object|not a git repository|"
    r"bad config|does not match index|far too short|is too small|necessary objects|inflate)",
    re.IGNORECASE | re.MULTILINE,
)


def is_not_offered(stderr: str) -> bool:
    """Tell whether a server has a commit, or may have it, but does not hand it out."""
    return _NOT_OFFERED.search(stderr) is not None


def is_not_there(stderr: str) -> bool:
    """Tell whether a server would hand out any commit, but has no such one."""
    return _NOT_THERE.search(stderr) is not None


def is_damage(stderr: str) -> bool:
    """Tell whether something is damaged or missing in the repository on this disk.

    Of its own accord nothing is; but disks fail, and people tidy up.
    """
    return _DAMAGED.search(stderr) is not None


def hindrance(stderr: str) -> str | None:
    """Return the error of this machine's disk in the words of strerror(3); None without one."""
    found = _HINDERED.search(stderr)
    return found and found[1]


def was_killed(status: int, stderr: str) -> bool:
    """Tell whether the kernel killed git, or what git has started: for want of memory or a disk.

    `status` is negative after a signal, and 128 + its number from a shell or a sandbox.
    """
    if any(status in (-number, 128 + number) for number in (_SIGBUS, _SIGKILL)):
        return True
    return bool(_KILLED.search(stderr) or _SILENTLY.fullmatch(stderr))


def is_starved(stderr: str, *, serving: bool) -> bool:
    """Tell whether git got no more memory.

    `serving` is for one that has served the repository to itself: what a remote says is its own.
    """
    return (_STARVED_ANYWHERE if serving else _STARVED_HERE).search(stderr) is not None
