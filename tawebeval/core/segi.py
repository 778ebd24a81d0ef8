"""Markers: the secret lines that separate blocks from text in an evaluator's stdout."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import attrs
import msgspec

from tawebeval.core import text
from tawebeval.core.events import (
    TERMINATOR,
    Batch,
    encode_data,
    encode_error,
    encode_file,
    encode_text,
    has_blank_line,
)
from tawebeval.core.fileblock import FileBlock, FileBlockError, InlineFile, WantedFile

MARKER_START = b"~"
"""The first byte of each: it is seldom in text, and where it is absent, so are markers."""


@attrs.frozen
class Markers:
    """The four markers of one run."""

    data_begin: bytes
    data_end: bytes
    file_begin: bytes
    file_end: bytes

    @classmethod
    def fresh(cls, random: Callable[[int], bytes]) -> Markers:
        """Draw markers of 128 bits each; `random(n)` returns n random bytes."""

        def marker(name: bytes) -> bytes:
            return b"%stawebeval:%s:%s" % (MARKER_START, name, random(16).hex().encode())

        return cls(*map(marker, (b"data-begin", b"data-end", b"file-begin", b"file-end")))

    @property
    def begins(self) -> tuple[bytes, bytes]:
        """Begin markers of a data block and of a file block."""
        return self.data_begin, self.file_begin

    @property
    def in_values(self) -> tuple[bytes, bytes, bytes]:
        """Markers to look for in a data block: its end marker and the begin markers."""
        return self.data_end, self.data_begin, self.file_begin

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give the markers to the evaluator."""
        values = (marker.decode() for marker in attrs.astuple(self))
        return dict(zip(VARIABLES, values, strict=True))


VARIABLES = tuple(f"EVALUATION_{field.name.upper()}" for field in attrs.fields(Markers))
"""Names of the environment variables that tell the markers, in the order of the fields."""


NESTING = 500
"""The levels of arrays and objects that a value may have wherever it is checked.

The parser takes more, how many depends on the version of Python and on what is on the stack.
"""

REFUSED = (msgspec.DecodeError, RecursionError)
"""What `check` raises."""

_EXPLAINED = 256 * 1024  # bytes of a value that is checked once more, to say what is wrong

check = msgspec.json.Decoder(msgspec.Raw).decode
"""Raise one of REFUSED unless the bytes, which have to be UTF-8, are one JSON value."""


def find_value_error(value: bytes, error: Exception) -> str:
    """Return a message about a value for which `check` raised `error`."""
    if not isinstance(error, RecursionError) and len(value) <= _EXPLAINED:
        # Half a surrogate pair is JSON by its grammar, and the parser has strange words for it.
        # As escapes of other characters, in the same places, halves and pairs are like any.
        try:
            check(value.replace(rb"\ud", rb"\u0").replace(rb"\uD", rb"\u0"))
        except REFUSED as other:
            error = other
        else:
            return (
                r"a line of a data block has half of a surrogate pair, \ud800 to \udfff, which is"
                " no character: escape both halves, or write the character itself"
            )
    if isinstance(error, RecursionError):
        return (
            "a line of a data block is nested too deeply: keep to"
            f" {NESTING} levels of arrays and objects"
        )
    return f"a line of a data block is not JSON: {error}"


MAX_PAYLOAD = 64 * 1024
"""The most bytes of UTF-8 that one text event carries (contract, section 4)."""

_PIECE = MAX_PAYLOAD // 3  # of a line: a byte that is not UTF-8 becomes U+FFFD, which is three

TURN = 512 * 1024
"""The work of one call: it begins no step when this is reached.

The unit is a byte of an event. What takes longer than some 4 ns for each byte of its events counts
for more. A read of 64 KiB with lines of ten bytes is less.
"""

# Work besides the bytes of events:
_STEP = 2 * 1024  # the search for markers, and putting a piece of a file away
_LINE = 256  # a line of a data block, and as much as it is long
_FAULT = 4 * 1024  # an error
_FILE = 32 * 1024  # the headers of a file

# Bytes of text in one step:
_BLOCK = 64 * 1024 + _PIECE  # a read, and what was held back before it
_SHORT = 32 * 1024  # with blank lines, which take longer
_NEAR = 16 * 1024  # from what looks like a marker, lest the search for each takes long

_CHARACTER = 3  # the most bytes that a character has after its first
_EXCERPT = 200


class _State(Enum):
    TEXT = auto()
    VALUES = auto()
    FILE = auto()


class Parser:
    """Parser of one run's stdout.

    `feed`, `proceed`, `flush`, `finish`, `supply` and `refuse` return the events that have become
    certain. `max_value` and `max_file` (bytes) bound a line of a data block and a file; longer ones
    are skipped and reported.

    While `pending`, there is input for `proceed`. While `wanted` is set, parsing stops until the
    caller supplies or refuses that file.
    """

    __slots__ = (
        *("_at", "_count", "_file", "_imagined", "_input", "_lines", "_markers", "_max_file"),
        *("_max_value", "_overlong", "_sound", "_state", "_value", "_work", "pending", "wanted"),
    )

    def __init__(self, markers: Markers, *, max_value: int = 2**20, max_file: int = 2**21) -> None:
        self.wanted: WantedFile | None = None
        self.pending = False
        self._markers = markers
        self._max_value = max_value
        self._max_file = max_file
        self._state = _State.TEXT
        self._input = TERMINATOR
        self._at = 0  # where in the input parsing goes on
        self._imagined = True  # the terminator there is one that nobody wrote, or a marker's
        self._value = bytearray()  # VALUES: the part of a line that has come so far, as UTF-8
        self._overlong = False  # ... which is over its limit, and not kept
        self._sound = True  # VALUES: no line of the block was wrong so far
        self._file: FileBlock | None = None
        self._work = 0
        self._count = 0
        self._lines: list[bytes] = []

    def feed(self, chunk: bytes) -> Batch:
        """Add bytes of stdout and do one call's work."""
        self._input = self._input[self._at :] + chunk
        self._at = 0
        return self.proceed()

    def proceed(self) -> Batch:
        """Do one more call's work on the pending input."""
        more = self.wanted is None
        while more and self._work < TURN:
            more = _STEPS[self._state](self)
        self.pending = more
        return self._take()

    @property
    def partial(self) -> bool:
        """Whether `flush` would deliver a partial line."""
        return self._flushable() > 0

    def flush(self) -> Batch:
        """Deliver the partial line without waiting for its rest."""
        end = self._at + self._flushable()
        self._text(self._input[self._at : end])
        self._at = end
        return self._take()

    def finish(self) -> Batch:
        """Take the end of stdout; call it when nothing is pending and no file wanted.

        The end of stdout ends the last line, but makes no marker of it (contract, section 4).
        """
        assert self.wanted is None, "the wanted file comes before the end"
        assert not self.pending, "all that was printed comes before the end"
        rest = self._input[self._at :]
        if self._state is _State.TEXT:
            self._text(rest)
        else:
            if self._state is _State.VALUES and (rest or self._value or self._overlong):
                self._take_line(rest)
            self._protocol("stdout ended inside a block, before the line of its end marker")
        self._state = _State.TEXT
        self._input = b""
        self._at = 0
        return self._take()

    def supply(self, content: bytes) -> Batch:
        """Take the content of the wanted file and continue."""
        assert self.wanted is not None
        self._emit(encode_file(self.wanted.filename, self.wanted.content_type, content))
        self.wanted = None
        return self.proceed()

    def refuse(self, message: str) -> Batch:
        """Report that the wanted file cannot be had and continue."""
        self._protocol(message)
        self.wanted = None
        return self.proceed()

    # What becomes of it

    def _take(self) -> Batch:
        batch = Batch(self._count, b"".join(self._lines))
        self._count = self._work = 0
        self._lines.clear()
        return batch

    def _emit(self, batch: Batch) -> None:
        self._count += batch.count
        self._work += len(batch.lines)
        self._lines.append(batch.lines)

    def _protocol(self, message: str, **members: str) -> None:
        self._work += _FAULT
        self._emit(encode_error("protocol", message, members))

    # Text

    def _parse_text(self) -> bool:
        """Deliver text up to the next block, or else to the last terminator in the input."""
        self._work += _STEP
        data, at = self._input, self._at
        end = min(at + _BLOCK, len(data))
        begin = b""
        near = data.find(MARKER_START, at, end)
        if near >= 0:
            end = min(near + _NEAR, end)
            for marker in self._markers.begins:
                line = TERMINATOR + marker + TERMINATOR
                place = data.find(line, at, end + len(line))
                if place >= 0:
                    # Another one counts if it stands before this one.
                    begin, end = marker, place
        cut = end if begin else _last_line(data, at, end)
        block = data[at:cut]
        blank_lines = has_blank_line(block)
        if blank_lines and len(block) > _SHORT:
            begin, end = b"", at + _SHORT
            cut = _last_line(data, at, end)
            block = data[at:cut]
        self._text(block, blank_lines)
        self._at = cut
        if begin:
            self._at += len(TERMINATOR + begin + TERMINATOR)
            self._begin(begin)
            return True
        return end < len(data)

    def _text(self, block: bytes, blank_lines: bool | None = None) -> None:
        if block and self._imagined:
            self._imagined = False
            block = block[1:]
        for piece in text.pieces(block, _PIECE):
            self._emit(encode_text(piece, blank_lines))

    def _flushable(self) -> int:
        """Return the size in bytes of the input that is text whatever follows."""
        if self._state is not _State.TEXT or self.pending or self.wanted is not None:
            return 0
        rest = self._input[self._at :]
        if rest.startswith(TERMINATOR):
            line = rest[1:]
            if any(begin.startswith(line) for begin in self._markers.begins):
                return 0
        return text.complete(rest)

    # Blocks

    def _begin(self, marker: bytes) -> None:
        if marker == self._markers.data_begin:
            self._state = _State.VALUES
            self._sound = True
        else:
            self._state = _State.FILE
            self._file = FileBlock(self._markers.file_end, self._max_file)

    def _end_block(self, at: int) -> None:
        """Return to text; the end marker's terminator, at `at`, serves as the imagined one."""
        self._state = _State.TEXT
        self._imagined = True
        self._at = at

    def _parse_values(self) -> bool:
        """Parse complete lines of a data block and keep the beginning of the next."""
        data, at = self._input, self._at
        while self._work < TURN:
            end = data.find(TERMINATOR, at)
            if end < 0:
                self._at = at + text.complete(data[at:])
                self._keep(data[at : self._at])
                return False
            marker = self._take_line(data[at:end])
            at = end + len(TERMINATOR)
            if marker == self._markers.data_end:
                self._end_block(end)
                return True
            if marker:
                # No JSON looks like a marker: the evaluator broke off and began anew.
                self._protocol("a block began inside a data block, before its end marker")
                self._at = at
                self._begin(marker)
                return True
        self._at = at
        return True

    def _take_line(self, rest: bytes) -> bytes:
        """Parse the data block's line that ends with `rest`; return the line if it is a marker."""
        if self._value or self._overlong:
            self._keep(rest)
            line, overlong = bytes(self._value), self._overlong
            self._value.clear()
            self._overlong = False
        else:
            line = _as_utf8(rest)
            overlong = len(line) > self._max_value
        self._work += _LINE + len(line)
        if overlong:
            self._broken(f"a line of a data block is over {self._max_value} bytes")
        elif line.startswith(MARKER_START) and line in self._markers.in_values:
            return line
        else:
            self._check_value(line)
        return b""

    def _keep(self, part: bytes) -> None:
        """Add to the line of a data block, unless the line is too long already."""
        if not self._overlong:
            self._value += _as_utf8(part)
            if len(self._value) > self._max_value:
                self._overlong = True
                self._value.clear()

    def _broken(self, message: str, **members: str) -> None:
        """Report the first wrong line of a data block; later ones are not reported."""
        if self._sound:
            self._sound = False
            self._protocol(message, **members)

    def _check_value(self, line: bytes) -> None:
        value = line.strip(b" \t\r")
        try:
            check(value)
        except REFUSED as error:
            if self._sound:  # else nobody asks why
                excerpt = value[:_EXCERPT].decode("utf-8", "replace")
                self._broken(find_value_error(value, error), line=excerpt)
        else:
            self._emit(encode_data(value))

    def _parse_file(self) -> bool:
        """Add a piece of a file block; deliver the file at the end of the block."""
        assert self._file is not None, "a block has begun"
        self._work += _STEP
        end = min(self._at + _PIECE, len(self._input))
        rest = self._file.feed(self._input[self._at : end])
        self._at = end
        if rest is None:
            return end < len(self._input)
        self._end_block(end - len(rest) - len(TERMINATOR))
        block, self._file = self._file, None  # which need not be kept
        self._work += _FILE
        try:
            file = block.parse()
        except FileBlockError as error:
            self._protocol(str(error))
            return True
        if isinstance(file, InlineFile):
            self._emit(encode_file(file.filename, file.content_type, file.content))
            return True
        self.wanted = file
        return False


_STEPS = {
    _State.TEXT: Parser._parse_text,
    _State.VALUES: Parser._parse_values,
    _State.FILE: Parser._parse_file,
}


def _last_line(data: bytes, at: int, end: int) -> int:
    """Return where the last line in data[at:end] begins, or must be cut."""
    place = max(data.rfind(TERMINATOR, at, end), at)
    if end - place > _PIECE or (place == at and end < len(data)):
        # It is too long for a marker, and for one event.
        return text.boundary(data, end - _CHARACTER)
    return place


def _as_utf8(part: bytes) -> bytes:
    """Return part of stdout with U+FFFD in place of bytes that are not UTF-8."""
    return part if part.isascii() else part.decode("utf-8", "replace").encode()
