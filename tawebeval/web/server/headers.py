"""Response headers: those of every response, CORS, and their order on the wire."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus

from twisted.web.http_headers import Headers
from twisted.web.iweb import IRequest

from tawebeval import __version__

SERVER_HEADER = b"tawebeval/" + __version__.encode()
JSON_MEDIA_TYPE = b"application/json"

_FRAMING = (b"Content-Length", b"Transfer-Encoding", b"Content-Type")
_HEADERS = {
    b"Server": SERVER_HEADER,
    b"Access-Control-Expose-Headers": b"Location, Link, Preference-Applied, Retry-After",
    b"X-Content-Type-Options": b"nosniff",
}


def make_general_headers(
    origins: Collection[str], request_origins: Sequence[bytes]
) -> dict[bytes, bytes]:
    """Return the headers of any response; `request_origins` are the request's `Origin`.

    With `*` in `origins` any page may read it. Otherwise only a page of a listed origin may, and
    caches must keep responses apart by origin.
    """
    if "*" in origins:
        return {**_HEADERS, b"Access-Control-Allow-Origin": b"*"}
    headers = {**_HEADERS, b"Vary": b"Origin"}
    if len(request_origins) == 1 and request_origins[0].decode("latin-1") in origins:
        headers[b"Access-Control-Allow-Origin"] = request_origins[0]
    return headers


def make_content_headers(body: bytes, content_type: bytes = JSON_MEDIA_TYPE) -> dict[bytes, bytes]:
    """Return the headers that stand first in a response (`sort_content_headers_first`)."""
    return {b"Content-Length": b"%d" % len(body), b"Content-Type": content_type}


def sort_content_headers_first(headers: Headers) -> Headers:
    """Return the headers with those first that say where the body ends.

    Some clients take a response with a truncated head for a complete one without a body (curl
    7.88). They report the truncation if they know by then that a body follows, curl 8.14 only if it
    also knows the length of the body.
    """
    ordered = Headers()
    for name in _FRAMING:
        ordered.setRawHeaders(name, headers.getRawHeaders(name, []))
    for name, values in headers.getAllRawHeaders():
        ordered.setRawHeaders(name, values)  # a header set above keeps its place
    return ordered


def encode_status_line(status: HTTPStatus) -> bytes:
    """Return the status line of a response."""
    return b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode())


def encode_headers(headers: Mapping[bytes, bytes]) -> bytes:
    """Return headers as they are sent."""
    return b"".join([b"%s: %s\r\n" % header for header in headers.items()])


def set_headers(request: IRequest, headers: Mapping[bytes, bytes]) -> None:
    """Set headers of the response to `request`."""
    for name, value in headers.items():
        request.setHeader(name, value)
