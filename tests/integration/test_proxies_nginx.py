"""The daemon behind nginx: over TCP and a UNIX socket, and with the path taken away."""

from __future__ import annotations

from typing import Any

from tests.integration.client import Client
from tests.integration.proxies import BELOW, Nginx, StrippingNginx
from tests.integration.proxy_case import (
    AddressTests,
    FollowingTests,
    Http2RefusalTests,
    Http2Tests,
    PathTests,
    ProxyTestCase,
    StreamTests,
    SurfaceTests,
    lacking,
    settings,
)
from tests.integration.raw import Connection
from tests.integration.terminal import piped


class RefusalTests:
    async def test_broken_heads_are_answered_with_problems(self: Any) -> None:
        rest = b" HTTP/1.1\r\nHost: localhost\r\n"
        long = b"x" * 40_000
        for request, codes in (
            (b"nonsense\r\n\r\n", {400}),
            (b"GET /health" + rest + b"no header\r\n\r\n", {400}),
            (b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", {400}),
            (b"POST /x" + rest + b"Transfer-Encoding: odd\r\n\r\n", {400}),
            (b"TRACE /health" + rest + b"\r\n", {400, 405}),
            (b"GET /" + long + rest + b"\r\n", {400, 414}),
            (b"GET /health" + rest + b"X-Long: " + long + b"\r\n\r\n", {400}),
        ):
            with Connection(self.proxy.port) as connection:
                answer = connection.ask(request)
            self.assertIn(answer.code, codes, request[:80])
            answer.problem(answer.code)

    async def test_plain_http_to_the_tls_port_is_answered_with_a_problem(self: Any) -> None:
        with Connection(self.proxy.tls_port) as connection:
            connection.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").problem(400)


class NginxTests(
    StreamTests, SurfaceTests, Http2Tests, RefusalTests, Http2RefusalTests, ProxyTestCase
):
    skip = lacking(Nginx)
    proxy_type = Nginx
    configuration = settings()


class NginxBelowTests(PathTests, RefusalTests, ProxyTestCase):
    skip = lacking(Nginx)
    proxy_type = Nginx
    below = True
    configuration = settings(BELOW)

    async def test_path_without_a_slash_leads_to_the_page(self) -> None:
        for url in (self.proxy.url, self.proxy.tls_url):
            async with Client(url, trust=self.trust) as client:
                answer = await client.get("")
            self.assertEqual(answer.body, (await self.client.get("/")).body)

    async def test_command_works_over_tls_below_a_path(self) -> None:
        place = ("--repository", self.repository.url, "--commit", self.commit)
        done = await piped(
            self.proxy.tls_url,
            *("evaluate", *place, "--evaluator", "echo hello", "x=1"),
            SSL_CERT_FILE=str(self.proxy.certificate),
        )
        self.assertEqual((done.returncode, done.stdout), (0, "hello\n"), done.stderr)


class NginxStrippingTests(PathTests, ProxyTestCase):
    """nginx, which takes the path away; the daemon has the same settings."""

    skip = lacking(Nginx)
    proxy_type = StrippingNginx
    below = True
    configuration = settings(BELOW)


class NginxSocketTests(FollowingTests, AddressTests, ProxyTestCase):
    skip = lacking(Nginx)
    proxy_type = Nginx
    configuration = settings(trusted="unix")

    def upstream(self) -> str:
        return f"unix:{self.daemon.folder}/socket"

    def options(self) -> tuple[str, ...]:
        return ("--listen", f"{self.upstream()}:mode=660")
