r"""SEGI: an evaluator's environment, and its stdout as events (docs/evaluators.md).

Ordinary output is text. Between *markers*, four secret lines that are new in each run, stand
blocks:

    <terminator> DATA_BEGIN <terminator>          <terminator> FILE_BEGIN <terminator>
    one JSON value per line                       a file (see below)
    DATA_END <terminator>                         <terminator> FILE_END <terminator>

A file block has headers and a body:

    Content-Type: image/svg+xml
    Content-Disposition: attachment; filename="report.svg"
    X-SEGI-As: content

    <svg ...

Headers follow HTTP's syntax (RFC 9112, section 5) and may be folded. A `\r` before the terminator
of a header or of the empty line is ignored. The body is the file's content or, with
`X-SEGI-As: path`, the file's path. The terminator before the end marker belongs to the block, not
to the body. The size of headers is bounded, and parsing takes time linear in their size.

`Markers` draws the markers and gives them to the evaluator. `SegiParser` is a state machine without
I/O:

    TEXT --a begin marker--> VALUES or FILE --its end marker--> TEXT

The one subtle rule: the terminator *before* a begin marker belongs to the block. So the parser
holds back a terminator, and any beginning of a marker after it, until the next bytes decide. In
TEXT the unparsed input therefore always begins with the last terminator seen (or in mid-line,
after a flush). A marker may also stand without a terminator before it at the start of the stream
and right after a block; the parser puts an imagined terminator there, which it never delivers.

Text leaves in pieces that end just before a terminator, so characters are cut only where a line is
delivered in parts; the parts decode to the same text as the whole. A line that is too long for one
event is cut at places that its bytes alone decide, counted from its beginning or from a flush. So
the events, one by one, depend on stdout and on the places of flushes, and not on reads.

The evaluator chooses every byte, and the reactor waits for each call. So a call does a bounded
amount of work, counted and not timed, and yields a bounded number of events: it parses in steps,
each linear in the bytes that the step reads and writes, and leaves the rest of the input to the
next call (`has_pending_input`).

A checkpoint is a place in stdout and the flags of the state there, less than 1 KiB. The place lies
before the unparsed input and before the line of a data block, or the file, that is gathered: at
most `max_value` bytes, or `max_file` and `MAX_FILE_HEADERS_BYTES`. Of what is over its limit, and
skipped, only a flag and the beginning of an end marker are needed.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import attrs
import msgspec

from tawebeval.core.events import (
    LINE_TERMINATOR,
    EventBatch,
    encode_data_event,
    encode_error_event,
    encode_file_event,
    encode_text_events,
    has_blank_line,
)
from tawebeval.core.form import decode_extended_filename, get_base_name
from tawebeval.errors import format_size
from tawebeval_client.results import (
    MAX_RESULT_BYTES,
    MIN_RESULT_BYTES,
    TYPE_KEY_JSON,
    ResultSummary,
)

MAX_FILE_HEADERS_BYTES = 1024
"""The most bytes that the headers of a file block may have together, with their terminators."""

MAX_PATH_BYTES = 4096
"""The most bytes that the path of a file may have (PATH_MAX of Linux)."""

_EMPTY_LINE = re.compile(rb"\n\r?\n")
_LONGEST_HEAD = MAX_FILE_HEADERS_BYTES + len(b"\n\n")  # with the terminators before and after it

# RFC 9110, sections 5.5 and 5.6, with UTF-8 for obs-text. Each can match in one way only, so that
# no search backtracks.
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105  (a token of HTTP's grammar)
_SPACES = " \t"
_TEXT = r"[^\0-\x08\x0a-\x1f\x7f]*"
_HEADER = re.compile(rf"({_TOKEN}):({_TEXT})\r?")
_CONTINUED = re.compile(rf"[ \t]({_TEXT})\r?")
_DISPOSITION = re.compile(_TOKEN)
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*(?:({_TOKEN})=(?:({_TOKEN})|"((?:[^"\\]|\\.)*+)"))?')
_QUOTED = re.compile(r"\\?(.)")  # a character, or a pair that stands for one
_EXCERPT = 80  # characters of a wrong header, in its error


class FileBlockError(ValueError):
    """A malformed file block; `str()` is a message for the evaluator's author."""


@attrs.frozen
class PrintedFile:
    """A file whose content stood in the block."""

    filename: str
    content_type: str
    content: bytes


@attrs.frozen
class FileReference:
    """A file named by its path, which the caller must read.

    `path` is unchecked: the evaluator chose it.
    """

    filename: str
    content_type: str
    path: str


class FileBlockCollector:
    """Collector of one block; keeps at most `max_body_bytes` of the body and drops the rest.

    `is_overlong` says that bytes were dropped, so that `parse_file` will raise.
    """

    def __init__(self, end_marker: bytes, max_body_bytes: int) -> None:
        self._end = b"\n" + end_marker + b"\n"
        self._limit = max_body_bytes
        self.is_overlong = False
        # The end marker may stand on the very first line.
        self._gathered = bytearray(b"\n")

    @classmethod
    def make_overlong_block(cls, end_marker: bytes, max_body_bytes: int) -> FileBlockCollector:
        """Return the collector of a block that is over its limit already.

        The first bytes fed to it are the `held_back_byte_count` last bytes of the block so far.
        """
        block = cls(end_marker, max_body_bytes)
        block.is_overlong = True
        block._gathered.clear()
        return block

    @property
    def held_back_byte_count(self) -> int:
        """Number of the last bytes that may begin the end of an overlong block."""
        return min(len(self._gathered), len(self._end) - 1)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes of the block; return the bytes after its end, or None before the end."""
        start = max(len(self._gathered) - len(self._end) + 1, 0)
        self._gathered += data
        at = self._gathered.find(self._end, start)
        if at >= 0:
            rest = bytes(self._gathered[at + len(self._end) :])
            del self._gathered[at + 1 :]
            # As where a read ends before the end marker: the error must not depend on reads.
            self.is_overlong |= at > self._limit + _LONGEST_HEAD + 1
            return rest
        if len(self._gathered) > self._limit + _LONGEST_HEAD + len(self._end):
            self.is_overlong = True
            del self._gathered[: 1 - len(self._end)]
        return None

    def parse_file(self) -> PrintedFile | FileReference:
        """Return the file of a block that has ended. Raises FileBlockError."""
        too_large = FileBlockError(
            f"a file block is over {format_size(self._limit)}, or its headers over"
            f" {format_size(MAX_FILE_HEADERS_BYTES)}"
        )
        if self.is_overlong:
            raise too_large
        # Its last terminator, which is the block's own, may be the one that ends the empty line.
        empty_line = _EMPTY_LINE.search(self._gathered, 0, _LONGEST_HEAD)
        if empty_line is None:
            raise FileBlockError(
                "a file block has no empty line between its headers and its body, or its headers"
                f" are over {format_size(MAX_FILE_HEADERS_BYTES)}"
            )
        body = memoryview(self._gathered)[empty_line.end() : -1]
        if len(body) > self._limit:
            raise too_large
        headers = _headers(self._gathered[1 : empty_line.start()].decode("utf-8", "replace"))
        content_type = headers.get("content-type", "application/octet-stream")
        filename = _filename(headers.get("content-disposition"))
        kind = headers.get("x-segi-as", "content")
        match kind.lower():
            case "content":
                return PrintedFile(_checked(filename or "file"), content_type, bytes(body))
            case "path":
                path = _path(bytes(body[: MAX_PATH_BYTES + 1]))
                return FileReference(_checked(filename or path), content_type, path)
        raise FileBlockError(f"X-SEGI-As is {kind[:_EXCERPT]!r}; allowed: content, path")


def _headers(head: str) -> Mapping[str, str]:
    """Return header values by lower-case name. Raises FileBlockError."""
    headers: dict[str, str] = {}
    name = ""
    for line in head.split("\n") if head else ():
        if name and (continued := _CONTINUED.fullmatch(line)):
            headers[name] = f"{headers[name]} {continued[1].strip(_SPACES)}".strip(_SPACES)
        elif header := _HEADER.fullmatch(line):
            name = header[1].lower()
            if name in headers:
                raise FileBlockError(f"a file block repeats the header {name[:_EXCERPT]!r}")
            headers[name] = header[2].strip(_SPACES)
        else:
            raise FileBlockError(
                f"{line[:_EXCERPT]!r} is not a header of a file block; write NAME: VALUE, and an"
                " empty line before the body"
            )
    return headers


def _filename(disposition: str | None) -> str:
    """Return the name in a Content-Disposition (RFC 6266), "" if absent. Raises FileBlockError."""
    if disposition is None:
        return ""
    parameters = _parameters(disposition)
    extended = parameters.get("filename*")
    if extended is None:
        return parameters.get("filename", "")
    try:
        return decode_extended_filename(extended)
    except ValueError as error:
        raise FileBlockError(str(error)) from None


def _parameters(disposition: str) -> Mapping[str, str]:
    """Return parameters by lower-case name. Raises FileBlockError."""
    parameters: dict[str, str] = {}
    place = _DISPOSITION.match(disposition)
    while place is not None and place.end() < len(disposition):
        place = _PARAMETER.match(disposition, place.end())
        if place is None or place[1] is None:
            continue
        name = place[1].lower()
        if name in parameters:
            raise FileBlockError(f"Content-Disposition repeats {name[:_EXCERPT]!r}")
        parameters[name] = place[2] or "".join(_QUOTED.findall(place[3] or ""))
    if place is None:
        raise FileBlockError(
            f"malformed Content-Disposition {disposition[:_EXCERPT]!r}; write"
            ' attachment; filename="NAME" (RFC 6266)'
        )
    return parameters


def _path(body: bytes) -> str:
    """Return the path in the body of a block. Raises FileBlockError."""
    if len(body) > MAX_PATH_BYTES:
        raise FileBlockError(f"the path in a file block is over {format_size(MAX_PATH_BYTES)}")
    return body.decode("utf-8", "surrogateescape")


def _checked(filename: str) -> str:
    try:
        return get_base_name(filename)
    except ValueError as error:
        raise FileBlockError(f"a file block's name: {error}") from None


MAX_DATA_VALUE_BYTES = 1024 * 1024
"""Bytes of a line in a data block. Checking 1 MiB takes up to 5 ms."""
MAX_SENT_FILE_BYTES = 2 * 1024 * 1024
"""Bytes of a file that an evaluator sends. Encoding 1 MiB takes 2 ms."""
MAX_TEXT_PAYLOAD_BYTES = 64 * 1024
"""The most bytes of UTF-8 that one text event carries (docs/evaluators.md)."""

MAX_BYTES_PARSED_PER_CALL = 512 * 1024
"""Work after which a call begins no further step.

The unit is a byte of an event. Anything that takes longer than some 4 ns for each byte of its
events counts for more. A read of 64 KiB with lines of ten bytes is less.
"""

# Work besides the bytes of events:
_STEP = 2 * 1024  # the search for markers, and putting a piece of a file away
_LINE = 256  # a line of a data block, besides its length
_RESULT = 1024  # a value that may be a result, besides its length
_FAULT = 4 * 1024  # an error
_FILE = 32 * 1024  # the headers of a file

_PIECE = (
    MAX_TEXT_PAYLOAD_BYTES // 3
)  # of a line: a byte that is not UTF-8 becomes U+FFFD, which is three

# Bytes of text in one step, each more than `_PIECE`, so that a step in a long line can cut it:
_BLOCK = 64 * 1024 + _PIECE  # a read, and the bytes held back before it
_SHORT = 32 * 1024  # with blank lines, which take longer
_NEAR = 24 * 1024  # from the first byte of a possible marker, lest the search for each takes long

_LINE_EXCERPT = 200  # characters of a wrong line, in its error
_NESTING = 500  # levels of arrays and objects that are parsed at any depth of the stack
_EXPLAINED = 256 * 1024  # bytes of a value that is checked once more, to explain the error
_MARKER_START = b"~"  # seldom in text; text without this byte has no marker


@attrs.frozen
class Markers:
    """The four markers of one run."""

    data_begin: bytes
    data_end: bytes
    file_begin: bytes
    file_end: bytes

    @classmethod
    def generate(cls, random: Callable[[int], bytes]) -> Markers:
        """Draw markers of 128 bits each; `random(n)` returns n random bytes."""

        def marker(name: bytes) -> bytes:
            return b"%stawebeval:%s:%s" % (_MARKER_START, name, random(16).hex().encode())

        return cls(*map(marker, (b"data-begin", b"data-end", b"file-begin", b"file-end")))

    @property
    def begin_markers(self) -> tuple[bytes, bytes]:
        """Begin markers of a data block and of a file block."""
        return self.data_begin, self.file_begin

    @property
    def data_block_end_markers(self) -> tuple[bytes, bytes, bytes]:
        """Markers that end a data block: its end marker and the begin markers."""
        return self.data_end, self.data_begin, self.file_begin

    def build_variables(self) -> dict[str, str]:
        """Return the environment variables that give the markers to the evaluator."""
        values = (marker.decode() for marker in attrs.astuple(self))
        return dict(zip(MARKER_VARIABLE_NAMES, values, strict=True))


MARKER_VARIABLE_NAMES = tuple(f"EVALUATION_{field.name.upper()}" for field in attrs.fields(Markers))
"""Environment variables that give the markers to the evaluator, in the order of the fields."""


class _State(Enum):
    TEXT = auto()
    VALUES = auto()
    FILE = auto()


class _Checkpoint(msgspec.Struct, array_like=True, gc=False):
    """State of a parser that has yet to parse stdout from `position` on."""

    position: int  # -1: before the terminator that is imagined at the start
    state: _State
    is_imagined: bool
    is_overlong: bool  # the line of a data block that goes on there, or the file
    is_sound: bool


_pack_checkpoint = msgspec.msgpack.Encoder().encode
_unpack_checkpoint = msgspec.msgpack.Decoder(_Checkpoint).decode


@attrs.define(eq=False)
class SegiParser:
    """Parser of one run's stdout.

    `feed`, `parse_pending`, `flush_partial_line`, `finish`, `supply_file` and `refuse_file` return
    the events that have become certain. `max_value` and `max_file` (bytes) bound a line of a data
    block and a file; longer lines and files are skipped and reported. `result_summary` sums up the
    values.

    While `has_pending_input`, there is input for `parse_pending`. While `awaited_file` is set,
    parsing stops until the caller supplies or refuses that file.

    A parser in another process continues from `make_checkpoint` by `make_from_checkpoint`.
    """

    _markers: Markers
    _max_value: int = attrs.field(factory=lambda: MAX_DATA_VALUE_BYTES, kw_only=True)
    _max_file: int = attrs.field(factory=lambda: MAX_SENT_FILE_BYTES, kw_only=True)
    result_summary: ResultSummary = attrs.field(factory=ResultSummary)
    awaited_file: FileReference | None = None
    has_pending_input: bool = False
    _state: _State = _State.TEXT
    _input: bytes = LINE_TERMINATOR
    _at: int = 0  # where in the input parsing goes on
    _offset: int = -len(LINE_TERMINATOR)  # of the input in stdout
    _part_begin: int = 0  # in stdout: of the line of which `_value` is a part, of the last file
    _is_imagined: bool = True  # the terminator there was not printed, or belongs to a marker
    _value: bytearray = attrs.field(factory=bytearray)  # VALUES: the part of a line, as UTF-8
    _is_overlong: bool = False  # VALUES: the line is over its limit, and not kept
    _is_sound: bool = True  # VALUES: no error was reported for this block
    _file: FileBlockCollector | None = None
    _work: int = 0
    _count: int = 0
    _lines: list[bytes] = attrs.field(factory=list)

    def feed(self, chunk: bytes) -> EventBatch:
        """Add bytes of stdout and do one call's work."""
        self._input = self._input[self._at :] + chunk
        self._offset += self._at
        self._at = 0
        return self.parse_pending()

    def parse_pending(self) -> EventBatch:
        """Do one more call's work on the pending input."""
        more = self.awaited_file is None
        while more and self._work < MAX_BYTES_PARSED_PER_CALL:
            more = _STEPS[self._state](self)
        self.has_pending_input = more
        return self._take_batch()

    @property
    def has_partial_line(self) -> bool:
        """Whether `flush_partial_line` would deliver a partial line."""
        return self._measure_flushable() > 0

    def flush_partial_line(self) -> EventBatch:
        """Deliver the partial line without waiting for its rest."""
        end = self._at + self._measure_flushable()
        self._emit_text(self._input[self._at : end])
        self._at = end
        return self._take_batch()

    def finish(self) -> EventBatch:
        """Take the end of stdout; call this when no input is pending and no file is wanted.

        The end of stdout ends the last line, but makes no marker of it (docs/evaluators.md).
        """
        assert self.awaited_file is None, "the wanted file comes before the end"
        assert not self.has_pending_input, "all that was printed comes before the end"
        rest = self._input[self._at :]
        if self._state is _State.TEXT:
            self._emit_text(rest)
        else:
            if self._state is _State.VALUES and (rest or self._value or self._is_overlong):
                self._take_line(rest)
            self._emit_error(
                "stdout ended inside a block; print the end marker on a line of its own"
            )
        self._state = _State.TEXT
        self._offset += len(self._input)
        self._input = b""
        self._at = 0
        return self._take_batch()

    def supply_file(self, content: bytes) -> EventBatch:
        """Take the content of the wanted file and continue."""
        assert self.awaited_file is not None
        self._emit(
            encode_file_event(self.awaited_file.filename, self.awaited_file.content_type, content)
        )
        self.awaited_file = None
        return self.parse_pending()

    def refuse_file(self, message: str) -> EventBatch:
        """Report that the wanted file is not available, and continue."""
        self._emit_error(message)
        self.awaited_file = None
        return self.parse_pending()

    # Checkpoints

    def make_checkpoint(self) -> tuple[int, bytes]:
        """Return how many bytes of stdout need not be fed again, and the packed state there.

        The number counts from the start of stdout, also after `make_from_checkpoint`, and never
        falls. What is fed again is the unparsed input and, before it, the line of a data block or
        the file that has yet to end or to be supplied, unless it is over its limit. The state has
        no `result_summary`.
        """
        state, position = self._state, self._offset + self._at
        is_overlong = False
        if self.awaited_file is not None:
            state, position = _State.FILE, self._part_begin
        elif state is _State.VALUES:
            is_overlong = self._is_overlong
            if self._value:
                position = self._part_begin
        elif state is _State.FILE:
            assert self._file is not None, "a block has begun"
            is_overlong = self._file.is_overlong
            position = (
                position - self._file.held_back_byte_count if is_overlong else self._part_begin
            )
        checkpoint = _Checkpoint(position, state, self._is_imagined, is_overlong, self._is_sound)
        return max(position, 0), _pack_checkpoint(checkpoint)

    @classmethod
    def make_from_checkpoint(cls, packed: bytes, markers: Markers, **limits: Any) -> SegiParser:
        """Return a parser that continues from a checkpoint.

        Fed stdout from the checkpoint's number on, in any chunks, the parser returns the events
        that the first parser had not returned, and awaits the same file again. `limits` are the
        same `max_value` and `max_file`. The caller sets `result_summary`. Raises
        msgspec.DecodeError.
        """
        checkpoint = _unpack_checkpoint(packed)
        parser = cls(markers, **limits)
        if checkpoint.position >= 0:
            parser._input = b""
            parser._offset = parser._part_begin = checkpoint.position
        parser._state = checkpoint.state
        parser._is_imagined = checkpoint.is_imagined
        parser._is_sound = checkpoint.is_sound
        if checkpoint.state is _State.VALUES:
            parser._is_overlong = checkpoint.is_overlong
        elif checkpoint.state is _State.FILE:
            collector = FileBlockCollector
            make_block = collector.make_overlong_block if checkpoint.is_overlong else collector
            parser._file = make_block(markers.file_end, parser._max_file)
        return parser

    # Output

    def _take_batch(self) -> EventBatch:
        batch = EventBatch(self._count, b"".join(self._lines))
        self._count = self._work = 0
        self._lines.clear()
        return batch

    def _emit(self, batch: EventBatch) -> None:
        self._count += batch.count
        self._work += len(batch.lines)
        self._lines.append(batch.lines)

    def _emit_error(self, message: str, **members: str) -> None:
        self._work += _FAULT
        self._emit(encode_error_event("protocol", message, members))

    # Text

    def _parse_text(self) -> bool:
        """Deliver text up to the next block, or else to the last terminator in the input."""
        self._work += _STEP
        data, at = self._input, self._at
        end = min(at + _BLOCK, len(data))
        begin = b""
        near = data.find(_MARKER_START, at, end)
        if near >= 0:
            end = min(near + _NEAR, end)
            for marker in self._markers.begin_markers:
                line = LINE_TERMINATOR + marker + LINE_TERMINATOR
                place = data.find(line, at, end + len(line))
                if place >= 0:
                    # The other marker counts if it stands before this one.
                    begin, end = marker, place
        cut = end if begin else _find_last_line(data, at, end)
        block = data[at:cut]
        may_have_blank_lines = len(block) <= _SHORT
        if not may_have_blank_lines and has_blank_line(block):
            begin, end = b"", at + _SHORT
            cut = _find_last_line(data, at, end)
            block, may_have_blank_lines = data[at:cut], True
        self._emit_text(block, may_have_blank_lines)
        self._at = cut
        if begin:
            self._at += len(LINE_TERMINATOR + begin + LINE_TERMINATOR)
            self._begin_block(begin)
            return True
        return end < len(data)

    def _emit_text(self, block: bytes, may_have_blank_lines: bool = True) -> None:
        if block and self._is_imagined:
            self._is_imagined = False
            block = block[1:]
        for piece in split_long_lines(block, _PIECE):
            self._emit(encode_text_events(piece, may_have_blank_lines))

    def _measure_flushable(self) -> int:
        """Return the size in bytes of the input that is text whatever bytes follow."""
        if (
            self._state is not _State.TEXT
            or self.has_pending_input
            or self.awaited_file is not None
        ):
            return 0
        rest = self._input[self._at :]
        if rest.startswith(LINE_TERMINATOR):
            line = rest[1:]
            if any(begin.startswith(line) for begin in self._markers.begin_markers):
                return 0
        return measure_complete_utf8(rest)

    # Blocks

    def _begin_block(self, marker: bytes) -> None:
        if marker == self._markers.data_begin:
            self._state = _State.VALUES
            self._is_sound = True
        else:
            self._state = _State.FILE
            self._file = FileBlockCollector(self._markers.file_end, self._max_file)
            self._part_begin = self._offset + self._at

    def _end_block(self, at: int) -> None:
        """Return to text; the end marker's terminator, at `at`, serves as the imagined one."""
        self._state = _State.TEXT
        self._is_imagined = True
        self._at = at

    def _parse_values(self) -> bool:
        """Parse complete lines of a data block and keep the beginning of the next."""
        data, at = self._input, self._at
        while self._work < MAX_BYTES_PARSED_PER_CALL:
            end = data.find(LINE_TERMINATOR, at)
            if end < 0:
                if not self._value:
                    self._part_begin = self._offset + at
                self._at = at + measure_complete_utf8(data[at:])
                self._keep_part(data[at : self._at])
                return False
            marker = self._take_line(data[at:end])
            at = end + len(LINE_TERMINATOR)
            if marker == self._markers.data_end:
                self._end_block(end)
                return True
            if marker:
                # No JSON looks like a marker: the evaluator broke off and began anew.
                self._emit_error("a block began inside a data block; print the end marker first")
                self._at = at
                self._begin_block(marker)
                return True
        self._at = at
        return True

    def _take_line(self, rest: bytes) -> bytes:
        """Parse the data block's line that ends with `rest`; return the line if it is a marker."""
        if self._value or self._is_overlong:
            self._keep_part(rest)
            line, overlong = bytes(self._value), self._is_overlong
            self._value.clear()
            self._is_overlong = False
        else:
            line = _replace_invalid(rest)
            overlong = len(line) > self._max_value
        self._work += _LINE + len(line)
        if overlong:
            self._emit_first_error(f"a line of a data block is over {format_size(self._max_value)}")
        elif line.startswith(_MARKER_START) and line in self._markers.data_block_end_markers:
            return line
        else:
            self._check_value(line)
        return b""

    def _keep_part(self, part: bytes) -> None:
        """Add to the line of a data block, unless the line is too long already."""
        if not self._is_overlong:
            self._value += _replace_invalid(part)
            if len(self._value) > self._max_value:
                self._is_overlong = True
                self._value.clear()

    def _emit_first_error(self, message: str, **members: str) -> None:
        """Report the first wrong line of a data block; later ones are not reported."""
        if self._is_sound:
            self._is_sound = False
            self._emit_error(message, **members)

    def _check_value(self, line: bytes) -> None:
        value = line.strip(b" \t\r")
        try:
            _check_json(value)
        except _JSON_ERRORS as error:
            if self._is_sound:  # else the error is not reported
                excerpt = value[:_LINE_EXCERPT].decode("utf-8", "replace")
                self._emit_first_error(_describe_json_error(value, error), line=excerpt)
        else:
            # `find` takes a third of the time of `in`, which tries an integer first.
            if (
                MIN_RESULT_BYTES <= len(value) <= MAX_RESULT_BYTES
                and value.find(TYPE_KEY_JSON) >= 0
            ):
                self._work += _RESULT + len(value)
                self.result_summary.add_if_result(value)
            self._emit(encode_data_event(value))

    def _parse_file(self) -> bool:
        """Add a piece of a file block; deliver the file at the end of the block."""
        assert self._file is not None, "a block has begun"
        self._work += _STEP
        end = min(self._at + _PIECE, len(self._input))
        rest = self._file.feed(self._input[self._at : end])
        self._at = end
        if rest is None:
            return end < len(self._input)
        self._end_block(end - len(rest) - len(LINE_TERMINATOR))
        block, self._file = self._file, None
        self._work += _FILE
        try:
            file = block.parse_file()
        except FileBlockError as error:
            self._emit_error(str(error))
            return True
        if isinstance(file, PrintedFile):
            self._emit(encode_file_event(file.filename, file.content_type, file.content))
            return True
        self.awaited_file = file
        return False


_STEPS = {
    _State.TEXT: SegiParser._parse_text,
    _State.VALUES: SegiParser._parse_values,
    _State.FILE: SegiParser._parse_file,
}


def find_character_boundary(data: bytes, at: int) -> int:
    """Return the last place between two characters of `data` that is not after `at`.

    The result is at most 3 less than `at`, also if `data` is not UTF-8.
    """
    for place in range(at, max(at - 4, -1), -1):
        if place >= len(data) or data[place] & 0xC0 != 0x80:
            return place
    return at


def measure_complete_utf8(data: bytes) -> int:
    """Return the size in bytes of `data` without an incomplete character at its end."""
    # Only a character that begins in the last three bytes can be incomplete.
    before = max(len(data) - 3, 0)
    return before + utf_8_decode(data[before:], "replace", False)[1]


def split_long_lines(block: bytes, max_line_bytes: int) -> Iterator[bytes]:
    """Cut `block`, usually into one piece, so that no line of a piece is over `max_line_bytes`."""
    start = line = 0  # beginnings of the next piece and of the next line
    while len(block) - line > max_line_bytes:
        end = block.rfind(b"\n", line, line + max_line_bytes + 1)
        if end >= 0:
            line = end + 1
            continue
        cut = find_character_boundary(block, line + max_line_bytes)
        yield block[start:cut]
        start = line = cut
    yield block[start:]


def _find_last_line(data: bytes, at: int, end: int) -> int:
    """Return where the last line in data[at:end] begins, or where a piece of it last ends."""
    place = max(data.rfind(LINE_TERMINATOR, at, end), at)
    line = place + 1 if data.startswith(LINE_TERMINATOR, place) else place
    while end - line > _PIECE:
        place = line = find_character_boundary(data, line + _PIECE)
    return place


def _replace_invalid(part: bytes) -> bytes:
    """Return part of stdout with U+FFFD in place of bytes that are not UTF-8."""
    return part if part.isascii() else part.decode("utf-8", "replace").encode()


# Raises one of _JSON_ERRORS unless the bytes, which must be UTF-8, are one JSON value.
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_JSON_ERRORS = (msgspec.DecodeError, RecursionError)


def _describe_json_error(value: bytes, error: Exception) -> str:
    """Return a message about a value for which `_check_json` raised `error`."""
    if not isinstance(error, RecursionError) and len(value) <= _EXPLAINED:
        # Half a surrogate pair is JSON by its grammar, and the parser has strange words for it.
        # As escapes of other characters, in the same places, halves and pairs are like any.
        try:
            _check_json(value.replace(rb"\ud", rb"\u0").replace(rb"\uD", rb"\u0"))
        except _JSON_ERRORS as other:
            error = other
        else:
            return (
                r"a line of a data block has half of a surrogate pair, \ud800 to \udfff; escape"
                " both halves, or write the character itself"
            )
    if isinstance(error, RecursionError):
        return (
            "a line of a data block is nested too deeply; up to"
            f" {_NESTING} levels of arrays and objects are always taken"
        )
    return f"a line of a data block is not JSON: {error}"


_DEFAULTS = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
_OF_EACH_RUN = ("HOME", "TEMPORARY_DIRECTORY", "TURINGARENA_SEED")
_TOOLS = "EVALUATION_TOOLS"
_RESERVED = frozenset((*_OF_EACH_RUN, *MARKER_VARIABLE_NAMES, _TOOLS))
_SUBMISSION_FILE = "SUBMISSION_FILE_"


def is_reserved_variable(name: str) -> bool:
    """Return whether the daemon sets a variable itself, so that operators cannot configure it."""
    return name in _RESERVED or name.startswith(_SUBMISSION_FILE)


def add_tools_to_path(environment: Mapping[str, str], tools_directory: str) -> dict[str, str]:
    """Return the environment with the directory of tools for evaluators, whose `bin` is on PATH."""
    path = f"{environment.get('PATH', _DEFAULTS['PATH'])}:{tools_directory}/bin"
    return {**environment, "PATH": path, _TOOLS: tools_directory}


def build_evaluator_environment(
    configured: Mapping[str, str],
    *,
    home: str,
    temporary_directory: str,
    seed: int,
    submission: Mapping[str, str],
    markers: Markers,
) -> dict[str, str]:
    """Return the environment of an evaluator; nothing is inherited from the daemon.

    `home`, `temporary_directory` and the values of `submission` (by field name) are paths inside
    the sandbox. `configured` are the operator's variables.
    """
    return {
        **_DEFAULTS,
        **configured,
        **dict(zip(_OF_EACH_RUN, (home, temporary_directory, str(seed)), strict=True)),
        **{f"{_SUBMISSION_FILE}{field.upper()}": path for field, path in submission.items()},
        **markers.build_variables(),
    }
