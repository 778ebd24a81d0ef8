"""Connections that send at once what is written, as far as the kernel takes it.

Twisted's own keep what is written until the reactor's next turn. So an answer that the kernel
takes whole, as it does nearly all, costs a turn more and two changes of what the reactor watches.
"""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet import tcp, unix
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from zope.interface import implementer


class PromptServer(tcp.Server):
    """A connection to a client that has nothing in memory unless the client is slow.

    Where something is left its producer is paused until all is sent, however little it is: so what
    a stream has written before it is to go on has left the daemon. All else is Twisted's.
    """

    # Whether the reactor is to tell when the kernel takes more: then something is to be sent, or
    # the connection to be ended, before anything that is written now.
    _in_turn = False
    _aborted = False

    def write(self, data: bytes) -> None:
        """Send `data`, behind all that was written before."""
        if not self._in_turn and self._sends_at_once and data:
            sent = self.writeSomeData(data)
            # An error is met again in the reactor's next turn, which ends the connection.
            if isinstance(sent, int):
                if sent < len(data):
                    super().write(data[sent:])
                    self._pause_producer()
                return
        super().write(data)

    def _pause_producer(self) -> None:
        if self.producer is not None:
            self.producerPaused = True  # so that it is resumed when all is sent
            self.producer.pauseProducing()  # type: ignore[attr-defined]

    @property
    def _sends_at_once(self) -> bool:
        """Whether there is a socket to send by, and nothing that has to come from Twisted."""
        return bool(
            self.connected
            and not self._aborted
            and not self.TLS  # begun on the connection, which then encrypts what is written
            # A producer that is asked for each piece waits to hear that the last one is sent.
            and (self.producer is None or self.streamingProducer)
        )

    def startWriting(self) -> None:
        """Have the reactor tell when the kernel takes more."""
        self._in_turn = True
        super().startWriting()

    def stopWriting(self) -> None:
        """Note that all is sent."""
        self._in_turn = False
        super().stopWriting()

    def abortConnection(self) -> None:
        """End the connection in the reactor's next turn, and send nothing more."""
        self._aborted = True
        super().abortConnection()


class PromptUnixServer(PromptServer, unix.Server):
    """The same on a socket of the file system."""


_PROMPT = {tcp.Server: PromptServer, unix.Server: PromptUnixServer}


@implementer(IStreamServerEndpoint)
@attrs.frozen
class PromptEndpoint:
    """An endpoint whose connections send at once, below TLS too, where they are Twisted's."""

    _endpoint: IStreamServerEndpoint

    def listen(self, factory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Listen as the endpoint does."""
        return self._endpoint.listen(factory).addCallback(_make_prompt)


def _make_prompt(port: Any) -> Any:
    usual = getattr(port, "transport", None)
    if usual in _PROMPT:
        port.transport = _PROMPT[usual]
    return port
