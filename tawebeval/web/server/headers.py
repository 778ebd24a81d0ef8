"""Response headers: those of every response, CORS, and their order on the wire."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from http import HTTPStatus

from twisted.web.http import datetimeToString
from twisted.web.http_headers import Headers
from twisted.web.iweb import IRequest

from tawebeval import __version__

SERVER = b"tawebeval/" + __version__.encode()
JSON = b"application/json"

_FRAMING = (b"Content-Length", b"Transfer-Encoding", b"Content-Type")
_HEADERS = {
    b"Server": SERVER,
    b"Access-Control-Expose-Headers": b"Location, Link, Preference-Applied, Retry-After",
    b"X-Content-Type-Options": b"nosniff",
}


def general_headers(origins: Collection[str], asking: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the headers of any response; `asking` are the headers `Origin` of the request.

    With `*` among `origins` all pages may read it. Else only those of an origin that is named, and
    caches must not take the response to one for that to another.
    """
    if "*" in origins:
        return {**_HEADERS, b"Access-Control-Allow-Origin": b"*"}
    headers = {**_HEADERS, b"Vary": b"Origin"}
    if len(asking) == 1 and asking[0].decode("latin-1") in origins:
        headers[b"Access-Control-Allow-Origin"] = asking[0]
    return headers


def framing_headers(body: bytes, content_type: bytes = JSON) -> dict[bytes, bytes]:
    """Return the headers that stand first in an answer with this body (`put_framing_first`)."""
    return {b"Content-Length": b"%d" % len(body), b"Content-Type": content_type}


def put_framing_first(headers: Headers) -> Headers:
    """Return the headers of an answer with those first that say where its body ends.

    Some clients take an answer whose head is cut off for a whole one without a body (curl 7.88).
    They report the cut if they know by then that a body was to come.
    """
    ordered = Headers()
    for name in _FRAMING:
        ordered.setRawHeaders(name, headers.getRawHeaders(name, []))
    for name, values in headers.getAllRawHeaders():
        ordered.setRawHeaders(name, values)  # one that is there keeps its place
    return ordered


@cache
def status_line(status: HTTPStatus) -> bytes:
    """Return the first line of an answer."""
    return b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode())


@lru_cache(1)
def date_line(seconds: int) -> bytes:
    """Return the line of an answer that tells when it was made, in seconds of the epoch."""
    return b"Date: %b\r\n" % datetimeToString(seconds)


def lines(headers: Mapping[bytes, bytes]) -> bytes:
    """Return headers as they stand in an answer."""
    return b"".join([b"%s: %s\r\n" % header for header in headers.items()])


def set_headers(request: IRequest, headers: Mapping[bytes, bytes]) -> None:
    """Let the answer to a request have these headers."""
    for name, value in headers.items():
        request.setHeader(name, value)
