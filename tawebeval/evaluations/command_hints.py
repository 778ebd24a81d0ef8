"""Hints about files that a command names: missing, not named by a path, with CRLF or a BOM.

The shell says only "not found" for a file with Windows line ends or without its interpreter, so
the hints come from the commit's files.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tawebeval.linux.filetree import open_regular_file

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
