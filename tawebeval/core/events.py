r"""Encoding of events as JSON Lines, done once per event.

An event is `{"type": "text"|"data", "payload": ...}`. From here on an event is bytes: a batch
has lines, each a complete JSON object that ends with `\n`. JSON escapes every other `\n`. So a
page is a join, a JSON Lines stream is the bytes as they are, and counting or cutting a batch is
`bytes.count` and `bytes.find`.

Encoding text line by line in Python would be the daemon's most expensive work. `encode_text_events`
encodes a whole block of lines with one call of `orjson`: it replaces each line terminator by a
character that the block does not contain, and after encoding replaces this character by the
text that ends one event, writes the terminator's own event and begins the next event.

A `StreamFraming` frames a batch as a whole, without parsing its events. JSON Lines are sent as they
are. Server-sent events (HTML standard, section 9.2) get a field name before each event and the
cursor after it. WebSocket messages (RFC 6455, section 5.2) get a header with their length.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import orjson

ALL_RECEIVED_CURSOR = "end"
"""The dummy end: the cursor of a client that has received every event."""

LINE_TERMINATOR = b"\n"
r"""The only line terminator: `\r`, U+2028 and the like are ordinary text."""

BLANK_LINE = re.compile(LINE_TERMINATOR * 2)
"""Two line terminators. The search takes a third of the time of `in`."""

# Characters that JSON does not escape and text almost never has: DEL, Unicode's noncharacters.
_STAND_INS = (b"\x7f", *(chr(code).encode() for code in range(0xFDD0, 0xFDF0)))
_TEXT = b'{"type":"text","payload":'
_DATA = b'{"type":"data","payload":'
_TERMINATOR_EVENT = _TEXT + b'"\\n"}\n'
_EMPTY_EVENT = _TEXT + b'""}\n'
_BETWEEN_LINES = b'"}\n' + _TERMINATOR_EVENT + _TEXT + b'"'


@attrs.frozen
class EventBatch:
    r"""A number of consecutive events as JSON Lines.

    `count` is the number of events, which is the number of `\n` in `lines`.
    """

    count: int
    lines: bytes

    def __add__(self, other: EventBatch) -> EventBatch:
        return EventBatch(self.count + other.count, self.lines + other.lines)


EMPTY_BATCH = EventBatch(0, b"")


def measure_first_events(batch: EventBatch, count: int) -> int:
    """Return the size in bytes of the first `count` events of a batch."""
    lines = batch.lines
    if count <= batch.count // 2:
        at = 0
        for _ in range(count):
            at = lines.index(b"\n", at) + 1
    else:
        at = len(lines)
        for _ in range(batch.count - count):
            at = lines.rindex(b"\n", 0, at - 1) + 1
    return at


def split_batch(batch: EventBatch, count: int) -> tuple[EventBatch, EventBatch]:
    """Return the first `count` events of a batch, and the others."""
    if count == batch.count:
        return batch, EMPTY_BATCH
    at = measure_first_events(batch, count)
    return (
        EventBatch(count, batch.lines[:at]),
        EventBatch(batch.count - count, batch.lines[at:]),
    )


def encode_text_events(block: bytes) -> EventBatch:
    """Encode stdout as text events: one for each line and one for each line terminator.

    Bytes that are not UTF-8 become U+FFFD. `block` must end between two characters and have no
    line over the limit of one event.
    """
    if not block:
        return EMPTY_BATCH
    stand_in = next((one for one in _STAND_INS if one not in block), None) or _absent(block)
    if block[0] == LINE_TERMINATOR[0]:
        # The usual block begins with the terminator that was held back before it.
        head, count = _TERMINATOR_EVENT, 1
        block = block[1:]
        if not block:
            return EventBatch(count, head)
    else:
        head, count = b"", 0
    string = orjson.dumps(block.replace(LINE_TERMINATOR, stand_in).decode("utf-8", "replace"))
    # Joined before the replacement, which makes it several times as long.
    framed = b"".join((head, _TEXT, string, b"}\n"))
    lines = framed.replace(stand_in, _BETWEEN_LINES)
    # Each terminator became two events. (Counting terminators costs more than this division.)
    terminators = (len(lines) - len(framed)) // (len(_BETWEEN_LINES) - len(stand_in))
    count += 1 + 2 * terminators
    if BLANK_LINE.search(block) or LINE_TERMINATOR[0] in (block[0], block[-1]):
        # Blank lines left text events with nothing in them. No payload can contain
        # the bytes of such an event, for a payload's quotes are escaped.
        length = len(lines)
        lines = lines.replace(_EMPTY_EVENT, b"")
        count -= (length - len(lines)) // len(_EMPTY_EVENT)
    return EventBatch(count, lines)


def _absent(block: bytes) -> bytes:
    """Return a character beyond the Basic Multilingual Plane that `block` does not contain.

    The planes have a million characters of four bytes each, more than any block can hold.
    """
    present = set(block.decode("utf-8", "replace"))
    return next(one for one in map(chr, range(0x10000, 0x110000)) if one not in present).encode()


def encode_data_event(value: bytes) -> EventBatch:
    """Encode a data event; `value`, one line of valid JSON, is the payload as it stands."""
    return EventBatch(1, b"%b%b}\n" % (_DATA, value))


def encode_file_event(filename: str, content_type: str, content: bytes) -> EventBatch:
    """Encode a file block as its data event (docs/evaluators.md; base64 of RFC 4648)."""
    head = orjson.dumps({"type": "file", "filename": filename, "content_type": content_type})
    # Joined once, because it is long.
    parts = (_DATA, head[:-1], b',"content_base64":"', b64encode(content), b'"}}\n')
    return EventBatch(1, b"".join(parts))


def compute_base64_size(size: int) -> int:
    """Return the size in bytes of the base64 encoding of `size` bytes."""
    return (size + 2) // 3 * 4


def encode_error_event(
    reason: str, message: str, members: Mapping[str, Any] | None = None
) -> EventBatch:
    """Encode the data event `evaluation_error` (docs/api.md)."""
    payload = {"type": "evaluation_error", "reason": reason, "message": message}
    return encode_data_event(orjson.dumps({**payload, **(members or {})}))


RETRY_MILLISECONDS = 2000
"""Milliseconds after which a browser asks again when a stream has broken off."""

_TEXT_MESSAGE = 0x81  # FIN, and the opcode of a text frame
_SHORT = [bytes((_TEXT_MESSAGE, length)) for length in range(126)]
_TWO_BYTES = bytes((_TEXT_MESSAGE, 126))
_EIGHT_BYTES = bytes((_TEXT_MESSAGE, 127))


@attrs.frozen
class StreamFraming:
    """Format of a stream: its beginning, events, end and heartbeat.

    `encode_events(begin_cursor, batch)` frames a batch.
    """

    first_bytes: bytes
    encode_events: Callable[[int, EventBatch], bytes]
    last_bytes: bytes
    heartbeat_bytes: bytes


def encode_server_sent_events(begin_cursor: int, batch: EventBatch) -> bytes:
    """Return a batch as server-sent events, each with the cursor after it as its `id`.

    Server-sent events also end a line at a carriage return, which JSON has only between values.
    """
    if not batch.count:
        return b""
    lines = batch.lines[:-1].replace(b"\r", b" ").replace(b"%", b"%%")
    template = b"data: %s\nid: %%d\n\n" % lines.replace(b"\n", b"\nid: %d\n\ndata: ")
    return template % tuple(range(begin_cursor + 1, begin_cursor + batch.count + 1))


def encode_websocket_messages(begin_cursor: int, batch: EventBatch) -> bytes:
    """Return a batch as text messages of a WebSocket server, one for each event."""
    frames = []
    for event in batch.lines.split(b"\n")[: batch.count]:
        length = len(event)
        if length < len(_SHORT):
            frames.append(_SHORT[length])
        elif length < 2**16:
            frames.append(_TWO_BYTES + length.to_bytes(2, "big"))
        else:
            frames.append(_EIGHT_BYTES + length.to_bytes(8, "big"))
        frames.append(event)
    return b"".join(frames)


JSON_LINES = StreamFraming(b"", lambda first, batch: batch.lines, b"", b"")
"""JSON Lines, which have neither an end nor a heartbeat."""

EVENT_STREAM = StreamFraming(
    b"retry: %d\n\n" % RETRY_MILLISECONDS,
    encode_server_sent_events,
    b"event: end\ndata: null\nid: %s\n\n" % ALL_RECEIVED_CURSOR.encode(),
    b":\n\n",
)
"""`text/event-stream`."""

WEBSOCKET_MESSAGES = StreamFraming(b"", encode_websocket_messages, b"", b"")
"""Messages of a WebSocket; its connection sends the end and the heartbeat (a ping)."""
