"""The context of all routes: registry, configuration, authentication; counters and access log."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import attrs
from klein import Klein
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.web.http_headers import Headers
from werkzeug.exceptions import HTTPException

from tawebeval.config import Configuration
from tawebeval.core.evaluations import IDENTIFIER_PATTERN, SHORT_DURATION_BOUNDS, Histogram
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import Unauthorized
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.web.auth import (
    CANNOT_READ,
    CANNOT_WRITE,
    SAFE_METHODS,
    Authentication,
    EvaluationLinks,
    check_origin,
)
from tawebeval.web.lists import EvaluationLists
from tawebeval.web.streams import StreamTurns

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

    def match_route(self, method: bytes, path: bytes) -> tuple[str, str, Mapping[str, Any]]:
        """Return method and route of a request, each may be `UNKNOWN_ROUTE`, and parameters."""
        named = method.decode("latin-1")
        named = named if named in _METHODS else UNKNOWN_ROUTE
        mapper = self._app.url_map.bind("")
        try:
            rule, parameters = mapper.match(decode_path(path), named, return_rule=True)
        except HTTPException:  # which answers that there is none
            return named, UNKNOWN_ROUTE, {}
        return named, rule.rule, parameters

    def list_routes(self) -> Iterator[tuple[str, str]]:
        """Yield each pair of a method and a route that `match_route` may return."""
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


MAX_METRICS_AGE = 1.0
"""Seconds for which metrics are not collected again: with many evaluations that takes some ms."""


@attrs.define
class HealthAndMetrics:
    """Sources of /health/ready and /metrics.

    `find_unreadiness_reasons` returns the reasons why the daemon takes no work, empty if it does.
    `collect_metrics` returns the text format of Prometheus. `metrics_authentication` authenticates
    readers of metrics; None if programs of this machine read them.
    """

    find_unreadiness_reasons: Callable[[], Sequence[str]] = tuple
    collect_metrics: Callable[[], bytes] = bytes
    metrics_authentication: Authentication | None = None
    _collected: tuple[float, bytes] | None = None  # when, in seconds of the clock

    def read_metrics(self, now: float) -> bytes:
        """Return metrics that are at most `MAX_METRICS_AGE` old."""
        if self._collected is None or now - self._collected[0] >= MAX_METRICS_AGE:
            self._collected = now, self.collect_metrics()
        return self._collected[1]


@attrs.define(eq=False)
class WebContext:
    """The dependencies of the routes, and the checks of callers and origins.

    `upload_directory` is the directory of arriving forms, written by `upload_threads`. `clock` is
    for deadlines; `random_bytes(n)` returns n random bytes. `lists` are those of evaluations;
    `links` are the links that read one evaluation.
    """

    registry: EvaluationRegistry
    upload_directory: Path
    random_bytes: Callable[[int], bytes]
    authentication: Authentication
    clock: IReactorTime
    upload_threads: WorkerThreads
    lists: EvaluationLists
    links: EvaluationLinks
    health_and_metrics: HealthAndMetrics = attrs.field(factory=HealthAndMetrics)
    request_log: RequestLog = attrs.field(factory=RequestLog)
    stream_turns: StreamTurns = attrs.Factory(lambda self: StreamTurns(self.clock), takes_self=True)

    @property
    def configuration(self) -> Configuration:
        """The configuration of the evaluations, which a reload replaces."""
        return self.registry.context.configuration

    def check_origin(self, method: bytes, headers: Headers) -> None:
        """Raise ForeignOrigin if a page of another origin may not make this request.

        Only daemons without tokens check it.
        """
        if method in SAFE_METHODS or not self.authentication.is_token_optional:
            return
        callers = self.configuration.callers
        if not callers.open:
            check_origin(headers, callers.origins, CANNOT_WRITE)

    def check_websocket_origin(self, headers: Headers) -> None:
        """Raise ForeignOrigin for a WebSocket of a page that may not read responses.

        Browsers enforce CORS for other requests, but not for WebSockets (RFC 6455, section 10.2).
        """
        origins = self.configuration.callers.origins
        if "*" not in origins:
            check_origin(headers, origins, CANNOT_READ)

    def check_listing_access(self, headers: Headers) -> None:
        """Raise Unauthorized or ForeignOrigin if the client may not list evaluations.

        Without tokens, evaluations have no owner. Then only programs of this machine and the
        daemon's own page may list them.
        """
        callers = self.configuration.callers
        if not self.authentication.is_token_optional:
            return
        if callers.open:
            raise Unauthorized(
                "the list of evaluations needs a token; the operator can set callers.tokens"
            )
        check_origin(headers, callers.origins, CANNOT_READ, is_host_checked=True)
