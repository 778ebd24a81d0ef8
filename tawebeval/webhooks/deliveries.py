"""Callbacks: their queue, attempts, retries, and the memory limit.

Attempts take turns between callers, and pending callbacks take at most `MAX_QUEUE_BYTES`. Beyond
it, the oldest delivery of the caller with the most bytes is given up, so a receiver that is down
does not affect other callers. A stop of the daemon ends nothing: the store has the documents,
and the next process goes on.

The caller chose the URL, so the receiver may be hostile: a connection takes at most 64 KiB and
15 seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from treq.client import HTTPClient
from treq.content import collect
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.task import deferLater
from twisted.logger import Logger, LogLevel
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent

from tawebeval import __version__
from tawebeval.config import MAX_CONCURRENT_CALLBACKS, MIB, CallbackSettings
from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.hosts import (
    HostPolicy,
    IPAddress,
    ServerAddress,
)
from tawebeval.deferreds import (
    FairQueue,
    run_in_background,
)
from tawebeval.errors import ForbiddenURLHost, InvalidField, format_size
from tawebeval.linux.privileges import ReloadableFiles, find_secret_file
from tawebeval.pinned_agent import (
    BytesProducer,
    CachedPolicyForHTTPS,
    CheckedResolver,
    LookupFailed,
    OutgoingRequestFailed,
    PinnedAgent,
    Resolver,
    UnknownHost,
    convert_request_failures,
)
from tawebeval.webhooks.records import CallbackRecord, CallbackState, parse_callback_url
from tawebeval.webhooks.signing import (
    SECRETS_CREDENTIAL,
    SECRETS_SETTING,
    SigningSecrets,
    read_signing_secrets,
)
from tawebeval_client.backoff import (
    Backoff,
    RequestOutcome,
    classify_http_status,
    parse_retry_after,
)

ATTEMPT_TIMEOUT = 15
"""Seconds for one attempt, from the DNS look-up to the end of the answer."""

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
    """Posts JSON documents, each attempt within `ATTEMPT_TIMEOUT` seconds.

    `agent` returns an agent for a target that is pinned to addresses. `time` returns seconds
    since the epoch.
    """

    _resolver: CheckedResolver
    _agent: Callable[[ServerAddress, Sequence[IPAddress]], IAgent]
    _clock: Any
    _time: Callable[[], float]

    def check_url(self, url: str) -> None:
        """Check the URL without a look-up. Raises: ForbiddenURLHost."""
        self._resolver.check_host(parse_callback_url(url))

    async def post_document(
        self, url: str, headers: dict[str, str], body: bytes, caller: str
    ) -> AttemptResult:
        """Make one attempt for a caller. Every failure becomes a result.

        A cancellation after the status has arrived has no effect: the status counts.
        """
        attempt = Deferred.fromCoroutine(self._attempt(url, headers, body, caller))
        try:
            return await attempt.addTimeout(ATTEMPT_TIMEOUT, self._clock)
        except TookTooLong:
            reason = f"no answer within {ATTEMPT_TIMEOUT} seconds"
            return AttemptResult(RequestOutcome.RETRY, reason)

    async def _attempt(
        self, url: str, headers: dict[str, str], body: bytes, caller: str
    ) -> AttemptResult:
        target = parse_callback_url(url)
        try:
            addresses = await self._resolver.find_permitted_addresses(target, caller=caller)
        except ForbiddenURLHost as error:
            return AttemptResult(RequestOutcome.REFUSED, str(error))
        except (UnknownHost, LookupFailed) as error:
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
        except OutgoingRequestFailed as error:
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


_FIELD = "callback_url"
DELIVERY_BACKOFF = Backoff(8, 5, 600)
"""Pauses between the attempts, which take 5 to 10 minutes together."""

MAX_QUEUE_BYTES = 32 * MIB
"""Bytes of pending callbacks; beyond it the caller with most bytes loses its oldest callback."""

DELIVERY_OVERHEAD_BYTES = 16 * 1024
"""Bytes of memory of a delivery and its evaluation besides texts, rounded up."""

log = Logger()


@attrs.define(eq=False)
class Delivery:
    """A pending callback.

    `evaluation_log_name` is the evaluation's name in the log. `give_up_reason` is the reason why
    no further attempt begins, empty if one may.
    """

    callback: CallbackRecord
    evaluation_log_name: str
    give_up_reason: str = ""
    delivery_task: Deferred[None] | None = None

    @property
    def size(self) -> int:
        """Size in bytes, as it counts towards `MAX_QUEUE_BYTES`."""
        # The evaluation has the texts, too: in its details, and stderr once more in its last event.
        return 3 * len(self.callback.document) + DELIVERY_OVERHEAD_BYTES


@attrs.define(eq=False)
class CallbackQueue:
    """Queue of callbacks, signed by the secrets of a file. Without a file it accepts none.

    A caller has at most half of the slots. `random` returns so many random bytes, `time` the
    seconds since the epoch. `secrets` are those of the file as it was read last,
    `ended_counts_by_state` counts deliveries by their final state.

    Blocks when it is made. Raises: ConfigurationError, if the file cannot be read.
    """

    _secrets_file: Path | None
    _sender: WebhookSender
    _clock: Any
    _random: Callable[[int], bytes]
    _time: Callable[[], float]
    secrets: SigningSecrets = attrs.field(factory=SigningSecrets, init=False)
    ended_counts_by_state: Counter[CallbackState] = attrs.field(factory=Counter, init=False)
    _slots: FairQueue = attrs.field(
        factory=lambda: FairQueue(
            MAX_CONCURRENT_CALLBACKS, running_per_caller=(MAX_CONCURRENT_CALLBACKS + 1) // 2
        )
    )
    _deliveries: dict[str, Delivery] = attrs.field(factory=dict)  # by event, the oldest first
    # Without deliveries given up.
    _budget: Budget = attrs.Factory(lambda: Budget(SharedResource.CALLBACKS, MAX_QUEUE_BYTES))

    def __attrs_post_init__(self) -> None:
        if self._secrets_file is not None:
            self.secrets = read_signing_secrets(self._secrets_file)

    @property
    def pending_count(self) -> int:
        """Number of callbacks that are not delivered yet."""
        return len(self._deliveries)

    def list_reloadable_files(self) -> Iterator[ReloadableFiles[SigningSecrets]]:
        """Yield the secrets file, unless callbacks are disabled."""
        if self._secrets_file is not None:
            read = partial(read_signing_secrets, self._secrets_file)
            paths = (self._secrets_file,)
            yield ReloadableFiles(SECRETS_SETTING, paths, read, partial(setattr, self, "secrets"))

    def create_callback(self, url: str, caller: str) -> CallbackRecord:
        """Return the callback of a new evaluation, not sent yet. Raises: InvalidField."""
        if self._secrets_file is None:
            raise InvalidField(_FIELD, "callbacks are disabled (callbacks.secrets)")
        if not self.secrets.has_secret(caller):
            raise InvalidField(
                _FIELD,
                "callbacks to you cannot be signed; ask the operator for a secret"
                " (callbacks.secrets)",
            )
        try:
            self._sender.check_url(url)
        except ForbiddenURLHost as error:
            raise InvalidField(_FIELD, str(error)) from None
        return CallbackRecord(url, caller)

    def start_delivery(
        self,
        callback: CallbackRecord,
        evaluation: str,
        on_end: Callable[[], object] = lambda: None,
        store: Callable[[], Awaitable[object]] = lambda: succeed(None),
    ) -> None:
        """Start a delivery of the callback's document.

        The first attempt follows `store`, which stores the callback. `on_end` is called in the
        final state.
        """
        callback.state = CallbackState.PENDING
        callback.webhook_id = callback.webhook_id or f"evt_{self._random(16).hex()}"
        delivery = self._deliveries[callback.webhook_id] = Delivery(callback, evaluation)
        self._budget.record_usage(delivery.size, callback.caller)
        self._evict()
        delivery.delivery_task = run_in_background(
            self._run(delivery, on_end, store),
            log,
            "{evaluation}: defect in its callback",
            evaluation=evaluation,
        )

    def _evict(self) -> None:
        """Give up deliveries until the others fit: the oldest of the caller with most bytes."""
        evicted: list[Delivery] = []
        while self._budget.used > self._budget.total:
            caller = self._budget.list_callers()[0]
            oldest = next(
                one
                for one in self._deliveries.values()
                if one.callback.caller == caller and not one.give_up_reason
            )
            most = format_size(MAX_QUEUE_BYTES)
            self._give_up(oldest, f"the caller's pending callbacks exceed {most}")
            evicted.append(oldest)
        for delivery in evicted:
            if delivery.delivery_task is not None:
                delivery.delivery_task.cancel()

    def _give_up(self, delivery: Delivery, reason: str) -> None:
        """Prevent further attempts and release the size. The first reason stays."""
        if not delivery.give_up_reason:
            delivery.give_up_reason = reason
            self._budget.give_back(delivery.size, delivery.callback.caller)

    async def _run(
        self,
        delivery: Delivery,
        on_end: Callable[[], object],
        store: Callable[[], Awaitable[object]],
    ) -> None:
        """Deliver a callback and record its final state."""
        callback = delivery.callback
        try:
            await store()
            callback.state = await self._deliver(delivery)
        except CancelledError:
            callback.state = CallbackState.GIVEN_UP
        except Exception:  # noqa: BLE001  (a defect must not leave the callback pending)
            log.failure(
                "{evaluation}: defect: the callback could not be sent",
                evaluation=delivery.evaluation_log_name,
            )
            self._give_up(delivery, "defect of the daemon; its log has the details")
            callback.state = CallbackState.GIVEN_UP
        if callback.state is CallbackState.GIVEN_UP and delivery.give_up_reason:
            before = f"; last error: {callback.last_error}" if callback.last_error else ""
            callback.last_error = delivery.give_up_reason + before
        self.ended_counts_by_state[callback.state] += 1
        self._give_up(delivery, "ended")
        callback.document = b""
        del self._deliveries[callback.webhook_id]
        self._log(delivery)
        on_end()

    async def _deliver(self, delivery: Delivery) -> CallbackState:
        callback = delivery.callback
        while not delivery.give_up_reason:
            result = await self._attempt(delivery)
            if result.outcome is RequestOutcome.ACCEPTED:
                return CallbackState.DELIVERED
            callback.last_error = result.reason
            if result.outcome is RequestOutcome.REFUSED:
                return CallbackState.REFUSED
            chance = int.from_bytes(self._random(4), "big") / 2**32
            retry_after = min(result.retry_after, DELIVERY_BACKOFF.max_delay_seconds)
            delay = DELIVERY_BACKOFF.draw_delay(callback.attempt_count, chance, retry_after)
            if delay is None:
                break
            if not delivery.give_up_reason:
                self._log(delivery, delay)
                await deferLater(self._clock, delay)
        return CallbackState.GIVEN_UP

    async def _attempt(self, delivery: Delivery) -> AttemptResult:
        callback = delivery.callback
        await self._slots.acquire_slot(callback.webhook_id, callback.caller)
        try:
            if delivery.give_up_reason:
                raise CancelledError
            secrets = self.secrets
            if not secrets.has_secret(callback.caller):
                # A few in each turn of the reactor: thousands may wait.
                await deferLater(self._clock, 0)
                reason = "the caller's secret was removed from callbacks.secrets"
                return AttemptResult(RequestOutcome.REFUSED, reason)
            callback.attempt_count += 1
            headers = secrets.sign_body(
                callback.caller, callback.webhook_id, int(self._time()), callback.document
            )
            if callback.traceparent:
                headers["traceparent"] = callback.traceparent
            return await self._sender.post_document(
                callback.url, headers, callback.document, callback.caller
            )
        finally:
            self._slots.release_slot(callback.webhook_id)

    def _log(self, delivery: Delivery, delay: float | None = None) -> None:
        """Log the end of a delivery, or a failed attempt with the `delay` before the next."""
        callback = delivery.callback
        delivered = callback.state is CallbackState.DELIVERED
        log.emit(
            LogLevel.info if delivered or delay is not None else LogLevel.warn,
            "{evaluation}: callback to {origin}: {state}, attempts: {attempts}{error}{again}",
            evaluation=delivery.evaluation_log_name,
            origin=callback.url_origin,
            state=callback.state.value,
            attempts=callback.attempt_count,
            error="" if delivered else f": {callback.last_error}",
            again="" if delay is None else f"; next attempt in {delay:.1f} s",
        )


def make_callback_queue(
    settings: CallbackSettings,
    environment: Mapping[str, str],
    resolver: Resolver,
    reactor: Any,
    random: Callable[[int], bytes],
    time: Callable[[], float],
) -> CallbackQueue:
    """Return the `CallbackQueue` for `settings`.

    Parameters without a note are those of `CallbackQueue`.

    `environment` is that of the daemon, for the credentials of systemd. Raises: ConfigurationError,
    if the secrets cannot be read.
    """
    policy = HostPolicy(settings.allow_hosts, settings.private_networks, "callbacks")
    tls_policy = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
    sender = WebhookSender(
        CheckedResolver(policy, resolver, reactor),
        partial(PinnedAgent, reactor, tls_policy, ATTEMPT_TIMEOUT),
        reactor,
        time,
    )
    return CallbackQueue(
        find_secret_file(settings.secrets, SECRETS_CREDENTIAL, environment),
        sender,
        clock=reactor,
        random=random,
        time=time,
    )
