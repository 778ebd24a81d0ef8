"""Targets of requests: the path, the query and the host, as strangers write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import unquote_to_bytes as unquote

from twisted.web.http import parse_qs

from tawebeval.errors import MalformedRequest, TargetTooLong, UnknownMethod, format_size

MAX_PATH_BYTES = 1024
"""Bytes of a path, at most."""

_MAX_PARAMETERS = 100  # of a query
_SHORT_QUERY = 128  # bytes
_ABSOLUTE = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)
_HOST = re.compile(rb"[A-Za-z0-9._:\[\]-]*")


def strip_scheme_and_host(target: bytes) -> bytes:
    """Return a request target in origin form (RFC 9112, section 3.2.1)."""
    return target if target.startswith(b"/") else _ABSOLUTE.sub(b"", target) or b"/"


def parse_query(query: bytes) -> Mapping[bytes, Sequence[bytes]]:
    """Return the parameters of a query by name. Raises: TargetTooLong."""
    return _parse_short_query(query) if len(query) < _SHORT_QUERY else _parse_query(query)


@lru_cache(256)  # clients that wait repeat a query
def _parse_short_query(query: bytes) -> Mapping[bytes, Sequence[bytes]]:
    return _parse_query(query)


def _parse_query(query: bytes) -> Mapping[bytes, Sequence[bytes]]:
    if query.count(b"&") + query.count(b";") >= _MAX_PARAMETERS:
        raise TargetTooLong(f"the query has over {_MAX_PARAMETERS} parameters")
    parameters: dict[bytes, list[bytes]] = parse_qs(query, True)
    return parameters


def check_method_and_path(method: bytes, path: bytes) -> None:
    """Refuse what Twisted or Klein answer in HTML, or take for something else.

    Raises: MalformedRequest, TargetTooLong, UnknownMethod.
    """
    if method != method.upper():  # which Klein would take for that in upper case
        raise UnknownMethod(
            f"method {method.decode('latin-1')!r:.40}: methods are case-sensitive;"
            f" send {method.upper().decode('latin-1'):.40}"
        )
    if len(path) > MAX_PATH_BYTES:
        raise TargetTooLong(
            f"the path has {format_size(len(path))}; the limit is {format_size(MAX_PATH_BYTES)}"
        )
    if not path.startswith(b"/") and (method, path) != (b"OPTIONS", b"*"):
        raise MalformedRequest("the request target is not a path such as /evaluate")
    if b"%" in path or not path.isascii():
        try:
            unquote(path).decode()
        except UnicodeDecodeError:
            raise MalformedRequest("the path is not UTF-8") from None


def check_hosts(hosts: Sequence[bytes], version: bytes) -> None:
    """Check the headers `Host` (RFC 9112, section 3.2). Raises: MalformedRequest."""
    if not hosts and version != b"HTTP/1.0":
        raise MalformedRequest("Host: the header is required")
    if len(hosts) > 1:
        raise MalformedRequest("Host: the header is repeated; send it once")
    if not all(map(_HOST.fullmatch, hosts)):
        raise MalformedRequest("Host: not a host name")
