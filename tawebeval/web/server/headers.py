"""Response headers: those of every response, CORS, and their order on the wire."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from twisted.web.http import Request, datetimeToString
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

PREFLIGHT_HEADERS = {
    b"Access-Control-Allow-Methods": b"GET, POST, DELETE, OPTIONS",
    b"Access-Control-Allow-Headers": b"Authorization, Content-Type, Idempotency-Key,"
    b" Last-Event-ID, Prefer",
    b"Access-Control-Max-Age": b"86400",
}
"""Headers of the response to OPTIONS (CORS)."""


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
    """Return the headers that stand first in a response (`encode_response_headers`)."""
    return {b"Content-Length": b"%d" % len(body), b"Content-Type": content_type}


def encode_general_headers(origins: Collection[str], request_headers: Headers) -> bytes:
    """Return the headers of any response as they are sent."""
    date = _encode_date(int(time.time()))
    if "*" in origins:
        return date + _GENERAL_HEADERS
    request_origins = request_headers.getRawHeaders(b"Origin", ())
    return date + encode_headers(make_general_headers(origins, request_origins))


@lru_cache(1)
def _encode_date(seconds: int) -> bytes:
    return b"Date: %b\r\n" % datetimeToString(seconds)


def encode_head(request: Request, first_headers: bytes, origins: Collection[str]) -> bytes:
    """Return the head of the response to `request`; `first_headers` are encoded already."""
    return b"%b %d %b\r\n%b%b%b\r\n" % (
        request.clientproto,
        request.code,
        request.code_message,
        first_headers,
        encode_response_headers(request.responseHeaders),
        encode_general_headers(origins, request.requestHeaders),
    )


def encode_response_headers(headers: Headers) -> bytes:
    """Return headers as they are sent, with those first that say where the body ends.

    Some clients take a response with a truncated head for a complete
    one without a body (curl 7.88). They report the truncation if they know by then that a body
    follows, curl 8.14 only if it also knows the length of the body.
    """
    lines = {
        name: b"".join([b"%b: %b\r\n" % (name, value) for value in values])
        for name, values in headers.getAllRawHeaders()
    }
    first = [lines.pop(name) for name in _FRAMING if name in lines]
    return b"".join([*first, *lines.values()])


def encode_headers(headers: Mapping[bytes, bytes]) -> bytes:
    """Return headers as they are sent."""
    return b"".join([b"%s: %s\r\n" % header for header in headers.items()])


def set_headers(request: IRequest, headers: Mapping[bytes, bytes]) -> None:
    """Set headers of the response to `request`."""
    for name, value in headers.items():
        request.setHeader(name, value)


_GENERAL_HEADERS = encode_headers(make_general_headers("*", ()))
