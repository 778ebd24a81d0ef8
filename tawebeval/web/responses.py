"""Reading parameters and headers of requests, and sending responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from twisted.web.http_headers import Headers

from tawebeval.errors import MalformedRequest
from tawebeval.web.server.headers import JSON_MEDIA_TYPE, make_content_headers, set_headers
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.server.request_headers import get_header_elements, get_header_values

Query: TypeAlias = Mapping[bytes, Sequence[bytes]]
"""The parameters of a query by name."""

NO_STORE_HEADERS = {b"Cache-Control": b"no-store"}

MAX_NUMBER_DIGITS = 15
"""Maximum of digits of a whole number; every JSON library keeps that many exactly."""

WHOLE_NUMBER_PATTERN = rf"[0-9]{{1,{MAX_NUMBER_DIGITS}}}"
"""Pattern of a whole number."""

WHOLE_NUMBER_REGEX = re.compile(WHOLE_NUMBER_PATTERN)
"""The same, compiled."""

_SECONDS = re.compile(rf'[ \t]*("?)({WHOLE_NUMBER_PATTERN})\1[ \t]*')  # in quotes or not, the same


def prepare_response(
    request: ApiRequest, body: bytes, content_type: bytes = JSON_MEDIA_TYPE
) -> bytes:
    """Set the headers of a response with this body, and return the body."""
    set_headers(request, {**make_content_headers(body, content_type), **NO_STORE_HEADERS})
    return body


def prepare_json_response(request: ApiRequest, value: Any) -> bytes:
    """Return a response of JSON."""
    return prepare_response(request, orjson.dumps(value))


def get_header(headers: Headers, name: str) -> str | None:
    """Return a header; None if it is absent.

    Raises: MalformedRequest, if it is repeated; HeaderTooLarge.
    """
    values = get_header_values(headers, name)
    if len(values) > 1:
        raise MalformedRequest(f"{name}: the header is repeated; send it once")
    try:
        return values[0].decode() if values else None
    except UnicodeDecodeError:
        raise MalformedRequest(f"{name}: not UTF-8") from None


def get_query_argument(query: Query, name: str) -> str | None:
    """Return a query parameter; None if it is absent. Raises: MalformedRequest."""
    values = query.get(name.encode(), ())
    if len(values) > 1:
        raise MalformedRequest(f"{name}: the query parameter is repeated; send it once")
    return values[0].decode("utf-8", "replace") if values else None


def get_query_arguments(query: Query, is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """Return the query parameters whose names are wanted, by name. Raises: MalformedRequest."""
    names = (name.decode("utf-8", "replace") for name in query)
    return {name: get_query_argument(query, name) or "" for name in names if is_wanted(name)}


def get_query_number(query: Query, name: str) -> int | None:
    """Return a query parameter that is a whole number; None if absent. Raises: MalformedRequest."""
    text = get_query_argument(query, name)
    if text is not None and not WHOLE_NUMBER_REGEX.fullmatch(text):
        raise MalformedRequest(
            f"{name}: {text[:80]!r} is not a whole number of up to {MAX_NUMBER_DIGITS} digits"
        )
    return None if text is None else int(text)


def parse_prefer_wait(headers: Headers) -> int | None:
    """Return the seconds of `Prefer: wait=N` (RFC 7240); None if absent.

    The first of several counts. Parameters behind a `;` are ignored. Raises: HeaderTooLarge.
    """
    for preference in get_header_elements(headers, "Prefer"):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip(" \t").lower() == "wait":
            seconds = _SECONDS.fullmatch(value)
            return None if seconds is None else int(seconds[2])
    return None
