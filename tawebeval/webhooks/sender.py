"""One attempt to post something to the URL of a stranger."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
from OpenSSL.SSL import Error as TlsError
from service_identity import VerificationError
from treq.client import HTTPClient
from treq.content import collect
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.error import ConnectError, ConnectingCancelledError
from twisted.internet.interfaces import IConsumer
from twisted.python.failure import Failure
from twisted.web.client import RequestTransmissionFailed, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer, IPolicyForHTTPS
from zope.interface import implementer

from tawebeval import __version__
from tawebeval.config import CallbackSettings
from tawebeval.core.backoff import Verdict, retry_after, verdict
from tawebeval.core.hosts import Address, HostPolicy, Target
from tawebeval.errors import ForbiddenHost
from tawebeval.resolver import Addresses, LookupFailed, Resolver, UnknownHost
from tawebeval.webhooks.callback import web_target
from tawebeval.webhooks.pinned import pinned_agent

_HEADERS = {"Content-Type": "application/json", "User-Agent": f"tawebeval/{__version__}"}


@attrs.frozen
class Receipt:
    """What came of an attempt; `what` says it to people.

    The receiver has `asked` to be left alone for so many seconds.
    """

    verdict: Verdict
    what: str
    asked: float = 0


@implementer(IBodyProducer)
class _Body:
    """A body that is sent at once, for it is short; Twisted's own takes turns of the reactor."""

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
class Poster:
    """Posts documents of JSON, each attempt within `timeout` seconds.

    `agent` makes what connects to a target at an address and nowhere else. `time` is in
    seconds since the epoch.
    """

    _addresses: Addresses
    _agent: Callable[[Target, Address], IAgent]
    _clock: Any
    _time: Callable[[], float]
    _timeout: float

    def check(self, url: str) -> None:
        """Check what a URL itself tells. Raises ForbiddenHost."""
        self._addresses.check(web_target(url))

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> Receipt:
        """Make one attempt; whatever fails on the way is in the receipt.

        When it is cancelled after the status has come, that counts.
        """
        attempt = Deferred.fromCoroutine(self._attempt(url, headers, body))
        try:
            return await attempt.addTimeout(self._timeout, self._clock)
        except TookTooLong:
            return Receipt(Verdict.AGAIN, f"no answer came within {self._timeout:g} seconds")

    async def _attempt(self, url: str, headers: dict[str, str], body: bytes) -> Receipt:
        target = web_target(url)
        try:
            address = await self._addresses.find(target)
        except ForbiddenHost as error:
            return Receipt(Verdict.REFUSED, str(error))
        except (UnknownHost, LookupFailed) as error:
            return Receipt(Verdict.AGAIN, str(error))
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
        except UnicodeError:  # by the rules of IDNA, which are not those of resolvers
            return Receipt(Verdict.REFUSED, f"the host {target.host} is no valid name")
        except ConnectingCancelledError:
            raise CancelledError from None
        except ConnectError as error:
            return Receipt(Verdict.AGAIN, f"no connection: {error}")
        except (ResponseFailed, RequestTransmissionFailed) as error:
            if any(reason.check(CancelledError) for reason in error.reasons):
                raise CancelledError from None
            return Receipt(Verdict.AGAIN, _why(error.reasons))
        with suppress(Exception):  # the status is all that counts, also if we are cancelled now
            await collect(response, lambda _: None)
        return Receipt(
            verdict(response.code),
            f"the status {response.code}",
            retry_after(response.headers.getRawHeaders(b"Retry-After", [b""])[0], self._time()),
        )


def open_poster(
    settings: CallbackSettings,
    trust: IPolicyForHTTPS,
    resolver: Resolver,
    reactor: Any,
    time: Callable[[], float],
) -> Poster:
    """Return what posts by these settings; `trust` says whose certificates count."""
    policy = HostPolicy(
        settings.allow_hosts, settings.deny_hosts, settings.private_networks, "callbacks"
    )
    return Poster(
        Addresses(policy, resolver, reactor),
        partial(pinned_agent, reactor, trust, settings.timeout),
        reactor,
        time,
        settings.timeout,
    )


def _why(reasons: list[Failure]) -> str:
    """Say why there is no answer, without a word of what has come instead.

    It may be from a service of the operator's that callers should not read.
    """
    if any(reason.check(TlsError, VerificationError) for reason in reasons):
        return "TLS failed: its certificate is not trusted, or not one of the host"
    return "what came was no answer, or no whole one"
