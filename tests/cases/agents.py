"""An HTTP agent whose requests fail in chosen ways, and responses made for tests."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionLost
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.interfaces import IProtocol
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer, IResponse
from zope.interface import implementer

HTML = b"<html><body>Bad gateway</body></html>"


class Fate(Enum):
    """What becomes of one request."""

    REFUSED = "there is no connection"
    LOST = "the server has it, and its answer is lost"
    HALF = "half of the answer comes"
    CUT = "half of the answer comes, and looks whole"
    SILENT = "neither an answer comes nor the end of the connection"
    GATEWAY = "a proxy answers that the server is away"
    BUSY = "the server is busy, and says for how long"
    NONSENSE = "something else answers"
    WELL = "it is answered"

    @property
    def passes(self) -> bool:
        """Whether it is no answer, and the next time there may be one."""
        return self not in (Fate.WELL, Fate.NONSENSE)


@implementer(IResponse)
@attrs.frozen
class MadeResponse:
    """A response out of nothing."""

    code: int
    body: bytes
    headers: Headers = attrs.field(factory=Headers)
    end: Exception = attrs.field(factory=lambda: ResponseDone())
    version: Any = (b"HTTP", 1, 1)
    phrase: bytes = b""
    request: Any = None
    previousResponse: Any = None  # noqa: N815  (Twisted's name)

    @property
    def length(self) -> int:
        """How long the body is."""
        return len(self.body)

    def deliverBody(self, protocol: IProtocol) -> None:
        """Hand over the body, and how it ended."""
        protocol.dataReceived(self.body)
        protocol.connectionLost(Failure(self.end))

    def setPreviousResponse(self, response: IResponse) -> None:
        """Have none."""


@implementer(IAgent)
@attrs.define
class BreakingAgent:
    """Asks by another agent, and lets happen to each request what `fate()` says.

    `asked` are the requests: method, path with its query, and the headers.
    """

    _agent: IAgent
    fate: Callable[[], Fate] = lambda: Fate.WELL
    asked: list[tuple[str, str, dict[str, str]]] = attrs.field(factory=list)
    cancelled: int = 0

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        body: IBodyProducer | None = None,
    ) -> Deferred[Any]:
        """Ask, or do not."""
        pairs = {k.decode(): v[0].decode() for k, v in (headers or Headers()).getAllRawHeaders()}
        path = "/" + uri.decode().split("/", 3)[3]
        self.asked.append((method.decode(), path, pairs))
        fate = self.fate()
        if fate is Fate.REFUSED:
            return fail(ConnectionRefused(111, "Connection refused"))
        if fate is Fate.SILENT:
            return Deferred(self._cancel)
        if fate is Fate.GATEWAY:
            return succeed(MadeResponse(502, HTML))
        if fate is Fate.NONSENSE:
            return succeed(MadeResponse(200, HTML, Headers({b"Content-Type": [b"text/html"]})))
        if fate is Fate.BUSY:
            return succeed(MadeResponse(503, b"", Headers({b"Retry-After": [b"3"]})))
        answer: Deferred[Any] = self._agent.request(method, uri, headers, body)
        return answer if fate is Fate.WELL else answer.addCallback(_spoil, fate)

    def _cancel(self, _: object) -> None:
        self.cancelled += 1


def _spoil(response: IResponse, fate: Fate) -> Deferred[Any]:
    """Return what is left of a response."""
    gathered = _Gathered()
    response.deliverBody(gathered)
    return gathered.done.addCallback(_half, response, fate)


def _half(body: bytes, response: IResponse, fate: Fate) -> MadeResponse:
    lost = ResponseFailed([Failure(ConnectionLost())])
    if fate is Fate.LOST:
        raise lost
    end = ResponseDone() if fate is Fate.CUT else lost
    return MadeResponse(response.code, body[: len(body) // 2], response.headers, end)


@implementer(IProtocol)
class _Gathered:
    def __init__(self) -> None:
        self.done: Deferred[bytes] = Deferred()
        self._body = b""

    def makeConnection(self, transport: Any) -> None:
        """Do nothing."""

    connectionMade = makeConnection

    def dataReceived(self, data: bytes) -> None:
        self._body += data

    def connectionLost(self, reason: Failure) -> None:
        self.done.callback(self._body)
