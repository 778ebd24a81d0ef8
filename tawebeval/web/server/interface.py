"""Protocols of the site and of the application, by which connections and requests use them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime
from twisted.web.resource import IResource

from tawebeval.web.server.limits import ClientAddressResolver, ConnectionLimits, OpenConnections
from tawebeval.web.server.targets import BasePath

CLIENT_GONE_STATUS = 499
"""Status for the log where the client disconnected before the response (as nginx has it)."""


class BodyReceiver(Protocol):
    """Receiver of a body that is parsed while it arrives. Methods raise RequestError."""

    def feed(self, chunk: bytes) -> None:
        """Parse a part of the body."""

    def abandon(self) -> None:
        """Store nothing more, and remove what is stored."""


class Application(Protocol):
    """The API. It refuses requests, which are `request.ApiRequest`, by RequestError."""

    @property
    def origins(self) -> Collection[str]:
        """Origins whose pages may read responses; `*` = any."""

    def identify_caller(self, request: Any) -> str:
        """Return the caller of a request, and count the request."""

    def make_form_receiver(self, request: Any, length: int | None) -> BodyReceiver | None:
        """Return the receiver of a body; None if none is expected.

        `length` is that of the body in bytes, None if unknown.
        """

    def check_not_stopping(self) -> None:
        """Raise ServerStopping if the daemon accepts no more forms."""

    def record_response(self, request: Any, status: int, seconds: float) -> None:
        """Count and log a request; `status` may be GONE, `seconds` is its duration."""

    def record_refusal(self, status: int, address: str) -> None:
        """Count and log the refusal of a connection or of a malformed request."""


class ChannelSite(Protocol):
    """The site, as connections and requests use it."""

    application: Application
    address_resolver: ClientAddressResolver
    clock: IReactorTime
    connection_limits: ConnectionLimits
    base_path: BasePath
    open_connections: OpenConnections
    resource: IResource
