"""Targets of requests: path, query and host as strangers write them, and the proxy's prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar
from urllib.parse import unquote_to_bytes as unquote

import attrs
from twisted.web.http import parse_qs

from tawebeval.errors import (
    MalformedRequest,
    ResourceMoved,
    TargetTooLong,
    UnknownMethod,
    format_size,
)

MAX_PATH_BYTES = 1024
"""Bytes of a path, at most."""

_MAX_PARAMETERS = 100  # of a query
_SHORT_QUERY = 128  # bytes
_ABSOLUTE = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)
_NAME = rb"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_HOST = re.compile(rb"(?:%b|\[[0-9A-Fa-f:.]+\])?(?::[0-9]*)?" % _NAME)
_SLASHES = re.compile(rb"/+")

T = TypeVar("T")


def strip_scheme_and_host(target: bytes) -> bytes:
    """Return a request target in origin form (RFC 9112, section 3.2.1)."""
    return target if target.startswith(b"/") else _ABSOLUTE.sub(b"", target) or b"/"


def cache_short_queries(parse: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Return `parse`, which remembers short queries: clients that wait repeat theirs."""
    parse_short = lru_cache(256)(parse)
    return lambda query: parse_short(query) if len(query) < _SHORT_QUERY else parse(query)


@cache_short_queries
def parse_query(query: bytes) -> Mapping[bytes, Sequence[bytes]]:
    """Return the parameters of a query by name. Raises: TargetTooLong."""
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


def collapse_slashes(path: bytes) -> bytes:
    """Return a path with one slash in place of several: clients join paths carelessly."""
    return _SLASHES.sub(b"/", path) if b"//" in path else path


def _compile(base_path: BasePath) -> re.Pattern[bytes] | None:
    if not base_path.prefix:
        return None
    parts = (re.escape(part.encode()) for part in base_path.prefix[1:].split("/"))
    return re.compile(rb"/+%b(?=[/?]|\Z)" % rb"/+".join(parts))  # clients join paths carelessly


@attrs.frozen
class BasePath:
    """The prefix of all paths, without a slash at its end; empty = the root of the host.

    Requests may have the prefix or not, since some proxies remove it.
    """

    prefix: str
    _pattern: re.Pattern[bytes] | None = attrs.field(
        init=False, repr=False, default=attrs.Factory(_compile, takes_self=True)
    )

    def strip_prefix(self, target: bytes) -> bytes:
        """Return a request target without the prefix; unchanged if it is only the prefix."""
        rest = self._rest(target)
        return rest if rest is not None and rest.startswith(b"/") else target

    def require_trailing_slash(self, target: bytes) -> None:
        """Raise ResourceMoved if the target is only the prefix, without a slash.

        Relative links of a page there would lead out of the prefix.
        """
        rest = self._rest(target)
        if rest is not None and not rest.startswith(b"/"):
            raise ResourceMoved(f"{self.prefix}/")

    def _rest(self, target: bytes) -> bytes | None:
        """Return the part of a target behind the prefix; None if it has none."""
        found = None if self._pattern is None else self._pattern.match(target)
        return None if found is None else target[found.end() :]
