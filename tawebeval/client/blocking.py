"""The client for programs without a reactor: `Client`, with the reactor in a thread.

The first client starts the reactor, which runs until the program ends. A reactor that already
runs in another thread is used as it is.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import blockingCallFromThread
from twisted.python.threadable import isInIOThread

from tawebeval.client.client import Client, Document
from tawebeval.client.events import Event, Page

P = ParamSpec("P")
T = TypeVar("T")

_starting = Lock()


class BlockingClient:
    """`Client` with methods that block until the result is there.

    Arguments and exceptions are those of `Client`. Several threads may share one. Ctrl-C cancels
    the request. Raises RuntimeError in the reactor's own thread.
    """

    def __init__(self, server: str, token: str | None = None, **settings: Any) -> None:
        self._reactor = _running_reactor()
        self._client: Client = blockingCallFromThread(
            self._reactor, lambda: Client(server, token, **settings)
        )

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all idle connections."""
        self._wait(self._client.close)

    @functools.wraps(Client.evaluate)
    def evaluate(self, *arguments: Any, **fields: Any) -> str:
        """Begin an evaluation and return its identifier."""
        return self._wait(self._client.evaluate, *arguments, **fields)

    @functools.wraps(Client.evaluate_problem)
    def evaluate_problem(self, *arguments: Any, **fields: Any) -> str:
        """Begin an evaluation for a problem of the server."""
        return self._wait(self._client.evaluate_problem, *arguments, **fields)

    @functools.wraps(Client.rerun)
    def rerun(self, *arguments: Any, **fields: Any) -> str:
        """Begin an evaluation as an ended one."""
        return self._wait(self._client.rerun, *arguments, **fields)

    def events(
        self, identifier: str, after: str | None = None, *, times: bool = False
    ) -> Iterator[Event]:
        """Yield the events of an evaluation as they come, each once and in order."""
        for page in self.pages(identifier, after, times=times):
            yield from page.events

    def pages(
        self,
        identifier: str,
        after: str | None = None,
        *,
        limit: int | None = None,
        times: bool = False,
    ) -> Iterator[Page]:
        """Yield the pages of an evaluation; requesting the next one acknowledges the last."""
        return self._each(self._client.pages(identifier, after, limit=limit, times=times))

    def status(self, identifier: str) -> Document:
        """Return the status document."""
        return self._wait(self._client.status, identifier)

    def cancel(self, identifier: str) -> None:
        """Cancel an evaluation; return when none of its processes runs."""
        self._wait(self._client.cancel, identifier)

    def environments(self) -> list[Document]:
        """Return the environments of the server: name, description and digest of each."""
        return self._wait(self._client.environments)

    @functools.wraps(Client.evaluations)
    def evaluations(self, **wanted: Any) -> Iterator[Document]:
        """Yield the caller's evaluations that the server still has, oldest first."""
        return self._each(self._client.evaluations(**wanted))

    def problems(self) -> Iterator[Document]:
        """Yield the problems of the server that the caller may use."""
        return self._each(self._client.problems())

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                item = self._wait(items.__anext__)
            except StopAsyncIteration:
                return
            yield item

    def _wait(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call in the reactor; an exception here cancels the call."""

        async def whole() -> T:
            return await call(*args, **kwargs)

        started: list[Deferred[T]] = []

        def start() -> Deferred[T]:
            started.append(Deferred.fromCoroutine(whole()))
            return started[0]

        def cancel() -> None:
            for deferred in started:
                deferred.addErrback(lambda _: None)
                deferred.cancel()

        try:
            # Annotated for functions that return a value, but not for those that return a Deferred.
            return blockingCallFromThread(self._reactor, start)  # type: ignore[arg-type]
        except BaseException:
            self._reactor.callFromThread(cancel)
            raise


def _running_reactor() -> Any:
    """Return the reactor, which runs in another thread. Raises RuntimeError in that thread."""
    from twisted.internet import reactor

    with _starting:
        if not reactor.running:
            _start(reactor)
    if isInIOThread():
        raise RuntimeError("the reactor's thread must not block; use Client there")
    return reactor


def _start(reactor: Any) -> None:
    begun: Lock = Lock()
    begun.acquire()
    reactor.callWhenRunning(begun.release)
    thread = Thread(
        target=reactor.run,
        kwargs={"installSignalHandlers": False},
        name="tawebeval-client",
        daemon=True,
    )
    thread.start()
    begun.acquire()

    def stop() -> None:
        reactor.callFromThread(reactor.stop)
        thread.join()

    atexit.register(stop)
