"""What the web layer knows of the world below it."""

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
from tawebeval.web.exposure import check_change, check_reading
from tawebeval.web.responses import header


@attrs.frozen
class Operations:
    """What there is to tell.

    `obstacles` returns why no work would be taken, and nothing where it would. `metrics` returns
    the figures as Prometheus reads them, and `readers` knows the tokens of those who may, if it
    goes by tokens.
    """

    obstacles: Callable[[], Sequence[str]] = tuple
    metrics: Callable[[], bytes] = bytes
    readers: Authentication | None = None


@attrs.define(eq=False)
class WebContext:
    """The registry, where forms are put while they arrive, who may call, and what is counted.

    `threads` write the forms. A reload changes the configuration. `clock` is for deadlines,
    `time` of day for what is dated, in seconds since the epoch.
    """

    registry: Registry
    configuration: Configuration
    uploads: Path
    random: Callable[[int], bytes]
    access: Authentication
    clock: IReactorTime
    threads: WorkerThreads
    operations: Operations = attrs.field(factory=Operations)
    traffic: RequestLog = attrs.field(factory=RequestLog)
    time: Callable[[], float] = time.time

    def admit(self, method: bytes, headers: Headers) -> str:
        """Return the name of the caller whose request has these headers, and count it.

        Raises Unauthorized, OverShare, ForeignPage.
        """
        self.check_origin(method, headers)
        return self.access.admit(headers.getRawHeaders(b"Authorization", []))

    def check_origin(self, method: bytes, headers: Headers) -> None:
        """Raise ForeignPage for a page that may not ask for this where callers have no tokens."""
        callers = self.configuration.callers
        if self.access.open and not callers.open:
            origin, host = header(headers, "Origin"), header(headers, "Host")
            check_change(method, origin, host, callers.origins)

    def check_websocket(self, headers: Headers) -> None:
        """Raise ForeignPage for a page that may not read answers: browsers let all ask for this.

        For other answers they heed CORS, and here the server has to.
        """
        origins = self.configuration.callers.origins
        if "*" not in origins:
            origin, host = header(headers, "Origin"), header(headers, "Host")
            check_reading(origin, host, origins)

    def check_listing(self, headers: Headers) -> None:
        """Raise Unauthorized or ForeignPage for those who may not see all identifiers there are.

        Without tokens nobody has any of his own. Then they are for programs of this machine,
        and for no page but ours. (A page that is asked for its own origin sends no `Origin`.)
        """
        callers = self.configuration.callers
        if not self.access.open:
            return
        if callers.open:
            raise Unauthorized("only callers with tokens have a list of their evaluations")
        host = header(headers, "Host")
        origin = header(headers, "Origin") or f"http://{host}".lower()
        check_reading(origin, host, callers.origins)
