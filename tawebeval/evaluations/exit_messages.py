"""The message about an evaluator's bad exit, with a hint for its author."""

from __future__ import annotations

import re
import signal

from tawebeval.config import LimitSettings
from tawebeval.errors import format_size
from tawebeval.sandbox.base import EvaluatorExit

# What programs and libraries write to stderr, in any language's runtime, by the setting that is the
# likely reason.
_STDERR = {
    "sandbox.network": re.compile(
        "name or service not known|name resolution|could not resolve|network is unreachable|"
        "no address associated with hostname|eai_again|getaddrinfo|unknownhostexception"
        "|no such host",
        re.IGNORECASE,
    ),
    "limits.memory": re.compile(
        "memoryerror|bad_alloc|outofmemoryerror|out of memory|cannot allocate memory|^killed$"
        "|: killed",
        re.IGNORECASE | re.MULTILINE,
    ),
    "limits.file_size": re.compile("file too large|file size limit exceeded", re.IGNORECASE),
    "limits.processes": re.compile(
        "can't start new thread|cannot fork|fork: |unable to create thread"
        "|resource temporarily unavailable",
        re.IGNORECASE,
    ),
    "limits.open_files": re.compile("too many open files", re.IGNORECASE),
    "limits.disk": re.compile("no space left on device|disk quota exceeded", re.IGNORECASE),
}
_SIGNALS: dict[int | None, str] = {
    signal.SIGKILL: "limits.memory",
    signal.SIGXFSZ: "limits.file_size",
}
_DENIED = re.compile("permission denied", re.IGNORECASE)
_WORD_END = re.compile(r"[\s:'\"]")
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127  # exit statuses of shells


def explain_exit(
    evaluator_exit: EvaluatorExit,
    stderr: str,
    limits: LimitSettings,
    *,
    has_network: bool,
    has_output: bool,
    stray_marker_advice: str | None = None,
) -> str:
    """Return the message about a bad exit. `stderr` is the last part of stderr."""
    if evaluator_exit.signal is not None:
        name = signal.strsignal(evaluator_exit.signal)
        message = f"the evaluator was ended by signal {evaluator_exit.signal} ({name})"
    else:
        message = f"the evaluator exited with status {evaluator_exit.status}"
    if stray_marker_advice:
        message += f"; {stray_marker_advice}"
    hint = _find_hint(evaluator_exit, stderr, limits, has_network)
    if hint:
        return f"{message}; {hint}"
    return message if has_output else f"{message}; it printed nothing"


def _find_hint(end: EvaluatorExit, stderr: str, limits: LimitSettings, has_network: bool) -> str:
    """Return the likely reason of a bad exit and its remedy; "" if none is known."""
    if find_denied_files(end, stderr):
        return (
            "permission denied: run `chmod +x FILE`, or `git update-index --chmod=+x FILE`, and"
            " commit"
        )
    if end.status == _NOT_FOUND:
        return "a command was not found: check its path, or ask the operator to install it"
    match guess_setting_at_fault(end, stderr, has_network=has_network):
        case "sandbox.network":
            return "the sandbox has no network (sandbox.network)"
        case "limits.memory":
            return f"if memory ran out: the limit is {format_size(limits.memory)} (limits.memory)"
        case "limits.file_size":
            return f"the limit of a file is {format_size(limits.file_size)} (limits.file_size)"
        case "limits.processes":
            return f"the limit is {limits.processes} processes and threads (limits.processes)"
        case "limits.open_files":
            return f"the limit is {limits.open_files} open files (limits.open_files)"
        case "limits.disk":
            return f"the limit on the disk is {format_size(limits.disk)} (limits.disk)"
    return ""


def find_denied_files(evaluator_exit: EvaluatorExit, stderr: str) -> list[str]:
    """Return the paths that a shell may not execute, "" for one that stderr does not name."""
    if evaluator_exit.status != _CANNOT_EXECUTE:
        return []
    before = _DENIED.split(stderr)[:-1]
    return [_WORD_END.split(part.removesuffix(": "))[-1] for part in before]


def guess_setting_at_fault(evaluator_exit: EvaluatorExit, stderr: str, *, has_network: bool) -> str:
    """Return the setting that is the likely reason of a bad exit; "" if none is known."""
    if evaluator_exit.signal in _SIGNALS:
        return _SIGNALS[evaluator_exit.signal]
    for setting, pattern in _STDERR.items():
        if pattern.search(stderr) and not (setting == "sandbox.network" and has_network):
            return setting
    return ""
