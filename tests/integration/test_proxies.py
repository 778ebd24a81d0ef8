"""The daemon behind nginx, HAProxy and Caddy."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, ClassVar

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.websocket import WebSocketClientEndpoint

from tests.integration.client import Client, SocketReader, failure, text
from tests.integration.harness import DaemonTestCase, until
from tests.integration.proxies import (
    BELOW,
    WAITING,
    Caddy,
    HAProxy,
    HAProxyBeforeSeveral,
    Nginx,
    Proxy,
    answered,
    lacking,
    settings,
)
from tests.integration.raw import Connection, body_of, head_of, part
from tests.integration.terminal import piped

MIB = 2**20


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
        return BELOW if self.below else ""

    async def begin_by(self, client: Client, command: str) -> str:
        return await client.evaluate(self.repository.url, self.commit, command)

    def upstream(self) -> str:
        return f"127.0.0.1:{self.daemon.port}"

    def socket(self, client: Client, identifier: str) -> tuple[SocketReader, Deferred[Any]]:
        """Return what reads a WebSocket, and what fires when that is connected."""
        reader = SocketReader()
        url = f"ws{client.url.removeprefix('http')}/evaluation/{identifier}/events"
        endpoint = WebSocketClientEndpoint.new(reactor, url, self.trust)
        return reader, Deferred.fromCoroutine(endpoint.connect(reader))


def asking(path: str, accept: str) -> bytes:
    """Return a request for a stream."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n".encode()


class FollowingTests:
    async def test_each_event_passes_before_the_next_is_printed(self: Any) -> None:
        for client in self.clients:
            identifier = await self.begin_by(client, WAITING)
            path = f"/evaluation/{identifier}/events"
            received: dict[str, list[Any]] = {"text/event-stream": [], "application/jsonl": []}
            ended = [
                Deferred.fromCoroutine(client.stream(path, pieces.append, {"Accept": accept}))
                for accept, pieces in received.items()
            ]
            socket, connected = self.socket(client, identifier)
            await connected
            received["WebSocket"] = socket.messages
            for name, pieces in received.items():
                await until(lambda pieces=pieces: '"one"' in str(pieces), f"{name} has it")
            page = await client.page(identifier, wait=10)
            poll = Deferred.fromCoroutine(client.page(identifier, page["end"], wait=30))
            self.assertEqual((await client.status(identifier))["state"], "running")
            await client.cancel(identifier)
            await gatherResults([*ended, socket.closed])
            failure((await poll)["data"], "cancelled")
            for name, pieces in received.items():
                self.assertIn('"reason":"cancelled"', str(pieces), name)


class StreamTests(FollowingTests):
    async def test_daemon_learns_that_quiet_readers_have_left(self: Any) -> None:
        identifier = await self.begin_by(self.plain, WAITING)
        path = f"{self.base_path}/evaluation/{identifier}/events"
        connections = [Connection(self.proxy.port) for _ in range(2)]
        for connection, accept in zip(
            connections, ("text/event-stream", "application/jsonl"), strict=True
        ):
            connection.send(asking(path, accept))
            connection.read_until(b'"one"')
        self.assertEqual(answered(self.daemon, identifier), [])
        for connection in connections:
            connection.close()
        await until(lambda: len(answered(self.daemon, identifier)) == 2, "both streams end")


class AddressTests:
    async def test_log_has_the_address_of_the_client_whatever_it_claims(self: Any) -> None:
        for source, client in {
            "127.0.0.2": Client(self.proxy.url, source="127.0.0.2"),
            "127.0.0.3": Client(self.proxy.tls_url, trust=self.trust, source="127.0.0.3"),
        }.items():
            async with client:
                claims = {"X-Forwarded-For": "192.0.2.1", "Forwarded": "for=192.0.2.1"}
                await client.get(f"/{source}", headers=claims)
            self.assertEqual(await self.logged(f"/{source}"), [source])

    async def logged(self: Any, path: str) -> list[str]:
        def lines() -> list[str]:
            found = (json.loads(line) for line in self.daemon.lines)
            return [line["client"] for line in found if line.get("path") == path]

        found: list[str] = await until(lines, "it is in the log")
        return found


class PathTests:
    async def test_links_lead_back_through_the_proxy(self: Any) -> None:
        base = BELOW if self.below else ""
        answer = await self.plain.post(self.repository.url, self.commit, WAITING)
        location = answer.header("Location")
        self.assertEqual(location, f"{base}/evaluation/{answer.json['evaluation_id']}")
        page = await self.plain.get(f"{location.removeprefix(base)}/events?wait=10")
        link = page.header("Link").partition("<")[2].partition(">")[0]
        self.assertTrue(link.startswith(f"{location}/events?after="), link)
        following = await self.plain.get(link.removeprefix(base))
        self.assertEqual(following.json["begin"], page.json["end"])


class SurfaceTests(AddressTests, PathTests):
    async def test_errors_and_preflights_pass_unchanged(self: Any) -> None:
        for client in self.clients:
            for method, path, code in (
                ("GET", "/nowhere", 404),
                ("PUT", "/evaluate", 405),
                ("POST", "/evaluate", 415),
                ("GET", "/metrics", 403),
                ("GET", f"/evaluation/{'a' * 40}/events", 404),
            ):
                (await client.request(method, path)).problem(code)
            answer = await client.request("OPTIONS", "/evaluate")
            self.assertEqual(answer.code, 204)
            self.assertIn("POST", answer.header("Access-Control-Allow-Methods"))
        # As clients of 2018 join paths.
        answer = await self.plain.get("//evaluation//x")
        self.assertIn("no such evaluation", answer.problem(404)["detail"])

    async def test_large_form_passes_while_it_is_sent(self: Any) -> None:
        content = bytes(range(256)) * (12 * MIB // 256)
        fields = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": "basename $SUBMISSION_FILE_SOURCE; sha256sum <$SUBMISSION_FILE_SOURCE",
        }
        parts = [part(name, value.encode()) for name, value in fields.items()]
        body = body_of([*parts, part("submission[source]", content, "solution.bin")])
        with Connection(self.proxy.port) as connection:
            connection.send(head_of(len(body), target=f"{self.base_path}/evaluate"))
            half = len(body) // 2
            connection.send(body[:half])
            await until(lambda: self.arrived() > half - MIB, "half of it is there")
            connection.send(body[half:])
            answer = connection.answer()
        self.assertEqual(answer.code, 200, answer)
        identifier = json.loads(answer.body)["evaluation_id"]
        self.plain.evaluations.append(identifier)
        printed = text(await self.plain.follow(identifier))
        self.assertEqual(printed, f"solution.bin\n{sha256(content).hexdigest()}  -\n")

    def arrived(self: Any) -> int:
        """Return how many bytes of forms are on the daemon's disk."""
        files = (self.daemon.state / "uploads").rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())

    async def test_form_over_the_limit_is_refused_before_its_end(self: Any) -> None:
        with Connection(self.proxy.port) as connection:
            connection.send(head_of(200 * MIB, target=f"{self.base_path}/evaluate"))
            connection.send_until_answered(b"x" * (100 * MIB))
            self.assertEqual(connection.answer().problem(413)["limit"], 64 * MIB)

    async def test_stopped_daemon_is_answered_with_a_503_document(self: Any) -> None:
        await self.daemon.kill()
        for client in self.clients:
            answer = await client.get("/health")
            answer.problem(503)
            self.assertEqual(answer.header("Retry-After"), "5")
        self.daemon.start(*self.options())
        await self.daemon.ready()
        for client in self.clients:
            self.assertEqual((await client.get("/health")).code, 200)


class BrokenHeadTests:
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


class NginxTests(StreamTests, SurfaceTests, BrokenHeadTests, ProxyTestCase):
    skip = lacking(Nginx)
    proxy_type = Nginx
    configuration = settings()


class NginxBelowTests(PathTests, BrokenHeadTests, ProxyTestCase):
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


class NginxSocketTests(FollowingTests, AddressTests, ProxyTestCase):
    skip = lacking(Nginx)
    proxy_type = Nginx
    configuration = settings(trusted="unix")

    def upstream(self) -> str:
        return f"unix:{self.daemon.folder}/socket"

    def options(self) -> tuple[str, ...]:
        return ("--listen", f"{self.upstream()}:mode=660")


class HAProxyTests(StreamTests, SurfaceTests, ProxyTestCase):
    skip = lacking(HAProxy)
    proxy_type = HAProxy
    configuration = settings()


class HAProxyBelowTests(PathTests, ProxyTestCase):
    skip = lacking(HAProxy)
    proxy_type = HAProxy
    below = True
    configuration = settings(BELOW)


class HAProxyBeforeSeveralTests(FollowingTests, AddressTests, ProxyTestCase):
    """HAProxy before several daemons. All are the same one here; `test_several` has three."""

    skip = lacking(HAProxyBeforeSeveral)
    proxy_type = HAProxyBeforeSeveral
    configuration = settings()
    daemon_name = "a"

    def upstream(self) -> str:
        return " ".join([super().upstream()] * 3)


class CaddyTests(StreamTests, SurfaceTests, ProxyTestCase):
    skip = lacking(Caddy)
    proxy_type = Caddy
    configuration = settings()

    async def test_http3_is_not_announced(self) -> None:
        answer = await self.secure.get("/health")
        self.assertIsNone(answer.header("Alt-Svc"))

    async def test_too_large_head_is_refused_by_the_daemon(self) -> None:
        with Connection(self.proxy.port) as connection:
            head = f"GET /{'x' * 40_000} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.ask(head.encode()).problem(414)


class CaddyBelowTests(PathTests, ProxyTestCase):
    skip = lacking(Caddy)
    proxy_type = Caddy
    below = True
    configuration = settings(BELOW)
