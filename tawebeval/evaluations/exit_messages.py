"""The message about an evaluator's bad exit, with a hint for its author.

The shell says only "not found" for a file with Windows line ends or without its interpreter, so
these hints come from the commit's files.
"""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

from tawebeval.config import LimitSettings
from tawebeval.errors import format_size
from tawebeval.linux.filetree import open_regular_file
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
        r"can't start new thread|cannot fork|fork: |unable to create thread|spawn \S{1,80} eagain",
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
    match guess_setting_at_fault(end, stderr, has_network=has_network):
        case "sandbox.network":
            return "the sandbox has no network (sandbox.network)"
        case "limits.memory":
            return f"if memory ran out: the limit is {format_size(limits.memory)} (limits.memory)"
        case "limits.file_size":
            return f"the limit of a file is {format_size(limits.file_size)} (limits.file_size)"
        case "limits.processes":
            most = f"{limits.processes} processes and threads (limits.processes)"
            return f"the limit is {most}, and their stacks need limits.memory"
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


_HEAD_BYTES = 256
_MAX_WORDS = 50
_FILE_NAME = re.compile(r"(\./)?[\w.-]+(/[\w.-]+)*")
# How shells and env(1) show the end of a line of Windows, or what they make of it.
_CARRIAGE_RETURN = re.compile(r"\\r['\u2019]|\r: |[Ii]llegal option [^\r\n]{1,40}\r")
_SYNTAX_ERROR = re.compile("syntax error", re.IGNORECASE)


def find_command_hint(command: str, root: Path, directory: str, status: int, stderr: str) -> str:
    """Return the likely reason of a bad exit in the first lines of scripts; "" if none is known.

    `command` runs in `directory`, relative to `root`, which has the files. Blocks, hardly.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    for word in words[:_MAX_WORDS]:
        name = word.rstrip(";&|)")
        if _FILE_NAME.fullmatch(name):
            line = _read_first_line(root / directory / name, root)
            not_found = status == _NOT_FOUND and f"{name}: not found" in stderr
            not_found = not_found or f"{name}: command not found" in stderr
            said = _CARRIAGE_RETURN.search(stderr) or _SYNTAX_ERROR.search(stderr)
            if line.endswith(b"\r") and (said or not_found):
                return _explain_line_ends(name)
            if line.startswith(b"#!") and not_found and "/" in name:
                interpreter = line[2:].decode(errors="replace").strip()
                return (
                    f"{name} begins with #!{interpreter}, which is not installed here: change the"
                    " line, or ask the operator to install the program"
                )
    return _explain_line_ends("") if _CARRIAGE_RETURN.search(stderr) else ""


def _read_first_line(path: Path, root: Path) -> bytes:
    """Return the first line of a regular file below `root`, b"" without one or for a long line."""
    try:
        if path.resolve().is_relative_to(root):
            with open_regular_file(path.resolve()) as file:
                line, end, _ = file.read(_HEAD_BYTES).partition(b"\n")
                return line if end else b""
    except (OSError, RuntimeError):  # no file, another kind, links in a circle
        pass
    return b""


def _explain_line_ends(name: str) -> str:
    kind = f"*{Path(name).suffix or '.sh'}"
    return (
        f"{name or 'a script'} has the line ends of Windows (CRLF): run"
        rf" `sed -i 's/\r$//' {name or 'FILE'}`, add the line `{kind} text eol=lf` to"
        " .gitattributes, and commit"
    )
