"""The client for asyncio and trio."""

from __future__ import annotations

import asyncio
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
import httpcore
import httpx

from tawebeval.client.async_methods import AsyncMethods
from tawebeval.client.forms import FormBody
from tawebeval.client.http import FailureKind, HttpRequest, RequestFailure
from tawebeval.client.httpx_adapters import (
    CONNECTION_POOL_SETTINGS,
    FORKABLE_CLIENTS,
    HTTPX_PROXY_ERRORS,
    HTTPX_REQUEST_ERRORS,
    BodyCollector,
    check_first_bytes,
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
    _pools: WeakKeyDictionary[object, httpx.AsyncClient] = attrs.field(
        factory=WeakKeyDictionary, init=False, repr=False
    )
    _making: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        FORKABLE_CLIENTS.add(self)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this event loop. The next request opens new ones."""
        with self._making:
            pool = self._pools.pop(_get_loop(), None)
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
                in_threads = step.form.has_files
                if in_threads:
                    body = await anyio.to_thread.run_sync(step.form.open_body, opened)
                else:
                    body = step.form.open_body(opened)
                length = body.length
                headers["Content-Length"] = str(length)
                content = self._count(body, in_threads=in_threads)
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

    async def _count(self, body: FormBody, *, in_threads: bool) -> AsyncIterator[bytes]:
        sent = 0
        pieces = body.iterate_pieces()
        while True:
            if in_threads:
                piece = await anyio.to_thread.run_sync(next, pieces, b"")
            else:
                piece = next(pieces, b"")
            if not piece:
                return
            yield piece
            sent += len(piece)
            self.on_upload(sent, body.length)

    def _get_pool(self) -> httpx.AsyncClient:
        loop = _get_loop()
        with self._making:
            pool = self._pools.get(loop)
            if pool is None:
                for other in list(self._pools):
                    if isinstance(other, asyncio.AbstractEventLoop) and other.is_closed():
                        del self._pools[other]  # its connections keep it alive
                pool = self._pools[loop] = httpx.AsyncClient(
                    transport=self.transport,
                    verify=self.tls or make_ssl_context(self.server),
                    **CONNECTION_POOL_SETTINGS,
                )
                replace_network(pool, _CheckingBackend)
        return pool

    def abandon_connections_after_fork(self) -> None:
        """Leave the connections, and locks that other threads hold, to the parent process."""
        self._pools = WeakKeyDictionary()
        self._making = threading.Lock()


class _CheckingBackend(httpcore.AsyncNetworkBackend):
    """A network whose connections fail at once if the server does not speak HTTP."""

    def __init__(self, network: httpcore.AsyncNetworkBackend) -> None:
        self._network = network

    async def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        """Connect. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        return _CheckingStream(await self._network.connect_tcp(*args, **kwargs))

    async def sleep(self, seconds: float) -> None:
        """Sleep between two attempts to connect."""
        await self._network.sleep(seconds)


class _CheckingStream(httpcore.AsyncNetworkStream):
    """A connection that fails at its first bytes if they are not HTTP."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._is_new = True

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return some bytes.

        Raises httpcore.ReadTimeout, httpcore.ReadError, httpcore.RemoteProtocolError.
        """
        data = await self._stream.read(max_bytes, timeout)
        if self._is_new:
            check_first_bytes(data)
        self._is_new = False
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes. Raises httpcore.WriteTimeout, httpcore.WriteError."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    async def start_tls(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        """Begin TLS. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        return _CheckingStream(await self._stream.start_tls(*args, **kwargs))

    def get_extra_info(self, info: str) -> Any:
        """Return what httpcore asks about the connection."""
        return self._stream.get_extra_info(info)


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
