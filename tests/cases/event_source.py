"""A reader of server-sent events, as the HTML standard (section 9.2.6) has it."""

from __future__ import annotations

import re

import attrs

_LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n)")


@attrs.frozen
class ServerSentEvent:
    """What a page would be given."""

    type: str
    data: str
    last_event_id: str


@attrs.define
class EventSource:
    """Takes a stream, in pieces, and has its events; `retry` is in milliseconds."""

    last_event_id: str = ""
    events: list[ServerSentEvent] = attrs.field(factory=list)
    retry: int | None = None
    _rest: bytes = b""
    _type: str = ""
    _data: str = ""
    _id: str = ""

    def __attrs_post_init__(self) -> None:
        self._id = self.last_event_id

    def feed(self, some: bytes) -> None:
        self._rest += some
        end = self._rest.rfind(b"\n") + 1  # so that no line, and no character, is cut
        lines, self._rest = self._rest[:end].decode(), self._rest[end:]
        for line in _LINE.finditer(lines):
            self._take(line[1])

    def reconnect(self) -> None:
        """Forget the event that a broken connection has cut off."""
        self._rest, self._data, self._type = b"", "", ""

    def _take(self, line: str) -> None:
        if not line:
            self._dispatch()
            return
        field, colon, value = line.partition(":")
        value = value.removeprefix(" ")
        if not colon:
            value = ""
        if field == "event":
            self._type = value
        elif field == "data":
            self._data += value + "\n"
        elif field == "id" and "\0" not in value:
            self._id = value
        elif field == "retry" and re.fullmatch("[0-9]+", value):
            self.retry = int(value)

    def _dispatch(self) -> None:
        self.last_event_id = self._id
        if self._data:
            data = self._data.removesuffix("\n")
            self.events.append(ServerSentEvent(self._type or "message", data, self.last_event_id))
        self._type = self._data = ""
