"""Tools for coroutines and Deferreds.

- Waiting: `Condition` wakes its waiters each time, `OneShotEvent` once; `wait_despite_cancellation`
  waits even if cancelled, `wait_until_true` for at most some time.
- Blocking calls: `WorkerThreads` makes calls in threads. `RetryQueue` repeats calls that must
  succeed in the end, such as the removal of directories: a machine may lack descriptors, or its
  disk may not answer, for a while.
- Sharing: `SingleFlight` does work once for all who ask for its result meanwhile. `FairQueue` is a
  queue for slots that is fair between callers.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.defer import TimeoutError as WaitedInVain
from twisted.internet.interfaces import IDelayedCall, IReactorFromThreads, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.errors import EvaluationFailure

_UNLIMITED = 2**62

K = TypeVar("K")
T = TypeVar("T")

log = Logger()


def run_in_background(
    coroutine: Coroutine[Deferred[Any], Any, None], log: Logger, message: str, **fields: Any
) -> Deferred[None]:
    """Start a coroutine that nobody waits for; the returned Deferred never fails.

    An exception is logged to `log` with `message`, a format of twisted.logger, and its `fields`.
    """
    return Deferred.fromCoroutine(coroutine).addErrback(
        lambda failure: log.failure(message, failure, **fields)
    )


@attrs.define
class Condition:
    """Condition that wakes all waiters each time it is notified."""

    # A dictionary for its order: the first waiter is woken first.
    _waiting: dict[Deferred[bool], None] = attrs.field(factory=dict, repr=False)

    def wait(self) -> Deferred[bool]:
        """Return a Deferred of True that fires at the next notification. It can be cancelled."""
        waiter: Deferred[bool] = Deferred(self._forget)
        self._waiting[waiter] = None
        return waiter

    def wait_up_to(self, seconds: float, clock: IReactorTime) -> Deferred[bool]:
        """Return a Deferred as `wait`, which fires with False after `seconds` seconds.

        A poll that waits has one: `Deferred.addTimeout` takes three times the memory.
        """
        waiter = self.wait()
        return waiter.addBoth(_stop_timeout, clock.callLater(seconds, self._expire, waiter))

    def _expire(self, waiter: Deferred[bool]) -> None:
        self._forget(waiter)
        waiter.callback(False)

    def _forget(self, waiter: Deferred[bool]) -> None:
        self._waiting.pop(waiter, None)

    def notify(self) -> None:
        """Wake the present waiters."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.called:  # cancelled by a waiter that was woken before
                waiter.callback(True)

    def __len__(self) -> int:
        return len(self._waiting)


def _stop_timeout(result: T, timeout: IDelayedCall) -> T:
    if timeout.active():
        timeout.cancel()
    return result


_NOT_YET: Any = object()


@attrs.define
class OneShotEvent(Generic[T]):
    """Event that happens once; later waiters are answered at once.

    Every evaluation has several, so it stores nothing but its value and its callbacks.
    """

    _value: T = _NOT_YET
    _waiting: tuple[Callable[[T], object], ...] = attrs.field(default=(), repr=False)

    @property
    def is_set(self) -> bool:
        """Whether the event has happened."""
        return self._value is not _NOT_YET

    def wait(self) -> Deferred[T]:
        """Return a new Deferred of the value. It can be cancelled."""
        if self.is_set:
            return succeed(self._value)
        waiter: Deferred[T] = Deferred(self._forget)
        self.add_callback(waiter.callback)
        return waiter

    def add_callback(self, callback: Callable[[T], object]) -> None:
        """Call `callback` with the value, now or later; takes less memory than `wait`."""
        if self.is_set:
            callback(self._value)
        else:
            self._waiting += (callback,)

    def set_value(self, value: T) -> None:
        """Set the value and wake all waiters. The first value stays."""
        if not self.is_set:
            self._value = value
            while self._waiting:  # a waiter that is woken may cancel others
                first, *others = self._waiting
                self._waiting = tuple(others)
                first(value)

    def _forget(self, waiter: Deferred[T]) -> None:
        self._waiting = tuple(call for call in self._waiting if call != waiter.callback)


def convert_deferred_to_event(deferred: Deferred[T]) -> OneShotEvent[Callable[[], T]]:
    """Return a one-shot event with the result of `deferred`: a call that returns or raises it.

    (A Deferred takes a Failure given as its value for its own failure.)
    """
    one_shot: OneShotEvent[Callable[[], T]] = OneShotEvent()
    deferred.addCallbacks(
        lambda value: one_shot.set_value(lambda: value),
        lambda failure: one_shot.set_value(failure.raiseException),
    )
    return one_shot


async def wait_despite_cancellation(
    one_shot: OneShotEvent[T], cancel: Callable[[], Any] = lambda: None
) -> T:
    """Wait for `one_shot` even if cancelled; a cancellation calls `cancel` and is raised later."""
    try:
        return await one_shot.wait()
    except CancelledError:
        cancel()
        while True:
            try:
                await one_shot.wait()
            except CancelledError:
                continue
            raise


async def wait_until_true(
    is_done: Callable[[], bool], progress_condition: Condition, timeout: float, clock: IReactorTime
) -> None:
    """Wait for `is_done()`, called at each progress, or until `timeout` seconds have passed."""

    async def wait() -> None:
        while not is_done():
            await progress_condition.wait()

    with suppress(WaitedInVain):
        await Deferred.fromCoroutine(wait()).addTimeout(timeout, clock)


@attrs.define(eq=False)
class WorkerThreads:
    """Threads for blocking calls.

    Not Twisted's pool: a call that changes threads by it takes twice as much processor time, and it
    makes threads on demand, which fails when evaluators have used up the allowed number of
    processes. The reactor's own pool is shared with name look-ups, which take as long as strangers'
    name servers do.
    """

    _reactor: IReactorFromThreads
    _is_abandoned: bool
    _calls: SimpleQueue[Callable[[], object] | None] = attrs.field(factory=SimpleQueue)
    _threads: list[Thread] = attrs.field(factory=list)

    @classmethod
    def create(
        cls,
        reactor: IReactorFromThreads,
        count: int,
        name: str,
        *,
        abandons_running_calls: bool = False,
    ) -> WorkerThreads:
        """Return a pool of `count` threads, all of which `start` makes.

        If `abandons_running_calls`, `stop` does not wait for running calls, which end with the
        process. Calls made before `start` wait for it.
        """
        pool = cls(reactor, abandons_running_calls)
        # Daemon threads let a process whose start fails later end without `stop`.
        pool._threads = [
            Thread(target=pool._make_calls, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        return pool

    def start(self) -> None:
        """Start all threads. Raises OSError."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # Python's only message for a thread that cannot start
            raise OSError(errno.EAGAIN, f"threads: {error}") from None

    def stop(self) -> None:
        """Wait for the calls until now, and make no others. Blocks."""
        if not self._is_abandoned:
            started = [thread for thread in self._threads if thread.ident]
            for _ in started:
                self._calls.put(None)
            for thread in started:
                thread.join()

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:  # noqa: BLE001  (without the thread, later calls would wait for ever)
                log.failure("defect: the result of a call in a thread is lost")
            del call  # an idle thread keeps nothing that it has used

    async def run_in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `call(*args, **kwargs)`, called in a thread.

        A thread cannot be stopped: a cancellation is raised after the call has returned, so that no
        clean-up runs at the same time as the call.
        """
        ended: OneShotEvent[Callable[[], T]] = OneShotEvent()

        def make_call() -> None:
            try:
                value = call(*args, **kwargs)
            except BaseException:  # noqa: BLE001  (the caller gets it)
                # Not a variable: the exception's traceback has this frame.
                self._reactor.callFromThread(ended.set_value, Failure().raiseException)
            else:
                self._reactor.callFromThread(ended.set_value, lambda: value)

        self._calls.put(make_call)
        return (await wait_despite_cancellation(ended))()


@attrs.define(eq=False)
class RetryQueue:
    """Queue of the calls that raised OSError; they are repeated now and then, until one fails."""

    _threads: WorkerThreads
    # Purpose, call, and what is called after it has succeeded.
    _kept: deque[tuple[str, Callable[[], object], Callable[[], object]]] = attrs.field(
        factory=deque
    )
    _is_busy: bool = False

    def __len__(self) -> int:
        return len(self._kept)

    async def attempt_call(
        self,
        purpose: str,
        call: Callable[..., object],
        *arguments: Any,
        on_success: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a call in a thread; on OSError, log its `purpose` and keep the call.

        `on_success()` is called once the call has succeeded.
        """
        try:
            await self._threads.run_in_thread(call, *arguments)
        except OSError as error:
            words = "{what} has failed, and will be tried again: {error}"
            log.error(words, what=purpose, error=error)  # noqa: TRY400  (no defect: no traceback)
            self._kept.append((purpose, partial(call, *arguments), on_success))
        else:
            on_success()

    def retry_next_calls(self) -> None:
        """Retry kept calls until one fails, unless a retry runs; call it once a second."""
        if self._kept and not self._is_busy:
            self._is_busy = True
            run_in_background(self._retry(), log, "defect: failed calls could not be retried")

    async def _retry(self) -> None:
        try:
            for _ in range(len(self._kept)):
                purpose, call, on_success = self._kept.popleft()
                try:
                    await self._threads.run_in_thread(call)
                except OSError:
                    # Behind the others, which may lack nothing.
                    self._kept.append((purpose, call, on_success))
                    break
                except Exception:  # noqa: BLE001  (the other calls are still made)
                    log.failure("defect: {what} has failed for good", what=purpose)
                else:
                    log.info("{what} has succeeded now", what=purpose)
                    on_success()
        finally:
            self._is_busy = False


@attrs.define
class _Work(Generic[T]):
    """Work in progress; `waiting` is the number of its waiters."""

    deferred: Deferred[T]
    outcome: OneShotEvent[Callable[[], T]]
    waiting: int = 0


@attrs.define
class SingleFlight(Generic[K, T]):
    """Work in progress by key, shared by its waiters; results are not kept."""

    _works: dict[K, _Work[T]] = attrs.field(factory=dict)

    async def run_once(self, key: K, work: Callable[[], Coroutine[Deferred[Any], Any, T]]) -> T:
        """Return the result of the work in progress for `key`, or else of `work()`.

        When the last waiter is cancelled the work is cancelled, and that waiter returns after the
        work has ended; a later call begins anew.
        """
        found = self._works.get(key)
        if found is None:
            deferred = Deferred.fromCoroutine(work())
            found = self._works[key] = _Work(deferred, convert_deferred_to_event(deferred))
        found.waiting += 1
        try:
            result = await found.outcome.wait()
        except CancelledError:
            if found.waiting == 1:
                self._works.pop(key, None)
                found.deferred.cancel()
                await wait_despite_cancellation(found.outcome)
            raise
        finally:
            found.waiting -= 1
            if found.outcome.is_set and self._works.get(key) is found:
                del self._works[key]
        try:
            return result()
        except EvaluationFailure as error:
            raise attrs.evolve(error) from None  # each waiter gets a traceback of its own


def resolve_run_slot_count(configured: int) -> int:
    """Return the number of run slots: `configured`, or the number of processors if that is 0."""
    return configured or len(os.sched_getaffinity(0))


class FairQueue:
    """Queue for `running` slots, with at most `queued` waiters, fair between callers.

    A free slot goes to the caller whose last turn is longest ago, and among that caller's waiters
    to the first. A `Budget` each counts slots and waiters; `running_per_caller` and
    `queued_per_caller` are the parts of one caller in them; 0 stands for the total.

    A waiter that is not ready can reserve its turn: others pass the waiter until `acquire_slot`.
    """

    def __init__(
        self,
        running: int,
        queued: int = _UNLIMITED,
        running_per_caller: int = 0,
        queued_per_caller: int = 0,
    ) -> None:
        self._slots = Budget(SharedResource.SLOTS, running, running_per_caller or None)
        self._waiters = Budget(SharedResource.QUEUE, queued, queued_per_caller or None)
        self._is_dispatching = False
        self._running: dict[str, str] = {}  # callers by the names of holders
        self._suspended: set[str] = set()  # holders of slots that others may have meanwhile
        self._callers: dict[str, str] = {}  # those of the waiters, by name
        # By caller in the order of turns: the waiters in their order, with None for one that is not
        # ready. None is empty. Unlike those of a dict, the first item is always found at once.
        self._lines: OrderedDict[str, OrderedDict[str, Deferred[None] | None]] = OrderedDict()
        self._call_count = 0

    @property
    def slot_count(self) -> int:
        """Number of slots."""
        return self._slots.total

    @property
    def taken_slot_count(self) -> int:
        """Number of slots taken."""
        return self._slots.used - len(self._suspended)

    @property
    def waiter_count(self) -> int:
        """Number of waiters."""
        return self._waiters.used

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free, perhaps because a waiter is not ready."""
        return self.taken_slot_count < self._slots.total

    @property
    def waiting_caller_count(self) -> int:
        """Number of callers that have waiters."""
        return len(self._lines)

    def is_full(self, caller: str = ANONYMOUS_CALLER) -> bool:
        """Return whether one more waiter of `caller` would exceed `queued`."""
        # A waiter that is not ready waits beside free slots, which others may have meanwhile.
        slots, waiters = self._slots, self._waiters
        free = slots.total - self.taken_slot_count if self._may_run(caller) else 0
        return waiters.used >= waiters.total + free

    def is_caller_quota_exhausted(self, caller: str) -> bool:
        """Return whether one more waiter of `caller` would exceed `queued_per_caller`."""
        slots, waiters = self._slots, self._waiters
        part = waiters.compute_quota(caller)
        if part == waiters.total:  # one caller would be blamed for others
            return False
        own = slots.compute_quota(caller) - slots.used_by_caller[caller]
        free = own if self._may_run(caller) else 0
        return waiters.used_by_caller[caller] >= part + free

    def _may_run(self, caller: str) -> bool:
        return self.has_free_slot and not self._slots.is_quota_used_up(caller)

    def reserve_queue_place(self, holder: str, caller: str = ANONYMOUS_CALLER) -> None:
        """Wait without being ready: the turn counts from now; `acquire_slot` has to follow."""
        self._callers[holder] = caller
        self._waiters.record_usage(1, caller)
        self._lines.setdefault(caller, OrderedDict())[holder] = None

    def acquire_slot(self, holder: str, caller: str = ANONYMOUS_CALLER) -> Deferred[None]:
        """Return a Deferred of a slot. Its cancellation ends the wait."""
        is_reserved = holder in self._callers
        # No waiter could use the slot then, except during a dispatch.
        if not is_reserved and self._may_run(caller) and not self._is_dispatching:
            self.take_slot_unconditionally(holder, caller)
            return succeed(None)
        if not is_reserved:
            self.reserve_queue_place(holder, caller)
        slot: Deferred[None] = Deferred(lambda _: self.release_slot(holder))
        self._lines[self._callers[holder]][holder] = slot
        if is_reserved:
            self._dispatch_slots()
        return slot

    @asynccontextmanager
    async def hold_slot(self, caller: str) -> AsyncIterator[None]:
        """Have a slot within the context."""
        self._call_count += 1
        holder = f"call {self._call_count}"
        try:
            await self.acquire_slot(holder, caller)
            yield
        finally:
            self.release_slot(holder)

    async def run_in_turn(self, caller: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an asynchronous call, which has a slot meanwhile."""
        async with self.hold_slot(caller):
            return await call()

    def take_slot_unconditionally(self, holder: str, caller: str = ANONYMOUS_CALLER) -> None:
        """Take a slot, whatever the bounds are."""
        self._running[holder] = caller
        self._slots.record_usage(1, caller)

    def release_slot_keep_quota(self, holder: str) -> None:
        """Give back the slot of `holder`, which counts for its caller until `release_slot`."""
        self._suspended.add(holder)
        self._dispatch_slots()

    def return_to_queue(self, holder: str) -> None:
        """Give back the slot of `holder`, and reserve its turn again, in its former place.

        The waiters before it are those that were not ready when it got the slot.
        """
        caller = self._running.pop(holder)
        self._suspended.discard(holder)
        self._slots.give_back(1, caller)
        before = []
        for other, slot in self._lines.get(caller, {}).items():
            if slot is not None:
                break
            before.append(other)
        self.reserve_queue_place(holder, caller)
        line = self._lines[caller]
        for other in (holder, *reversed(before)):
            line.move_to_end(other, last=False)
        self._dispatch_slots()

    def release_slot(self, holder: str) -> None:
        """Give back the slot or the turn of `holder`, if it has one."""
        if holder in self._callers:
            self._remove_waiter(holder)
            return
        self._suspended.discard(holder)
        if holder in self._running:
            self._slots.give_back(1, self._running.pop(holder))
            self._dispatch_slots()

    def _remove_waiter(self, holder: str) -> None:
        caller = self._callers.pop(holder)
        self._waiters.give_back(1, caller)
        del self._lines[caller][holder]
        if not self._lines[caller]:
            del self._lines[caller]

    def _dispatch_slots(self) -> None:
        """Give free slots to waiters.

        A waiter may release its slot at once. The next waiter gets the slot in this loop, not in a
        nested call: a thousand nested calls would exceed Python's recursion limit.
        """
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while found := self._find_next_waiter():
                holder, caller, slot = found
                self._remove_waiter(holder)
                if caller in self._lines:
                    self._lines.move_to_end(caller)
                self.take_slot_unconditionally(holder, caller)
                slot.callback(None)
        finally:
            self._is_dispatching = False

    def _find_next_waiter(self) -> tuple[str, str, Deferred[None]] | None:
        """Return the waiter for a free slot, with its caller; None without one."""
        for caller, line in self._lines.items() if self.has_free_slot else ():
            if not self._slots.is_quota_used_up(caller):
                for holder, slot in line.items():
                    if slot is not None:
                        return holder, caller, slot
        return None

    def find_waiter_position(self, holder: str) -> int | None:
        """Return the number of waiters before `holder`, or None if `holder` does not wait.

        Later callers have their turns, too, and callers at their limit are passed over, so the
        number may change in both directions.
        """
        if holder not in self._callers:
            return None
        own = self._callers[holder]
        rounds = list(self._lines[own]).index(holder)
        before, is_turn_before = 0, True
        # In each round before, each caller that has a waiter left takes a slot, `own` too; then
        # each caller whose turn is earlier.
        for caller, line in self._lines.items():
            is_turn_before = is_turn_before and caller != own
            before += min(len(line), rounds + is_turn_before)
        return before
