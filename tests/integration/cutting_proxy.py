"""A proxy that cuts each connection: in or after a response.

It knows nothing of HTTP. What a client sends counts as a request, what comes back as its
response, until the client sends again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from itertools import cycle
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.interfaces import IAddress, IListeningPort
from twisted.protocols.portforward import (
    ProxyClient,
    ProxyClientFactory,
    ProxyFactory,
    ProxyServer,
)
from twisted.python.failure import Failure

_BUFFER = 32 * 1024  # bytes: what a cut loses here should be little beside what a server keeps


class Place(Enum):
    """Where a connection is cut."""

    WITHIN_RESPONSES = auto()
    """When the client has so many bytes of responses."""
    AFTER_RESPONSE = auto()
    """When the client sends the next request, or the server has closed the connection."""


class CuttingProxy(ProxyFactory):
    """Listens on 127.0.0.1 for `port` there, and lets no connection through to its end.

    The first, second, … connection is cut at the next of `places`, over and over, as if everything
    had been said. Within responses a cut comes after `shortest` to `longest` bytes, which `seed`
    draws; small numbers are as likely as large ones. `cuts` counts them. Without `places` nothing
    is cut before `stop`.
    """

    noisy = False

    def __init__(
        self,
        port: int,
        seed: int = 0,
        places: Sequence[Place] = (),
        longest: int = 2**17,
        shortest: int = 1,
    ) -> None:
        super().__init__("127.0.0.1", port)
        self.cuts: Counter[Place] = Counter()
        self._chance = random.Random(seed)
        self._places = cycle(places)
        self._longest = longest
        self._shortest = shortest
        self._open: set[_Near | _Far] = set()
        self._closed: Deferred[None] | None = None
        self._listening: IListeningPort | None = None

    def buildProtocol(self, addr: IAddress | None) -> _Near:
        """Return a connection, whose fate is drawn here."""
        span = self._longest / self._shortest
        left = int(self._shortest * span ** self._chance.random())
        near = _Near(self, next(self._places, None), left)
        near.factory = self
        return near

    async def listen(self, port: int = 0) -> int:
        endpoint = TCP4ServerEndpoint(reactor, port, interface="127.0.0.1")
        self._listening = await endpoint.listen(self)
        return int(self._listening.getHost().port)

    async def stop(self) -> None:
        if self._listening is not None:
            await self._listening.stopListening()
        for connection in list(self._open):
            connection.transport.abortConnection()
        if self._open:
            self._closed = Deferred()
            await self._closed

    def opened(self, connection: _Near | _Far) -> None:
        self._open.add(connection)

    def closed(self, connection: _Near | _Far) -> None:
        self._open.discard(connection)
        if self._closed is not None and not self._open:
            self._closed.callback(None)


class _Far(ProxyClient):
    """The side of the server."""

    peer: _Near
    transport: Any

    def connectionMade(self) -> None:
        self.peer.proxy.opened(self)
        self.transport.socket.setsockopt(SOL_SOCKET, SO_RCVBUF, _BUFFER)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        self.peer.responds(data)

    def connectionLost(self, reason: Failure) -> None:
        near = self.peer
        near.proxy.closed(self)
        near.server_closed()


class _FarFactory(ProxyClientFactory):
    protocol = _Far
    noisy = False


class _Near(ProxyServer):
    """The side of the client, and what is to become of the connection."""

    clientProtocolFactory = _FarFactory  # noqa: N815  (Twisted's name)
    peer: _Far | None
    transport: Any

    def __init__(self, proxy: CuttingProxy, place: Place | None, left: int) -> None:
        self.proxy = proxy
        self._place = place
        self._left = left  # bytes that still pass, where the cut is within responses
        self._responded = False
        self._cut = False

    def connectionMade(self) -> None:
        self.proxy.opened(self)
        self.transport.socket.setsockopt(SOL_SOCKET, SO_SNDBUF, _BUFFER)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        if self._cut or self.peer is None:
            return
        if self._place is Place.AFTER_RESPONSE and self._responded:
            self._end()
        else:
            self.peer.transport.write(data)

    def responds(self, data: bytes) -> None:
        if self._cut:
            return
        self._responded = True
        if self._place is Place.WITHIN_RESPONSES:
            self.transport.write(data[: self._left])
            self._left -= len(data)
            if self._left <= 0:
                self._end()
        else:
            self.transport.write(data)

    def _end(self) -> None:
        self._cut = True
        self.proxy.cuts[self._place] += 1
        if self.peer is not None:
            self.peer.transport.abortConnection()
        self._close()

    def _close(self) -> None:
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def server_closed(self) -> None:
        """End when all that the server has said is there."""
        self.peer = None
        if not self._cut:
            if self._place is Place.AFTER_RESPONSE:
                self.proxy.cuts[self._place] += 1
            self._cut = True
            self._close()

    def connectionLost(self, reason: Failure) -> None:
        self._cut = True
        self.proxy.closed(self)
        if self.peer is not None:
            self.peer.transport.abortConnection()
