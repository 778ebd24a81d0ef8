"""What holds of the daemon behind any proxy, with the configurations of `etc/proxies`."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.websocket import WebSocketClientEndpoint

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.cases.event_source import EventSource
from tests.cases.web import LINK
from tests.integration.client import Client, Event, SocketReader, failure, python, text
from tests.integration.curl import CurlFailed, Http2Client
from tests.integration.harness import CONFIGURATION, Daemon, DaemonTestCase, until
from tests.integration.proxies import BELOW, Proxy
from tests.integration.raw import BOUNDARY, Connection, body_of, head_of, part
from tests.integration.uploads import DESCRIBE, MIB, described

FORM = f"multipart/form-data; boundary={BOUNDARY}"


class Http2Tests:
    """HTTP/2 as curl speaks it; for a `ProxyTestCase` with `StreamTests` and `SurfaceTests`."""

    async def test_one_connection_has_as_many_streams_as_a_client_may_have(self: Any) -> None:
        identifier = await self.begin_by(self.http2, WAITING)
        path = f"/evaluation/{identifier}/events"
        options = ("--parallel", "--header", "Accept: application/jsonl")
        reading = Deferred.fromCoroutine(
            self.http2.together(self.folder, path, PER_CLIENT, *options)
        )
        files = [self.folder / f"answer-{number + 1}" for number in range(PER_CLIENT)]
        await until(
            lambda: all(file.exists() and b'"one"' in file.read_bytes() for file in files),
            "each stream has begun",
        )
        answer = await self.http2.get("/health")
        self.assertIn("too many requests of this client", answer.problem(503)["detail"])
        self.assertEqual(answer.header("Retry-After"), "5")
        url, certificate = self.proxy.tls_url, self.proxy.certificate
        async with Http2Client(url, certificate, source="127.0.0.2") as another:
            self.assertEqual((await another.get("/health")).code, 200)
        await self.client.cancel(identifier)
        answers, connections = await reading
        self.assertEqual((len(answers), connections), (PER_CLIENT, 1))
        for answer in answers:
            self.assertEqual(answer.code, 200)
            failure(map(json.loads, answer.body.splitlines()), "cancelled")

    async def test_form_refused_while_it_is_sent_leaves_the_connection_usable(self: Any) -> None:
        source = part("submission[a]", b"x" * 300_000, "a")
        for kind, body, path, code in (
            (FORM, body_of([part("submission[Not]", b"x"), source]), "/evaluate", 400),
            ("text/plain", source, "/evaluate", 415),
            (FORM, body_of([source]), "/nowhere", 413),
        ):
            sent = self.folder / "sent"
            sent.write_bytes(body)
            options = ("--header", f"Content-Type: {kind}", "--data-binary", f"@{sent}")
            answers, connections = await self.http2.together(self.folder, path, 2, *options)
            self.assertEqual((len(answers), connections), (2, 1))
            for answer in answers:
                answer.problem(code)

    async def test_form_without_a_length_passes_while_it_is_sent(self: Any) -> None:
        content = bytes(range(256)) * (4 * MIB // 256)
        body = self.describing(content)
        answer: list[bytes] = []
        options = ("--request", "POST", "--upload-file", "-")
        curl = self.http2.begin(answer.append, "/evaluate", *options, Content_Type=FORM)
        half = len(body) // 2
        curl.write(body[:half])
        await until(lambda: self.arrived() > half - MIB, "half of it is there")
        curl.write(body[half:])
        curl.finish()
        (transfer,) = await curl.done
        self.assertEqual((transfer.code, transfer.version), (200, "2"))
        await self.check_described(self.http2, b"".join(answer), content)

    async def test_daemon_learns_that_a_connection_with_streams_has_gone(self: Any) -> None:
        identifier = await self.begin_by(self.http2, WAITING)
        pieces: list[bytes] = []
        path = f"/evaluation/{identifier}/events?n=[1-3]"
        options = ("--parallel", "--header", "Accept: application/jsonl")
        curl = self.http2.begin(pieces.append, path, *options)
        await until(lambda: b"".join(pieces).count(b'"one"') == 3, "each has it")
        self.assertEqual(answered(self.daemon, identifier), [])
        await curl.kill()
        await until(lambda: len(answered(self.daemon, identifier)) == 3, "all streams end")


class Http2RefusalTests:
    async def test_too_large_head_leaves_the_next_request_alone(self: Any) -> None:
        for path, headers in ((f"/{'x' * 40_000}", {}), ("/health", {"X-Long": "x" * 40_000})):
            asking = Deferred.fromCoroutine(self.http2.get(path, headers=headers))
            await self.assertFailure(asking, CurlFailed)
        self.assertEqual((await self.http2.get("/health")).code, 200)


WAITING = "printf one; exec sleep 600"
COUNT = 20_000
# Each line in one write: what is written in parts may become several events.
LINES = python(f"for number in range({COUNT}): print(f'line {{number}}')")
FEWER_LINES = LINES.replace(str(COUNT), "5000")
PRINTED = "".join(f"line {number}\n" for number in range(COUNT))
FEWER_PRINTED = PRINTED.partition("line 5000\n")[0]
PER_CLIENT = 100
"""Requests that a client may have at once: as many as go over one connection of HTTP/2 anywhere."""


def settings(
    base_path: str = "",
    trusted: str = "127.0.0.1",
    more: str = "",
) -> str:
    """Return the configuration of a daemon behind a proxy."""
    return (
        f"{CONFIGURATION}\n[http]\nbase_path = '{base_path}'\n"
        f"trusted_proxies = ['{trusted}']\n"
        f"connections_per_address = {PER_CLIENT}\n"
        f"[log]\nformat = 'json'\naccess = true\n{more}"
    )


def asking(path: str, accept: str) -> bytes:
    """Return a request for a stream."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n".encode()


def lacking(proxy: type[Proxy]) -> str | None:
    """Return why the tests of a proxy are skipped, None if they are not."""
    return None if proxy.find() else f"there is no {proxy.program} (Debian package of that name)"


def answered(daemon: Daemon, identifier: str) -> list[str]:
    """Return the lines of the access log about streams of an evaluation that are over."""
    path = f"/evaluation/{derive_log_pseudonym(identifier)}/events"
    return [line for line in daemon.lines if path in line]


@attrs.define
class Reading:
    """A stream that is read: `pieces` are what has come of it, `ended` fires at its end."""

    pieces: list[bytes] = attrs.field(factory=list)
    ended: Deferred[None] = attrs.field(init=False)

    @classmethod
    def begin(cls, client: Client, path: str, **headers: str) -> Reading:
        reading = cls()
        reading.ended = Deferred.fromCoroutine(client.stream(path, reading.pieces.append, headers))
        return reading

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)

    def lines(self) -> list[Event]:
        return [json.loads(line) for line in self.received.splitlines()]

    def server_sent(self) -> list[Event]:
        """Return the events of server-sent events that have come to their end."""
        source = EventSource()
        source.feed(self.received)
        *events, end = source.events
        assert end.type == "end", end
        return [json.loads(event.data) for event in events]


class ProxyTestCase(DaemonTestCase):
    """One proxy for each test.

    `plain` asks it over HTTP, `secure` over TLS, `http2` over TLS by HTTP/2, and `client` asks
    the daemon itself.
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
        self.http2 = Http2Client(self.proxy.tls_url, self.proxy.certificate)
        self.clients = (self.plain, self.secure, self.http2)
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


class FollowingTests:
    async def test_each_event_passes_before_the_next_is_printed(self: Any) -> None:
        for client in self.clients:
            await self.read_along(client)

    async def follow_by_all(
        self: Any, client: Client, identifier: str
    ) -> tuple[Reading, Reading, SocketReader]:
        """Begin to read by server-sent events, JSON Lines and a WebSocket."""
        path = f"/evaluation/{identifier}/events"
        sent = Reading.begin(client, path, Accept="text/event-stream")
        lines = Reading.begin(client, path, Accept="application/jsonl")
        socket, connected = self.socket(client, identifier)
        await connected
        return sent, lines, socket

    async def read_along(self: Any, client: Client) -> None:
        """Read in all ways while an evaluator waits, and then the end of that."""
        identifier = await self.begin_by(client, WAITING)
        sent, lines, socket = await self.follow_by_all(client, identifier)
        await until(lambda: b'"one"' in sent.received, "server-sent events have it")
        await until(lambda: b'"one"' in lines.received, "JSON Lines have it")
        await until(lambda: '"one"' in "".join(socket.messages), "the WebSocket has it")
        page = await client.page(identifier, wait=10)
        poll = Deferred.fromCoroutine(client.page(identifier, page["end"], wait=30))
        self.assertEqual((await client.status(identifier))["state"], "running")
        await client.cancel(identifier)
        await gatherResults([sent.ended, lines.ended, socket.closed])
        messages = [json.loads(message) for message in socket.messages]
        for events in (sent.server_sent(), lines.lines(), messages, (await poll)["data"]):
            failure(events, "cancelled")


class StreamTests(FollowingTests):
    async def test_all_events_pass_in_order(self: Any) -> None:
        for client in self.clients:
            identifier = await self.begin_by(client, FEWER_LINES)
            sent, lines, socket = await self.follow_by_all(client, identifier)
            await gatherResults([sent.ended, lines.ended, socket.closed])
            messages = [json.loads(message) for message in socket.messages]
            for events in (sent.server_sent(), lines.lines(), messages):
                self.assertTrue(text(events) == FEWER_PRINTED, "not what was printed")
            pages = await client.follow(await self.begin_by(client, FEWER_LINES))
            self.assertTrue(text(pages) == FEWER_PRINTED, "not what was printed")

    async def test_stream_resumes_after_the_proxy_restarts(self: Any) -> None:
        command = (
            f"{LINES.removeprefix('exec ')}; until [ -e ~/gate ]; do sleep 0.1; done; {WAITING}"
        )
        identifier = await self.begin_by(self.plain, command)
        path = f"/evaluation/{identifier}/events"
        sent = Reading.begin(self.plain, path, Accept="text/event-stream")
        sent.ended.addErrback(lambda _: None)
        await until(lambda: len(sent.received) > 100_000, "some have come")
        await self.proxy.stop()
        await sent.ended
        source = EventSource()
        source.feed(sent.received)
        first = [json.loads(event.data) for event in source.events]
        self.proxy.start()
        await self.proxy.ready()
        headers = {"Accept": "text/event-stream", "Last-Event-ID": source.last_event_id}
        rest = Reading.begin(self.plain, path, **headers)
        # The last event follows only now: the first stream may have all that was printed before.
        (home,) = self.daemon.state.glob("evaluations/*/home")
        (home / "gate").touch()
        await until(lambda: b'"one"' in rest.received, "the rest has come")
        await self.plain.cancel(identifier)
        await rest.ended
        events = first + rest.server_sent()
        self.assertTrue(text(events) == PRINTED + "one", "not what was printed")

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
        secure, certificate = self.proxy.tls_url, self.proxy.certificate
        for source, client in {
            "127.0.0.2": Client(self.proxy.url, source="127.0.0.2"),
            "127.0.0.3": Client(secure, trust=self.trust, source="127.0.0.3"),
            "127.0.0.4": Http2Client(secure, certificate, source="127.0.0.4"),
        }.items():
            async with client:
                claims = {"X-Forwarded-For": "192.0.2.1", "Forwarded": "for=192.0.2.1"}
                await client.get(f"/{source}", headers=claims)
            self.assertEqual(await self.logged(f"/{source}"), [source])

    async def logged(self: Any, path: str) -> list[str]:
        """Return from which addresses somebody asked for this."""

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

    async def test_page_and_its_files_pass_unchanged(self: Any) -> None:
        for client in self.clients:
            page = await client.get("/")
            for link in ["", *LINK.findall(page.body.decode())]:
                if not link.startswith("#"):
                    answers = [await each.get(f"/{link}") for each in (client, self.client)]
                    self.assertEqual([answer.code for answer in answers], [200, 200])
                    self.assertEqual(answers[0].body, answers[1].body)
                    kinds = {answer.header("Content-Type") for answer in answers}
                    self.assertEqual(len(kinds), 1)


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
        body = self.describing(content)
        with Connection(self.proxy.port) as connection:
            connection.send(head_of(len(body), target=f"{self.base_path}/evaluate"))
            half = len(body) // 2
            connection.send(body[:half])
            await until(lambda: self.arrived() > half - MIB, "half of it is there")
            connection.send(body[half:])
            answer = connection.answer()
        self.assertEqual(answer.code, 200, answer)
        await self.check_described(self.plain, answer.body, content)

    def describing(self: Any, content: bytes) -> bytes:
        """Return a form with a file of this content, which its evaluator is to describe."""
        fields = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": DESCRIBE,
        }
        parts = [part(name, value.encode()) for name, value in fields.items()]
        return body_of([*parts, part("submission[source]", content, "solution.bin")])

    async def check_described(self: Any, client: Client, answer: bytes, content: bytes) -> None:
        """Hold that the evaluation that has begun with this answer got the file as it was."""
        identifier = json.loads(answer)["evaluation_id"]
        client.evaluations.append(identifier)
        (found,) = (event["payload"] for event in await client.follow(identifier))
        self.assertEqual(found, described(("source", "solution.bin", content)))

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
