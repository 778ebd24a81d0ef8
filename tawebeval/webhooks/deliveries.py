"""The queue of callbacks: attempts, retries, and the memory limit.

Attempts take turns between callers, and pending documents take bounded memory (`DeliveryBounds`).
Beyond it, the oldest delivery of the caller with the most bytes is given up, so a receiver that is
down does not affect other callers. A stop of the daemon ends nothing: the store has the documents,
and the next process goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import Logger, LogLevel
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval.config import CONCURRENT_CALLBACKS, MIB, CallbackSettings
from tawebeval.core.backoff import Backoff, RequestOutcome
from tawebeval.core.shares import Share, SharedResource
from tawebeval.deferreds import (
    UNLIMITED_WAITERS,
    FairQueue,
    run_in_background,
)
from tawebeval.errors import ForbiddenHost, InvalidField, format_size
from tawebeval.pinned_agent import CachedPolicyForHTTPS
from tawebeval.reloadable import ReloadableFiles
from tawebeval.resolver import Resolver
from tawebeval.webhooks.callback import CallbackRecord, CallbackState
from tawebeval.webhooks.sender import AttemptResult, WebhookSender, make_webhook_sender
from tawebeval.webhooks.signing import SigningSecrets, SigningSecretsFile, find_secrets_file

_FIELD = "callback_url"
DELIVERY_OVERHEAD_BYTES = 4096
"""Bytes of memory of a delivery besides its document, rounded up."""

log = Logger()


@attrs.define(eq=False)
class Delivery:
    """A pending callback with the document to post.

    `evaluation_log_name` is the evaluation's name in the log. `give_up_reason` is the reason why
    no further attempt begins, empty if one may.
    """

    callback: CallbackRecord
    evaluation_log_name: str
    document: bytes = attrs.field(repr=False)
    give_up_reason: str = ""
    delivery_task: Deferred[None] | None = None

    @property
    def size(self) -> int:
        """Size in bytes, as it counts towards `DeliveryBounds.pending_bytes`."""
        return len(self.document) + DELIVERY_OVERHEAD_BYTES

    def cancel_attempt(self) -> None:
        """Cancel the attempt or the pause that is under way."""
        if self.delivery_task is not None:
            self.delivery_task.cancel()


@attrs.frozen
class DeliveryBounds:
    """Numbers of deliveries: 8 attempts take 5 to 10 minutes.

    One caller has at most half of `concurrent_attempts`. Beyond `pending_bytes` of pending
    callbacks the caller with most bytes loses its oldest callback.
    """

    backoff: Backoff = attrs.field(factory=lambda: Backoff(8, 5, 600))
    concurrent_attempts: int = CONCURRENT_CALLBACKS
    pending_bytes: int = 16 * MIB


class CallbackQueue:
    """Queue of callbacks. Without a file of secrets it accepts none.

    A caller has at most half of the slots, except with `has_one_caller`: without tokens all
    requests belong to one caller. `random` returns so many random bytes, `time` the seconds since
    the epoch. `ended_counts_by_state` counts deliveries by their final state.
    """

    def __init__(
        self,
        secrets: SigningSecretsFile,
        sender: WebhookSender,
        *,
        has_one_caller: bool,
        clock: Any,
        random: Callable[[int], bytes],
        time: Callable[[], float],
        bounds: DeliveryBounds | None = None,
    ) -> None:
        self._bounds = bounds = bounds or DeliveryBounds()
        self._secrets = secrets
        self._sender = sender
        per_caller = 0 if has_one_caller else (bounds.concurrent_attempts + 1) // 2
        self._slots = FairQueue(bounds.concurrent_attempts, UNLIMITED_WAITERS, per_caller)
        self._clock = clock
        self._random = random
        self._time = time
        self._deliveries: dict[str, Delivery] = {}  # by event, the oldest first
        # Without deliveries given up.
        self._share = Share(SharedResource.CALLBACKS, bounds.pending_bytes)
        self.ended_counts_by_state: Counter[CallbackState] = Counter()

    @property
    def pending_count(self) -> int:
        """Number of callbacks that are not delivered yet."""
        return len(self._deliveries)

    def list_reloadable_files(self) -> Iterator[ReloadableFiles[SigningSecrets]]:
        """Yield the secrets file, unless callbacks are disabled."""
        return self._secrets.list_reloadable_files()

    def create_callback(self, url: str, caller: str) -> CallbackRecord:
        """Return the callback of a new evaluation, not sent yet. Raises: InvalidField."""
        if self._secrets.path is None:
            raise InvalidField(_FIELD, "callbacks are disabled (callbacks.secrets)")
        if not self._secrets.current_secrets.has_secret(caller):
            raise InvalidField(
                _FIELD,
                "callbacks to you cannot be signed; ask the operator for a secret"
                " (callbacks.secrets)",
            )
        try:
            self._sender.check_url(url)
        except ForbiddenHost as error:
            raise InvalidField(_FIELD, str(error)) from None
        return CallbackRecord(url, caller)

    def start_delivery(
        self,
        callback: CallbackRecord,
        evaluation: str,
        document: Callable[[], bytes],
        on_end: Callable[[], object] = lambda: None,
        wait_until_stored: Callable[[], Awaitable[object]] = lambda: succeed(None),
    ) -> None:
        """Start a delivery.

        `document` returns the body, and is called in the state PENDING. The first attempt follows
        `wait_until_stored`. `on_end` is called in the final state.
        """
        callback.state = CallbackState.PENDING
        callback.webhook_id = callback.webhook_id or f"evt_{self._random(16).hex()}"
        delivery = self._deliveries[callback.webhook_id] = Delivery(
            callback, evaluation, document()
        )
        self._share.take(delivery.size, callback.caller)
        self._evict()
        delivery.delivery_task = run_in_background(
            self._run(delivery, on_end, wait_until_stored),
            log,
            "{evaluation}: defect in its callback",
            evaluation=evaluation,
        )

    def _evict(self) -> None:
        """Give up deliveries until the others fit: the oldest of the caller with most bytes."""
        evicted: list[Delivery] = []
        while self._share.used > self._share.total:
            caller = self._share.list_callers()[0]
            oldest = next(
                one
                for one in self._deliveries.values()
                if one.callback.caller == caller and not one.give_up_reason
            )
            most = format_size(self._bounds.pending_bytes)
            self._give_up(oldest, f"the caller's pending callbacks exceed {most}")
            evicted.append(oldest)
        for delivery in evicted:
            delivery.cancel_attempt()

    def _give_up(self, delivery: Delivery, reason: str) -> None:
        """Prevent further attempts and release the size. The first reason stays."""
        if not delivery.give_up_reason:
            delivery.give_up_reason = reason
            self._share.give_back(delivery.size, delivery.callback.caller)

    async def _run(
        self,
        delivery: Delivery,
        on_end: Callable[[], object],
        wait_until_stored: Callable[[], Awaitable[object]],
    ) -> None:
        """Deliver a callback and record its final state."""
        callback = delivery.callback
        try:
            await wait_until_stored()
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
            retry_after = min(result.retry_after, self._bounds.backoff.max_delay_seconds)
            delay = self._bounds.backoff.draw_delay(callback.attempt_count, chance, retry_after)
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
            secrets = self._secrets.current_secrets
            if not secrets.has_secret(callback.caller):
                # A few in each turn of the reactor: thousands may wait.
                await deferLater(self._clock, 0)
                reason = "the caller's secret was removed from callbacks.secrets"
                return AttemptResult(RequestOutcome.REFUSED, reason)
            callback.attempt_count += 1
            headers = secrets.sign_body(
                callback.caller, callback.webhook_id, int(self._time()), delivery.document
            )
            return await self._sender.post_document(callback.url, headers, delivery.document)
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
    *,
    has_one_caller: bool,
) -> CallbackQueue:
    """Return the `CallbackQueue` for `settings`.

    Parameters without a note are those of `CallbackQueue`.

    `environment` is that of the daemon, for the credentials of systemd. Raises: ConfigurationError,
    if the secrets cannot be read.
    """
    secrets = SigningSecretsFile(find_secrets_file(settings.secrets, environment))
    tls_policy = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
    return CallbackQueue(
        secrets,
        make_webhook_sender(settings, tls_policy, resolver, reactor, time),
        has_one_caller=has_one_caller,
        clock=reactor,
        random=random,
        time=time,
    )
