"""The message about an evaluator's bad exit, with a hint for its author."""

from __future__ import annotations

import re
import shlex
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
        r"|spawn \S{1,80} eagain",
        re.IGNORECASE,
    ),
    "limits.open_files": re.compile("too many open files", re.IGNORECASE),
    "limits.disk": re.compile("no space left on device|disk quota exceeded", re.IGNORECASE),
}
_SIGNALS: dict[int | None, str] = {
    signal.SIGKILL: "limits.memory",
    signal.SIGXFSZ: "limits.file_size",
}
# EAGAIN has another reason if a program writes to a non-blocking descriptor.
_AGAIN = "resource temporarily unavailable"
_STARTS = re.compile("fork|clone|spawn|create_thread|pthread_create|std::system_error")
_AGAIN_CONTEXT = 300  # characters before it, as many as a traceback's last lines
_WRITE_WOULD_BLOCK = re.compile(
    f"write error: {_AGAIN}|write could not complete without blocking", re.IGNORECASE
)
_DENIED = re.compile("permission denied", re.IGNORECASE)
_MAX_NAME = 80  # characters of a file's name in a hint
_COMMAND_NOT_FOUND = re.compile("([\\w./+-]{1,80}): (?:command )?not found$", re.MULTILINE)
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
    command_hint: str = "",
) -> str:
    """Return the message about a bad exit. `stderr` is the last part of stderr.

    `command_hint` is that of `find_command_hint`.
    """
    if evaluator_exit.signal is not None:
        name = signal.strsignal(evaluator_exit.signal)
        message = f"the evaluator was ended by signal {evaluator_exit.signal} ({name})"
    else:
        message = f"the evaluator exited with status {evaluator_exit.status}"
    if stray_marker_advice:
        message += f"; {stray_marker_advice}"
    hint = command_hint or _find_hint(evaluator_exit, stderr, limits, has_network)
    if hint:
        return f"{message}; {hint}"
    return message if has_output else f"{message}; it printed nothing"


def _find_hint(end: EvaluatorExit, stderr: str, limits: LimitSettings, has_network: bool) -> str:
    """Return the likely reason of a bad exit and its remedy; "" if none is known."""
    if denied := find_denied_files(end, stderr):
        file = shlex.quote(denied[0]) if 0 < len(denied[0]) <= _MAX_NAME else "FILE"
        return (
            f"permission denied: run `chmod +x {file}`, or `git update-index --chmod=+x {file}`,"
            " and commit"
        )
    if end.status == _NOT_FOUND:
        names = _COMMAND_NOT_FOUND.findall(stderr)
        if names[-1:] == ["python"]:
            return "the command python was not found: write python3"
        what = f"the command {names[-1]}" if names else "a command"
        return f"{what} was not found: check its path, or ask the operator to install it"
    if _WRITE_WOULD_BLOCK.search(stderr):
        return (
            "stdout or stderr is non-blocking: a program set O_NONBLOCK, which holds for all"
            " programs with the same pipe; give that program a pipe of its own"
        )
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
    return "limits.processes" if _is_start_refused(stderr.lower()) else ""


def _is_start_refused(stderr: str) -> bool:
    end = stderr.rfind(_AGAIN)
    return _STARTS.search(stderr, max(0, end - _AGAIN_CONTEXT), max(0, end)) is not None
