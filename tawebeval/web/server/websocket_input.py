"""What the client of a WebSocket sends, and the end of a WebSocket."""

from __future__ import annotations

from typing import Any

import attrs
from wsproto.utilities import LocalProtocolError

_MAX_BYTES = 64 * 1024  # of messages without meaning from the client of a WebSocket
_SHORT_FRAME = 6  # overhead of a short client frame, in bytes
_TOO_BIG = 1009  # close code beyond _MAX_BYTES


@attrs.define(eq=False)
class WebSocketInput:
    """The bytes that the client of a WebSocket sends; `protocol` is Twisted's WebSocket.

    `sends_close_frame` is true while a close frame is being sent, `awaits_close_frame` from then on
    until the client answers.
    """

    _protocol: Any
    _received: int = 0  # bytes without meaning
    sends_close_frame: bool = False
    awaits_close_frame: bool = False

    def receive(self, data: bytes) -> bool:
        """Pass bytes to the WebSocket; return False if too much has come after the close frame.

        Answers to pings count too; they take a week to reach the limit.
        """
        self._received += len(data)
        if self._received > _MAX_BYTES:
            if self.awaits_close_frame:
                return False
            self._protocol.loseConnection(_TOO_BIG)
            return True
        try:
            self._protocol.dataReceived(data)
        except LocalProtocolError:
            # Twisted answers pings even after the close frame, which RFC 6455 forbids.
            if not self.awaits_close_frame:
                raise
        return True

    def exempt_message_from_limit(self, size: int) -> None:
        """Do not count a meaningful message of `size` bytes against the limit."""
        self._received -= _SHORT_FRAME + size

    def send_close_frame(self, code: int) -> bool:
        """Send a close frame; return False if one was sent before."""
        if self.awaits_close_frame:
            return False
        self.sends_close_frame = True
        self._protocol.loseConnection(code)
        self.sends_close_frame, self.awaits_close_frame = False, True
        return True
