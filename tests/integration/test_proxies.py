"""The daemon behind nginx, HAProxy and Caddy."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

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
    """One daemon, which listens on TCP and on a UNIX socket, and one proxy after another before it.

    `plain` asks the proxy over HTTP, `secure` over TLS, and `client` asks the daemon itself.
    """

    skip = lacking(Nginx) or lacking(HAProxy) or lacking(Caddy)
    configuration = settings()
    daemon_name = "a"  # HAProxy before several daemons finds evaluations by it
    proxy: Proxy

    @property
    def unix_upstream(self) -> str:
        return f"unix:{self.daemon.folder}/socket"

    def options(self) -> tuple[str, ...]:
        return ("--listen", f"{self.unix_upstream}:mode=660")

    async def put_before(
        self, proxy_type: type[Proxy], upstream: str = "", below: bool = False
    ) -> None:
        """Put a proxy before the daemon, in place of the one before."""
        self.proxy = proxy_type(upstream or f"127.0.0.1:{self.daemon.port}", below)
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

    async def begin_by(self, client: Client, command: str) -> str:
        return await client.evaluate(self.repository.url, self.commit, command)

    def socket(self, client: Client, identifier: str) -> tuple[SocketReader, Deferred[Any]]:
        """Return what reads a WebSocket, and what fires when that is connected."""
        reader = SocketReader()
        url = f"ws{client.url.removeprefix('http')}/evaluation/{identifier}/events"
        endpoint = WebSocketClientEndpoint.new(reactor, url, self.trust)
        return reader, Deferred.fromCoroutine(endpoint.connect(reader))

    async def check_following(self) -> None:
        """Hold that each event passes before the next one is printed."""
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

    async def check_leaving(self) -> None:
        """Hold that the daemon learns that quiet readers have left."""
        identifier = await self.begin_by(self.plain, WAITING)
        path = f"/evaluation/{identifier}/events"
        head = "GET {} HTTP/1.1\r\nHost: localhost\r\nAccept: {}\r\n\r\n"
        connections = [Connection(self.proxy.port) for _ in range(2)]
        for connection, accept in zip(
            connections, ("text/event-stream", "application/jsonl"), strict=True
        ):
            connection.send(head.format(path, accept).encode())
            connection.read_until(b'"one"')
        self.assertEqual(answered(self.daemon, identifier), [])
        for connection in connections:
            connection.close()
        await until(lambda: len(answered(self.daemon, identifier)) == 2, "both streams end")

    async def check_address(self) -> None:
        """Hold that the log has the address of the client, whatever it claims."""
        for source, client in {
            "127.0.0.2": Client(self.proxy.url, source="127.0.0.2"),
            "127.0.0.3": Client(self.proxy.tls_url, trust=self.trust, source="127.0.0.3"),
        }.items():
            path = f"/{source}/{self.proxy.port}"
            async with client:
                claims = {"X-Forwarded-For": "192.0.2.1", "Forwarded": "for=192.0.2.1"}
                await client.get(path, headers=claims)
            self.assertEqual(await self.logged(path), [source])

    async def logged(self, path: str) -> list[str]:
        def lines() -> list[str]:
            found = (json.loads(line) for line in self.daemon.lines)
            return [line["client"] for line in found if line.get("path") == path]

        found: list[str] = await until(lines, "it is in the log")
        return found

    async def check_errors(self) -> None:
        """Hold that errors and preflights pass unchanged."""
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

    async def check_large_form(self) -> None:
        """Hold that a large form passes while it is sent."""
        content = bytes(range(256)) * (12 * MIB // 256)
        fields = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": "basename $SUBMISSION_FILE_SOURCE; sha256sum <$SUBMISSION_FILE_SOURCE",
        }
        parts = [part(name, value.encode()) for name, value in fields.items()]
        body = body_of([*parts, part("submission[source]", content, "solution.bin")])
        with Connection(self.proxy.port) as connection:
            connection.send(head_of(len(body), target="/evaluate"))
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

    def arrived(self) -> int:
        """Return how many bytes of forms are on the daemon's disk."""
        files = (self.daemon.state / "uploads").rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())

    async def check_too_large_form(self) -> None:
        """Hold that a form over the limit is refused before its end."""
        with Connection(self.proxy.port) as connection:
            connection.send(head_of(200 * MIB, target="/evaluate"))
            connection.send_until_answered(b"x" * (100 * MIB))
            self.assertEqual(connection.answer().problem(413)["limit"], 64 * MIB)

    async def check_stopped_daemon(self) -> None:
        """Hold that the proxy answers for a stopped daemon by a document."""
        await self.daemon.kill()
        for client in self.clients:
            answer = await client.get("/health")
            answer.problem(503)
            self.assertEqual(answer.header("Retry-After"), "5")
        self.daemon.start(*self.options())
        await self.daemon.ready()
        for client in self.clients:
            self.assertEqual((await client.get("/health")).code, 200)

    async def check_broken_heads(self) -> None:
        """Hold that broken heads are answered with problems."""
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

    async def check_links(self) -> None:
        """Hold that links lead back through the proxy."""
        answer = await self.plain.post(self.repository.url, self.commit, WAITING)
        location = answer.header("Location")
        self.assertEqual(location, f"{BELOW}/evaluation/{answer.json['evaluation_id']}")
        page = await self.plain.get(f"{location.removeprefix(BELOW)}/events?wait=10")
        link = page.header("Link").partition("<")[2].partition(">")[0]
        self.assertTrue(link.startswith(f"{location}/events?after="), link)
        following = await self.plain.get(link.removeprefix(BELOW))
        self.assertEqual(following.json["begin"], page.json["end"])


class ProxyTests(ProxyTestCase):
    async def check_all(self, proxy_type: type[Proxy]) -> None:
        await self.put_before(proxy_type)
        await self.check_following()
        await self.check_leaving()
        await self.check_address()
        await self.check_errors()
        await self.check_large_form()
        await self.check_too_large_form()
        await self.check_stopped_daemon()

    async def test_nginx_passes_streams_forms_and_errors(self) -> None:
        await self.check_all(Nginx)
        await self.check_broken_heads()
        with Connection(self.proxy.tls_port) as connection:
            connection.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").problem(400)

    async def test_nginx_reaches_the_daemon_by_a_unix_socket(self) -> None:
        await self.put_before(Nginx, self.unix_upstream)
        await self.check_following()
        await self.check_address()

    async def test_haproxy_passes_streams_forms_and_errors(self) -> None:
        await self.check_all(HAProxy)

    async def test_caddy_passes_streams_forms_and_errors_and_announces_no_http3(self) -> None:
        await self.check_all(Caddy)
        self.assertIsNone((await self.secure.get("/health")).header("Alt-Svc"))
        with Connection(self.proxy.port) as connection:
            head = f"GET /{'x' * 40_000} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.ask(head.encode()).problem(414)


class PathPrefixTests(ProxyTestCase):
    """The daemon below a path of the proxy."""

    configuration = settings(BELOW)

    async def test_links_include_the_path_prefix_of_each_proxy(self) -> None:
        for proxy_type in (Nginx, HAProxy, Caddy):
            await self.put_before(proxy_type, below=True)
            await self.check_links()

    async def test_nginx_serves_page_and_command_below_the_path(self) -> None:
        await self.put_before(Nginx, below=True)
        await self.check_broken_heads()
        for url in (self.proxy.url, self.proxy.tls_url):
            async with Client(url, trust=self.trust) as client:
                answer = await client.get("")
            self.assertEqual(answer.body, (await self.client.get("/")).body)
        place = ("--repository", self.repository.url, "--commit", self.commit)
        command = ("evaluate", *place, "--evaluator", "echo hello", "x=1")
        certificate = str(self.proxy.certificate)
        done = await piped(self.proxy.tls_url, *command, SSL_CERT_FILE=certificate)
        self.assertEqual((done.returncode, done.stdout), (0, "hello\n"), done.stderr)
