"""What requests say, and how answers are sent: small things that all routes share."""

from __future__ import annotations

import re
from typing import Any, cast

import orjson
from twisted.web.http_headers import Headers
from twisted.web.iweb import IRequest

from tawebeval.errors import MalformedRequest
from tawebeval.web.server.headers import JSON, framing_headers, set_headers
from tawebeval.web.server.request import ApiRequest

NO_STORE = {b"Cache-Control": b"no-store"}

MAX_DIGITS = 15
"""Of a whole number: more than anybody needs, and no more than any program for JSON keeps."""

NUMBER = rf"[0-9]{{1,{MAX_DIGITS}}}"
"""The pattern of a whole number."""

_NUMBER = re.compile(NUMBER)
_ELEMENT = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')  # of a list; there may be commas in quotes
_SECONDS = re.compile(rf'[ \t]*("?)({NUMBER})\1[ \t]*')  # in quotes or not, the same


def received(request: IRequest) -> ApiRequest:
    """Return a request as what all of ours are."""
    return cast(ApiRequest, request)


def send(request: IRequest, body: bytes, content_type: bytes = JSON) -> bytes:
    """Set the headers of an answer with this body, and return it."""
    set_headers(request, {**framing_headers(body, content_type), **NO_STORE})
    return body


def send_json(request: IRequest, value: Any) -> bytes:
    """Return an answer of JSON."""
    return send(request, orjson.dumps(value))


def header(headers: Headers, name: str) -> str | None:
    """Return a header of which there should be one. Raises MalformedRequest if there are more."""
    values = headers.getRawHeaders(name.encode(), [])
    if len(values) > 1:
        raise MalformedRequest(f"{name}: stands in the request more than once")
    try:
        return values[0].decode() if values else None
    except UnicodeDecodeError:
        raise MalformedRequest(f"{name}: is not UTF-8") from None


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
