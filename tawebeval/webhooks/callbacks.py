"""Callbacks: the end of an evaluation, told to a URL until somebody has taken it.

Places to send are few and go round the callers; what waits is bounded in bytes (`deliveries`).

Settings may change meanwhile. What has begun, an attempt or a pause, ends as it began, and all that
comes after goes by the new ones: so no attempt begins any more to where nothing may be sent by now.
Thousands may come to their end by that, so they do it in many turns of the reactor.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as WaitedInVain
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger, LogLevel
from twisted.web.client import BrowserLikePolicyForHTTPS

from tawebeval.admission import UNBOUNDED, Queue
from tawebeval.config import CallbackSettings as Settings
from tawebeval.core.backoff import Backoff, Verdict
from tawebeval.deferreds import Signal, in_background
from tawebeval.errors import ForbiddenHost, InvalidField
from tawebeval.reloadable import Rereading
from tawebeval.resolver import Resolver
from tawebeval.webhooks.callback import Callback, CallbackState
from tawebeval.webhooks.deliveries import Deliveries, Delivery
from tawebeval.webhooks.sender import AttemptResult, CachedPolicyForHTTPS, Sender, open_sender
from tawebeval.webhooks.signatures import Secrets
from tawebeval.webhooks.signing import Signing

_FIELD = "callback_url"
_IN_A_TURN = 16  # deliveries that may come to their end by new settings
_STOPPED = "the service was stopped"

log = Logger()


class Callbacks:
    """Sends callbacks by `settings`, where these enable them.

    `open_sender` returns what posts by such settings. With `alone` there is one caller only.
    `random` is as `os.urandom`, `time` in seconds since the epoch. `ended` counts how
    deliveries have ended.
    """

    def __init__(
        self,
        settings: Settings,
        signing: Signing,
        open_sender: Callable[[Settings], Sender],
        *,
        alone: bool,
        clock: Any,
        random: Callable[[int], bytes],
        time: Callable[[], float],
    ) -> None:
        self._signing = signing
        self._open_sender = open_sender
        self._alone = alone
        self._places = Queue(settings.at_once, UNBOUNDED)
        self._clock = clock
        self._random = random
        self._time = time
        self._last_seconds: float | None = None  # for the last attempts, once they are made
        self._hastened: Signal[None] = Signal()
        self._hurried = False
        self._deliveries = Deliveries()
        self._too_many: deque[Delivery] = deque()  # given up, and yet to be stopped
        self._stopping: IDelayedCall | None = None
        self.ended: Counter[CallbackState] = Counter()
        self.go_by(settings)

    def go_by(self, settings: Settings) -> None:
        """Have all that begins from now on go by these settings."""
        self._settings = settings
        self._sender = self._open_sender(settings)
        self._backoff = Backoff(settings.attempts, settings.first_delay, settings.longest_delay)
        # Half of the places at most are one caller's, whose receiver may be slow.
        own = 0 if self._alone else (settings.at_once + 1) // 2
        self._places.bound(settings.at_once, UNBOUNDED, own)
        self._make_room()
        self._places.go_on()

    @property
    def pending(self) -> int:
        """How many are on their way."""
        return len(self._deliveries)

    def rereadings(self, settings: Settings) -> Iterator[Rereading[Secrets]]:
        """Yield what reads the secrets that such settings need. Raises ConfigurationError."""
        return self._signing.rereadings(settings)

    def expect(self, url: str, caller: str) -> Callback:
        """Return the callback of an evaluation that begins. Raises InvalidField."""
        if not self._settings.enabled:
            raise InvalidField(_FIELD, "there are no callbacks here ([callbacks] enabled)")
        if not self._signing.secrets.has(caller):
            raise InvalidField(
                _FIELD, "the operator has no secret of yours, with which callbacks are signed"
            )
        try:
            self._sender.check(url)
        except ForbiddenHost as error:
            raise InvalidField(_FIELD, str(error)) from None
        return Callback(url, caller)

    def send(self, callback: Callback, evaluation: str, document: Callable[[], bytes]) -> None:
        """Deliver a document, which is asked for when the callback is on its way."""
        callback.state = CallbackState.PENDING
        event = f"evt_{self._random(16).hex()}"
        delivery = Delivery(callback, evaluation, document(), event)
        self._deliveries.add(delivery)
        self._make_room()
        if self._hurried:
            delivery.mark(_STOPPED)
        delivery.life = in_background(
            self._live(delivery), log, "{evaluation}: a defect", evaluation=evaluation
        )

    def hasten(self) -> None:
        """Let each have one last attempt, at once; what time there is for them is settled now."""
        if self._last_seconds is None:
            self._last_seconds = self._settings.timeout if self._settings.enabled else 0
            self._hastened.fire(None)

    def hurry(self) -> None:
        """Give up all of them, and those that are yet to come."""
        self._hurried = True
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None
            self._too_many.clear()
        deliveries = list(self._deliveries)
        for delivery in deliveries:
            delivery.mark(_STOPPED)
        for delivery in deliveries:
            delivery.stop()

    async def close(self) -> None:
        """Wait for the last attempts, for the time of one at most, and give up what is left."""
        self.hasten()
        with suppress(WaitedInVain):
            all_over = Deferred.fromCoroutine(self._all_over())
            await all_over.addTimeout(self._last_seconds or 0, self._clock)
        self.hurry()

    async def _all_over(self) -> None:
        while self._deliveries:
            await next(iter(self._deliveries)).over.wait()

    def _make_room(self) -> None:
        """Give up deliveries until the others fit."""
        too_many = self._deliveries.take_excess(self._settings.buffer)
        for delivery in too_many:
            delivery.mark("too many callbacks of this caller wait")
        self._too_many += too_many
        if self._stopping is None:
            self._stop_some()

    def _stop_some(self) -> None:
        """Stop a few of those that are too many, and the others in further turns."""
        self._stopping = None
        for _ in range(min(_IN_A_TURN, len(self._too_many))):
            self._too_many.popleft().stop()
        if self._too_many:
            self._stopping = self._clock.callLater(0, self._stop_some)

    def _turn(self) -> Deferred[None]:
        """Return what fires when the reactor has seen to everything else once."""
        return deferLater(self._clock, 0)

    async def _live(self, delivery: Delivery) -> None:
        """Deliver, and note how that has ended."""
        callback = delivery.callback
        try:
            callback.state = await self._deliver(delivery)
        except CancelledError:
            callback.state = CallbackState.GIVEN_UP
        except Exception:  # noqa: BLE001  (its failures are told, also those that are ours)
            log.failure("{evaluation}: a defect in its callback", evaluation=delivery.evaluation)
            delivery.given_up = "the daemon could not send it"
            callback.state = CallbackState.GIVEN_UP
        if callback.state is CallbackState.GIVEN_UP and delivery.given_up:
            before = f"; before: {callback.last_error}" if callback.last_error else ""
            callback.last_error = delivery.given_up + before
        self.ended[callback.state] += 1
        self._deliveries.remove(delivery)
        self._log(delivery)
        delivery.over.set(None)

    async def _deliver(self, delivery: Delivery) -> CallbackState:
        callback = delivery.callback
        while not delivery.given_up:
            result = await self._attempt(delivery)
            if result.verdict is Verdict.TAKEN:
                return CallbackState.DELIVERED
            callback.last_error = result.reason
            if result.verdict is Verdict.REFUSED:
                return CallbackState.REFUSED
            chance = int.from_bytes(self._random(4), "big") / 2**32
            # A receiver cannot keep us waiting for longer than one that is silent.
            asked = min(result.retry_after, self._backoff.longest_delay)
            delay = self._backoff.delay(callback.attempts, chance, asked)
            if delay is None:
                break
            if self._last_seconds is not None:
                delivery.given_up = _STOPPED  # not to be cancelled: it is we who run
            elif not delivery.given_up:
                self._log(delivery, delay)
                with suppress(WaitedInVain):  # then it is time; the other end is an early last one
                    await self._hastened.wait().addTimeout(delay, self._clock)
        return CallbackState.GIVEN_UP

    async def _attempt(self, delivery: Delivery) -> AttemptResult:
        callback = delivery.callback
        await self._places.enter(delivery.event, callback.caller)
        try:
            if delivery.given_up or self._forbidden(callback):
                await self._turn()  # as many as have places go at once
            if delivery.given_up:
                raise CancelledError
            if forbidden := self._forbidden(callback):
                return AttemptResult(Verdict.REFUSED, forbidden)
            callback.attempts += 1
            headers = self._signing.secrets.sign(
                callback.caller, delivery.event, int(self._time()), delivery.document
            )
            return await self._sender.post(callback.url, headers, delivery.document)
        finally:
            self._places.leave(delivery.event)

    def _forbidden(self, callback: Callback) -> str:
        """Return why nothing may be sent any more; empty if it may."""
        if not self._settings.enabled:
            return "the operator has disabled callbacks"
        if not self._signing.secrets.has(callback.caller):
            return "the operator has removed the secret to sign with"
        return ""

    def _log(self, delivery: Delivery, delay: float | None = None) -> None:
        """Log what has come of a delivery, or of an attempt after which there is a `delay`."""
        callback = delivery.callback
        well = callback.state is CallbackState.DELIVERED
        log.emit(
            LogLevel.info if well or delay is not None else LogLevel.warn,
            "{evaluation}: callback to {origin}: {stage}, attempts: {attempts}{error}{again}",
            evaluation=delivery.evaluation,
            origin=callback.origin,
            stage=callback.state.value,
            attempts=callback.attempts,
            error="" if well else f": {callback.last_error}",
            again="" if delay is None else f"; again in {delay:.1f} s",
        )


def open_callbacks(
    settings: Settings,
    environment: Mapping[str, str],
    resolver: Resolver,
    reactor: Any,
    random: Callable[[int], bytes],
    time: Callable[[], float],
    *,
    alone: bool,
) -> Callbacks:
    """Return what sends callbacks, signed with the secrets of these settings.

    Raises ConfigurationError for secrets that are needed and cannot be read.
    """
    signing = Signing(environment)
    for secrets in signing.rereadings(settings):
        secrets.take(secrets.read())
    trust = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
    return Callbacks(
        settings,
        signing,
        lambda settings: open_sender(settings, trust, resolver, reactor, time),
        alone=alone,
        clock=reactor,
        random=random,
        time=time,
    )
