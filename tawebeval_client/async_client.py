"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack

import attrs
import httpx

from tawebeval_client import operations
from tawebeval_client.http import FormBody, HttpRequest, RequestFailure, Response
from tawebeval_client.operations import BaseClient
from tawebeval_client.sync_client import (
    CONNECTION_POOL_SETTINGS,
    HTTPX_PROXY_ERRORS,
    HTTPX_REQUEST_ERRORS,
    BodyCollector,
    explain_error,
    explain_proxy_settings,
    make_ssl_context,
)


@attrs.define(eq=False, slots=False)
class AsyncClient(BaseClient):
    """The client of one server for asyncio. Connections are kept until `close`.

    It may be made outside of an event loop, and be used in several, one after the other. Files are
    read in threads.

    `tls` replaces the system's settings of TLS, `transport` the connections. Proxies are those of
    the environment. For all other arguments see `BaseClient`.
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

    evaluate = operations.evaluate
    evaluate_problem = operations.evaluate_problem
    rerun = operations.rerun
    events = operations.events
    pages = operations.pages
    wait = operations.wait
    run = operations.run
    run_problem = operations.run_problem
    status = operations.status
    submission = operations.submission
    make_link = operations.make_link
    revoke_links = operations.revoke_links
    cancel = operations.cancel
    environments = operations.environments
    whoami = operations.whoami
    evaluations = operations.evaluations
    standings = operations.standings
    problems = operations.problems
    problem = operations.problem

    async def pause(self, seconds: float) -> None:
        """Return after so many seconds."""
        await asyncio.sleep(seconds)

    async def exchange(self, request: HttpRequest) -> Response | RequestFailure:
        """Send a request once. Raises OSError for a file that cannot be read."""
        try:
            pool = self._get_pool()
        except HTTPX_PROXY_ERRORS as error:
            return explain_proxy_settings(error, self.server)
        headers, content, timeout = dict(request.headers), None, request.timeout
        with ExitStack() as opened:
            if request.form is not None:
                form = await asyncio.to_thread(request.form.open_body, opened)
                timeout = request.get_timeout(form.length)
                headers["Content-Length"] = str(form.length)
                content = _read_pieces(form)
            limits = httpx.Timeout(timeout, connect=request.connect_timeout)
            try:
                async with (
                    asyncio.timeout(timeout),
                    pool.stream(
                        request.method,
                        request.url,
                        headers=headers,
                        content=content,
                        timeout=limits,
                    ) as response,
                ):
                    body = BodyCollector(response)
                    async for piece in response.aiter_bytes():
                        body.add(piece)
                    return body.make_response()
            except (*HTTPX_REQUEST_ERRORS, TimeoutError) as error:
                return explain_error(error, self.server, request, timeout)

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
