"""Framing of JSON Lines as server-sent events and WebSocket messages.

A batch is framed as a whole, without parsing its events. JSON Lines are sent as they are.
Server-sent events (HTML standard, section 9.2) get a field name before each event and the cursor
after it. WebSocket messages (RFC 6455, section 5.2) get a header with their length.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tawebeval.core.events import EventBatch
from tawebeval.core.pages import ALL_RECEIVED_CURSOR

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
