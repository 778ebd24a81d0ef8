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
from tawebeval.evaluations.registry import Registry
from tawebeval.web.access_log import RequestLog
from tawebeval.web.auth import Authentication
from tawebeval.web.exposure import check_change, check_read
from tawebeval.web.responses import get_header


@attrs.frozen
class Operations:
    """Sources of /health/ready and /metrics.

    `obstacles` returns the reasons why the daemon takes no work, empty if it does. `metrics`
    returns the text format of Prometheus. `readers` authenticates readers of metrics; None unless
    `metrics.readers` is "tokens".
    """

    obstacles: Callable[[], Sequence[str]] = tuple
    metrics: Callable[[], bytes] = bytes
    readers: Authentication | None = None


@attrs.define(eq=False)
class WebContext:
    """The dependencies of the routes, and the checks of callers and origins.

    `uploads` is the directory of arriving forms, written by `threads`. A reload replaces
    `configuration`. `clock` is for deadlines; `time` returns the time of day in seconds since the
    epoch; `random(n)` returns n random bytes.
    """

    registry: Registry
    configuration: Configuration
    uploads: Path
    random: Callable[[int], bytes]
    authentication: Authentication
    clock: IReactorTime
    threads: WorkerThreads
    operations: Operations = attrs.field(factory=Operations)
    request_log: RequestLog = attrs.field(factory=RequestLog)
    time: Callable[[], float] = time.time

    def admit(self, method: bytes, headers: Headers) -> str:
        """Return the caller of a request with these headers, and count the request.

        Raises: Unauthorized, OverShare, ForeignPage.
        """
        self.check_origin(method, headers)
        return self.authentication.admit(headers.getRawHeaders(b"Authorization", []))

    def check_origin(self, method: bytes, headers: Headers) -> None:
        """Raise ForeignPage if a page of another origin may not make this request.

        Only daemons without tokens check it (`exposure`).
        """
        callers = self.configuration.callers
        if self.authentication.is_open and not callers.open:
            origin, host = get_header(headers, "Origin"), get_header(headers, "Host")
            check_change(method, origin, host, callers.origins)

    def check_websocket(self, headers: Headers) -> None:
        """Raise ForeignPage for a WebSocket of a page that may not read responses.

        Browsers enforce CORS for other requests, but not for WebSockets (RFC 6455, section 10.2).
        """
        origins = self.configuration.callers.origins
        if "*" not in origins:
            origin, host = get_header(headers, "Origin"), get_header(headers, "Host")
            check_read(origin, host, origins)

    def check_listing(self, headers: Headers) -> None:
        """Raise Unauthorized or ForeignPage if the client may not list evaluations.

        Without tokens, evaluations have no owner. Then only programs of this machine and the
        daemon's own page may list them. A request of a page to its own origin may have no `Origin`,
        so the `Host` is checked then.
        """
        callers = self.configuration.callers
        if not self.authentication.is_open:
            return
        if callers.open:
            raise Unauthorized(
                "the list of evaluations needs a token; the operator can set callers.tokens"
            )
        host = get_header(headers, "Host")
        origin = get_header(headers, "Origin") or f"http://{host}".lower()
        check_read(origin, host, callers.origins)
