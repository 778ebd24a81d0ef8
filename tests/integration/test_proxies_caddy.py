"""The daemon behind Caddy."""

from __future__ import annotations

from tests.integration.proxies import BELOW, Caddy
from tests.integration.proxy_case import (
    Http2Tests,
    PathTests,
    ProxyTestCase,
    StreamTests,
    SurfaceTests,
    lacking,
    settings,
)
from tests.integration.raw import Connection


class CaddyTests(StreamTests, SurfaceTests, Http2Tests, ProxyTestCase):
    skip = lacking(Caddy)
    proxy_type = Caddy
    configuration = settings()

    async def test_http3_is_not_announced(self) -> None:
        answer = await self.http2.get("/health")
        self.assertIsNone(answer.header("Alt-Svc"))

    async def test_too_large_head_is_refused_by_the_daemon(self) -> None:
        with Connection(self.proxy.port) as connection:
            head = f"GET /{'x' * 40_000} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.ask(head.encode()).problem(414)
        (await self.http2.get(f"/{'x' * 40_000}")).problem(414)


class CaddyBelowTests(PathTests, ProxyTestCase):
    skip = lacking(Caddy)
    proxy_type = Caddy
    below = True
    configuration = settings(BELOW)
