"""The client for asyncio and trio."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread
import attrs
import httpx

from tawebeval.client.async_methods import AsyncMethods
from tawebeval.client.forms import FormBody
from tawebeval.client.http import FailureKind, HttpRequest, RequestFailure
from tawebeval.client.httpx_adapters import (
    CONNECTION_POOL_SETTINGS,
    HTTPX_PROXY_ERRORS,
    HTTPX_REQUEST_ERRORS,
    BodyCollector,
    CheckedConnection,
    NetworkWrapper,
    classify_error,
    make_ssl_context,
    replace_network,
)
from tawebeval.client.operations import Pause, RequestResult


@attrs.define(eq=False, slots=False)
class AsyncClient(AsyncMethods):
    """The client of one server for asyncio and trio. Connections are kept until `close`.

    It may be made outside of an event loop, and be used in several, one after the other or at the
    same time: each has connections of its own. Files are read in threads.

    `tls` replaces the system's settings of TLS, `transport` the connections. Proxies are those of
    the environment. For all other arguments see `ClientSettings`.
    """

    tls: ssl.SSLContext | None = attrs.field(default=None, kw_only=True, repr=False)
    transport: httpx.AsyncBaseTransport | None = attrs.field(default=None, kw_only=True, repr=False)
    _pools: _ThreadPools = attrs.field(factory=lambda: _ThreadPools(), init=False, repr=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this event loop. The next request opens new ones."""
        pool = self._pools.get_all().pop(_get_loop(), None)
        if pool is not None:
            await pool.aclose()

    async def execute_step(self, step: HttpRequest | Pause) -> RequestResult | None:
        """Do a step of an operation. Raises OSError for a file that cannot be read."""
        if isinstance(step, Pause):
            await anyio.sleep(step.seconds)
            return None
        with ExitStack() as opened:
            headers, content, length = dict(step.headers), None, 0
            if step.form is not None:
                body = await anyio.to_thread.run_sync(step.form.open_body, opened)
                length = body.length
                headers["Content-Length"] = str(length)
                content = self._count(body)
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
            with anyio.fail_after(timeout):
                async with pool.stream(
                    send.method, send.url, headers=headers, content=content, timeout=limits
                ) as response:
                    body = BodyCollector(response)
                    async for piece in response.aiter_bytes():
                        body.add(piece)
                    return body.make_response()
        except (*HTTPX_REQUEST_ERRORS, TimeoutError) as error:
            return classify_error(error, send, timeout)

    async def _count(self, body: FormBody) -> AsyncIterator[bytes]:
        sent = 0
        pieces = body.iterate_pieces()
        while piece := await anyio.to_thread.run_sync(next, pieces, b""):
            yield piece
            sent += len(piece)
            self.on_upload(sent, body.length)

    def _get_pool(self) -> httpx.AsyncClient:
        loop, pools = _get_loop(), self._pools.get_all()
        if loop not in pools:
            for other in list(pools):
                if isinstance(other, asyncio.AbstractEventLoop) and other.is_closed():
                    del pools[other]  # its connections keep it alive
            pools[loop] = httpx.AsyncClient(
                transport=self.transport,
                verify=self.tls or make_ssl_context(self.server),
                **CONNECTION_POOL_SETTINGS,
            )
            replace_network(pools[loop], _CheckedNetwork)
        return pools[loop]


class _CheckedNetwork(NetworkWrapper):
    """A network whose connections fail at once if the server does not speak HTTP."""

    async def connect_tcp(self, *args: Any, **kwargs: Any) -> _CheckedConnection:
        """Connect. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        return _CheckedConnection(await self._inner.connect_tcp(*args, **kwargs))


class _CheckedConnection(CheckedConnection):
    async def read(self, *args: Any, **kwargs: Any) -> bytes:
        """Return some bytes.

        Raises httpcore.ReadTimeout, httpcore.ReadError, httpcore.RemoteProtocolError.
        """
        data: bytes = await self._inner.read(*args, **kwargs)
        self.check_first_bytes(data)
        return data

    async def start_tls(self, *args: Any, **kwargs: Any) -> _CheckedConnection:
        """Begin TLS. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        return _CheckedConnection(await self._inner.start_tls(*args, **kwargs))


class _ThreadPools(threading.local):
    """The connections of each event loop of a thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.by_loop: WeakKeyDictionary[object, httpx.AsyncClient] = WeakKeyDictionary()

    def get_all(self) -> WeakKeyDictionary[object, httpx.AsyncClient]:
        """Return the connections by loop; after a fork the child has none."""
        if self.process != os.getpid():
            self.process, self.by_loop = os.getpid(), WeakKeyDictionary()
        return self.by_loop


def _get_loop() -> object:
    """Return the running event loop of asyncio, or the token of trio's. Raises RuntimeError."""
    trio = sys.modules.get("trio")
    if trio is not None:
        try:
            token: object = trio.lowlevel.current_trio_token()
        except RuntimeError:
            pass
        else:
            return token
    return asyncio.get_running_loop()
