"""What the web layer knows of the world below it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import attrs
from twisted.internet.interfaces import IReactorTime
from twisted.web.http_headers import Headers

from tawebeval.config import Configuration
from tawebeval.deferreds import Threads
from tawebeval.errors import MalformedRequest, Unauthorized
from tawebeval.evaluations.registry import Registry
from tawebeval.evaluations.uploads import Source, UploadWriter
from tawebeval.web.access_log import Traffic
from tawebeval.web.auth import Access
from tawebeval.web.exposure import check_change, check_reading
from tawebeval.web.operations import Operations
from tawebeval.web.server.base_path import Mount
from tawebeval.web.server.clients import Clients
from tawebeval.web.upload import FormReceiver

_MAX_KEY = 255


@attrs.define(eq=False)
class Api:
    """The registry, where forms are put while they arrive, who may call, and what is counted.

    `threads` write the forms. A reload changes the configuration. `clock` is for deadlines,
    `time` of day for what is dated, in seconds since the epoch.
    """

    registry: Registry
    configuration: Configuration
    uploads: Path
    random: Callable[[int], bytes]
    access: Access
    clock: IReactorTime
    threads: Threads
    operations: Operations = attrs.field(factory=Operations)
    traffic: Traffic = attrs.field(factory=Traffic)
    time: Callable[[], float] = time.time
    clients: Clients = attrs.field(init=False)
    mount: Mount = attrs.field(init=False)

    @clients.default
    def _clients(self) -> Clients:
        return Clients.of(self.configuration.http)

    @mount.default
    def _mount(self) -> Mount:
        return Mount(self.configuration.http.base_path)

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
            origin, host = _header(headers, "Origin"), _header(headers, "Host")
            check_change(method, origin, host, callers.origins)

    def check_websocket(self, headers: Headers) -> None:
        """Raise ForeignPage for a page that may not read answers: browsers let all ask for this.

        For other answers they heed CORS, and here the server has to.
        """
        origins = self.configuration.callers.origins
        if "*" not in origins:
            origin, host = _header(headers, "Origin"), _header(headers, "Host")
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
        host = _header(headers, "Host")
        origin = _header(headers, "Origin") or f"http://{host}".lower()
        check_reading(origin, host, callers.origins)

    def receive_form(
        self, headers: Headers, length: int | None, caller: str, source: Source
    ) -> FormReceiver:
        """Return what takes the form of a request with these headers. Raises RequestErrors.

        `length` is that of the body in bytes, None if it is not known beforehand.
        """
        spool = self.registry.spool
        key = _header(headers, "Idempotency-Key")
        if key is not None and not 0 < len(key) <= _MAX_KEY:
            raise MalformedRequest(f"Idempotency-Key: must have 1 to {_MAX_KEY} characters")
        form = FormReceiver(
            _header(headers, "Content-Type") or "",
            length,
            UploadWriter(self.uploads / self.random(16).hex(), source, spool, self.threads),
            key,
            self.configuration,
            spool,
        )
        if key is None:
            # Before the body is sent, for nothing. (A key may be for one that is accepted.)
            self.registry.check_admission(caller)
        return form


def _header(headers: Headers, name: str) -> str | None:
    """Return a header of which there should be one. Raises MalformedRequest if there are more."""
    values = headers.getRawHeaders(name.encode(), [])
    if len(values) > 1:
        raise MalformedRequest(f"{name}: stands in the request more than once")
    try:
        return values[0].decode() if values else None
    except UnicodeDecodeError:
        raise MalformedRequest(f"{name}: is not UTF-8") from None
