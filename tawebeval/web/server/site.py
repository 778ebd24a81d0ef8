"""The site: what all connections share."""

from __future__ import annotations

from typing import Any

from twisted.web.resource import IResource
from twisted.web.server import Site

from tawebeval.config import HttpSettings
from tawebeval.web.server.channel import ApiChannel
from tawebeval.web.server.interface import Application
from tawebeval.web.server.limits import ClientAddressResolver, ConnectionLimits, OpenConnections
from tawebeval.web.server.request import ApiRequest
from tawebeval.web.server.targets import BasePath


class ApiSite(Site):
    """The site of an application; `root` is its resource."""

    # Not Twisted's own, which would speak HTTP/2 where it can: that calls `gotLength` too early.
    protocol = ApiChannel  # type: ignore[assignment]
    displayTracebacks = False
    noisy = False  # `Daemon` logs the URL

    def __init__(
        self,
        root: IResource,
        application: Application,
        settings: HttpSettings,
        reactor: Any,
    ) -> None:
        super().__init__(
            root,
            requestFactory=ApiRequest,
            timeout=None,  # the channel has deadlines of its own
            reactor=reactor,
            parsePOSTFormSubmission=False,
        )
        self.application = application
        self.address_resolver = ClientAddressResolver.from_settings(settings)
        self.clock = reactor
        self.connection_limits = ConnectionLimits(settings)
        self.base_path = BasePath(settings.base_path)
        self.open_connections = OpenConnections(reactor)

    def log(self, request: object) -> None:
        """Do nothing: `Application.record_response` logs requests."""

    def acceptableProtocols(self) -> list[bytes]:
        """Return the protocols that TLS may negotiate."""
        return [b"http/1.1"]
