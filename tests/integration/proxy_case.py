"""A proxy before a daemon, with the configurations of `etc/proxies`."""

from __future__ import annotations

from typing import Any, ClassVar

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.websocket import WebSocketClientEndpoint

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.integration.client import Client, SocketReader
from tests.integration.harness import CONFIGURATION, Daemon, DaemonTestCase
from tests.integration.proxies import BELOW, Proxy

WAITING = "printf one; exec sleep 600"


def settings(
    base_path: str = "",
    trusted: str = "127.0.0.1",
) -> str:
    """Return the configuration of a daemon behind a proxy."""
    return (
        f"{CONFIGURATION}\n[http]\nbase_path = '{base_path}'\n"
        f"trusted_proxies = ['{trusted}']\n"
        f"[log]\nformat = 'json'\naccess = true\n"
    )


def lacking(proxy: type[Proxy]) -> str | None:
    """Return why the tests of a proxy are skipped, None if they are not."""
    return None if proxy.find() else f"there is no {proxy.program} (Debian package of that name)"


def answered(daemon: Daemon, identifier: str) -> list[str]:
    """Return the lines of the access log about streams of an evaluation that are over."""
    path = f"/evaluation/{derive_log_pseudonym(identifier)}/events"
    return [line for line in daemon.lines if path in line]


class ProxyTestCase(DaemonTestCase):
    """One proxy for each test.

    `plain` asks it over HTTP, `secure` over TLS, and `client` asks the daemon itself.
    """

    proxy_type: ClassVar[type[Proxy]]
    below: ClassVar[bool] = False

    async def setUp(self) -> None:
        await super().setUp()
        self.proxy = self.proxy_type(self.upstream(), self.below)
        self.addCleanup(self.proxy.remove)
        self.proxy.start()
        await self.proxy.ready()
        certificate = Certificate.loadPEM(self.proxy.certificate.read_bytes())
        self.trust = BrowserLikePolicyForHTTPS(trustRootFromCertificates([certificate]))
        self.plain = Client(self.proxy.url)
        self.secure = Client(self.proxy.tls_url, trust=self.trust)
        self.clients = (self.plain, self.secure)
        for client in self.clients:
            client.evaluations = self.client.evaluations
            self.addCleanup(client.close)

    @property
    def base_path(self) -> str:
        """The path below which the proxy has the API."""
        return BELOW if self.below else ""

    async def begin_by(self, client: Client, command: str) -> str:
        """Begin an evaluation through the proxy; return its identifier."""
        return await client.evaluate(self.repository.url, self.commit, command)

    def upstream(self) -> str:
        """Return where the proxy finds the daemon."""
        return f"127.0.0.1:{self.daemon.port}"

    def socket(self, client: Client, identifier: str) -> tuple[SocketReader, Deferred[Any]]:
        """Return what reads a WebSocket, and what fires when that is connected."""
        reader = SocketReader()
        url = f"ws{client.url.removeprefix('http')}/evaluation/{identifier}/events"
        endpoint = WebSocketClientEndpoint.new(reactor, url, self.trust)
        return reader, Deferred.fromCoroutine(endpoint.connect(reader))
