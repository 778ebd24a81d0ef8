"""The message about an evaluator's bad exit, with a hint for its author."""

from __future__ import annotations

import re
import signal

from tawebeval.config import LimitSettings
from tawebeval.errors import format_size
from tawebeval.sandbox.base import EvaluatorExit

# What programs and libraries write to stderr, in any language's runtime.
_NETWORK = re.compile(
    "name or service not known|name resolution|could not resolve|network is unreachable|"
    "no address associated with hostname|eai_again|getaddrinfo|unknownhostexception|no such host",
    re.IGNORECASE,
)
_MEMORY = re.compile(
    r"memoryerror|bad_alloc|outofmemoryerror|out of memory|cannot allocate memory|^killed$"
    r"|: killed",
    re.IGNORECASE | re.MULTILINE,
)
_PROCESSES = re.compile(
    "can't start new thread|cannot fork|fork: |unable to create thread", re.IGNORECASE
)
_FILES = re.compile("too many open files", re.IGNORECASE)
_DISK = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)
_DENIED = re.compile("permission denied", re.IGNORECASE)
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127  # exit statuses of shells


def explain_exit(
    end: EvaluatorExit,
    stderr: str,
    limits: LimitSettings,
    *,
    has_network: bool,
    has_output: bool,
    has_misplaced_marker: bool = False,
) -> str:
    """Return the message about a bad exit. `stderr` is the last part of stderr."""
    if end.signal is not None:
        name = signal.strsignal(end.signal)
        message = f"the evaluator was ended by signal {end.signal} ({name})"
    else:
        message = f"the evaluator exited with status {end.status}"
    if has_misplaced_marker:
        message += f"; {MISPLACED_MARKER}"
    hint = _find_hint(end, stderr, limits, has_network)
    if hint:
        return f"{message}; {hint}"
    return message if has_output else f"{message}; it printed nothing"


MISPLACED_MARKER = (
    "a begin marker was taken for text, as it does not stand alone on its line: print a newline"
    " before it and after it"
)
"""The hint about a begin marker in the middle of a line."""


def _find_hint(end: EvaluatorExit, stderr: str, limits: LimitSettings, has_network: bool) -> str:
    """Return the likely reason of a bad exit and its remedy; "" if none is known."""
    if end.status == _CANNOT_EXECUTE and _DENIED.search(stderr):
        return (
            "permission denied: run `chmod +x FILE`, or `git update-index --chmod=+x FILE`, and"
            " commit"
        )
    if end.status == _NOT_FOUND:
        return "a command was not found: check its path, or ask the operator to install it"
    if not has_network and _NETWORK.search(stderr):
        return "the sandbox has no network (sandbox.network)"
    if end.signal == signal.SIGKILL or _MEMORY.search(stderr):
        return f"if memory ran out: the limit is {format_size(limits.memory)} (limits.memory)"
    if end.signal == signal.SIGXFSZ:
        return f"the limit of a file is {format_size(limits.file_size)} (limits.file_size)"
    if _PROCESSES.search(stderr):
        return f"the limit is {limits.processes} processes and threads (limits.processes)"
    if _FILES.search(stderr):
        return f"the limit is {limits.open_files} open files (limits.open_files)"
    if _DISK.search(stderr):
        return f"the limit on the disk is {format_size(limits.disk)} (limits.disk)"
    return ""
