"""One attempt to deliver a webhook, over a connection to one checked address.

The caller chose the URL, so the receiver may be hostile: a connection takes at most 64 KiB and
`timeout` seconds, and treq sees no header of the answer but `Retry-After`. Otherwise treq would
unpack the body (`Content-Encoding`) and keep cookies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import attrs
from OpenSSL.SSL import Error as TlsError
from service_identity import VerificationError
from treq.client import HTTPClient
from treq.content import collect
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

from tawebeval import __version__
from tawebeval.config import CallbackSettings
from tawebeval.core.backoff import RequestOutcome, classify_status, parse_retry_after
from tawebeval.core.hosts import Address, HostPolicy, UrlServer
from tawebeval.errors import ForbiddenHost
from tawebeval.resolver import CheckedResolver, LookupFailed, Resolver, UnknownHost
from tawebeval.webhooks.callback import parse_callback_url

MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of an answer, headers included, after which the connection is aborted."""

_CACHED_HOSTS = 8
_HEADERS = {"Content-Type": "application/json", "User-Agent": f"tawebeval/{__version__}"}
_VISIBLE_HEADERS = (b"Retry-After",)


class _BoundedProtocol(ProtocolWrapper):
    """Aborts the connection after `MAX_RESPONSE_BYTES` bytes or the factory's `lifetime`."""

    _left = MAX_RESPONSE_BYTES
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
    """Factory of connections that last at most `lifetime` seconds of `clock`."""

    noisy = False
    protocol = _BoundedProtocol
    clock: Any
    lifetime: float


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _BoundedEndpoint:
    """An endpoint whose connections are bounded in bytes and seconds."""

    _endpoint: IStreamClientEndpoint
    _clock: Any
    _lifetime: float

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:  # noqa: N803
        bounding = _BoundingFactory(protocolFactory)
        bounding.clock, bounding.lifetime = self._clock, self._lifetime
        connected: Deferred[Any] = self._endpoint.connect(bounding)
        return connected.addCallback(lambda bounded: bounded.wrappedProtocol)


@implementer(IPolicyForHTTPS)
class CachedPolicyForHTTPS:
    """The TLS policy `policy`, with its answers for the last few hosts cached.

    Each answer reads the certificates of all authorities: 10 ms of the reactor, and a megabyte.
    """

    def __init__(self, policy: IPolicyForHTTPS) -> None:
        self.creatorForNetloc = lru_cache(_CACHED_HOSTS)(policy.creatorForNetloc)


@implementer(IAgent, IAgentEndpointFactory)
@attrs.frozen
class PinnedAgent:
    """HTTP agent that connects to `target` at `address`, whatever the name resolves to by now.

    The certificate has to be valid for the target's name by the policy `tls_policy`. A connection
    lasts at most `lifetime` seconds.
    """

    _reactor: Any
    _tls_policy: IPolicyForHTTPS
    _lifetime: float
    _target: UrlServer
    _address: Address

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:  # noqa: N802  (Twisted's name)
        """Return the endpoint of the pinned address; `uri` is not looked at."""
        kind = TCP6ClientEndpoint if self._address.version == 6 else TCP4ClientEndpoint
        endpoint: Any = kind(self._reactor, str(self._address), self._target.port)
        if self._target.protocol == "https":
            name = self._target.host.encode()
            creator = self._tls_policy.creatorForNetloc(name, self._target.port)
            endpoint = wrapClientTLS(creator, endpoint)
        return _BoundedEndpoint(endpoint, self._reactor, self._lifetime)

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
class _Body:
    """A body written in one call; Twisted's own producer takes several turns of the reactor."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.length: Any = len(body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self._body)
        return succeed(None)

    def pauseProducing(self) -> None:
        """Do nothing: all is written."""

    resumeProducing = stopProducing = pauseProducing


@attrs.frozen
class AttemptResult:
    """Result of one attempt; `reason` describes it for people.

    `retry_after` is the number of seconds that the receiver asked for, 0 if it did not.
    """

    outcome: RequestOutcome
    reason: str
    retry_after: float = 0


@attrs.frozen
class WebhookSender:
    """Posts JSON documents, each attempt within `timeout` seconds.

    `agent` returns an agent for a target that is pinned to an address. `time` returns seconds
    since the epoch.
    """

    _resolver: CheckedResolver
    _agent: Callable[[UrlServer, Address], IAgent]
    _clock: Any
    _time: Callable[[], float]
    _timeout: float

    def check_url(self, url: str) -> None:
        """Check the URL without a look-up. Raises: ForbiddenHost."""
        self._resolver.check_host(parse_callback_url(url))

    async def post_document(self, url: str, headers: dict[str, str], body: bytes) -> AttemptResult:
        """Make one attempt. Every failure becomes a result.

        A cancellation after the status has arrived has no effect: the status counts.
        """
        attempt = Deferred.fromCoroutine(self._attempt(url, headers, body))
        try:
            return await attempt.addTimeout(self._timeout, self._clock)
        except TookTooLong:
            reason = f"no answer within {self._timeout:g} seconds (callbacks.timeout)"
            return AttemptResult(RequestOutcome.RETRY, reason)

    async def _attempt(self, url: str, headers: dict[str, str], body: bytes) -> AttemptResult:
        target = parse_callback_url(url)
        try:
            address = await self._resolver.find_address(target)
        except ForbiddenHost as error:
            return AttemptResult(RequestOutcome.REFUSED, str(error))
        except (UnknownHost, LookupFailed) as error:
            return AttemptResult(RequestOutcome.RETRY, str(error))
        client = HTTPClient(self._agent(target, address), data_to_body_producer=_Body)
        try:
            response = await client.post(
                url,
                data=body,
                headers=Headers({name: [value] for name, value in (_HEADERS | headers).items()}),
                allow_redirects=False,
                unbuffered=True,
                reactor=self._clock,
            )
        except UnicodeError:  # IDNA (RFC 5891) is stricter than resolvers are
            return AttemptResult(
                RequestOutcome.REFUSED, f"the host {target.host} is not a valid name"
            )
        except ConnectingCancelledError:
            raise CancelledError from None
        except ConnectError as error:
            reason = str(error).rstrip(".").rpartition(": ")[2].lower()
            return AttemptResult(RequestOutcome.RETRY, f"cannot connect to {target.host}: {reason}")
        except (ResponseFailed, RequestTransmissionFailed) as error:
            if any(reason.check(CancelledError) for reason in error.reasons):
                raise CancelledError from None
            return AttemptResult(RequestOutcome.RETRY, _failure_reason(error.reasons))
        with suppress(Exception):  # the status counts alone, even if this is cancelled now
            await collect(response, lambda _: None)
        return AttemptResult(
            classify_status(response.code),
            f"the receiver answered with status {response.code}",
            parse_retry_after(
                response.headers.getRawHeaders(b"Retry-After", [b""])[0], self._time()
            ),
        )


def make_webhook_sender(
    settings: CallbackSettings,
    tls_policy: IPolicyForHTTPS,
    resolver: Resolver,
    reactor: Any,
    time: Callable[[], float],
) -> WebhookSender:
    """Return the sender by `settings`.

    `tls_policy` is the TLS policy, `time` as in `WebhookSender`.
    """
    policy = HostPolicy(
        settings.allow_hosts, settings.deny_hosts, settings.private_networks, "callbacks"
    )
    return WebhookSender(
        CheckedResolver(policy, resolver, reactor),
        partial(PinnedAgent, reactor, tls_policy, settings.timeout),
        reactor,
        time,
        settings.timeout,
    )


def _failure_reason(reasons: list[Failure]) -> str:
    """Return the reason why no response has arrived, without a byte of the data received.

    The data may come from a service of the operator that callers must not read.
    """
    if any(reason.check(TlsError, VerificationError) for reason in reasons):
        return "TLS failed: the certificate is not trusted, or is for another host"
    return "the answer was incomplete or not HTTP"
