"""What both drivers for httpx share: pools of connections, responses and failures as values."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from tawebeval.client.http import (
    MAX_RESPONSE_BODY,
    FailureKind,
    HttpRequest,
    RequestFailure,
    Response,
)

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

_NOT_CONNECTED = (
    FailureKind.UNREACHABLE,
    FailureKind.CONNECTION_REFUSED,
    FailureKind.UNKNOWN_HOST,
)
_ENCODINGS = ("", "identity", "gzip")
_DISCONNECTED = "the server closed the connection"


def classify_error(error: Exception, send: HttpRequest, timeout: float) -> RequestFailure:
    """Return why a request got no response within `timeout` seconds."""
    failure = _classify(error, send, timeout)
    if failure.kind in _NOT_CONNECTED and (proxy := _find_proxy(send.url)):
        return RequestFailure(FailureKind.PROXY_UNREACHABLE, proxy)
    return failure


def _find_proxy(url: str) -> str:
    """Return host and port of the proxy of the environment for a URL, empty without one."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return ""
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    return proxy.rpartition("//")[2].rpartition("@")[2].rstrip("/")


def _classify(error: Exception, send: HttpRequest, timeout: float) -> RequestFailure:
    match error:
        case httpx.ConnectTimeout():
            return RequestFailure(
                FailureKind.TIMED_OUT, f"{min(timeout, send.connect_timeout):.0f}"
            )
        case httpx.TimeoutException() | TimeoutError():
            return RequestFailure(FailureKind.TIMED_OUT, f"{timeout:.0f}")
        case BodyTooLarge():
            return RequestFailure(FailureKind.TOO_LARGE)
        case UnexpectedEncoding():
            return RequestFailure(FailureKind.UNEXPECTED, str(error))
        case httpx.ProxyError():
            return RequestFailure(FailureKind.PROXY_ERROR, str(error))
        case httpx.InvalidURL() | httpx.UnsupportedProtocol() | UnicodeError():
            return RequestFailure(FailureKind.INVALID_URL, str(error))
        case httpx.RemoteProtocolError() if str(error).startswith("illegal status line"):
            return RequestFailure(FailureKind.NOT_HTTP)
    kind = (
        FailureKind.UNREACHABLE
        if isinstance(error, httpx.ConnectError)
        else FailureKind.BROKEN_CONNECTION
    )
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError() if "ostname mismatch" in cause.verify_message or (
                "IP address mismatch" in cause.verify_message
            ):
                return RequestFailure(FailureKind.WRONG_HOST_CERTIFICATE)
            case ssl.SSLCertVerificationError():
                return RequestFailure(FailureKind.UNTRUSTED_CERTIFICATE, cause.verify_message)
            case ssl.SSLEOFError() | ssl.SSLZeroReturnError() | ssl.SSLSyscallError():
                return RequestFailure(FailureKind.BROKEN_CONNECTION, _DISCONNECTED)
            case ssl.SSLError():
                return RequestFailure(FailureKind.NOT_TLS, _describe_tls_error(cause))
            case socket.gaierror():
                return RequestFailure(FailureKind.UNKNOWN_HOST)
            case ConnectionRefusedError():
                return RequestFailure(FailureKind.CONNECTION_REFUSED)
            case OSError(errno=int(number)):
                return RequestFailure(kind, os.strerror(number).lower())
    return RequestFailure(kind, str(error).strip(" .") or _DISCONNECTED)


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


def _describe_tls_error(error: ssl.SSLError) -> str:
    reason: str | None = error.reason
    return (reason or str(error)).lower().replace("_", " ")


class BodyCollector:
    """The body of a response, up to `MAX_RESPONSE_BODY` bytes.

    Raises UnexpectedEncoding: httpx decodes a piece whole, and 1 KiB compressed twice may be 1 GiB.
    """

    def __init__(self, response: httpx.Response) -> None:
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise UnexpectedEncoding(f"the answer has the Content-Encoding {encoding!r}, not gzip")
        self._response = response
        self._pieces: list[bytes] = []
        self._room = MAX_RESPONSE_BODY

    def add(self, piece: bytes) -> None:
        """Add a piece. Raises BodyTooLarge."""
        self._room -= len(piece)
        if self._room < 0:
            raise BodyTooLarge("too large")
        self._pieces.append(piece)

    def make_response(self) -> Response:
        """Return the response with this body and the first value of each header."""
        headers: dict[str, str] = {}
        for name, value in self._response.headers.raw:
            headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        return Response(self._response.status_code, headers, b"".join(self._pieces))


class BodyTooLarge(httpx.TransportError):
    """A body of more than `MAX_RESPONSE_BODY` bytes."""


class UnexpectedEncoding(httpx.TransportError):
    """A body compressed more than once, or not by gzip."""


class NetworkWrapper:
    """A network or a connection of httpcore with some methods replaced."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class CheckedConnection(NetworkWrapper):
    """A connection that fails at its first bytes if they are not HTTP.

    h11 waits for a whole line, or for the end.
    """

    _is_new = True

    def check_first_bytes(self, data: bytes) -> None:
        """Raise httpcore.RemoteProtocolError if the first bytes that are read are not HTTP."""
        if self._is_new and data and data[0] not in _FIRST_BYTES:
            raise httpcore.RemoteProtocolError("illegal status line")
        self._is_new = False


def replace_network(pool: Any, wrap: Callable[[Any], NetworkWrapper]) -> None:
    """Wrap the network of a pool, for which httpx has no parameter."""
    for transport in (pool._transport, *pool._mounts.values()):
        inner: Any = getattr(transport, "_pool", None)
        if inner is not None:
            inner._network_backend = wrap(inner._network_backend)


def make_ssl_context(base: str) -> ssl.SSLContext:
    """Return the TLS settings for the server at a URL: the system's authorities for https."""
    if base.startswith("https:"):
        return ssl.create_default_context()  # of SSL_CERT_FILE, if it is set
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # loading authorities takes 10 ms and more
