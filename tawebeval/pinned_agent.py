"""Resolver and HTTP agent for URLs of strangers: checked addresses, and bounded answers.

`CheckedResolver` looks a host up and returns the addresses that the operator's rules allow.
`PinnedAgent` connects to these addresses alone.

The server may be hostile: a connection takes at most the bytes of its limit, and some seconds, and
callers see no header of the answer but `Retry-After`. Otherwise treq would unpack the body
(`Content-Encoding`) and keep cookies.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any, Protocol

import attrs
from OpenSSL.SSL import Error as TlsError
from service_identity import VerificationError
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint, wrapClientTLS
from twisted.internet.error import ConnectError, ConnectingCancelledError
from twisted.internet.interfaces import (
    IConsumer,
    IDelayedCall,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent, RequestTransmissionFailed, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import (
    IAgent,
    IAgentEndpointFactory,
    IBodyProducer,
    IPolicyForHTTPS,
    IResponse,
)
from zope.interface import implementer

from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import FairQueue, OneShotEvent, WorkerThreads, convert_deferred_to_event
from tawebeval.errors import ForbiddenURLHost, TawebevalError

MAX_LOOKUP_SECONDS = 30.0
"""Maximum duration of a look-up, in seconds: longer than a resolver with its retries takes."""

# Errors of getaddrinfo(3) for a name that does not exist, or has no address.
_UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)

log = Logger()


class UnknownHost(TawebevalError):
    """A host that does not exist or has no address."""


class LookupFailed(TawebevalError):
    """A look-up that took too long, or that name servers or this machine could not answer."""


class Resolver(Protocol):
    """Source of addresses."""

    async def look_up_host(self, host: str, caller: str) -> Sequence[IPAddress]:
        """Return the addresses of a host. Raises: OSError, as getaddrinfo(3) does."""


@attrs.define(eq=False)
class _Lookup:
    """A look-up that runs, or waits for a thread in the turn of `caller`.

    `waiters` counts the coroutines that await it.
    """

    _host: str
    caller: str
    waiters: int = 0
    is_started: bool = False
    is_abandoned: bool = False
    outcome: OneShotEvent[Callable[[], Sequence[IPAddress]]] = attrs.field(init=False)

    def resolve(self) -> Sequence[IPAddress]:
        """Look the host up, unless the look-up is abandoned. Blocks. Raises: OSError."""
        if self.is_abandoned:
            return ()
        self.is_started = True
        found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        return [ip_address(address[0]) for *_, address in found]


class SystemResolver:
    """Resolver by getaddrinfo(3) in threads of its own; one look-up for each host at a time.

    A running look-up cannot be stopped: without waiters it keeps its thread until the system gives
    up. So a host whose name server does not answer takes one thread, however often it is asked for.
    A look-up without waiters that has no thread yet never starts. The threads end with the process.
    Callers take turns: `slots` has one for each thread, of which a caller has a part. So no caller
    awaits a look-up that waits for the turn of another one.
    """

    def __init__(self, threads: WorkerThreads, slots: FairQueue) -> None:
        self._threads, self._slots = threads, slots
        self._lookups: dict[str, _Lookup] = {}

    async def look_up_host(self, host: str, caller: str) -> Sequence[IPAddress]:
        """Return the addresses of a host. Raises: OSError."""
        lookup = self._lookups.get(host)
        if lookup is None or not (lookup.is_started or lookup.caller == caller):
            lookup = self._lookups[host] = _Lookup(host, caller)
            resolve = partial(self._threads.run_in_thread, lookup.resolve)
            lookup.outcome = convert_deferred_to_event(
                Deferred.fromCoroutine(self._slots.run_in_turn(caller, resolve))
            )
            lookup.outcome.add_callback(lambda _: self._remove(host, lookup))
        lookup.waiters += 1
        try:
            return (await lookup.outcome.wait())()
        finally:
            lookup.waiters -= 1
            if not lookup.waiters and not lookup.is_started:
                lookup.is_abandoned = True
                self._remove(host, lookup)

    def _remove(self, host: str, lookup: _Lookup) -> None:
        if self._lookups.get(host) is lookup:
            del self._lookups[host]


@attrs.frozen
class CheckedResolver:
    """Resolver that checks hosts and addresses against the operator's rules."""

    _policy: HostPolicy
    _resolver: Resolver
    _clock: Any

    def check_host(self, server: ServerAddress) -> None:
        """Check the host of a URL before the look-up. Raises: ForbiddenURLHost."""
        self._policy.check_host(server)

    async def find_permitted_addresses(
        self,
        server: ServerAddress,
        timeout: float = MAX_LOOKUP_SECONDS,
        caller: str = ANONYMOUS_CALLER,
    ) -> Sequence[IPAddress]:
        """Return the addresses to try in turn, within `timeout` seconds.

        Raises: ForbiddenURLHost, UnknownHost, LookupFailed.
        """
        self.check_host(server)
        addresses = (
            [server.ip_address]
            if server.ip_address
            else await self._look_up(server.host, timeout, caller)
        )
        try:
            return self._policy.choose_addresses(server, addresses)
        except ForbiddenURLHost:
            log.info(
                "the host {host} is refused for its addresses: {addresses}",
                host=server.host,
                addresses=addresses,
            )
            raise

    async def _look_up(self, host: str, timeout: float, caller: str) -> Sequence[IPAddress]:
        looked_up = Deferred.fromCoroutine(self._resolver.look_up_host(host, caller))
        try:
            addresses = await looked_up.addTimeout(timeout, self._clock)
        except TookTooLong:
            raise LookupFailed(
                f"the DNS look-up of the host {host} took over {timeout:g} seconds"
            ) from None
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise LookupFailed(
                    f"the DNS look-up of the host {host} failed: {error.strerror}"
                ) from None
            addresses = ()
        except UnicodeError:  # IDNA (RFC 5891)
            addresses = ()
        if not addresses:
            raise UnknownHost(
                f"the host {host} does not exist or has no address; check its spelling"
            )
        return addresses


MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of an answer, headers included, after which the connection is aborted."""

_CACHED_HOSTS = 8
_CONNECT_TIMEOUT = 10.0  # seconds, where another address follows
_VISIBLE_HEADERS = (b"Retry-After",)


class OutgoingRequestFailed(TawebevalError):
    """A request without a complete answer."""


@attrs.define
class ResponseSizeLimit:
    """Bytes that one connection may still receive; `abort_connection()` aborts it."""

    remaining_bytes: int = MAX_RESPONSE_BYTES
    abort_connection: Callable[[], object] = lambda: None


class _BoundedProtocol(ProtocolWrapper):
    """Aborts the connection after the bytes of the factory's `limit`, or its `lifetime`."""

    factory: _BoundingFactory
    _end: IDelayedCall

    def connectionMade(self) -> None:
        self.factory.limit.abort_connection = self._abort
        self._end = self.factory.clock.callLater(self.factory.lifetime, self._abort)
        super().connectionMade()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._end.active():
            self._end.cancel()
        super().connectionLost(reason)

    def dataReceived(self, data: bytes) -> None:
        self.factory.limit.remaining_bytes -= len(data)
        if self.factory.limit.remaining_bytes >= 0:
            super().dataReceived(data)
        else:
            self._abort()

    def _abort(self) -> None:
        transport: Any = self.transport
        transport.abortConnection()


class _BoundingFactory(WrappingFactory):
    """Factory of connections that last at most `lifetime` seconds of `clock`."""

    noisy = False
    protocol = _BoundedProtocol
    clock: Any
    lifetime: float
    limit: ResponseSizeLimit


@implementer(IPolicyForHTTPS)
class CachedPolicyForHTTPS:
    """The TLS policy `policy`, with its answers for the last few hosts cached.

    Each answer reads the certificates of all authorities: 10 ms of the reactor, and a megabyte.
    """

    def __init__(self, policy: IPolicyForHTTPS) -> None:
        self.creatorForNetloc = lru_cache(_CACHED_HOSTS)(policy.creatorForNetloc)


@implementer(IAgent, IAgentEndpointFactory, IStreamClientEndpoint)
@attrs.frozen
class PinnedAgent:
    """HTTP agent that connects to `target` at `addresses`, whatever the name resolves to by now.

    It is its own endpoint: the first of the addresses that accepts a connection; after it nothing
    else is tried. All but the last have an equal part of `lifetime` seconds each, at most 10. The
    certificate has to be valid for the target's name by the policy `tls_policy`. A connection lasts
    at most `lifetime` seconds, and an answer has at most the bytes of `limit`.
    """

    _reactor: Any
    _tls_policy: IPolicyForHTTPS
    _lifetime: float
    _target: ServerAddress
    _addresses: Sequence[IPAddress]
    _limit: ResponseSizeLimit = attrs.field(factory=ResponseSizeLimit)

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  (Twisted's name)
        """Return the endpoint of the pinned addresses; `uri` is not looked at."""
        return self

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:  # noqa: N803
        """Connect to one of the addresses; the connection is bounded in bytes and seconds."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> Any:
        bounding = _BoundingFactory(factory)
        bounding.clock, bounding.lifetime = self._reactor, self._lifetime
        bounding.limit = self._limit
        *others, last = self._addresses
        timeout = min(self._lifetime / len(self._addresses), _CONNECT_TIMEOUT)
        for address in others:
            with suppress(ConnectError):
                return await self._connect_to(address, bounding, timeout)
        return await self._connect_to(last, bounding, self._lifetime)

    async def _connect_to(
        self, address: IPAddress, bounding: _BoundingFactory, timeout: float
    ) -> Any:
        kind: Any = TCP6ClientEndpoint if address.version == 6 else TCP4ClientEndpoint
        endpoint = kind(self._reactor, str(address), self._target.port, timeout=timeout)
        if self._target.protocol == "https":
            name = self._target.host.encode()
            creator = self._tls_policy.creatorForNetloc(name, self._target.port)
            endpoint = wrapClientTLS(creator, endpoint)
        return (await endpoint.connect(bounding)).wrappedProtocol

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,  # noqa: N803
    ) -> Deferred[IResponse]:
        """Make a request; of the response's headers only `Retry-After` is visible."""
        headers = Headers() if headers is None else headers.copy()
        headers.removeHeader(b"Accept-Encoding")
        agent: IAgent = Agent.usingEndpointFactory(self._reactor, self)
        return agent.request(method, uri, headers, bodyProducer).addCallback(_hide_headers)


def _hide_headers(response: IResponse) -> IResponse:
    found = ((name, response.headers.getRawHeaders(name)) for name in _VISIBLE_HEADERS)
    response.headers = Headers({name: values for name, values in found if values})
    return response


@implementer(IBodyProducer)
class BytesProducer:
    """A body written in one call; Twisted's own producer takes several turns of the reactor."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.length: Any = len(body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Write the body."""
        consumer.write(self._body)
        return succeed(None)

    def pauseProducing(self) -> None:
        """Do nothing: all is written."""

    resumeProducing = stopProducing = pauseProducing


@contextmanager
def convert_request_failures(host: str) -> Iterator[None]:
    """Raise OutgoingRequestFailed, with words for people, if the request of the body fails.

    CancelledError stays, also where the agent calls it a failure of the connection.
    """
    try:
        yield
    except ConnectingCancelledError:
        raise CancelledError from None
    except ConnectError as error:
        reason = str(error).rstrip(".").rpartition(": ")[2].lower()
        raise OutgoingRequestFailed(f"cannot connect to {host}: {reason}") from None
    except (ResponseFailed, RequestTransmissionFailed) as error:
        if any(reason.check(CancelledError) for reason in error.reasons):
            raise CancelledError from None
        raise OutgoingRequestFailed(_failure_reason(error.reasons)) from None


def _failure_reason(reasons: list[Failure]) -> str:
    """Return the reason why no response has arrived, without a byte of the data received.

    The data may come from a service of the operator that callers must not read.
    """
    if any(reason.check(TlsError, VerificationError) for reason in reasons):
        return "TLS failed: the certificate is not trusted, or is for another host"
    return "the answer was incomplete or not HTTP"
