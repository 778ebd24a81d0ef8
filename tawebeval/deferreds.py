"""Tools for coroutines: notifiers, one-shot events, threads, single-flight, queues."""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.defer import TimeoutError as WaitedInVain
from twisted.internet.interfaces import IReactorThreads, IReactorTime
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from tawebeval.errors import EvaluationFailure

T = TypeVar("T")


def in_background(
    coroutine: Coroutine[Deferred[Any], Any, None], log: Logger, complaint: str, **fields: Any
) -> Deferred[None]:
    """Start a coroutine that nobody waits for; the returned Deferred never fails.

    An exception is logged to `log` with `complaint`, a format of twisted.logger, and its `fields`.
    """
    return Deferred.fromCoroutine(coroutine).addErrback(
        lambda failure: log.failure(complaint, failure, **fields)
    )


@attrs.define
class Condition(Generic[T]):
    """Condition that wakes all waiters each time it is notified."""

    # A dictionary for its order: who waited first is woken first.
    _waiting: dict[Deferred[T], None] = attrs.field(factory=dict, repr=False)

    def wait(self) -> Deferred[T]:
        """Return a Deferred that fires at the next notification. It can be cancelled."""
        waiter: Deferred[T] = Deferred(self._forget)
        self._waiting[waiter] = None
        return waiter

    def _forget(self, waiter: Deferred[T]) -> None:
        self._waiting.pop(waiter, None)

    def notify(self, value: T) -> None:
        """Wake the present waiters."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.called:  # cancelled by one who was woken before
                waiter.callback(value)

    def __len__(self) -> int:
        return len(self._waiting)


_NOT_YET: Any = object()


@attrs.define
class OneShot(Generic[T]):
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

    def add_callback(self, call: Callable[[T], object]) -> None:
        """Call `call` with the value, now or later; takes less memory than `wait`."""
        if self.is_set:
            call(self._value)
        else:
            self._waiting += (call,)

    def set(self, value: T) -> None:
        """Set the value and wake all waiters. The first value stays."""
        if not self.is_set:
            self._value = value
            while self._waiting:  # one who is woken may cancel others
                first, *others = self._waiting
                self._waiting = tuple(others)
                first(value)

    def _forget(self, waiter: Deferred[T]) -> None:
        self._waiting = tuple(call for call in self._waiting if call != waiter.callback)


def one_shot_of(deferred: Deferred[T]) -> OneShot[Callable[[], T]]:
    """Return a one-shot event with the result of `deferred`: a call that returns or raises it.

    (A Deferred takes a Failure given as its value for its own failure.)
    """
    one_shot: OneShot[Callable[[], T]] = OneShot()
    deferred.addCallbacks(
        lambda value: one_shot.set(lambda: value),
        lambda failure: one_shot.set(failure.raiseException),
    )
    return one_shot


async def wait_shielded(one_shot: OneShot[T], cancel: Callable[[], Any] = lambda: None) -> T:
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


async def poll_until(
    done: Callable[[], bool], progress: Condition[None], seconds: float, clock: IReactorTime
) -> None:
    """Wait until `done()` is true or `seconds` have passed; `done` is called at each `progress`."""

    async def wait() -> None:
        while not done():
            await progress.wait()

    with suppress(WaitedInVain):
        await Deferred.fromCoroutine(wait()).addTimeout(seconds, clock)


@attrs.frozen
class WorkerThreads:
    """Thread pool for blocking calls."""

    _reactor: IReactorThreads
    _pool: ThreadPool

    @classmethod
    def create(cls, reactor: IReactorThreads, count: int, name: str) -> WorkerThreads:
        """Return a pool of `count` threads, all of which `start` makes.

        The reactor's own pool is shared with name look-ups, which take as long as strangers' name
        servers do; and it makes threads on demand, which fails when evaluators have used up the
        allowed number of processes. Calls made before `start` wait for it.
        """
        pool = ThreadPool(count, count, name)
        # A process whose start fails later ends, though nobody has stopped them.
        pool.threadFactory = partial(Thread, daemon=True)  # type: ignore[assignment]
        return cls(reactor, pool)

    def start(self) -> None:
        """Start all threads. Raises OSError."""
        try:
            self._pool.start()
        except RuntimeError as error:  # which tells no more
            # Of one that has not begun nobody can wait for the end.
            self._pool.threads = [thread for thread in self._pool.threads if thread.ident]
            raise OSError(errno.EAGAIN, f"threads: {error}") from None

    def stop(self) -> None:
        """Wait for running calls and start no more. Blocks."""
        self._pool.stop()

    async def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `call(*args, **kwargs)`, called in a thread.

        A thread cannot be stopped: a cancellation is raised after the call has returned, so that no
        clean-up runs at the same time as the call.
        """
        ended = one_shot_of(deferToThreadPool(self._reactor, self._pool, call, *args, **kwargs))
        return (await wait_shielded(ended))()


K = TypeVar("K")


@attrs.define
class _Work(Generic[T]):
    """Work in progress, and the number of its waiters."""

    deferred: Deferred[T]
    outcome: OneShot[Callable[[], T]]
    waiting: int = 0


@attrs.define
class SingleFlight(Generic[K, T]):
    """Work in progress by key; nothing is kept of finished work."""

    _works: dict[K, _Work[T]] = attrs.field(factory=dict)

    async def result(self, key: K, begin: Callable[[], Coroutine[Deferred[Any], Any, T]]) -> T:
        """Return the result of the work in progress for `key`, or else of `begin()`.

        When its last waiter is cancelled the work is cancelled, and that waiter returns after the
        work has ended; a later call begins anew.
        """
        work = self._works.get(key)
        if work is None:
            deferred = Deferred.fromCoroutine(begin())
            work = self._works[key] = _Work(deferred, one_shot_of(deferred))
        work.waiting += 1
        try:
            result = await work.outcome.wait()
        except CancelledError:
            if work.waiting == 1:
                self._works.pop(key, None)
                work.deferred.cancel()
                await wait_shielded(work.outcome)
            raise
        finally:
            work.waiting -= 1
            if work.outcome.is_set and self._works.get(key) is work:
                del self._works[key]
        try:
            return result()
        except EvaluationFailure as error:
            raise attrs.evolve(error) from None  # each who shares it gets a traceback of its own


UNBOUNDED = 2**62
"""Places to wait, where something else bounds those who do."""


def count_slots(running: int) -> int:
    """Return the number of run slots: `running`, or the number of processors if that is 0."""
    return running or len(os.sched_getaffinity(0))


class FairQueue:
    """Queue for `running` slots, with at most `queued` waiters, fair between callers.

    A free slot goes to the caller whose last turn is longest ago, and among that caller's waiters
    to the first. A caller has at most `own_running` slots and `own_queued` waiters; 0 sets no such
    limit. A caller for whom `admits` is false gets no slot; call `dispatch` when that may have
    changed.

    A waiter that is not ready can reserve its turn: others pass it until `acquire`.
    """

    def __init__(
        self,
        running: int,
        queued: int,
        own_running: int = 0,
        own_queued: int = 0,
        *,
        admits: Callable[[str], bool] = lambda caller: True,
    ) -> None:
        self._admits = admits
        self.set_bounds(running, queued, own_running, own_queued)
        self._letting_in = False
        self._inside: dict[str, str] = {}  # of whom each is
        self._resting: dict[str, str] = {}  # likewise
        self._taken: Counter[str] = Counter()  # those inside and resting, by caller
        self._callers: dict[str, str] = {}  # of those that wait
        # By caller, in the order of their turns; none is empty. None is for who is not ready.
        self._waiting: dict[str, dict[str, Deferred[None] | None]] = {}

    def set_bounds(
        self, running: int, queued: int, own_running: int = 0, own_queued: int = 0
    ) -> None:
        """Change the bounds. Present holders and waiters stay; call `dispatch` afterwards."""
        self.places = running
        self._queued = queued
        self._own_running = own_running or running
        self._own_queued = own_queued or queued

    @property
    def running(self) -> int:
        """Number of slots taken."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self._callers)

    def is_full(self, caller: str = "") -> bool:
        """Whether one more waiter of `caller` would exceed `queued`."""
        # Who is not ready waits also where there are places, which others may have meanwhile.
        free = self.places - len(self._inside) if self._may_run(caller) else 0
        return len(self._callers) >= self._queued + free

    def share_used(self, caller: str) -> bool:
        """Whether one more waiter of `caller` would exceed `own_queued`."""
        # Where nobody may have more than there is, it is not this caller's own fault.
        if self._own_queued >= self._queued:
            return False
        free = self._own_running - self._taken[caller] if self._may_run(caller) else 0
        return len(self._waiting.get(caller, ())) >= self._own_queued + free

    def _may_run(self, caller: str) -> bool:
        return (
            len(self._inside) < self.places
            and self._taken[caller] < self._own_running
            and self._admits(caller)
        )

    def reserve(self, name: str, caller: str = "") -> None:
        """Wait without being ready: the turn counts from now, but `acquire` has to be called."""
        self._callers[name] = caller
        self._waiting.setdefault(caller, {})[name] = None

    def acquire(self, name: str, caller: str = "") -> Deferred[None]:
        """Return a Deferred of a slot. Cancelling it gives up waiting."""
        reserved = name in self._callers
        # Nobody waits then who could have the place, save while others are being let in.
        if not reserved and self._may_run(caller) and not self._letting_in:
            self._let_in(name, caller)
            return succeed(None)
        place: Deferred[None] = Deferred(lambda _: self._give_up(name))
        self._callers[name] = caller
        self._waiting.setdefault(caller, {})[name] = place
        if reserved:
            self.dispatch()
        return place

    def _let_in(self, name: str, caller: str) -> None:
        self._inside[name] = caller
        self._taken[caller] += 1

    def _give_up(self, name: str) -> None:
        self._take_out(name)

    def _take_out(self, name: str) -> Deferred[None] | None:
        """Remove `name` from the waiters."""
        caller = self._callers.pop(name)
        own = self._waiting[caller]
        place = own.pop(name)
        if not own:
            del self._waiting[caller]
        return place

    def suspend(self, name: str) -> None:
        """Give back the slot of `name`, which counts for its caller until `release`."""
        self._resting[name] = self._inside.pop(name)
        self.dispatch()

    def release(self, name: str) -> None:
        """Give back the slot or the turn of `name`, if it has one."""
        if name in self._callers:
            self._take_out(name)
            return
        held = self._inside if name in self._inside else self._resting
        if name not in held:
            return
        caller = held.pop(name)
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
        self.dispatch()

    def dispatch(self) -> None:
        """Give free slots to waiters.

        Some leave as soon as they have a slot. Their successors get it in this loop, not in a
        nested call: a thousand nested calls would exceed Python's recursion limit.
        """
        if self._letting_in:
            return
        self._letting_in = True
        try:
            self._let_all_in()
        finally:
            self._letting_in = False

    def _let_all_in(self) -> None:
        while following := self._following():
            caller, name, place = following
            self._take_out(name)
            if caller in self._waiting:  # the others' turns come first
                self._waiting[caller] = self._waiting.pop(caller)
            self._let_in(name, caller)
            place.callback(None)

    def _following(self) -> tuple[str, str, Deferred[None]] | None:
        """Return the next waiter that is ready, or None."""
        for caller, own in self._waiting.items():
            if self._may_run(caller):
                for name, place in own.items():
                    if place is not None:
                        return caller, name, place
        return None

    def holders(self) -> list[tuple[str, bool]]:
        """Return all holders of slots, and for each whether it keeps a waiter out.

        A holder does if no other slot is free, or none of its caller's.
        """
        full = len(self._inside) >= self.places
        ready = [one for one, own in self._waiting.items() if any(own.values())]
        anybody = full and any(self._taken[caller] < self._own_running for caller in ready)
        kept_out = {one for one in ready if self._taken[one] >= self._own_running}
        return [(name, anybody or caller in kept_out) for name, caller in self._inside.items()]

    def position(self, name: str) -> int | None:
        """Return the number of waiters before `name`, or None if it does not wait.

        Callers that come later have their turns, too, and callers at their limit are passed over,
        so the number may change in both directions.
        """
        if name not in self._callers:
            return None
        caller = self._callers[name]
        rounds = before = list(self._waiting[caller]).index(name)
        first = 1  # whose turn is earlier takes one more
        for other, waiting in self._waiting.items():
            if other == caller:
                first = 0
            else:
                before += min(len(waiting), rounds + first)
        return before


_BATCH = 100  # calls that a thread makes one after the other
_LONGEST = 60  # seconds between two trials

log = Logger()


@attrs.frozen
class _Call:
    """Blocking call that may be repeated; `made` is called after its success."""

    what: str
    make: Callable[..., object]
    arguments: Sequence[Any]
    made: Callable[[], object]


@attrs.define(eq=False)
class RetryQueue:
    """Makes calls in threads and keeps those that raise OSError, in order."""

    _threads: WorkerThreads
    _kept: deque[_Call] = attrs.field(factory=deque)
    _busy: bool = False
    _delay: int = 1  # seconds between the last trial and the next
    _rest: int = 0  # of these are still to come

    def __len__(self) -> int:
        return len(self._kept)

    async def attempt(
        self,
        what: str,
        make: Callable[..., object],
        *arguments: Any,
        made: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a call; on OSError, log it with its purpose `what` and keep the call."""
        try:
            await self._threads.run(make, *arguments)
        except OSError as error:
            words = "{what} is not done yet, and tried again: {error}"
            log.error(words, what=what, error=error)  # noqa: TRY400  (no defect: no traceback)
            self._kept.append(_Call(what, make, arguments, made))
        else:
            made()

    def retry_next(self) -> None:
        """Retry kept calls unless a retry runs or the back-off lasts; call it once a second.

        The back-off doubles after each retry in which no call succeeds.
        """
        if not self._kept or self._busy:
            return
        if self._rest:
            self._rest -= 1
            return
        self._busy = True
        in_background(self._again(), log, "what was left to be done")

    async def _again(self) -> None:
        try:
            left, progress = len(self._kept), False
            while left:
                batch = [self._kept.popleft() for _ in range(min(left, _BATCH))]
                left -= len(batch)
                if not self._judge(batch, await self._threads.run(_make_all, batch)):
                    break  # what lacks for all of these lacks for the others, too
                progress = True
            self._delay = 1 if progress else min(2 * self._delay, _LONGEST)
            self._rest = self._delay - 1
        finally:
            self._busy = False

    def _judge(self, batch: Sequence[_Call], errors: Sequence[Exception | None]) -> bool:
        """Keep the calls that failed; return whether any succeeded."""
        outcomes = list(zip(batch, errors, strict=True))
        self._kept += (call for call, error in outcomes if isinstance(error, OSError))
        for call, error in outcomes:
            if error is None:
                log.info("{what} is done now", what=call.what)
                call.made()
            elif not isinstance(error, OSError):
                log.failure("{what} cannot be done", Failure(error), what=call.what)
        return None in errors


def _make_all(calls: Sequence[_Call]) -> Sequence[Exception | None]:
    """Make calls and return the error of each. Blocks."""
    return [_error_of(call) for call in calls]


def _error_of(call: _Call) -> Exception | None:
    try:
        call.make(*call.arguments)
    except Exception as error:  # noqa: BLE001  (the others are made all the same)
        return error
    return None
