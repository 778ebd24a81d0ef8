"""A client of HTTP that connects to one address, whatever its URL's host is by now.

Its peer was chosen by a stranger. So a connection takes a bounded number of bytes in a bounded
time, and of an answer's headers only those are shown that are wanted: nobody unpacks a body to
gigabytes then, or reads cookies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import (
    IDelayedCall,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent
from twisted.web.http_headers import Headers
from twisted.web.iweb import (
    IAgent,
    IAgentEndpointFactory,
    IBodyProducer,
    IPolicyForHTTPS,
    IResponse,
)
from zope.interface import implementer

from tawebeval.core.hosts import Address, Target

MOST_BYTES = 64 * 1024  # of an answer with all of its headers

_REMEMBERED = 8  # hosts
_SHOWN = (b"Retry-After",)


class _BoundedProtocol(ProtocolWrapper):
    """Passes so many bytes on in so many seconds, and then aborts the connection."""

    _left = MOST_BYTES
    _end: IDelayedCall

    def connectionMade(self) -> None:
        self._end = self.factory.clock.callLater(self.factory.lifetime, self._abort)
        super().connectionMade()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._end.active():
            self._end.cancel()
        super().connectionLost(reason)

    def dataReceived(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left >= 0:
            super().dataReceived(data)
        else:
            self._abort()

    def _abort(self) -> None:
        transport: Any = self.transport
        transport.abortConnection()


class _BoundingFactory(WrappingFactory):
    """Makes connections that last for `lifetime` seconds of `clock` at most."""

    noisy = False
    protocol = _BoundedProtocol
    clock: Any
    lifetime: float


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _BoundedEndpoint:
    """Connects as another endpoint does, for a bounded number of bytes and seconds."""

    _endpoint: IStreamClientEndpoint
    _clock: Any
    _lifetime: float

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:  # noqa: N803
        bounding = _BoundingFactory(protocolFactory)
        bounding.clock, bounding.lifetime = self._clock, self._lifetime
        connected: Deferred[Any] = self._endpoint.connect(bounding)
        return connected.addCallback(lambda bounded: bounded.wrappedProtocol)


@implementer(IPolicyForHTTPS)
class RememberedTrust:
    """Trusts as `policy` does, and remembers what that is for the hosts that were asked for last.

    For each it reads all authorities' certificates: 10 ms of the reactor's, and a megabyte.
    """

    def __init__(self, policy: IPolicyForHTTPS) -> None:
        self.creatorForNetloc = lru_cache(_REMEMBERED)(policy.creatorForNetloc)


@implementer(IAgentEndpointFactory)
@attrs.frozen
class _Pinned:
    """Connects to `_address`, where a certificate has to be that of the target's name."""

    _reactor: Any
    _target: Target
    _address: Address
    _trust: IPolicyForHTTPS
    _lifetime: float

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  (Twisted's name)
        """Return where to connect to; of the URI nothing is believed."""
        kind = TCP6ClientEndpoint if self._address.version == 6 else TCP4ClientEndpoint
        endpoint: Any = kind(self._reactor, str(self._address), self._target.port)
        if self._target.protocol == "https":
            name = self._target.host.encode()
            creator = self._trust.creatorForNetloc(name, self._target.port)
            endpoint = wrapClientTLS(creator, endpoint)
        return _BoundedEndpoint(endpoint, self._reactor, self._lifetime)


@implementer(IAgent)
@attrs.frozen
class _Plain:
    """Asks for an answer as it is, and hands on what little of its headers is wanted."""

    _agent: IAgent

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,  # noqa: N803
    ) -> Deferred[IResponse]:
        headers = Headers() if headers is None else headers.copy()
        headers.removeHeader(b"Accept-Encoding")
        return self._agent.request(method, uri, headers, bodyProducer).addCallback(_reduced)


def _reduced(response: IResponse) -> IResponse:
    found = ((name, response.headers.getRawHeaders(name)) for name in _SHOWN)
    response.headers = Headers({name: values for name, values in found if values})
    return response


def pinned_agent(
    reactor: Any, trust: IPolicyForHTTPS, lifetime: float, target: Target, address: Address
) -> IAgent:
    """Return an agent that connects to `target` at `address`, for `lifetime` seconds at most.

    `trust` says whose certificates count.
    """
    pinned = _Pinned(reactor, target, address, trust, lifetime)
    return _Plain(Agent.usingEndpointFactory(reactor, pinned))
