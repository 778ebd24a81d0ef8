"""The client for programs without an event loop: blocks until the result is there.

Each thread may use the same `Client`. After a fork the child gets connections of its own.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs
import httpcore
import httpx

from tawebeval.client import operations
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
from tawebeval.client.operations import (
    Operation,
    Pause,
    RequestResult,
    Stream,
    StreamItems,
    copy_documentation,
)
from tawebeval.client.settings import ClientSettings

P = ParamSpec("P")
T = TypeVar("T")

_PIECE = 1 << 14  # bytes that are sent until the deadline is looked at again


def _block(
    operation: Callable[Concatenate[ClientSettings, P], Operation[T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return the method that does all steps of an operation."""

    def run(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        steps = operation(client, *args, **kwargs)
        outcome: RequestResult | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = client.execute_step(step)

    copy_documentation(run, operation)
    return run


def _iterate(
    stream: Callable[Concatenate[ClientSettings, P], Stream[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Return the method that does the steps of a stream, and yields its items."""

    def iterate(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        steps = stream(client, *args, **kwargs)
        outcome: RequestResult | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration:
                return
            if isinstance(step, StreamItems):
                yield from step.items
                outcome = None
            else:
                outcome = client.execute_step(step)

    copy_documentation(iterate, stream)
    return iterate


@attrs.define(eq=False, slots=False)
class Client(ClientSettings):
    """The client of one server, whose methods block. Connections are kept until `close`.

    `tls` replaces the system's settings of TLS, `transport` the connections (as in tests:
    `httpx.MockTransport`). Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY,
    ALL_PROXY, NO_PROXY). For all other arguments see `ClientSettings`.
    """

    tls: ssl.SSLContext | None = attrs.field(default=None, kw_only=True, repr=False)
    transport: httpx.BaseTransport | None = attrs.field(default=None, kw_only=True, repr=False)
    # By the process. A lock could be held by another thread at a fork.
    _pools: dict[int, httpx.Client] = attrs.field(factory=dict, init=False, repr=False)
    _deadline: _Deadline = attrs.field(factory=lambda: _Deadline(), init=False, repr=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. The next request opens new ones."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.close()

    evaluate = _block(operations.evaluate)
    evaluate_problem = _block(operations.evaluate_problem)
    rerun = _block(operations.rerun)
    events = _iterate(operations.events)
    pages = _iterate(operations.pages)
    status = _block(operations.status)
    submission = _block(operations.submission)
    make_link = _block(operations.make_link)
    revoke_links = _block(operations.revoke_links)
    cancel = _block(operations.cancel)
    environments = _block(operations.environments)
    evaluations = _iterate(operations.evaluations)
    problems = _iterate(operations.problems)
    problem = _block(operations.problem)

    def execute_step(self, step: HttpRequest | Pause) -> RequestResult | None:
        """Do a step of an operation. Raises OSError for a file that cannot be read. Blocks."""
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        with ExitStack() as opened:
            headers, content, length = dict(step.headers), None, 0
            if step.form is not None:
                body = step.form.open_body(opened)
                length = body.length
                headers["Content-Length"] = str(length)
                content = self._count(body.iterate_pieces(), length)
            return self._exchange(step, headers, content, step.get_timeout(length))

    def _exchange(
        self,
        send: HttpRequest,
        headers: dict[str, str],
        content: Iterator[bytes] | None,
        timeout: float,
    ) -> RequestResult:
        try:
            pool = self._get_pool()
        except HTTPX_PROXY_ERRORS as error:
            return RequestFailure(FailureKind.INVALID_PROXY, str(error))
        self._deadline.at = time.monotonic() + timeout
        limits = httpx.Timeout(timeout, connect=send.connect_timeout)
        try:
            with pool.stream(
                send.method, send.url, headers=headers, content=content, timeout=limits
            ) as response:
                body = BodyCollector(response)
                for piece in response.iter_bytes():
                    body.add(piece)
                return body.make_response()
        except HTTPX_REQUEST_ERRORS as error:
            return classify_error(error, send, timeout)

    def _count(self, pieces: Iterable[bytes], total: int) -> Iterator[bytes]:
        sent = 0
        for piece in pieces:
            yield piece
            sent += len(piece)
            self.on_upload(sent, total)

    def _get_pool(self) -> httpx.Client:
        process = os.getpid()
        pool = self._pools.get(process)
        if pool is None:
            pool = self._make_pool()  # at first two threads may have one each
            self._pools = {process: pool}
        return pool

    def _make_pool(self) -> httpx.Client:
        """Return a pool without cookies whose connections end at the deadline of a request."""
        pool = httpx.Client(
            transport=self.transport,
            verify=self.tls or make_ssl_context(self.server),
            **CONNECTION_POOL_SETTINGS,
        )
        # httpx has a timeout for each read alone.
        replace_network(pool, lambda network: _DeadlineNetwork(network, self._deadline))
        return pool


class _Deadline(threading.local):
    """The time (`time.monotonic`) when the request of a thread has to be over."""

    at = 0.0

    def cap(self, timeout: float | None, error: type[Exception]) -> float:
        """Return the seconds that one call may take. Raises `error` if none are left."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise error("deadline")
        return left if timeout is None else min(timeout, left)


class _DeadlineNetwork(NetworkWrapper):
    """A network whose connections keep a deadline, however slowly bytes arrive."""

    def __init__(self, inner: Any, deadline: _Deadline) -> None:
        super().__init__(inner)
        self._deadline = deadline

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **kwargs: Any
    ) -> _DeadlineConnection:
        """Connect. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        timeout = self._deadline.cap(timeout, httpcore.ConnectTimeout)
        connection = self._inner.connect_tcp(host, port, timeout, *args, **kwargs)
        return _DeadlineConnection(connection, self._deadline)


class _DeadlineConnection(CheckedConnection):
    """A connection that keeps a deadline."""

    def __init__(self, inner: Any, deadline: _Deadline) -> None:
        super().__init__(inner)
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return some bytes.

        Raises httpcore.ReadTimeout, httpcore.ReadError, httpcore.RemoteProtocolError.
        """
        timeout = self._deadline.cap(timeout, httpcore.ReadTimeout)
        data: bytes = self._inner.read(max_bytes, timeout)
        self.check_first_bytes(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes. Raises httpcore.WriteTimeout, httpcore.WriteError."""
        for start in range(0, len(buffer), _PIECE):
            left = self._deadline.cap(timeout, httpcore.WriteTimeout)
            self._inner.write(buffer[start : start + _PIECE], left)

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> _DeadlineConnection:
        """Begin TLS. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        timeout = self._deadline.cap(timeout, httpcore.ConnectTimeout)
        connection = self._inner.start_tls(ssl_context, server_hostname, timeout)
        return _DeadlineConnection(connection, self._deadline)
