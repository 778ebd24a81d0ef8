"""Requests and responses as values, and what a client does about each response or failure.

The functions here only decide. The drivers (`sync_client`, `async_client`, `twisted_client`) send
an `HttpRequest` and return a `Response` or, if none has come, a `RequestFailure`, whose kind they
find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import attrs
import msgspec

from tawebeval.client.errors import make_printable
from tawebeval.client.forms import SubmissionForm
from tawebeval.errors import format_size

MAX_RESPONSE_BODY = 256 << 20
"""The largest body of a response that a client takes, in bytes after decompression."""

_SLOWEST = 4096  # bytes per second of an upload; the daemon cuts off slower ones
_JSON = "application/json"

Parsed = TypeVar("Parsed")


@attrs.frozen
class HttpRequest:
    """A request for a driver to send once, following no redirect.

    `timeout` is in seconds for the whole exchange, however slowly bytes arrive; `connect_timeout`
    is for the connection with its TLS handshake.
    """

    method: str
    url: str
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    form: SubmissionForm | None = None
    timeout: float = 60.0
    connect_timeout: float = 30.0

    def get_timeout(self, length: int) -> float:
        """Return the seconds for the exchange with a form of `length` bytes."""
        return self.timeout + length / _SLOWEST


@attrs.frozen
class Response:
    """A response with its whole body. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def get_header(self, name: str) -> str:
        """Return the value of a header, empty if it is absent."""
        return self.headers.get(name.lower(), "")


class FailureKind(Enum):
    """The reason why no response has come. The value is its sentence."""

    TIMED_OUT = "no answer from {base} within {detail} seconds"
    UNREACHABLE = "cannot connect to {base}: {detail}"
    CONNECTION_REFUSED = "cannot connect to {base}: connection refused"
    UNKNOWN_HOST = (
        "cannot connect to {base}: no address is known for the host {host}; check the URL, and the"
        " name service (DNS) of this machine"
    )
    BROKEN_CONNECTION = "the connection to {base} broke: {detail}"
    INVALID_URL = "cannot connect to {base}: {detail}; check the URL"
    UNTRUSTED_CERTIFICATE = (
        "the certificate of {base} is not trusted ({detail}); if you trust it, set SSL_CERT_FILE"
        " to the file of its authority's certificate"
    )
    WRONG_HOST_CERTIFICATE = "the certificate of {base} is for another host; check the URL"
    NOT_TLS = "{base} does not speak TLS as expected ({detail}); check the URL, or try {plain}"
    NOT_HTTP = "{base} does not speak HTTP; check the URL{secure}"
    PROXY_ERROR = (
        "the proxy for {base} answers: {detail}; check HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
    )
    PROXY_UNREACHABLE = (
        "cannot connect to the proxy {detail} for {base}; check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY"
        " and NO_PROXY"
    )
    INVALID_PROXY = (
        "{base} cannot be reached by the proxies of the environment: {detail}; check HTTP_PROXY,"
        " HTTPS_PROXY, ALL_PROXY and NO_PROXY"
    )
    TOO_LARGE = (
        f"the answer of {{base}} is larger than {format_size(MAX_RESPONSE_BODY)}; check the URL"
    )
    NOT_JSON = "{base} is not a tawebeval server: it sends {detail} instead of JSON; check the URL"
    UNEXPECTED = "{base}: {detail}"


_PASSING = (
    FailureKind.TIMED_OUT,
    FailureKind.UNREACHABLE,
    FailureKind.CONNECTION_REFUSED,
    FailureKind.BROKEN_CONNECTION,
    FailureKind.PROXY_ERROR,
    FailureKind.PROXY_UNREACHABLE,
)


@attrs.frozen
class RequestFailure:
    """No response, or none that can be used. `detail` may quote the server."""

    kind: FailureKind
    detail: str = ""

    def explain(self, base: str) -> str:
        """Return a sentence for people, for the server at the URL `base`."""
        secure = f", or try https{base[4:]}" if base.startswith("http:") else ""
        return self.kind.value.format(
            base=base,
            detail=make_printable(self.detail),
            host=urlsplit(base).hostname,
            plain=f"http{base.removeprefix('https')}",
            secure=secure,
        )

    def is_permanent(self, base: str, *, server_has_answered: bool, can_wait: bool) -> bool:
        """Tell whether the next attempt would fail in the same way.

        A server that has answered before has a known name, and may be restarting. With `can_wait` a
        server on this machine may also be about to start.
        """
        if self.kind is FailureKind.UNKNOWN_HOST:
            return not server_has_answered
        if self.kind is FailureKind.CONNECTION_REFUSED and is_loopback(base):
            return not (server_has_answered or can_wait)
        return self.kind not in _PASSING


def is_loopback(base: str) -> bool:
    """Tell whether the host of a URL is this machine."""
    host = urlsplit(base).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def parse_response(
    response: Response, parse: Callable[[Response], Parsed]
) -> Parsed | RequestFailure:
    """Return the result of `parse`, or why there is none."""
    try:
        return parse(response)
    except ValueError as error:
        kind = response.get_header("Content-Type").partition(";")[0].strip().lower()
        if kind != _JSON:
            return RequestFailure(FailureKind.NOT_JSON, kind or "a body of no declared type")
        try:
            msgspec.json.decode(response.body, type=msgspec.Raw)
        except (ValueError, RecursionError):
            return RequestFailure(FailureKind.BROKEN_CONNECTION, str(error))
        return RequestFailure(FailureKind.UNEXPECTED, str(error))
