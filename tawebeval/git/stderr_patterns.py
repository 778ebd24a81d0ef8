"""Classification of git's stderr, since its exit status does not tell failures apart.

The patterns are the messages of LC_ALL=C, which hardly change from version to version. A line that
begins with `remote:` was written by the server, and tells nothing about this machine.

Of each function the parameter `stderr` is what git printed, already decoded; `status` is the exit
status of `command.GitResult`.
"""

from __future__ import annotations

import re
from urllib.parse import urljoin

_EXCERPT = 300  # characters of git's reason
_UNKNOWN_OR_PRIVATE = (
    "the repository does not exist, or needs credentials; check repository[url], or ask the"
    " operator (repositories.credentials)"
)
# What people read, by the first pattern in the lines that git, curl and ssh of this machine print.
_EXPLANATIONS = {
    # GitHub and GitLab ask for credentials for a repository that does not exist.
    # Few beginnings in a line: the server may print many.
    r"could not read Username|Authentication failed|(?m:^.{0,40}repository .*not found)|"
    r"Permission denied \(": _UNKNOWN_OR_PRIVATE,
    "returned error: (401|403|404|410|451)": (
        "the git server refuses access (HTTP status {}); check repository[url], or ask the operator"
        " (repositories.credentials)"
    ),
    r"returned error: (429|5\d\d)": (
        "the git server cannot answer now (HTTP status {}); try again later"
    ),
    "not valid: is this a git repository|invalid server response|bad line length": (
        "repository[url] leads to a web page or another service, not to a git repository; use the"
        " URL for `git clone`"
    ),
    "does not appear to be a git repository|repository not exported": (
        "there is no git repository at the path of repository[url]; check the path"
    ),
    "illegal format|malformed input to a URL": (
        "repository[url] has characters that a URL has to escape: write %20 for a blank"
    ),
    "mismatched algorithms|unsupported hash algorithm": (
        "the repository has SHA-256 OIDs, which are not supported; use one with SHA-1 OIDs (`git"
        " init --object-format=sha1`)"
    ),
    "does not match target host|no alternative certificate subject name": (
        "the TLS certificate of the git server is for another host; check the host of"
        " repository[url]"
    ),
    "certificate (?:verification failed|problem|signer)|server verification failed": (
        "the TLS certificate of the git server is expired or not trusted; renew it, or ask the"
        " operator to install its authority (`update-ca-certificates`)"
    ),
    "gnutls_handshake|gnutls, handshake failed|wrong version number|SSL_connect|SSL routines": (
        "the git server does not speak TLS at this port; check protocol and port of repository[url]"
    ),
    "(connection refused|could(?:n't| not) connect to server|network is unreachable|"
    "no route to host|connection timed out|could not resolve host)": (
        "cannot connect to the git server ({}); check host and port of repository[url], or try"
        " again later"
    ),
    "host key verification failed": (
        "the ssh key of the git server is not in the operator's known_hosts_file"
        " (repositories.credentials)"
    ),
    r"object [0-9a-f]{40}: (\w+: .{0,200})": (
        "git refuses a malformed object of the repository ({}); find it by `git fsck` in a clone"
    ),
}
_REDIRECT = re.compile(r"^(?!remote:).*returned error: 30[12378]$", re.MULTILINE)
_LOCATION = re.compile(r"<= Recv header: location: (\S{1,1000})", re.IGNORECASE)
_WEB_URL = re.compile(r"https?://[!-?A-~]{1,300}")  # of printable characters, without user name
_REMOTE = re.compile("^remote:.*\n?", re.MULTILINE)
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
    own = _REMOTE.sub("", stderr)
    for pattern, words in _EXPLANATIONS.items():
        if found := re.search(pattern, own, re.IGNORECASE):
            return words.format(*found.groups())
    found = _FATAL.search(stderr)
    reason = f": {found[1][:_EXCERPT]}" if found else "; see stderr"
    return f"git could not fetch the repository{reason}"


def is_redirect(stderr: str) -> bool:
    """Tell whether the server of the repository answered with a redirect, which git reports."""
    return _REDIRECT.search(stderr) is not None


def explain_redirect(url: str, trace: str) -> str:
    """Return the message about a redirect of the repository's URL.

    `trace` is stderr with GIT_CURL_VERBOSE, which has the new URL.
    """
    found = _LOCATION.search(trace)
    try:
        location = urljoin(f"{url.rstrip('/')}/info/refs", found[1]) if found else ""
    except ValueError:  # of an IPv6 address
        location = ""
    target = location.partition("?")[0]
    moved = target.removesuffix("/info/refs")
    if not _WEB_URL.fullmatch(target):
        return "the repository has moved, and redirects are not followed; use its new URL"
    if moved != target:
        return f"the repository has moved to {moved}; use this URL in repository[url]"
    return f"the git server redirects to {target}: {_UNKNOWN_OR_PRIVATE}"


def is_server_of_files(stderr: str) -> bool:
    """Tell whether the server is not one of git, but sends files as they are."""
    return "dumb http transport" in stderr


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
