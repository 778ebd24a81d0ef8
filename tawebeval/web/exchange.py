"""What requests say, and how answers are sent: small things that all routes share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import orjson
from twisted.web.iweb import IRequest
from werkzeug.http import parse_dict_header

from tawebeval.errors import MalformedRequest

if TYPE_CHECKING:
    from tawebeval.web.site import ApiRequest

_NUMBER = re.compile(r"[0-9]{1,9}")


def received(request: IRequest) -> ApiRequest:
    """Return a request as what all of ours are."""
    return cast("ApiRequest", request)


def send(request: IRequest, body: bytes, content_type: str = "application/json") -> bytes:
    """Set the headers of an answer with this body, and return it."""
    request.setHeader(b"Content-Type", content_type.encode())
    request.setHeader(b"Content-Length", b"%d" % len(body))
    request.setHeader(b"Cache-Control", b"no-store")
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
        raise MalformedRequest(f"{name}: {text[:80]!r} is no whole number")
    return None if text is None else int(text)


def preferred_wait(request: IRequest) -> int | None:
    """Return the seconds that the client would wait: `?wait=N`, or `Prefer: wait=N` (RFC 7240)."""
    wait = number(request, "wait")
    if wait is not None:
        return wait
    for header in request.requestHeaders.getRawHeaders(b"Prefer", []):
        preference = parse_dict_header(header.decode("latin-1")).get("wait") or ""
        if _NUMBER.fullmatch(preference):
            return int(preference)
    return None
