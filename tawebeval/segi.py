r"""SEGI: what an evaluator prints, read as events. Bytes in, batches of JSON Lines out.

Ordinary output is text. Between markers that only this run knows stand *blocks*:

    <terminator> DATA_BEGIN <terminator>          <terminator> FILE_BEGIN <terminator>
    one JSON value per line                       a file (see tawebeval.fileblock)
    DATA_END <terminator>                         <terminator> FILE_END <terminator>

The parser is a state machine without input or output of its own:

    TEXT --a begin marker--> VALUES or FILE --its end marker--> TEXT

The one subtle rule: the terminator *before* a begin marker belongs to the block. So a
terminator, and whatever may yet become a marker after it, is held back until the next
bytes show what it was. In TEXT the unparsed input therefore always begins with the last
terminator seen (or in mid-line, after a flush). The places where a marker may stand with
no terminator before it, at the start of the stream and right after a block, are made
equal to all others by a terminator that is only imagined and never delivered.

Text leaves in blocks that end just before a terminator, so characters are cut apart only
where a line is delivered in parts; `tawebeval.utf8` knows where that is harmless.
"""

from __future__ import annotations

from enum import Enum, auto

from tawebeval import utf8
from tawebeval.events import TERMINATOR, Batch, encode_data, encode_error, encode_file, encode_text
from tawebeval.fileblock import File, FileBlock, FileBlockError, WantedFile
from tawebeval.markers import MARKER_START, Markers
from tawebeval.values import REFUSED, check, fault

MAX_PAYLOAD = 64 * 1024
"""The most bytes of UTF-8 that one text event carries (contract, section 4)."""

_PIECE = MAX_PAYLOAD // 3  # a byte that is not UTF-8 becomes U+FFFD, which is three
_EXCERPT = 200


class _State(Enum):
    TEXT = auto()
    VALUES = auto()
    FILE = auto()


class Parser:
    """Turns one run's stdout into events.

    `feed`, `flush`, `finish`, `supply` and `refuse` each return the events that have
    become certain. `max_value` and `max_file` (bytes) bound a line of a data block and
    a file; what is over them is skipped and reported.

    While `wanted` is set, nothing is parsed until that file is supplied or refused. It
    may be set after `finish` too.
    """

    __slots__ = (
        *("_count", "_file", "_imagined", "_input", "_lines", "_markers", "_max_file"),
        *("_max_value", "_overlong", "_sound", "_state", "_value", "wanted"),
    )

    def __init__(self, markers: Markers, *, max_value: int = 2**20, max_file: int = 2**21) -> None:
        self.wanted: WantedFile | None = None
        self._markers = markers
        self._max_value = max_value
        self._max_file = max_file
        self._state = _State.TEXT
        self._input = TERMINATOR
        self._imagined = True  # the input's first byte is a terminator that nobody wrote
        self._value = bytearray()  # VALUES: the part of a line that has come so far
        self._overlong = False  # ... which is over its limit, and not kept
        self._sound = True  # VALUES: no line of the block was wrong so far
        self._file: FileBlock
        self._count = 0
        self._lines: list[bytes] = []

    def feed(self, chunk: bytes) -> Batch:
        """Take what was read from stdout."""
        self._input += chunk
        return self._go_on()

    @property
    def partial(self) -> bool:
        """Whether there is a line that `flush` would deliver without its rest."""
        return self._flushable() > 0

    def flush(self) -> Batch:
        """Deliver the partial line that has waited long enough for its rest."""
        length = self._flushable()
        self._text(self._input[:length])
        self._input = self._input[length:]
        return self._take()

    def finish(self) -> Batch:
        """Take the end of stdout, which also ends its last line. No file may be wanted."""
        assert self.wanted is None, "the wanted file comes before the end"
        if self._state is _State.TEXT and self._input[1:] not in self._markers.begins:
            self._text(self._input)
        else:
            if self._state is not _State.VALUES or self._value or self._overlong:
                self._input += TERMINATOR
            self._parse()
            if self._state is not _State.TEXT:
                self._protocol("stdout ended inside a block, before its end marker")
        self._input = b""
        return self._take()

    def supply(self, content: bytes) -> Batch:
        """Take the content of the wanted file, and go on."""
        assert self.wanted is not None
        self._emit(encode_file(self.wanted.filename, self.wanted.content_type, content))
        self.wanted = None
        return self._go_on()

    def refuse(self, message: str) -> Batch:
        """Report that the wanted file is not to be had, and go on."""
        self._protocol(message)
        self.wanted = None
        return self._go_on()

    def _go_on(self) -> Batch:
        if self.wanted is None:
            self._parse()
        return self._take()

    def _parse(self) -> None:
        """Parse the input as far as it goes; each step says whether another one can."""
        while _STEPS[self._state](self):
            pass

    # What becomes of it

    def _take(self) -> Batch:
        batch = Batch(self._count, b"".join(self._lines))
        self._count = 0
        self._lines.clear()
        return batch

    def _emit(self, batch: Batch) -> None:
        self._count += batch.count
        self._lines.append(batch.lines)

    def _protocol(self, message: str, **members: str) -> None:
        self._emit(encode_error("protocol", message, members))

    # Text

    def _parse_text(self) -> bool:
        data = self._input
        if MARKER_START in data:
            values_begin, file_begin = map(_as_line, self._markers.begins)
            values = data.find(values_begin)
            file = data.find(file_begin)
            if values >= 0 and not 0 <= file < values:
                self._text(data[:values])
                return self._begin_values(data[values + len(values_begin) :])
            if file >= 0:
                self._text(data[:file])
                return self._begin_file(data[file + len(file_begin) :])
        cut = max(data.rfind(TERMINATOR), 0)
        if len(data) - cut > _PIECE:
            # The last line is too long for a marker, and for one event.
            cut = utf8.complete(data)
        self._text(data[:cut])
        self._input = data[cut:]
        return False

    def _text(self, block: bytes) -> None:
        if block and self._imagined:
            self._imagined = False
            block = block[1:]
        for piece in utf8.pieces(block, _PIECE):
            self._emit(encode_text(piece))

    def _flushable(self) -> int:
        """Return how many bytes of the input are text, whatever may come next."""
        if self.wanted is not None:
            return 0
        if self._input.startswith(TERMINATOR):
            line = self._input[1:]
            if any(begin.startswith(line) for begin in self._markers.begins):
                return 0
        return utf8.complete(self._input)

    # Blocks

    def _begin_values(self, rest: bytes) -> bool:
        self._state = _State.VALUES
        self._sound = True
        self._input = rest
        return True

    def _begin_file(self, rest: bytes) -> bool:
        self._state = _State.FILE
        self._file = FileBlock(self._markers.file_end, self._max_file)
        self._input = rest
        return True

    def _end_block(self, rest: bytes) -> None:
        self._state = _State.TEXT
        self._imagined = True
        self._input = TERMINATOR + rest

    def _parse_values(self) -> bool:
        data, at = self._input, 0
        begins = self._markers.begins
        while (end := data.find(TERMINATOR, at)) >= 0:
            self._keep(data[at:end])
            line, overlong, at = bytes(self._value), self._overlong, end + 1
            self._value.clear()
            self._overlong = False
            if overlong:
                self._broken(f"a line of a data block is over {self._max_value} bytes")
            elif line == self._markers.data_end:
                self._end_block(data[at:])
                return True
            elif line in begins:
                # No JSON looks like a marker: the evaluator broke off and began anew.
                self._protocol("a block began inside a data block, before its end marker")
                self._end_block(line + data[end:])
                return True
            else:
                self._check_value(line)
        self._keep(data[at:])
        self._input = b""
        return False

    def _broken(self, message: str, **members: str) -> None:
        """Report the first line of a data block that is wrong; one event says enough."""
        if self._sound:
            self._sound = False
            self._protocol(message, **members)

    def _keep(self, part: bytes) -> None:
        """Add to the line of a data block, if that is not too long already."""
        if len(self._value) + len(part) > self._max_value:
            self._overlong = True
        if not self._overlong:
            self._value += part

    def _check_value(self, line: bytes) -> None:
        value = line.strip(b" \t\r")
        if not value.isascii():
            value = value.decode("utf-8", "replace").encode()
        try:
            check(value)
        except REFUSED as error:
            if self._sound:  # else nobody asks why
                excerpt = value[:_EXCERPT].decode("utf-8", "replace")
                self._broken(fault(value, error), line=excerpt)
        else:
            self._emit(encode_data(value))

    def _parse_file(self) -> bool:
        rest = self._file.feed(self._input)
        if rest is None:
            self._input = b""
            return False
        self._end_block(rest)
        try:
            file = self._file.parse()
        except FileBlockError as error:
            self._protocol(str(error))
            return True
        if isinstance(file, File):
            self._emit(encode_file(file.filename, file.content_type, file.content))
            return True
        self.wanted = file
        return False


_STEPS = {
    _State.TEXT: Parser._parse_text,
    _State.VALUES: Parser._parse_values,
    _State.FILE: Parser._parse_file,
}


def _as_line(marker: bytes) -> bytes:
    """Return what is a marker where it is found, which is a whole line."""
    return TERMINATOR + marker + TERMINATOR
