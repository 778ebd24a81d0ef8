"""`web.fastpath`: plain polls are answered as on the usual road, byte by byte."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs
import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.web.http import datetimeToString

from tawebeval.config import (
    BufferSettings,
    CallerSettings,
    Configuration,
    HttpSettings,
    LogSettings,
)
from tawebeval.config import ServiceSettings as Process
from tawebeval.web.server import request
from tests.fakes.clients import MULTIPART, Connection, Service, form, parts
from tests.fakes.world import EPOCH
from tests.web.test_problems import RawTestCase
from tests.web.test_routes import END

TOKEN = "tawebeval_a-token"
TOKENS = f"alice sha256:{sha256(TOKEN.encode()).hexdigest()}\n"

CONFIGURATIONS = {
    "usual": Configuration(),
    "origins": Configuration(callers=CallerSettings(origins=("https://judge.example.org",))),
    "little": Configuration(http=HttpSettings(headers=4, line=150, header_bytes=250)),
    "tokens": Configuration(callers=CallerSettings(requests_per_minute=3)),
    "named": Configuration(service=Process(name="a")),
    "below": Configuration(http=HttpSettings(base_path="/judge/a.b")),
    "proxied": Configuration(
        http=HttpSettings(trusted_proxies=("127.0.0.1",), connections_per_address=1),
        log=LogSettings(access=True),
    ),
}

PLAIN = (
    "Host: localhost",
    "Host: localhost:8080",
    "Host: judge.example.org",
    "host:localhost",
    "Accept: */*",
    "Accept: application/json",
    "Accept: text/html, application/json;q=0.5, */*;q=0.1",
    "Accept-Encoding: gzip, deflate",
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64)",
    "Connection: keep-alive",
    "Connection: Keep-Alive",
    "Prefer: wait=2",
    'Prefer: respond-async, wait="3"',
    "Prefer: wait=x",
    "Prefer: Wait=1; x, wait=3",
    "prefer:",
    "Origin: https://judge.example.org",
    "Origin: https://else.example.org",
    "Cookie: a=b; c",
    "X-Odd: \xff",
    "Last-Event-ID: 1",
    "Range: bytes=0-1",
    "If-None-Match: *",
    f"Authorization: Bearer {TOKEN}",
    "Authorization: Bearer another",
    "X-Forwarded-For: 192.0.2.1",
    "X-Forwarded-For: 192.0.2.2, 127.0.0.1",
    "X-Forwarded-For: 2001:db8::1",
    "X-Forwarded-For: 2001:db8::2",
    "X-Forwarded-For: unknown",
    "X-Forwarded-For: _a",
    "X-Forwarded-For: nobody",  # for which a proxy is refused
    "Forwarded: for=192.0.2.3",
)
ODD_HOSTS = ("Host: [::1", "Host: ..", "Host:", "Host: a b")
NOT_PLAIN = (
    *ODD_HOSTS,
    "Host: other.example.org",  # as the second one
    "Accept: text/event-stream",
    "Accept: text/html",
    "Connection: close",
    "Connection: Upgrade",
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Expect: 100-continue",
    "Content-Length: 0",
    "Content-Length: 00",
    "Content-Length: 5",
    "Content-Length: x",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: identity",
    "X : y",
    " X: y",
    "no colon",
    ": y",
    "X: \0",
    "X: a\nb",
    "X: a\rb",
    "X: " + "y" * 4096,
)
QUERIES = (
    *("", "?", "?after=", "?after=0", "?after=1", "?after=2", "?after=4", f"?after={END}"),
    *("?wait=0", "?wait=2", "?after=0&wait=2", "?after=2&wait=3", "?after=4&wait=999999999"),
    *("?wait=2&after=1", "?after=1&", "?after=1&after=2", "?wait=1&wait=2", "?after=1wait=2"),
    *("?after=x", "?after=-1", "?after=99", "?after=00", "?after=%31", "?after=1&skip=1"),
    *("?wait=", "?wait=x", "?wait=2147483647", "?wait=1000000000000000", "?&"),
    *("?after=" + "9" * 200, "?after=1#x"),
    *("?limit=1", "?after=0&limit=40", "?after=&wait=2&limit=99", "?after=1&wait=2&limit=1"),
    *("?limit=1&after=1", "?wait=2&", "?limit=999999999999999", "?limit=1&", "?limit=01"),
    *("?limit=0", "?limit=", "?limit=-1", "?limit=x", "?limit=1000000000000000"),
    *("?limit=1&limit=1", "?limit=%31", "?after=1limit=1", "?after=1&wait=2limit=1"),
)
STARTS = st.sampled_from(["GET"] * 12 + ["HEAD", "POST", "get", "OPTIONS", "", "\r\nGET"])
VERSIONS = st.sampled_from(["HTTP/1.1"] * 12 + ["HTTP/1.0", "HTTP/1.2", "http/1.1", ""])
PATHS = st.sampled_from(
    ["/evaluation/ID/events"] * 12
    + ["/evaluation/NONE/events", "/evaluation/x/events", "//evaluation//ID/events"]
    + ["http://localhost/evaluation/ID/events", "/evaluation/ID/event%73", "/health"]
    + ["/judge/a.b/evaluation/ID/events"] * 4
    + ["//judge//a.b//evaluation/ID/events", "http://localhost/judge/a.b/evaluation/ID/events"]
    + ["/judge/a.b", "/judge/a_b/evaluation/ID/events", "/judge/a.b/judge/a.b/evaluation/ID/events"]
)
FIELDS = st.lists(
    st.sampled_from(PLAIN) | st.sampled_from(PLAIN + NOT_PLAIN), max_size=6, unique=True
)


def asking(query: str, *headers: str) -> bytes:
    """Return a request for a page."""
    first = f"GET /evaluation/ID/events{query} HTTP/1.1"
    return "\r\n".join([first, *with_host(headers), "", ""]).encode("latin-1")


def with_host(headers: Sequence[str]) -> list[str]:
    """Return headers, among them the name of a host."""
    named = any(header.lower().startswith("host:") for header in headers)
    return [*headers] if named else ["Host: localhost", *headers]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draw a request, most of them for a page, many of them plain."""
    target = draw(PATHS) + draw(st.sampled_from(QUERIES))
    first = f"{draw(STARTS)} {target} {draw(VERSIONS)}"
    fields = draw(FIELDS)
    if draw(st.sampled_from([True] * 12 + [False])):
        fields = with_host(fields)
    return "\r\n".join([first, *fields, "", ""]).encode("latin-1")


HOSTLESS = b"GET /evaluation/ID/events HTTP/1.1\r\n\r\n"

# A request, on one of two connections, and at which byte it is cut; or what happens besides.
ASKING = st.tuples(requests(), st.integers(0, 1), st.none() | st.integers(1, 300))
BESIDES = st.sampled_from(["print", "end", "second", "leave", "stop"])
STEPS = st.lists(st.one_of(ASKING, ASKING, ASKING, BESIDES), max_size=8)

_DATE = re.compile(rb"Date: [^\r]*")


class UsualRoad:
    """In place of the shortcut: none."""

    def take(self, data: bytes) -> bool:
        """Take nothing."""
        return False


@attrs.define
class World:
    """A service with one evaluation and two clients, with the shortcut or without."""

    root: Path
    configuration: Configuration
    tokens: bool
    shortcut: bool
    service: Service = attrs.field(init=False)
    identifier: str = attrs.field(init=False)
    clients: list[Connection] = attrs.field(init=False)
    ended: bool = False

    def __attrs_post_init__(self) -> None:
        self.root.mkdir()
        tokens = self.root / "tokens" if self.tokens else None
        if tokens is not None:
            tokens.write_text(TOKENS)
        self.service = Service(self.root, self.configuration, tokens=tokens)
        client = self.service.connect()
        headers = {"Content_Type": MULTIPART, "Authorization": f"Bearer {TOKEN}"}
        client.request("POST /evaluate", form(parts()), **headers)
        self.identifier = client.answer().json()["evaluation_id"]
        client.lose()
        self.clients = [self.connect(), self.connect()]

    def connect(self) -> Connection:
        """Return a new client."""
        connection = self.service.connect()
        if not self.shortcut:
            connection.channel.fast_path = UsualRoad()
        return connection

    def take(self, step: Any) -> None:
        """Let something happen."""
        child = self.service.world.child
        if step == "print":
            if not self.ended:
                child.print(b"a\nb\n")
        elif step == "end":
            if not self.ended:
                self.ended = True
                child.end()
                self.service.world.turn()
        elif step == "second":
            self.service.reactor.advance(1)
        elif step == "leave":
            self.clients[0].lose()
            self.clients[0] = self.connect()
        elif step == "stop":
            self.service.site.presence.leaving = True
        else:
            self.ask(*step)

    def ask(self, request: bytes, number: int, cut: int | None) -> None:
        """Send a request; with a cut a part of it, then the rest, and the same once more."""
        request = request.replace(b"ID", self.identifier.encode())
        request = request.replace(b"NONE", b"a" * len(self.identifier))
        for piece in (request,) if cut is None else (request[:cut], request[cut:] + request):
            client = self.clients[number]
            if piece and not client.closed:
                client.send(piece)

    def seen(self) -> list[Any]:
        """Return all that can be seen, from outside and of what is kept."""
        records = self.service.registry._records
        rings = [record.evaluation.ring for record in records._records.values()]
        return [
            *(_DATE.sub(b"Date:", client.received) for client in self.clients),
            *((client.closed, client.aborted) for client in self.clients),
            *((ring.oldest, ring.newest) for ring in rings),
            *(len(record.evaluation.changed) for record in records._records.values()),
            *(client.channel.phase for client in self.clients),
        ]

    def close(self) -> None:
        """End everything."""
        for client in self.clients:
            client.lose()
        closed = Deferred.fromCoroutine(self.service.registry.close())
        self.service.world.end()
        self.service.reactor.advance(5)
        assert closed.called
        left = [call.getTime() for call in self.service.reactor.getDelayedCalls()]
        assert not left, left


def check_alike(
    kind: str, steps: Iterable[Any], check: Callable[[World], object] = lambda world: None
) -> None:
    """Hold that both roads lead to the same, step by step; `check` more of one of them."""
    root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
    try:
        worlds = [
            World(root / name, CONFIGURATIONS[kind], kind == "tokens", name == "short")
            for name in ("short", "usual")
        ]
        for step in steps:
            for world in worlds:
                world.take(step)
            short, usual = (world.seen() for world in worlds)
            assert short == usual, step
            check(worlds[0])
        for world in worlds:
            world.close()
    finally:
        shutil.rmtree(root)


class EqualityTests(RawTestCase):
    """The shortcut and the usual road, side by side."""

    @settings(deadline=None, max_examples=100)
    @example("usual", [(asking("?after=1wait=2"), 0, None)])
    @example(
        "tokens", [(asking("", f"Authorization: Bearer {TOKEN}", "Host: a", "Host: b"), 0, None)]
    )
    @example("usual", [(asking("", "Host: .."), 0, None)])
    @example("usual", [(HOSTLESS, 0, None)])
    @example("usual", ["stop", (asking("?wait=0", "Host: a"), 0, None)])
    @example("little", [(asking("", *["X: y"] * 5), 0, None)])
    @example("little", [(asking("?after=" + "9" * 100), 0, None)])
    @example("little", [(asking("", "X: " + "y" * 100, "Y: " + "y" * 100), 0, None)])
    @given(st.sampled_from(sorted(CONFIGURATIONS)), STEPS)
    def test_bytes(self, kind: str, steps: list[Any]) -> None:
        """Whatever is asked, in whatever state, each client gets the same bytes."""
        check_alike(kind, steps)
        self.flushLoggedErrors()


class ShortcutTests(RawTestCase):
    """What takes the shortcut, and what must hold there as elsewhere."""

    configuration = Configuration(
        buffers=BufferSettings(evaluation=4096, page=1024),
        http=HttpSettings(idle=40, window=20, rate=1024),
    )

    def setUp(self) -> None:
        super().setUp()
        self.made = 0
        make = request.ApiRequest.__init__

        def count(request: request.ApiRequest, *arguments: Any, **more: Any) -> None:
            self.made += 1
            make(request, *arguments, **more)

        self.identifier = self.evaluate()
        self.patch(request.ApiRequest, "__init__", count)

    def poll(self, query: str = "", *headers: str) -> bytes:
        """Return a request for a page."""
        return asking(query, *headers).replace(b"ID", self.identifier.encode())

    def test_plain(self) -> None:
        """No request is made for a plain poll, such as clients send them."""
        for query in (
            *("?wait=0", "?after=0&wait=0", "?after=&wait=0", "?after=0&wait=1"),
            *("?wait=1&limit=9", "?after=0&wait=1&limit=9", "?after=&wait=0&limit=1"),
        ):
            for header in PLAIN:
                connection = self.connect()
                connection.send(self.poll(query, header))
                self.service.reactor.advance(1)
                self.assertEqual(connection.answer().status, 200)
                connection.lose()
        self.assertEqual(self.made, 0)

    def test_names(self) -> None:
        """Nor for one of a daemon's with a name, or of another's: that is not known here."""
        connection = self.connect()
        connection.send(self.poll().replace(b"/evaluation/", b"/evaluation/a-"))
        self.check_raw(connection.answer(), 404)
        self.assertEqual(self.made, 0)

    def test_not_plain(self) -> None:
        """One is made for all others."""
        for header in NOT_PLAIN:
            before = self.made
            hosts = ["Host: localhost"] if header == "Host: other.example.org" else []
            self.connect().send(self.poll("", *hosts, header))
            self.assertEqual(self.made, before + 1, header)
        connection = self.connect()
        connection.send(HOSTLESS.replace(b"ID", self.identifier.encode()))
        self.check_raw(connection.answer(), 400)
        for start in (b"HEAD", b"POST"):
            before = self.made
            self.connect().send(self.poll().replace(b"GET", start))
            self.assertEqual(self.made, before + 1, start)

    def test_reconfigured(self) -> None:
        """What was made of a connection's headers does not outlive the configuration."""
        connection = self.connect()
        for origins, expected in (
            (("*",), "*"),
            (("https://a.example",), "https://a.example"),
            (("https://b.example",), None),
        ):
            api, before = self.service.api, self.service.api.configuration
            callers = msgspec.structs.replace(before.callers, origins=origins)
            api.configuration = msgspec.structs.replace(before, callers=callers)
            connection.send(self.poll("?wait=0", "Origin: https://a.example"))
            headers = connection.answer().headers
            self.assertEqual(headers.get("access-control-allow-origin"), expected)
        self.assertEqual(self.made, 0)

    def test_headers_of_their_own(self) -> None:
        """What one request said in its headers does not hold of the next."""
        connection = self.connect()
        connection.send(self.poll("", "Prefer: wait=2"))
        self.assertEqual(connection.received, b"")
        self.service.reactor.advance(2)
        self.assertIn("Preference-Applied", connection.answer().headers)
        connection.send(self.poll("", "Prefer: wait=x"))
        self.assertIn("Retry-After", connection.answer().headers)
        self.assertEqual(self.made, 0)

    def test_empty_lines(self) -> None:
        """An empty line before each request is passed over, wherever it ends (RFC 9112, 2.2)."""
        connection = self.connect()
        for made in (1, 2, 3):
            for piece in (b"\r\n", self.poll()):
                connection.send(piece)
            self.assertEqual(connection.answer().status, 200)
            self.assertEqual(self.made, made)
        connection.send(self.poll())
        self.assertEqual(connection.answer().status, 200)
        self.assertEqual(self.made, 3)

    def test_gone(self) -> None:
        """A client that goes away while it waits leaves nothing, and the events stay."""
        calls = len(self.service.reactor.getDelayedCalls())
        evaluation = self.service.registry._records[self.identifier].evaluation
        connection = self.connect()
        connection.send(self.poll("?wait=20"))
        self.assertEqual(len(evaluation.changed), 1)
        connection.lose()
        self.assertEqual(len(evaluation.changed), 0)
        self.assertEqual(len(self.service.reactor.getDelayedCalls()), calls)
        self.child.print(b"a\n")
        self.assertEqual(len(self.page(self.identifier)["data"]), 1)

    def test_behind_one_that_waits(self) -> None:
        """What is sent behind a poll that waits is answered after it, and not kept without end."""
        connection = self.connect()
        connection.send(self.poll("?wait=20"))
        for _ in range(200):
            if connection.transport.producerState == "producing":
                connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        self.assertEqual(connection.received, b"")
        self.assertEqual(connection.transport.producerState, "paused")
        self.assertLess(sum(map(len, connection.channel._dataBuffer)), 20_000)
        self.child.print(b"a\n")
        connection.settle()
        found = re.findall(rb'{"(begin|status)"', connection.received)
        self.assertEqual(found[:2], [b"begin", b"status"])
        self.assertEqual(found.count(b"begin"), 1)
        self.assertGreater(len(found), 100)
        self.assertEqual(connection.transport.producerState, "producing")

    def test_date(self) -> None:
        """It is dated by the time of day, whatever clock there is for deadlines."""
        connection = self.connect()
        connection.send(self.poll())
        shown = datetimeToString(EPOCH + self.service.reactor.seconds())
        self.assertIn(b"\r\nDate: %b\r\n" % shown, connection.received)

    def test_answer_not_taken(self) -> None:
        """While an answer is not taken the next is not made; nor is it waited for for ever."""
        connection = self.connect()
        connection.take_no_more()
        for count in (1, 3, 5):
            connection.send(self.poll())
            connection.send(self.poll())
            self.assertEqual(connection.received.count(b"200 OK"), count)
            for _ in range(2):
                connection.channel.resumeProducing()
                self.assertEqual(connection.received.count(b"200 OK"), count + 1)
        self.assertEqual(self.made, 0)

    def test_never_taken(self) -> None:
        """Who takes an answer no more is cut off soon, however much it has taken before."""
        connection = self.connect()
        for _ in range(200):
            connection.send(self.poll())
        connection.channel.pauseProducing()
        for _ in range(19):
            self.service.reactor.advance(1)
        self.assertFalse(connection.aborted)
        for _ in range(2):
            self.service.reactor.advance(1)
        self.assertTrue(connection.aborted)

    def test_idle(self) -> None:
        """A connection is closed when it is idle, not while its poll waits."""
        connection = self.connect()
        connection.send(self.poll("?wait=30"))
        for _ in range(29):
            self.service.reactor.advance(1)
        self.assertFalse(connection.closed)
        self.service.reactor.advance(1)
        self.assertEqual(connection.answer().status, 200)
        self.service.reactor.advance(39.9)
        self.assertFalse(connection.closed)
        self.service.reactor.advance(0.2)
        self.assertTrue(connection.closed)
        self.assertEqual(self.made, 0)

    def test_defect(self) -> None:
        """A defect of ours is logged and answered as such, at once or later."""
        for query in ("", "?wait=20"):
            connection = self.connect()
            if query:
                connection.send(self.poll(query))
            self.patch(self.service.registry, "read_page", lambda *_: 1 // 0)
            if query:
                self.child.print(b"a\n")
            else:
                connection.send(self.poll(query))
            answer = connection.answer()
            self.assertEqual(answer.status, 500)
            self.assertEqual(answer.headers["Content-Type"], "application/problem+json")
            self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
            connection.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(connection.answer().status, 200)
            del self.service.registry.read_page
