"""The client for scripts that have no reactor: the same one, with its reactor in a thread.

The reactor is started with the first client and runs to the end of the program. Where it runs
already, as in a thread of a larger program, that one serves.
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
    """`Client`, of which each method returns when it has the result.

    It takes the same arguments, raises the same exceptions, and may be used by several threads.
    Ctrl-C ends what it waits for.
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
        """Close the connections that are kept."""
        self._wait(self._client.close)

    @functools.wraps(Client.evaluate)
    def evaluate(self, *arguments: Any, **fields: Any) -> str:
        """Begin an evaluation; return its identifier."""
        return self._wait(self._client.evaluate, *arguments, **fields)

    def events(self, identifier: str, after: str | None = None) -> Iterator[Event]:
        """Yield the events of an evaluation, each once and in order, as they come."""
        for page in self.pages(identifier, after):
            yield from page.events

    def pages(
        self, identifier: str, after: str | None = None, *, limit: int | None = None
    ) -> Iterator[Page]:
        """Yield the pages of an evaluation; asking for the next one acknowledges."""
        return self._each(self._client.pages(identifier, after, limit=limit))

    def status(self, identifier: str) -> Document:
        """Return the status document."""
        return self._wait(self._client.status, identifier)

    def cancel(self, identifier: str) -> None:
        """End an evaluation; return when nothing of it runs."""
        self._wait(self._client.cancel, identifier)

    def evaluations(self) -> Iterator[Document]:
        """Yield the caller's own evaluations that are not forgotten."""
        return self._each(self._client.evaluations())

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                item = self._wait(items.__anext__)
            except StopAsyncIteration:
                return
            yield item

    def _wait(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call in the reactor comes to; whoever gives up waiting ends it."""

        async def whole() -> T:
            return await call(*args, **kwargs)

        started: list[Deferred[T]] = []

        def start() -> Deferred[T]:
            started.append(Deferred.fromCoroutine(whole()))
            return started[0]

        def cancel() -> None:
            for deferred in started:
                deferred.addErrback(lambda _: None)  # nobody waits for it any more
                deferred.cancel()

        try:
            # It is annotated for what returns a value, and for what returns a Deferred of it.
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
        raise RuntimeError("this is the reactor's thread, which must not wait: use Client")
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
