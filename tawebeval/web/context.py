"""The context of all routes: registry, configuration, authentication, counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from tawebeval.config import Configuration
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import Unauthorized
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.web.access_log import RequestLog
from tawebeval.web.auth import (
    SAFE_METHODS,
    Authentication,
    check_read_origin,
    check_write_origin,
)
from tawebeval.web.links import EvaluationLinks
from tawebeval.web.peers import PeerEvaluationLists
from tawebeval.web.responses import get_header
from tawebeval.web.streams import StreamTurns

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
    for deadlines; `read_wall_clock` returns the time of day in seconds since the epoch;
    `random_bytes(n)` returns n random bytes. `peer_lists` are the lists of the other daemons;
    `links` are the links that read one evaluation.
    """

    registry: EvaluationRegistry
    upload_directory: Path
    random_bytes: Callable[[int], bytes]
    authentication: Authentication
    clock: IReactorTime
    upload_threads: WorkerThreads
    peer_lists: PeerEvaluationLists
    links: EvaluationLinks
    health_and_metrics: HealthAndMetrics = attrs.field(factory=HealthAndMetrics)
    request_log: RequestLog = attrs.field(factory=RequestLog)
    read_wall_clock: Callable[[], float] = time.time
    stream_turns: StreamTurns = attrs.Factory(lambda self: StreamTurns(self.clock), takes_self=True)

    @property
    def configuration(self) -> Configuration:
        """The configuration of the evaluations, which a reload replaces."""
        return self.registry.context.configuration

    def check_origin(self, method: bytes, headers: Headers) -> None:
        """Raise ForeignOrigin if a page of another origin may not make this request.

        Only daemons without tokens check it (`exposure`).
        """
        if method in SAFE_METHODS or not self.authentication.is_token_optional:
            return
        callers = self.configuration.callers
        if not callers.open:
            origin, host = get_header(headers, "Origin"), get_header(headers, "Host")
            check_write_origin(origin, host, callers.origins)

    def check_websocket_origin(self, headers: Headers) -> None:
        """Raise ForeignOrigin for a WebSocket of a page that may not read responses.

        Browsers enforce CORS for other requests, but not for WebSockets (RFC 6455, section 10.2).
        """
        origins = self.configuration.callers.origins
        if "*" not in origins:
            origin, host = get_header(headers, "Origin"), get_header(headers, "Host")
            check_read_origin(origin, host, origins)

    def check_listing_access(self, headers: Headers) -> None:
        """Raise Unauthorized or ForeignOrigin if the client may not list evaluations.

        Without tokens, evaluations have no owner. Then only programs of this machine and the
        daemon's own page may list them. A request of a page to its own origin may have no `Origin`,
        so the `Host` is checked then.
        """
        callers = self.configuration.callers
        if not self.authentication.is_token_optional:
            return
        if callers.open:
            raise Unauthorized(
                "the list of evaluations needs a token; the operator can set callers.tokens"
            )
        host = get_header(headers, "Host")
        origin = get_header(headers, "Origin") or f"http://{host}".lower()
        check_read_origin(origin, host, callers.origins)
