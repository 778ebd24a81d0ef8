"""The message about an evaluator's bad exit, with a hint for its author.

The shell says only "not found" for a file with Windows line ends or without its interpreter, so
some hints come from the commit's files.
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


_HEAD_BYTES = 256
_MAX_WORDS = 50
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127  # exit statuses of shells
_MISSING = re.compile(
    "not found|no such file|(cannot|can't) (open|find|access)|unable to access|could not find",
    re.IGNORECASE,
)
# How shells and env(1) show the end of a line of Windows.
_CARRIAGE_RETURN = re.compile(r"\\r['\u2019]|\r: |[Ii]llegal option [^\r\n]{1,40}\r")
_SYNTAX_ERROR = re.compile("syntax error", re.IGNORECASE)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_FILE_NAME = re.compile(r"(\./)?[\w.-]+(/[\w.-]+)*")


def find_command_hint(command: str, root: Path, directory: str, status: int, stderr: str) -> str:
    """Return the likely reason of a bad exit in the files of a commit; "" if none is known.

    `command` runs in `directory`, relative to `root`, which has the files. Blocks, hardly.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if "cd" in words:
        words = []  # the paths are relative to another directory
    for index, word in enumerate(words[:_MAX_WORDS]):
        name = word.rstrip(";&|)")
        is_path = "." in name or "/" in name
        if _FILE_NAME.fullmatch(name) and (is_path or _is_file(root / directory / name)):
            hint = _explain_file(root, directory, name, status, stderr, is_first=not index)
            if hint:
                return hint
    return _explain_line_ends("") if _CARRIAGE_RETURN.search(stderr) else ""


def _explain_file(
    root: Path, directory: str, name: str, status: int, stderr: str, *, is_first: bool
) -> str:
    lines = [line for line in stderr.splitlines() if name.removeprefix("./") in line]
    try:
        path = (root / directory / name).resolve()
        if not path.is_relative_to(root):
            return ""
        if path.is_dir():
            return f"{name} is a directory" if status == _CANNOT_EXECUTE and lines else ""
        with open_regular_file(path) as file:
            line, end, _ = file.read(_HEAD_BYTES).partition(b"\n")
    except FileNotFoundError:
        if any(map(_MISSING.search, lines)):
            return (
                f"the commit has no file {name} in {directory or 'its root'}: check the path, or"
                " add the file by `git add`, commit and push, and send the new commit"
            )
        return ""
    except (OSError, RuntimeError):  # another kind of file, links in a circle
        return ""
    not_found = status == _NOT_FOUND and any(
        re.search(rf"(?:^|[ '\"]){re.escape(name)}['\"]?: (?:command )?not found$", each)
        for each in lines
    )
    if "/" not in name and not_found:
        return (
            f"{name} is not a path, so the shell looked for a program of that name: write ./{name}"
        )
    if line.startswith((_BYTE_ORDER_MARK, *_UTF_16_MARKS)) and lines:
        return (
            f"{name} begins with a byte order mark (BOM), so its first line is not read: save the"
            " file as UTF-8 without BOM, and commit"
        )
    if end and line.endswith(b"\r"):
        said = _CARRIAGE_RETURN.search(stderr) or _SYNTAX_ERROR.search(stderr)
        return _explain_line_ends(name) if said or not_found else ""
    if line.startswith(b"#!") and not_found:
        interpreter = line[2:].decode(errors="replace").strip()
        return (
            f"{name} begins with #!{interpreter}, which is not installed here: change the line, or"
            " ask the operator to install the program"
        )
    if is_first and not line.startswith((b"#!", b"\x7f")) and _is_from_shell(name, lines):
        return (
            f"the shell executed {name}, which has no interpreter: write a first line such as"
            " #!/usr/bin/env python3, and commit"
        )
    return ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _is_from_shell(name: str, lines: list[str]) -> bool:
    return any(re.match(rf"{re.escape(name)}: (line )?\d+: ", line) for line in lines)


def _explain_line_ends(name: str) -> str:
    kind = f"*{Path(name).suffix or '.sh'}"
    return (
        f"{name or 'a script'} has the line ends of Windows (CRLF): run"
        rf" `sed -i 's/\r$//' {name or 'FILE'}`, add the line `{kind} text eol=lf` to"
        " .gitattributes, and commit"
    )
