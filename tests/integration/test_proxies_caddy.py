"""The daemon behind Caddy."""

from __future__ import annotations

from tests.integration.http2_case import Http2Tests
from tests.integration.proxies import BELOW, Caddy
from tests.integration.proxy_case import (
    FollowingTests,
    ProxyTestCase,
    SurfaceTests,
    lacking,
    settings,
)
from tests.integration.raw import Connection


class CaddyTests(FollowingTests, SurfaceTests, Http2Tests, ProxyTestCase):
    """Caddy."""

    skip = lacking(Caddy)
    proxy_type = Caddy
    configuration = settings()

    async def test_no_other_protocol(self) -> None:
        """Clients are not told of HTTP/3, which browsers would use from then on."""
        answer = await self.http2.get("/health")
        self.assertIsNone(answer.header("Alt-Svc"))

    async def test_long_head(self) -> None:
        """What is too large for the daemon reaches it, and is refused by that."""
        with Connection(self.proxy.port) as connection:
            head = f"GET /{'x' * 40_000} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.ask(head.encode()).problem(414)
        (await self.http2.get(f"/{'x' * 40_000}")).problem(414)


class CaddyBelowTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """Caddy, below a path."""

    skip = lacking(Caddy)
    proxy_type = Caddy
    below = True
    configuration = settings(BELOW)
