"""One attempt to deliver a webhook, over a connection to a checked address.

The caller chose the URL, so the receiver may be hostile: a connection takes at most 64 KiB and
`timeout` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
from treq.client import HTTPClient
from treq.content import collect
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IPolicyForHTTPS

from tawebeval import __version__
from tawebeval.config import CallbackSettings
from tawebeval.core.backoff import RequestOutcome, classify_http_status, parse_retry_after
from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress
from tawebeval.errors import ForbiddenHost
from tawebeval.pinned_agent import (
    BytesProducer,
    PinnedAgent,
    RequestFailed,
    convert_request_failures,
)
from tawebeval.resolver import CheckedResolver, LookupUnanswered, Resolver, UnknownHost
from tawebeval.webhooks.callback import parse_callback_url

_ATTEMPT_TIMEOUT = 15  # seconds for one attempt, from the DNS look-up to the end of the answer
_HEADERS = {"Content-Type": "application/json", "User-Agent": f"tawebeval/{__version__}"}


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

    `agent` returns an agent for a target that is pinned to addresses. `time` returns seconds
    since the epoch.
    """

    _resolver: CheckedResolver
    _agent: Callable[[ServerAddress, Sequence[IPAddress]], IAgent]
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
            reason = f"no answer within {self._timeout:g} seconds"
            return AttemptResult(RequestOutcome.RETRY, reason)

    async def _attempt(self, url: str, headers: dict[str, str], body: bytes) -> AttemptResult:
        target = parse_callback_url(url)
        try:
            addresses = await self._resolver.find_addresses(target)
        except ForbiddenHost as error:
            return AttemptResult(RequestOutcome.REFUSED, str(error))
        except (UnknownHost, LookupUnanswered) as error:
            return AttemptResult(RequestOutcome.RETRY, str(error))
        client = HTTPClient(self._agent(target, addresses), data_to_body_producer=BytesProducer)
        try:
            with convert_request_failures(target.host):
                response = await client.post(
                    url,
                    data=body,
                    headers=Headers(
                        {name: [value] for name, value in (_HEADERS | headers).items()}
                    ),
                    allow_redirects=False,
                    unbuffered=True,
                    reactor=self._clock,
                )
        except UnicodeError:  # IDNA (RFC 5891) is stricter than resolvers are
            return AttemptResult(
                RequestOutcome.REFUSED, f"the host {target.host} is not a valid name"
            )
        except RequestFailed as error:
            return AttemptResult(RequestOutcome.RETRY, str(error))
        with suppress(Exception):  # the status counts alone, even if this is cancelled now
            await collect(response, lambda _: None)
        return AttemptResult(
            classify_http_status(response.code),
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
    policy = HostPolicy(settings.allow_hosts, (), settings.private_networks, "callbacks")
    return WebhookSender(
        CheckedResolver(policy, resolver, reactor),
        partial(PinnedAgent, reactor, tls_policy, _ATTEMPT_TIMEOUT),
        reactor,
        time,
        _ATTEMPT_TIMEOUT,
    )
