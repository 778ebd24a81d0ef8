"""Waiting in coroutines: for something that happens again and again, once, or in a thread."""

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
    """Begin a coroutine for whose end nobody has to wait; the Deferred returned never fails.

    An exception that the coroutine raises is written to `log`, with the words `complaint`, which is
    a format of twisted.logger, and its `fields`.
    """
    return Deferred.fromCoroutine(coroutine).addErrback(
        lambda failure: log.failure(complaint, failure, **fields)
    )


@attrs.define
class Signal(Generic[T]):
    """Wakes all who wait for it, each time that it fires."""

    # A dictionary for its order: who waited first is woken first.
    _waiting: dict[Deferred[T], None] = attrs.field(factory=dict, repr=False)

    def wait(self) -> Deferred[T]:
        """Return a Deferred of the next firing; cancelling it leaves no trace."""
        waiter: Deferred[T] = Deferred(self._forget)
        self._waiting[waiter] = None
        return waiter

    def _forget(self, waiter: Deferred[T]) -> None:
        self._waiting.pop(waiter, None)

    def fire(self, value: T) -> None:
        """Wake those who wait now."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.called:  # cancelled by one who was woken before
                waiter.callback(value)

    def __len__(self) -> int:
        return len(self._waiting)


_NOT_YET: Any = object()


@attrs.define
class Latch(Generic[T]):
    """Something that happens once; whoever waits later is answered at once.

    There are several for each evaluation, so this is no more than those who wait.
    """

    _value: T = _NOT_YET
    _waiting: tuple[Callable[[T], object], ...] = attrs.field(default=(), repr=False)

    @property
    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._value is not _NOT_YET

    def wait(self) -> Deferred[T]:
        """Return a Deferred of its value, one for each who waits; cancelling leaves no trace."""
        if self.is_set:
            return succeed(self._value)
        waiter: Deferred[T] = Deferred(self._forget)
        self.tell(waiter.callback)
        return waiter

    def tell(self, call: Callable[[T], object]) -> None:
        """Call `call` with its value: a wait that takes next to no memory."""
        if self.is_set:
            call(self._value)
        else:
            self._waiting += (call,)

    def set(self, value: T) -> None:
        """Let it have happened. The first value stays."""
        if not self.is_set:
            self._value = value
            while self._waiting:  # one who is woken may cancel others
                first, *others = self._waiting
                self._waiting = tuple(others)
                first(value)

    def _forget(self, waiter: Deferred[T]) -> None:
        self._waiting = tuple(call for call in self._waiting if call != waiter.callback)


def outcome(deferred: Deferred[T]) -> Latch[Callable[[], T]]:
    """Return a latch of how `deferred` ends: a call that returns its value, or raises its error.

    (A Deferred would take a failure that it is given as its value for one of its own.)
    """
    latch: Latch[Callable[[], T]] = Latch()
    deferred.addCallbacks(
        lambda value: latch.set(lambda: value), lambda failure: latch.set(failure.raiseException)
    )
    return latch


async def completed(latch: Latch[T], cancel: Callable[[], Any] = lambda: None) -> T:
    """Wait for `latch` come what may; a cancellation is passed on to `cancel`, and raised after."""
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
    """Return when it is done, at the latest after so many seconds; each `progress` is looked at."""

    async def wait() -> None:
        while not done():
            await progress.wait()

    with suppress(WaitedInVain):
        await Deferred.fromCoroutine(wait()).addTimeout(seconds, clock)


@attrs.frozen
class Threads:
    """Where blocking calls run, so that they do not block the reactor."""

    _reactor: IReactorThreads
    _pool: ThreadPool

    @classmethod
    def own(cls, reactor: IReactorThreads, count: int, name: str) -> Threads:
        """Return so many threads that nobody else uses, which are all made by `start`.

        The reactor's pool is shared with its look-ups of names, which take as long as strangers'
        name servers like; and what it makes when it is needed cannot be made any more where
        evaluators have all that there may be. What is called before `start` waits for it.
        """
        pool = ThreadPool(count, count, name)
        # A process whose start fails later ends, though nobody has stopped them.
        pool.threadFactory = partial(Thread, daemon=True)  # type: ignore[assignment]
        return cls(reactor, pool)

    def start(self) -> None:
        """Begin to make calls. Raises OSError where the threads cannot be made."""
        try:
            self._pool.start()
        except RuntimeError as error:  # which tells no more
            # Of one that has not begun nobody can wait for the end.
            self._pool.threads = [thread for thread in self._pool.threads if thread.ident]
            raise OSError(errno.EAGAIN, f"threads: {error}") from None

    def stop(self) -> None:
        """Wait for the calls that are being made, and make no more. Blocks."""
        self._pool.stop()

    async def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `call(*args, **kwargs)`, made in a thread.

        A thread cannot be stopped: a cancellation is raised when the call has returned,
        so that nobody cleans up below it.
        """
        ended = outcome(deferToThreadPool(self._reactor, self._pool, call, *args, **kwargs))
        return (await completed(ended))()
