"""Request counters and the access log."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import attrs
from klein import Klein
from twisted.logger import Logger
from werkzeug.exceptions import HTTPException

from tawebeval.core.counters import SHORT_DURATION_BOUNDS, Histogram
from tawebeval.core.identifiers import IDENTIFIER_PATTERN
from tawebeval.sandbox.workspace import derive_log_pseudonym

UNKNOWN_ROUTE = "other"
"""Route or method of a request that has none of the API's: clients can send any number of others.
"""

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_IDENTIFIER = re.compile(IDENTIFIER_PATTERN)
_EVENTS_PATH = re.compile(rb"/evaluation/([A-Za-z0-9-]+)/events")
_MAX_LENGTH = 200  # characters of a path in the log

log = Logger()


@attrs.define(eq=False)
class RequestLog:
    """Counts responses and their durations; logs each response if `is_enabled`.

    `response_counts` counts by method, route and status; `response_durations` has the durations by
    route. A response that waits for events or for the end of an evaluation counts without a
    duration.
    """

    is_enabled: bool = False
    response_counts: Counter[tuple[str, str, int]] = attrs.field(factory=Counter)
    response_durations: defaultdict[str, Histogram] = attrs.field(
        factory=lambda: defaultdict(lambda: Histogram(SHORT_DURATION_BOUNDS))
    )

    def record_response(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count a response; `seconds` is None if it waited for an evaluation."""
        self.response_counts[method, route, int(status)] += (
            1  # HTTPStatus is equal, and hashes otherwise
        )
        if seconds is not None:
            self.response_durations[route].record_value(seconds)

    def record_refusal(self, status: int, client: str) -> None:
        """Count and log the refusal of a connection or of a malformed request."""
        self.record_response(UNKNOWN_ROUTE, UNKNOWN_ROUTE, status, None)
        if self.is_enabled:
            self.write_line(client, "", UNKNOWN_ROUTE, "-", status, 0, 0.0)

    def write_line(
        self,
        client: str,
        caller: str,
        method: str,
        path: str,
        status: int,
        size: int,
        seconds: float,
    ) -> None:
        """Write the line of a response of `size` bytes that took `seconds` seconds.

        The path has no query. Identifiers in it are replaced by their log names.
        """
        log.info(
            "{client} {caller!r} {method} {path} {status} {size} {took:.6f}",
            client=client or "-",
            caller=caller,
            method=method,
            path=_IDENTIFIER.sub(lambda found: derive_log_pseudonym(found[0]), path)[:_MAX_LENGTH],
            status=status,
            size=size,
            took=seconds,
        )


@attrs.frozen
class RouteTable:
    """The routes of a Klein app, for counters."""

    _app: Klein

    def match_route(self, method: bytes, path: bytes) -> tuple[str, str]:
        """Return the method and the route of a request; each may be OTHER."""
        return self.match_route_with_parameters(method, path)[:2]

    def match_route_with_parameters(
        self, method: bytes, path: bytes
    ) -> tuple[str, str, Mapping[str, Any]]:
        """Return what `match_route` returns, and the values of the route's parameters."""
        named = method.decode("latin-1")
        named = named if named in _METHODS else UNKNOWN_ROUTE
        mapper = self._app.url_map.bind("")
        try:
            rule, parameters = mapper.match(decode_path(path), named, return_rule=True)
        except HTTPException:  # which answers that there is none
            return named, UNKNOWN_ROUTE, {}
        return named, rule.rule, parameters

    def list_routes(self) -> Iterator[tuple[str, str]]:
        """Yield each pair that `match_route` may return."""
        for rule in self._app.url_map.iter_rules():
            for method in sorted(_METHODS & (rule.methods or _METHODS)):
                yield method, rule.rule
        for method in sorted(_METHODS | {UNKNOWN_ROUTE}):
            yield method, UNKNOWN_ROUTE


def match_events_path(path: bytes) -> str | None:
    """Return the identifier in a path of events, as clients write it; None for other paths."""
    found = _EVENTS_PATH.fullmatch(path)
    return None if found is None else found[1].decode()


def decode_path(path: bytes) -> str:
    """Return a path decoded, as the routes are written."""
    return unquote_to_bytes(path).decode("utf-8", "replace")
