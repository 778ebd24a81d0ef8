"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs
import httpx

from tawebeval.client import operations
from tawebeval.client.http import FailureKind, FormBody, HttpRequest, RequestFailure
from tawebeval.client.operations import (
    ClientSettings,
    Operation,
    Pause,
    RequestResult,
    Stream,
    StreamItems,
    copy_documentation,
)
from tawebeval.client.sync_client import (
    CONNECTION_POOL_SETTINGS,
    HTTPX_PROXY_ERRORS,
    HTTPX_REQUEST_ERRORS,
    BodyCollector,
    classify_error,
    make_ssl_context,
)

P = ParamSpec("P")
T = TypeVar("T")


def _wait(
    operation: Callable[Concatenate[ClientSettings, P], Operation[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return the method that does all steps of an operation."""

    async def run(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps = operation(client, *args, **kwargs)
        outcome: RequestResult | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = await client.execute_step(step)

    copy_documentation(run, operation)
    return run


def _iterate(
    stream: Callable[Concatenate[ClientSettings, P], Stream[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    """Return the method that does the steps of a stream, and yields its items."""

    async def iterate(
        client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[T]:
        steps = stream(client, *args, **kwargs)
        outcome: RequestResult | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration:
                return
            if isinstance(step, StreamItems):
                for item in step.items:
                    yield item
                outcome = None
            else:
                outcome = await client.execute_step(step)

    copy_documentation(iterate, stream)
    return iterate


@attrs.define(eq=False, slots=False)
class AsyncClient(ClientSettings):
    """The client of one server for asyncio. Connections are kept until `close`.

    It may be made outside of an event loop, and be used in several, one after the other. Files are
    read in threads.

    `tls` replaces the system's settings of TLS, `transport` the connections. Proxies are those of
    the environment. For all other arguments see `ClientSettings`.
    """

    tls: ssl.SSLContext | None = attrs.field(default=None, kw_only=True, repr=False)
    transport: httpx.AsyncBaseTransport | None = attrs.field(default=None, kw_only=True, repr=False)
    _pool: httpx.AsyncClient | None = attrs.field(default=None, init=False, repr=False)
    _owner: object = attrs.field(default=None, init=False, repr=False)
    """The process and the event loop of the pool, whose connections belong to them."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this event loop. The next request opens new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == _get_owner():
            await pool.aclose()

    evaluate = _wait(operations.evaluate)
    evaluate_problem = _wait(operations.evaluate_problem)
    rerun = _wait(operations.rerun)
    events = _iterate(operations.events)
    pages = _iterate(operations.pages)
    status = _wait(operations.status)
    submission = _wait(operations.submission)
    make_link = _wait(operations.make_link)
    revoke_links = _wait(operations.revoke_links)
    cancel = _wait(operations.cancel)
    environments = _wait(operations.environments)
    evaluations = _iterate(operations.evaluations)
    problems = _iterate(operations.problems)
    problem = _wait(operations.problem)

    async def execute_step(self, step: HttpRequest | Pause) -> RequestResult | None:
        """Do a step of an operation. Raises OSError for a file that cannot be read."""
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        with ExitStack() as opened:
            headers, content, length = dict(step.headers), None, 0
            if step.form is not None:
                body = await asyncio.to_thread(step.form.open_body, opened)
                length = body.length
                headers["Content-Length"] = str(length)
                content = _read_pieces(body)
            return await self._exchange(step, headers, content, step.get_timeout(length))

    async def _exchange(
        self,
        send: HttpRequest,
        headers: dict[str, str],
        content: AsyncIterator[bytes] | None,
        timeout: float,
    ) -> RequestResult:
        try:
            pool = self._get_pool()
        except HTTPX_PROXY_ERRORS as error:
            return RequestFailure(FailureKind.INVALID_PROXY, str(error))
        limits = httpx.Timeout(timeout, connect=send.connect_timeout)
        try:
            async with (
                asyncio.timeout(timeout),
                pool.stream(
                    send.method, send.url, headers=headers, content=content, timeout=limits
                ) as response,
            ):
                body = BodyCollector(response)
                async for piece in response.aiter_bytes():
                    body.add(piece)
                return body.make_response()
        except (*HTTPX_REQUEST_ERRORS, TimeoutError) as error:
            return classify_error(error, send, timeout)

    def _get_pool(self) -> httpx.AsyncClient:
        if self._pool is None or self._owner != _get_owner():
            self._owner = _get_owner()
            self._pool = httpx.AsyncClient(
                transport=self.transport,
                verify=self.tls or make_ssl_context(self.server),
                **CONNECTION_POOL_SETTINGS,
            )
        return self._pool


def _get_owner() -> tuple[int, asyncio.AbstractEventLoop]:
    return os.getpid(), asyncio.get_running_loop()


async def _read_pieces(body: FormBody) -> AsyncIterator[bytes]:
    pieces = body.iterate_pieces()
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece
