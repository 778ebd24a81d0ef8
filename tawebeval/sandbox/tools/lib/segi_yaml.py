"""Reader of the YAML that problem packages use: `problem.yaml`, `testdata.yaml`, `task.yaml`.

The Python of a sandbox has no PyYAML for certain: not on all machines, and not in an environment
that an operator has imported. If it were used where it is found, a package would mean one thing
here and another thing there. The daemon knows no packages, and does not read them. So this module
reads the part of YAML 1.2 that such files use, and refuses all else by the number of its line:
block and flow mappings and sequences, plain and quoted scalars, literal and folded blocks. Anchors,
aliases, tags, directives, several documents and `? ` keys are refused.
"""

from __future__ import annotations

import re
from typing import Any

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "e": "\x1b", "a": "\a", "b": "\b"}
_COMMENT = re.compile(r"(?:^|\s)#")
_COLON = re.compile(r":(?=\s|$)")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INFINITIES = (".inf", "+.inf", "-.inf")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # of an escape


class YamlError(ValueError):
    """Text that this module does not read; `str()` says where and why."""


class _Incomplete(Exception):
    """A flow collection or a quoted scalar that goes on in the next line."""


def read_yaml(text: str) -> Any:
    """Return the value of a document: None, bool, int, float, str, list or dict.

    Raises: YamlError.
    """
    reader = _Reader(text.removeprefix("\ufeff"))
    value = reader.read_node(-1)
    if reader.peek() is not None:
        raise reader.fail("this line belongs to nothing above it")
    return value


class _Reader:
    """A document, and the next line to read."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._at = 0
        head = re.match(r"(?:[ \t]*(?:#.*)?\n)*---[ \t]*(?:\n|$)", text)
        if head:
            self._at = head[0].count("\n")

    def fail(self, why: str) -> YamlError:
        """Return the error of the current line."""
        return YamlError(f"line {self._at + 1}: {why}")

    def peek(self) -> tuple[int, str] | None:
        """Return indentation and text of the next line that is no comment; None at the end."""
        while self._at < len(self._lines):
            line = self._lines[self._at].rstrip()
            text = line.lstrip(" ")
            if line == "...":
                self._lines = self._lines[: self._at]
                return None
            if line == "---" or text.startswith("\t"):
                raise self.fail("a second document, or a tab in the indentation")
            if text and not text.startswith("#"):
                return len(line) - len(text), text
            self._at += 1
        return None

    def read_node(self, parent: int) -> Any:
        """Return what is indented by more than `parent` from the next line on."""
        found = self.peek()
        if found is None or found[0] <= parent:
            return None
        indent, text = found
        if text == "-" or text.startswith("- "):
            return self._read_sequence(indent)
        if self._split_key(text) is not None:
            return self._read_mapping(indent)
        return self._read_scalar(text, parent)

    def _split_key(self, text: str) -> tuple[str, str] | None:
        """Return the key and the rest of a line; None if it has no key."""
        if text[0] in "\"'":
            try:
                key, end = _read_quoted(text, 0)
            except _Incomplete:
                return None
            rest = text[end:].lstrip()
            return (key, rest[1:].strip()) if _COLON.match(rest) else None
        comment, found = _COMMENT.search(text), _COLON.search(text)
        if text[0] in "[{|>" or found is None or (comment and comment.start() < found.start()):
            return None
        self._check_plain(text)
        return text[: found.start()].rstrip(), text[found.end() :].strip()

    def _check_plain(self, text: str) -> None:
        if text[0] in "&*!%@`,]}" or text.startswith("? "):
            raise self.fail(f"{text[0]!r} at the start of a value is not supported: quote it")

    def _read_mapping(self, indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while (line := self.peek()) is not None and line[0] == indent:
            pair = None if line[1].startswith("- ") else self._split_key(line[1])
            if pair is None:
                break
            key, rest = pair
            if key in found:
                raise self.fail(f"the key {key!r} is repeated")
            if rest and not rest.startswith("#"):
                found[key] = self._read_scalar(rest, indent)
                continue
            self._at += 1
            following = self.peek()
            is_list = following and following[0] == indent and following[1].startswith("-")
            found[key] = self.read_node(indent - 1 if is_list else indent)
        return found

    def _read_sequence(self, indent: int) -> list[Any]:
        found = []
        while (line := self.peek()) is not None and line[0] == indent:
            if line[1] != "-" and not line[1].startswith("- "):
                break
            # What follows the dash is a node of its own, which is indented by more.
            self._lines[self._at] = " " * (indent + 1) + line[1][1:]
            found.append(self.read_node(indent))
        return found

    def _read_scalar(self, text: str, parent: int) -> Any:
        """Return the value that begins with `text`, and go behind it."""
        if text[0] in "|>":
            return self._read_text(text, parent)
        if text[0] in "[{\"'":
            return self._read_flow(text)
        self._check_plain(text)
        words = []
        while True:
            comment = _COMMENT.search(text)
            words.append(text[: comment.start()].rstrip() if comment else text)
            if _COLON.search(words[-1]):
                raise self.fail("': ' in a plain value: quote it")
            self._at += 1
            following = self.peek()
            if comment or following is None or following[0] <= parent:
                return _convert(" ".join(words))
            text = following[1]

    def _read_flow(self, text: str) -> Any:
        count = 0  # of lines after the first: twice as many each time, as all are read again
        while True:
            try:
                value, end = _read_flow_node(text, 0)
            except _Incomplete:
                at = self._at + count + 1
                following = self._lines[at : at + count + 1]
                if not following:
                    self._at = at
                    raise self.fail("a bracket or a quote is not closed") from None
                text = "\n".join((text, *following))
                count += len(following)
                continue
            except YamlError as error:
                raise self.fail(str(error)) from None
            self._at += text.count("\n", 0, end)
            rest = text[end:].partition("\n")[0].strip()
            if rest and not rest.startswith("#"):
                raise self.fail(f"{rest[:20]!r} behind a value")
            self._at += 1
            return value

    def _read_text(self, header: str, parent: int) -> str:
        """Return a literal or folded block."""
        style = re.fullmatch(r"[|>]([-+]?)\s*(?:#.*)?", header)
        if style is None:
            raise self.fail("a block with an indentation indicator is not supported")
        lines: list[str] = []
        self._at += 1
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.strip() and len(line) - len(line.lstrip(" ")) <= parent:
                break
            lines.append(line)
            self._at += 1
        indents = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
        text = "\n".join(line[min(indents, default=0) :].rstrip() for line in lines)
        if header[0] == ">":
            text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
        return text if style[1] == "+" else text.rstrip("\n") + ("" if style[1] else "\n")


def _convert(word: str) -> Any:
    """Return the value of a plain scalar."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _INTEGER.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        return float(word)
    return float(word.replace(".", "")) if word.lower() in _INFINITIES else word


def _read_quoted(text: str, at: int) -> tuple[str, int]:
    """Return the quoted scalar at a place, and the place behind it. Raises: _Incomplete."""
    quote = text[at]
    found: list[str] = []
    at += 1
    while at < len(text):
        char = text[at]
        at += 1
        if char == quote:
            if quote == '"' or text[at : at + 1] != quote:
                return "".join(found), at
            at += 1
        elif char == "\\" and quote == '"':
            char, at = text[at : at + 1], at + 1
            digits = _HEX_DIGITS.get(char, 0)
            if digits:
                try:
                    char = chr(int(text[at : at + digits], 16))
                except (ValueError, OverflowError):
                    raise YamlError("a wrong escape in quotes") from None
                at += digits
            char = _ESCAPES.get(char, char)
        elif char == "\n":
            char = " "
            at += len(text[at:]) - len(text[at:].lstrip())
        found.append(char)
    raise _Incomplete


def _read_flow_node(text: str, at: int) -> tuple[Any, int]:
    """Return the flow node at a place, and the place behind it. Raises: _Incomplete, YamlError."""
    at = _skip(text, at)
    opening = text[at]
    if opening in "\"'":
        return _read_quoted(text, at)
    if opening not in "[{":
        found = re.compile(r"(?:[^,\[\]{}:#\n]|:(?![\s,\]}])|(?<!\s)#)*").match(text, at)
        word = found[0].strip() if found else ""
        if not found or word[:1] in ("&", "*", "!", "%", "@", "`", "|", ">"):
            raise YamlError(f"{word!r} is not supported: quote it")
        return _convert(word), found.end()
    values: list[Any] = []
    pairs: dict[str, Any] = {}
    closing = "]" if opening == "[" else "}"
    at += 1
    while True:
        at = _skip(text, at)
        if text[at] == closing:
            return (values if opening == "[" else pairs), at + 1
        value, at = _read_flow_node(text, at)
        at = _skip(text, at)
        if opening == "{":
            key, value = str(value), None
            if text[at] == ":":
                value, at = _read_flow_node(text, at + 1)
            pairs[key] = value
        values.append(value)
        at = _skip(text, at)
        if text[at] == ",":
            at += 1
        elif text[at] != closing:
            raise YamlError(f"{text[at]!r} in place of a comma")


def _skip(text: str, at: int) -> int:
    """Return the place behind spaces and comments. Raises: _Incomplete at the end."""
    found = re.compile(r"(?:\s+(?:#[^\n]*)?)*").match(text, at)
    at = found.end() if found else at
    if at >= len(text):
        raise _Incomplete
    return at
