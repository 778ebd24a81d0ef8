"""The daemon behind nginx: over TCP and a UNIX socket, and with the path taken away."""

from __future__ import annotations

from tests.integration.client import Client
from tests.integration.proxies import BELOW, Nginx, StrippingNginx
from tests.integration.proxy_case import (
    FollowingTests,
    ProxyTestCase,
    SurfaceTests,
    lacking,
    settings,
)
from tests.integration.terminal import piped


class NginxTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """nginx."""

    skip = lacking(Nginx)
    proxy_type = Nginx
    configuration = settings()


class NginxBelowTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """nginx, below a path."""

    skip = lacking(Nginx)
    proxy_type = Nginx
    below = True
    configuration = settings(BELOW)

    async def test_path_alone(self) -> None:
        """Who leaves out the slash behind the path is sent to the page."""
        for url in (self.proxy.url, self.proxy.tls_url):
            async with Client(url, trust=self.trust) as client:
                answer = await client.get("")
            self.assertEqual(answer.body, (await self.client.get("/")).body)

    async def test_command(self) -> None:
        """The command works over TLS, with the path in its server's URL."""
        place = ("--repository", self.repository.url, "--commit", self.commit)
        done = await piped(
            self.proxy.tls_url,
            *("evaluate", *place, "--evaluator", "echo hello", "x=1"),
            SSL_CERT_FILE=str(self.proxy.certificate),
        )
        self.assertEqual((done.returncode, done.stdout), (0, "hello\n"), done.stderr)


class NginxStrippingTests(SurfaceTests, ProxyTestCase):
    """nginx, which takes the path away; the daemon has the same settings."""

    skip = lacking(Nginx)
    proxy_type = StrippingNginx
    below = True
    configuration = settings(BELOW)


class NginxSocketTests(FollowingTests, SurfaceTests, ProxyTestCase):
    """nginx, which finds the daemon at a UNIX socket."""

    skip = lacking(Nginx)
    proxy_type = Nginx
    configuration = settings(trusted="unix")

    def upstream(self) -> str:
        """Return the socket."""
        return f"unix:{self.daemon.folder}/socket"

    def options(self) -> tuple[str, ...]:
        """Listen there, too."""
        return ("--listen", f"{self.upstream()}:mode=660")
