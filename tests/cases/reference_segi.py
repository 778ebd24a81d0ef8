r"""Reference parser of SEGI: slow, obvious, and on the whole of stdout at once.

`parse_events` follows the words of docs/evaluators.md, and shares
no code with `core.segi`. `check_reference` compares these with the reference.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tawebeval.core.segi import MAX_FILE_HEADERS_BYTES, MAX_PATH_BYTES, Markers, PrintedFile
from tests.cases.strategies import (
    BYTE_BY_BYTE,
    BYTE_BY_BYTE_FLUSHED,
    MARKERS,
    MAX_FILE,
    MAX_VALUE,
    Chunk,
    ErrorEvent,
    Event,
    classify,
    join_text,
    parse,
    read_file,
)

Files = Callable[[bytes], bytes | None]
"""Returns the content of the file at a path, None for a refused file."""

_TOKEN = frozenset(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~")
_PLAIN = frozenset(string.ascii_letters + string.digits + "!#$&+-.^_`|~")  # RFC 8187: attr-char
_HEXADECIMAL = frozenset(string.hexdigits)


class _Refused(Exception):
    """An invalid value or file block."""


def parse_events(
    stdout: bytes, markers: Markers, *, max_value: int, max_file: int, files: Files
) -> list[Event]:
    """Return the events of a whole run's stdout, with adjacent text joined."""
    *lines, unterminated = stdout.split(b"\n")
    return join_text(_events(lines, unterminated, markers, max_value, max_file, files))


def check_reference(stdout: bytes, chunking: list[Chunk], late: int) -> None:
    """Compare parser and reference: whole, byte by byte, and cut as `chunking` says."""
    expected = parse_events(
        stdout, MARKERS, max_value=MAX_VALUE, max_file=MAX_FILE, files=read_file
    )
    for cut in ([], BYTE_BY_BYTE, BYTE_BY_BYTE_FLUSHED, chunking):
        assert join_text(classify(parse(stdout, cut, late=late))) == expected


def _events(
    lines: list[bytes],
    unterminated: bytes,
    markers: Markers,
    max_value: int,
    max_file: int,
    files: Files,
) -> Iterator[Event]:
    text = b""
    while lines:
        line = lines.pop(0)
        if line not in (markers.data_begin, markers.file_begin):
            text += line + b"\n"
            continue
        # The terminator before the marker, if there is one, belongs to the block.
        yield from _text(text.removesuffix(b"\n"))
        text = b""
        while line == markers.data_begin:
            line = yield from _values(lines, unterminated, markers, max_value)
        if line == markers.file_begin:
            line = yield from _file(lines, markers, max_file, files)
        if not line:
            return
    yield from _text(text + unterminated)


def _text(text: bytes) -> Iterator[Event]:
    if text:
        yield text.decode("utf-8", "replace")


def _values(lines: list[bytes], unterminated: bytes, markers: Markers, limit: int) -> Iterator[Any]:
    """Yield the events of a data block; return the marker that ends it, b"" for none."""
    sound = True

    def check(line: bytes) -> Iterator[Event]:
        nonlocal sound
        try:
            yield _value(line, limit)
        except _Refused:
            if sound:
                yield ErrorEvent()
            sound = False

    those = (markers.data_end, markers.data_begin, markers.file_begin)
    while lines:
        line = lines.pop(0)
        if line == markers.data_end:
            return line
        if line in those:
            yield ErrorEvent()
            return line
        yield from check(line)
    if unterminated and unterminated not in those:
        yield from check(unterminated)
    yield ErrorEvent()
    return b""


def _value(line: bytes, limit: int) -> bytes:
    text = line.decode("utf-8", "replace")
    if len(text.encode()) > limit:
        raise _Refused
    text = text.strip(" \t\r")
    try:
        value = json.loads(
            text,
            parse_constant=_refuse,
            parse_int=str,
            parse_float=str,
            object_pairs_hook=list,  # nothing is dropped for having a name twice
        )
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a surrogate pair, too: UnicodeEncodeError
        raise _Refused from None
    return text.encode()


def _refuse(constant: str) -> NoReturn:
    raise _Refused


def _file(lines: list[bytes], markers: Markers, limit: int, files: Files) -> Iterator[Any]:
    """Yield the event of a file block; return the marker that ends it, b"" for none."""
    if markers.file_end not in lines:
        yield ErrorEvent()
        return b""
    end = lines.index(markers.file_end)
    block = lines[:end]
    del lines[: end + 1]
    try:
        yield _content(block, limit, files)
    except _Refused:
        yield ErrorEvent()
    return markers.file_end


def _content(block: list[bytes], limit: int, files: Files) -> PrintedFile:
    empty = [number for number, line in enumerate(block) if line in (b"", b"\r")]
    if not empty:
        raise _Refused
    head = b"".join(line + b"\n" for line in block[: empty[0]])
    body = b"\n".join(block[empty[0] + 1 :])
    if len(head + block[empty[0]]) > MAX_FILE_HEADERS_BYTES or len(body) > limit:
        raise _Refused
    headers = _headers(head.decode("utf-8", "replace").split("\n")[:-1])
    name = _disposition(headers.get("content-disposition", "a"))
    match headers.get("x-segi-as", "content").lower():
        case "content":
            name = name or "file"
            content: bytes | None = body
        case "path" if len(body) <= MAX_PATH_BYTES:
            name = name or body.decode("utf-8", "surrogateescape")
            content = files(body)
        case _:
            raise _Refused
    name = name.replace("\\", "/").split("/")[-1]
    try:
        sound = name not in ("", ".", "..") and "\0" not in name and len(name.encode()) <= 255
    except UnicodeEncodeError:
        sound = False
    if not sound or content is None:
        raise _Refused
    return PrintedFile(name, headers.get("content-type", "application/octet-stream"), content)


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    last = ""
    for terminated in lines:
        line = terminated.removesuffix("\r")
        if any((ord(c) < 32 and c != "\t") or ord(c) == 127 for c in line):
            raise _Refused
        if line[:1] in (" ", "\t"):
            if not last:
                raise _Refused
            headers[last] = (headers[last] + " " + line.strip(" \t")).strip(" \t")
            continue
        name, colon, value = line.partition(":")
        last = name.lower()
        if not name or not colon or not set(name) <= _TOKEN or last in headers:
            raise _Refused
        headers[last] = value.strip(" \t")
    return headers


def _disposition(value: str) -> str:
    """Return the file name in a Content-Disposition, "" for none."""
    parameters: dict[str, str] = {}
    rest = _token(value)[1]
    while rest:
        rest = rest.lstrip(" \t")
        if not rest.startswith(";"):
            raise _Refused
        rest = rest[1:].lstrip(" \t")
        if not rest or rest.startswith(";"):
            continue
        name, rest = _token(rest)
        if not rest.startswith("=") or name.lower() in parameters:
            raise _Refused
        rest = rest[1:]
        found, rest = _quoted(rest[1:]) if rest.startswith('"') else _token(rest)
        parameters[name.lower()] = found
    if "filename*" in parameters:
        return _decoded(parameters["filename*"])
    return parameters.get("filename", "")


def _token(text: str) -> tuple[str, str]:
    """Return the token with which a text begins, and what follows."""
    length = 0
    while length < len(text) and text[length] in _TOKEN:
        length += 1
    if not length:
        raise _Refused
    return text[:length], text[length:]


def _quoted(text: str) -> tuple[str, str]:
    """Return a string up to its closing quote, and what follows that."""
    found = ""
    while text and text[0] != '"':
        if text[0] == "\\":
            text = text[1:]
        found += text[:1]
        text = text[1:]
    if not text:
        raise _Refused
    return found, text[1:]


def _decoded(extended: str) -> str:
    parts = extended.split("'")
    if len(parts) != 3 or parts[0].lower() not in ("utf-8", "iso-8859-1"):
        raise _Refused
    if not set(parts[1]) <= set(string.ascii_letters + string.digits + "-"):
        raise _Refused
    encoded, text = b"", parts[2]
    while text:
        if text[0] in _PLAIN:
            encoded, text = encoded + text[0].encode(), text[1:]
        elif text[0] == "%" and len(text) > 2 and set(text[1:3]) <= _HEXADECIMAL:
            encoded, text = encoded + bytes.fromhex(text[1:3]), text[3:]
        else:
            raise _Refused
    try:
        return encoded.decode(parts[0])
    except UnicodeDecodeError:
        raise _Refused from None
