"""What requests say, and how answers are sent: small things that all routes share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import orjson
from twisted.web.http import datetimeToString
from twisted.web.http_headers import Headers
from twisted.web.iweb import IRequest

from tawebeval import __version__
from tawebeval.errors import MalformedRequest
from tawebeval.web.server.headers import share_with

if TYPE_CHECKING:
    from tawebeval.web.server.request import ApiRequest

SERVER = b"tawebeval/" + __version__.encode()
JSON = b"application/json"
NO_STORE = {b"Cache-Control": b"no-store"}

MAX_DIGITS = 15
"""Of a whole number: more than anybody needs, and no more than any program for JSON keeps."""

NUMBER = rf"[0-9]{{1,{MAX_DIGITS}}}"
"""The pattern of a whole number."""

_NUMBER = re.compile(NUMBER)
_ELEMENT = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')  # of a list; there may be commas in quotes
_SECONDS = re.compile(rf'[ \t]*("?)({NUMBER})\1[ \t]*')  # in quotes or not, the same
_FRAMING = (b"Content-Length", b"Transfer-Encoding", b"Content-Type")
_HEADERS = {
    b"Server": SERVER,
    b"Access-Control-Expose-Headers": b"Location, Link, Preference-Applied, Retry-After",
    b"X-Content-Type-Options": b"nosniff",
}


def received(request: IRequest) -> ApiRequest:
    """Return a request as what all of ours are."""
    return cast("ApiRequest", request)


def general_headers(origins: Collection[str], asking: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the headers of any answer; for the arguments see `share_with`."""
    return {**_HEADERS, **share_with(origins, asking)}


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


def send(request: IRequest, body: bytes, content_type: bytes = JSON) -> bytes:
    """Set the headers of an answer with this body, and return it."""
    set_headers(request, {**framing_headers(body, content_type), **NO_STORE})
    return body


def send_json(request: IRequest, value: Any) -> bytes:
    """Return an answer of JSON."""
    return send(request, orjson.dumps(value))


def argument(request: IRequest, name: str) -> str | None:
    """Return a parameter of the query, None if it is absent. Raises MalformedRequest."""
    values = received(request).args.get(name.encode(), [])
    if len(values) > 1:
        raise MalformedRequest(f"{name}: stands in the query more than once")
    return values[0].decode("utf-8", "replace") if values else None


def number(request: IRequest, name: str) -> int | None:
    """Return a parameter that is a whole number, None if it is absent. Raises MalformedRequest."""
    text = argument(request, name)
    if text is not None and not _NUMBER.fullmatch(text):
        raise MalformedRequest(
            f"{name}: {text[:80]!r} is no whole number of up to {MAX_DIGITS} digits"
        )
    return None if text is None else int(text)


def preferred_wait(request: IRequest) -> int | None:
    """Return the seconds that the client would wait: `?wait=N`, or `Prefer: wait=N` (RFC 7240)."""
    wait = number(request, "wait")
    if wait is not None:
        return wait
    return preference_of(request.requestHeaders)


def preference_of(headers: Headers) -> int | None:
    """Return the seconds that `Prefer: wait=N` asks for, None if none does.

    Of several the first counts; parameters behind a `;` make no difference.
    """
    said = b",".join(headers.getRawHeaders(b"Prefer", [])).decode("latin-1")
    for preference in _ELEMENT.findall(said):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip(" \t").lower() == "wait":
            seconds = _SECONDS.fullmatch(value)
            return None if seconds is None else int(seconds[2])
    return None
