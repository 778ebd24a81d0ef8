"""The client for programs without an event loop: blocks until the result is there.

Each thread may use the same `Client`. After a fork the child gets connections of its own.
"""

from __future__ import annotations

import inspect
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import wraps
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import attrs
import httpcore
import httpx

from tawebeval_client import operations
from tawebeval_client.http import (
    MAX_RESPONSE_BODY,
    HttpRequest,
    Repetition,
    RequestFailure,
    Response,
    describe_broken_connection,
)
from tawebeval_client.operations import BaseClient

_FIRST_BYTES = b"H\x05"  # of an answer: HTTP/1.1, or version 5 of a SOCKS proxy

HTTPX_PROXY_ERRORS = (ValueError, ImportError, httpx.InvalidURL)
"""What httpx raises for proxies of the environment that it cannot use."""
HTTPX_REQUEST_ERRORS = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""What httpx raises for a request that gets no response."""
CONNECTION_POOL_SETTINGS: dict[str, Any] = {
    "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=())),
    "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
    "headers": {"Accept-Encoding": "gzip"},
}
"""The settings of a pool: no cookies, and as many connections as there are requests."""

_ENCODINGS = ("", "identity", "gzip")
_DISCONNECTED = "the server closed the connection"
_CHECK_PROXIES = "check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY"


def explain_error(
    error: Exception, base: str, request: HttpRequest, timeout: float
) -> RequestFailure:
    """Return why a request to the server at `base` got no response within `timeout` seconds."""
    match error:
        case httpx.TimeoutException() | TimeoutError():
            if isinstance(error, httpx.ConnectTimeout):
                timeout = min(timeout, request.connect_timeout)
            why = f"no answer from {base} within {timeout:.0f} seconds"
            return RequestFailure(why, Repetition.ALWAYS)
        case UnusableBody():
            return RequestFailure(f"{base}: {error}; check the URL")
        case httpx.ProxyError():
            why = f"the proxy for {base} answers: {error}; {_CHECK_PROXIES}"
            return RequestFailure(why, Repetition.ALWAYS)
        case httpx.InvalidURL() | httpx.UnsupportedProtocol() | UnicodeError():
            return RequestFailure(f"cannot connect to {base}: {error}; check the URL")
        case httpx.RemoteProtocolError() if str(error).startswith("illegal status line"):
            secure = f", or try https{base[4:]}" if base.startswith("http:") else ""
            return RequestFailure(f"{base} does not speak HTTP; check the URL{secure}")
    causes = [*_causes(error)]
    for cause in causes:
        match cause:
            case ssl.SSLEOFError() | ssl.SSLZeroReturnError() | ssl.SSLSyscallError():
                return describe_broken_connection(base, _DISCONNECTED)
            case ssl.SSLError():
                return RequestFailure(_explain_tls_error(cause, base))
    proxy = _find_proxy(request.url)
    unconnected = isinstance(error, httpx.ConnectError)
    why, repetition = str(error).strip(" .") or _DISCONNECTED, Repetition.ALWAYS
    match next((cause for cause in causes if isinstance(cause, OSError)), None):
        case socket.gaierror():
            unconnected, repetition = True, Repetition.IF_NAME_IS_KNOWN
            why = (
                f"no address is known for the host {urlsplit(base).hostname}; check the URL, and"
                " the name service (DNS) of this machine"
            )
        case ConnectionRefusedError():
            unconnected, repetition = True, Repetition.IF_SERVER_MAY_START
            why = "connection refused"
        case OSError(errno=int(number)):
            why = os.strerror(number).lower()
    if not unconnected:
        return describe_broken_connection(base, why)
    if proxy:
        why = f"cannot connect to the proxy {proxy} for {base}; {_CHECK_PROXIES} and NO_PROXY"
        return RequestFailure(why, Repetition.ALWAYS)
    return RequestFailure(f"cannot connect to {base}: {why}", repetition)


def explain_proxy_settings(error: Exception, base: str) -> RequestFailure:
    """Return why httpx cannot use the proxies of the environment."""
    why = f"{base} cannot be reached by the proxies of the environment: {error}"
    return RequestFailure(f"{why}; {_CHECK_PROXIES} and NO_PROXY")


def _explain_tls_error(error: ssl.SSLError, base: str) -> str:
    """Return a message about a connection without TLS, or about the server's certificate."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        words = (error.reason or str(error)).lower().replace("_", " ")
        plain = f"http{base.removeprefix('https')}"
        return f"{base} does not speak TLS as expected ({words}); check the URL, or try {plain}"
    if "mismatch" in error.verify_message:  # of a name or an address
        return f"the certificate of {base} is for another host; check the URL"
    return (
        f"the certificate of {base} is not trusted ({error.verify_message}); if you trust it, set"
        " SSL_CERT_FILE to the file of its authority's certificate"
    )


def _find_proxy(url: str) -> str:
    """Return host and port of the proxy of the environment for a URL, empty without one."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return ""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    return proxy.rpartition("//")[2].rpartition("@")[2].rstrip("/")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that led to it."""
    rest: list[BaseException | None] = [error]
    seen: set[int] = set()
    while rest:
        one = rest.pop(0)
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


class BodyCollector:
    """The body of a response, up to `MAX_RESPONSE_BODY` bytes.

    Raises UnusableBody: httpx decodes a piece whole, and 1 KiB compressed twice may be 1 GiB.
    """

    def __init__(self, response: httpx.Response) -> None:
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise UnusableBody(f"the answer has the Content-Encoding {encoding!r}, not gzip")
        self._response = response
        self._pieces: list[bytes] = []
        self._room = MAX_RESPONSE_BODY

    def add(self, piece: bytes) -> None:
        """Add a piece. Raises UnusableBody."""
        self._room -= len(piece)
        if self._room < 0:
            raise UnusableBody(f"the answer is larger than {MAX_RESPONSE_BODY >> 20} MiB")
        self._pieces.append(piece)

    def make_response(self) -> Response:
        """Return the response with this body and the first value of each header."""
        headers: dict[str, str] = {}
        for name, value in self._response.headers.raw:
            headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        return Response(self._response.status_code, headers, b"".join(self._pieces))


class UnusableBody(httpx.TransportError):
    """A body that is too large, or compressed more than once or not by gzip."""


@attrs.frozen
class _DeadlineNetwork:
    """A network of httpcore whose connections keep a deadline: httpx has one for each read alone.

    `get_deadline` returns the time (`time.monotonic`) when the request of a thread has to be over.
    """

    _inner: Any
    _get_deadline: Callable[[], float]

    def connect_tcp(self, *args: Any, **kwargs: Any) -> _DeadlineConnection:
        """Connect. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        connection = self._inner.connect_tcp(*args, **kwargs)
        return _DeadlineConnection(connection, self._get_deadline)


class _DeadlineConnection:
    """A connection that keeps a deadline, and fails if its first bytes are not HTTP.

    h11 waits for a whole line, or for the end.
    """

    def __init__(self, inner: Any, get_deadline: Callable[[], float]) -> None:
        self._inner, self._get_deadline = inner, get_deadline
        self._is_new = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return some bytes.

        Raises httpcore.ReadTimeout, httpcore.ReadError, httpcore.RemoteProtocolError.
        """
        timeout = self._cap(timeout, httpcore.ReadTimeout)
        data: bytes = self._inner.read(max_bytes, timeout)
        if self._is_new and data and data[0] not in _FIRST_BYTES:
            raise httpcore.RemoteProtocolError("illegal status line")
        self._is_new = False
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes. Raises httpcore.WriteTimeout, httpcore.WriteError."""
        self._inner.write(buffer, self._cap(timeout, httpcore.WriteTimeout))

    def _cap(self, timeout: float | None, error: type[Exception]) -> float:
        """Return the seconds that a call may take. Raises `error` if none are left."""
        left = self._get_deadline() - time.monotonic()
        if left <= 0:
            raise error("deadline")
        return left if timeout is None else min(timeout, left)

    def start_tls(self, *args: Any, **kwargs: Any) -> _DeadlineConnection:
        """Begin TLS. Raises httpcore.ConnectTimeout, httpcore.ConnectError."""
        return _DeadlineConnection(self._inner.start_tls(*args, **kwargs), self._get_deadline)


def make_ssl_context(base: str) -> ssl.SSLContext:
    """Return the TLS settings for the server at a URL: the system's authorities for https."""
    if base.startswith("https:"):
        return ssl.create_default_context()  # of SSL_CERT_FILE, if it is set
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # loading authorities takes 10 ms and more


P = ParamSpec("P")
T = TypeVar("T")


def _run(operation: Coroutine[Any, Any, T]) -> T:
    """Return the result of an operation, which blocks and never suspends."""
    try:
        operation.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("an operation of a blocking client has suspended")


def _block(
    operation: Callable[Concatenate[BaseClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return the method that runs an operation."""

    @wraps(operation)
    def run(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(operation(client, *args, **kwargs))

    return run


def _iterate(
    stream: Callable[Concatenate[BaseClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Return the method that yields the items of a stream."""

    @wraps(stream)
    def iterate(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = stream(client, *args, **kwargs)
        try:
            while True:
                yield _run(items.__anext__())
        except StopAsyncIteration:
            return
        finally:
            _run(items.aclose())

    signature = inspect.signature(stream).replace(return_annotation=Iterator[Any])
    iterate.__signature__ = signature  # type: ignore[attr-defined]
    return iterate


@attrs.define(eq=False, slots=False)
class Client(BaseClient):
    """The client of one server, whose methods block. Connections are kept until `close`.

    `tls` replaces the system's settings of TLS, `transport` the connections (as in tests:
    `httpx.MockTransport`). Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY,
    ALL_PROXY, NO_PROXY). For all other arguments see `BaseClient`.
    """

    tls: ssl.SSLContext | None = attrs.field(default=None, kw_only=True, repr=False)
    transport: httpx.BaseTransport | None = attrs.field(default=None, kw_only=True, repr=False)
    # By the process. A lock could be held by another thread at a fork.
    _pools: dict[int, httpx.Client] = attrs.field(factory=dict, init=False, repr=False)
    _thread: threading.local = attrs.field(factory=threading.local, init=False, repr=False)

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
    wait = _block(operations.wait)
    run = _block(operations.run)
    run_problem = _block(operations.run_problem)
    status = _block(operations.status)
    submission = _block(operations.submission)
    make_link = _block(operations.make_link)
    revoke_links = _block(operations.revoke_links)
    cancel = _block(operations.cancel)
    environments = _block(operations.environments)
    whoami = _block(operations.whoami)
    evaluations = _iterate(operations.evaluations)
    standings = _iterate(operations.standings)
    problems = _iterate(operations.problems)
    problem = _block(operations.problem)

    async def pause(self, seconds: float) -> None:
        """Return after so many seconds. Blocks."""
        time.sleep(seconds)

    async def exchange(self, request: HttpRequest) -> Response | RequestFailure:
        """Send a request once. Raises OSError for a file that cannot be read. Blocks."""
        try:
            pool = self._get_pool()
        except HTTPX_PROXY_ERRORS as error:
            return explain_proxy_settings(error, self.server)
        headers, content, timeout = dict(request.headers), None, request.timeout
        with ExitStack() as opened:
            if request.form is not None:
                form = request.form.open_body(opened)
                timeout = request.get_timeout(form.length)
                headers["Content-Length"] = str(form.length)
                content = form.iterate_pieces()
            self._thread.deadline = time.monotonic() + timeout
            limits = httpx.Timeout(timeout, connect=request.connect_timeout)
            try:
                with pool.stream(
                    request.method, request.url, headers=headers, content=content, timeout=limits
                ) as response:
                    body = BodyCollector(response)
                    for piece in response.iter_bytes():
                        body.add(piece)
                    return body.make_response()
            except HTTPX_REQUEST_ERRORS as error:
                return explain_error(error, self.server, request, timeout)

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
        for transport in (pool._transport, *pool._mounts.values()):  # httpx has no parameter for it
            inner: Any = getattr(transport, "_pool", None)
            if inner is not None:
                network = inner._network_backend
                inner._network_backend = _DeadlineNetwork(network, lambda: self._thread.deadline)
        return pool
