"""Tools for coroutines: notifiers, one-shot events, threads, single-flight, queues."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine
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
from twisted.python.threadpool import ThreadPool

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
class Signal(Generic[T]):
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

    def fire(self, value: T) -> None:
        """Wake the present waiters."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.called:  # cancelled by one who was woken before
                waiter.callback(value)

    def __len__(self) -> int:
        return len(self._waiting)


_NOT_YET: Any = object()


@attrs.define
class Latch(Generic[T]):
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
        self.tell(waiter.callback)
        return waiter

    def tell(self, call: Callable[[T], object]) -> None:
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


def outcome(deferred: Deferred[T]) -> Latch[Callable[[], T]]:
    """Return a latch of the result of `deferred`: a call that returns it, or raises its error.

    (A Deferred takes a Failure given as its value for its own failure.)
    """
    latch: Latch[Callable[[], T]] = Latch()
    deferred.addCallbacks(
        lambda value: latch.set(lambda: value), lambda failure: latch.set(failure.raiseException)
    )
    return latch


async def completed(latch: Latch[T], cancel: Callable[[], Any] = lambda: None) -> T:
    """Wait for `latch` even if cancelled; a cancellation calls `cancel` and is raised later."""
    try:
        return await latch.wait()
    except CancelledError:
        cancel()
        while True:
            try:
                await latch.wait()
            except CancelledError:
                continue
            raise


async def until(
    done: Callable[[], bool], progress: Signal[None], seconds: float, clock: IReactorTime
) -> None:
    """Wait until `done()` is true or `seconds` have passed; `done` is called at each `progress`."""

    async def wait() -> None:
        while not done():
            await progress.wait()

    with suppress(WaitedInVain):
        await Deferred.fromCoroutine(wait()).addTimeout(seconds, clock)


@attrs.frozen
class Threads:
    """Thread pool for blocking calls."""

    _reactor: IReactorThreads
    _pool: ThreadPool

    @classmethod
    def own(cls, reactor: IReactorThreads, count: int, name: str) -> Threads:
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
        ended = outcome(deferToThreadPool(self._reactor, self._pool, call, *args, **kwargs))
        return (await completed(ended))()
