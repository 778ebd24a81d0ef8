"""Connections that send at once what is written, as far as the kernel takes it.

Twisted's own keep what is written until the reactor's next turn. So an answer that the kernel
takes whole, as it does nearly all, costs a turn more and two changes of what the reactor watches.
"""

from __future__ import annotations

import struct
from socket import (
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SOL_SOCKET,
    TCP_INFO,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
    TCP_USER_TIMEOUT,
    socket,
)
from typing import Any

import attrs
from twisted.internet import tcp, unix
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.protocols.policies import ProtocolWrapper
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


_INFO = struct.Struct("=120xQ16xI52xQQ12xI")
"""Of struct tcp_info (linux/tcp.h): tcpi_bytes_acked, tcpi_notsent_bytes, tcpi_bytes_sent,
tcpi_bytes_retrans, and tcpi_snd_wnd, which Linux has since 5.4."""


@attrs.define
class SocketProgress:
    """How far the client of a TCP connection has read, as the kernels at both ends know it.

    The window that the client's kernel offers is as large as its buffer when that is empty, and
    smaller by what is in it. So what has been acknowledged is in the buffer as far as the window is
    smaller than it has been. (A window that grows at the beginning though nothing is read has some
    tens of kilobytes count too early.) A proxy in between is the client here.
    """

    _socket: socket
    _widest: int = 0  # of the windows, in bytes
    _idle: int | None = None  # while probes are wanted: the seconds before the first one otherwise

    def progress(self) -> tuple[int, int]:
        """Return the bytes that were given to the kernel, and how many of them were read."""
        info = self._socket.getsockopt(IPPROTO_TCP, TCP_INFO, _INFO.size)
        acknowledged, unsent, sent, again, window = _INFO.unpack(info)
        self._widest = max(self._widest, window)
        return sent - again + unsent, acknowledged + window - self._widest

    def probe(self, wanted: bool) -> None:
        """Have the kernel ask for the window each second, by TCP's keep-alive, or no more."""
        if wanted and self._idle is None:
            self._idle = self._socket.getsockopt(IPPROTO_TCP, TCP_KEEPIDLE)
            set_probes(self._socket, idle=1)
        elif self._idle is not None and not wanted:
            set_probes(self._socket, self._idle)
            self._idle = None


def below_tls(transport: Any) -> Any:
    """Return the transport that has the socket."""
    while isinstance(transport, ProtocolWrapper):
        transport = transport.transport
    return transport


class PromptUnixServer(PromptServer, unix.Server):
    """The same on a socket of the file system."""


_PROMPT = {tcp.Server: PromptServer, unix.Server: PromptUnixServer}
_PROBES = 4  # in the second half of the time that a client may be silent


@implementer(IStreamServerEndpoint)
@attrs.frozen
class PromptEndpoint:
    """An endpoint whose connections send at once, below TLS too, where they are Twisted's.

    Those of TCP are lost when their client's kernel has acknowledged nothing for `silence` seconds,
    also where nothing is sent. Otherwise one that has vanished stays for a quarter of an hour.
    """

    _endpoint: IStreamServerEndpoint
    _silence: float

    def listen(self, factory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Listen as the endpoint does."""
        return self._endpoint.listen(factory).addCallback(self._prepare)

    def _prepare(self, port: Any) -> Any:
        usual = getattr(port, "transport", None)
        if usual in _PROMPT:
            port.transport = _PROMPT[usual]
        if usual is tcp.Server:
            limit_silence(port.socket, self._silence)
        return port


def limit_silence(listening: socket, seconds: float) -> None:
    """Have the kernel end accepted connections whose client acknowledges nothing for so long.

    Their sockets inherit the options, so no connection costs a system call (tcp(7)).
    """
    listening.setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, round(seconds * 1000))
    set_probes(listening, idle=max(1, round(seconds / 2)))


def set_probes(connection: socket, idle: int) -> None:
    """Have the kernel probe a client (keep-alive) that says nothing for `idle` seconds.

    How many probes may fail is not set: with TCP_USER_TIMEOUT the kernel counts the time alone.
    """
    connection.setsockopt(IPPROTO_TCP, TCP_KEEPINTVL, max(1, idle // _PROBES))
    connection.setsockopt(IPPROTO_TCP, TCP_KEEPIDLE, idle)  # which sets the timer anew
    connection.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
