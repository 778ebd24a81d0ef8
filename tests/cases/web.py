"""Cases of tests over HTTP: a service over fakes, in memory, with all its clients."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from treq.testing import RequestTraversalAgent
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tawebeval.config import (
    CallerSettings,
    Configuration,
    EventBufferSettings,
    HttpSettings,
    LimitSettings,
    LongPollSettings,
)
from tawebeval.core.tokens import generate_token
from tawebeval.web import streams
from tests.cases import described
from tests.cases.settings import with_constants
from tests.fakes.children import FakeChild
from tests.fakes.clients import (
    MULTIPART,
    Answer,
    Connection,
    Service,
    dash_names,
    form,
    head,
    parts,
)
from tests.fakes.streams import Follower, SocketFollower
from tests.fakes.world import read_again

Tokens = Mapping[str, Mapping[str, Any]]

END = "end"
BASE = "http://localhost:8080"


class WebTestCase(SynchronousTestCase):
    """A service over a world of fakes, and clients of it."""

    configuration = Configuration(
        limits=LimitSettings(request_body=100_000),
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
        polls=LongPollSettings(wait=30),
    )

    tokens: ClassVar[Tokens] = {}
    """Restrictions of tokens by their names, which are also their callers if `caller` is absent."""

    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute()
        self.headers: dict[str, str] = {}
        self.token_lines = {
            name: self.make_token(name, **given) for name, given in self.tokens.items()
        }
        self.file.write_text("\n".join(self.token_lines.values()))
        self.root = Path(self.mktemp()).resolve()
        tokens = self.file if self.tokens else None
        self.service = Service(self.root, self.configuration, tokens=tokens)
        self.agent: RequestTraversalAgent
        self.client, self.agent = self.service.treq()
        self.addCleanup(self.close)

    def make_token(self, name: str, **given: Any) -> str:
        """Have a new token in the header of that name, and return the line of the token."""
        token, line = generate_token(given.pop("caller", name), os.urandom, **given)
        self.headers[name] = f"Bearer {token}"
        return line

    def close(self) -> None:
        """End what still runs."""
        self.service.close()

    @property
    def child(self) -> FakeChild:
        """The evaluator that was started last."""
        return self.service.world.child

    def ask(self, method: str, path: str, **settings: Any) -> Deferred[Any]:
        """Make a request that may take its time."""
        answer: Deferred[Any] = self.client.request(method, BASE + path, **settings)
        self.agent.flush()
        return answer

    def answer(self, asked: Deferred[Any]) -> Answer:
        """Return the answer that has come, or comes in the next turn, as of a stream."""
        self.service.reactor.advance(0)
        self.agent.flush()
        response = self.successResultOf(asked)
        body = response.content()
        self.agent.flush()
        headers = described.merged(response.headers)
        return Answer(response.code, headers, self.successResultOf(body))

    def request(self, method: str, path: str, status: int = 200, **settings: Any) -> Answer:
        """Make a request and return its answer, of which the status and general rules hold."""
        answer = self.answer(self.ask(method, path, **settings))
        self.assertEqual(answer.status, status, answer.body)
        self.check(answer)
        described.check(method, path, answer)
        return answer

    def check(self, answer: Answer) -> None:
        """Hold what is promised of every answer."""
        headers = answer.headers
        self.assertEqual(headers["access-control-allow-origin"], "*")
        if answer.status != 500:
            self.assertEqual(headers["server"], f"tawebeval/{__version__}")
        self.assertNotIn("html", headers.get("content-type", ""))
        if answer.status >= 400:
            self.check_problem(answer)
        elif answer.body:
            self.assertEqual(headers["content-type"], "application/json")
            kept = "no-cache" if "etag" in headers else "no-store"
            self.assertEqual(headers["cache-control"], kept)

    def check_problem(self, answer: Answer) -> None:
        """Hold what is promised of every error."""
        self.assertEqual(answer.headers["content-type"], "application/problem+json")
        if answer.body:
            problem = answer.json()
            self.assertEqual(problem["status"], answer.status)
            self.assertEqual(problem["type"], "about:blank")
            self.assertTrue(problem["title"])
            self.assertTrue(problem["detail"])
            self.assertEqual(problem["message"], problem["detail"])
            self.assertNotIn("Traceback", problem["detail"])

    def post(
        self,
        status: int = 200,
        body: bytes | None = None,
        path: str = "/evaluate",
        **headers: str,
    ) -> Answer:
        return self.request(
            "POST",
            path,
            status,
            data=form(parts()) if body is None else body,
            headers={"Content-Type": MULTIPART, **headers},
        )

    def evaluate(self, printed: bytes = b"") -> str:
        """Begin an evaluation, which prints at once; return its identifier."""
        identifier: str = self.post().json()["evaluation_id"]
        if printed:
            self.print(printed)
        return identifier

    def print(self, text: bytes) -> None:
        """Let the evaluator print."""
        self.child.print(text)

    def page(self, identifier: str, query: str = "", **settings: Any) -> dict[str, Any]:
        page: dict[str, Any] = self.request(
            "GET", f"/evaluation/{identifier}/events{query}", **settings
        ).json()
        return page

    def connect(self) -> Connection:
        """Return a connection of which the bytes are our own."""
        return self.service.connect()

    def begin_form(self, length: int | None, path: str = "/evaluate", **headers: str) -> Connection:
        """Return a connection on which a form of so many bytes, or one in chunks, is announced."""
        connection = self.connect()
        framing = (
            ("Content-Length", str(length))
            if length is not None
            else ("Transfer-Encoding", "chunked")
        )
        fields = dict([("Content-Type", MULTIPART), framing], **dash_names(headers))
        connection.send(head(f"POST {path}", fields))
        return connection

    def exchange(self, line: str, body: bytes = b"", **headers: str) -> Answer:
        """Return the answer to a request on a connection of its own, as `Connection.request`."""
        connection = self.connect()
        connection.request(line, body, **headers)
        return connection.answer(line.partition(" ")[0])

    def exchange_bytes(self, request: bytes) -> Answer:
        """Return the answer to a request in bytes on a connection of its own."""
        connection = self.connect()
        connection.send(request)
        return connection.answer()

    def finish(self, status: int = 0) -> None:
        self.child.end(status)
        self.service.world.turn()


class RawTestCase(WebTestCase):
    """Clients of which every byte is our own."""

    def check_raw(self, answer: Answer, status: int) -> Answer:
        """Hold that an answer is a problem document of that status."""
        headers = {name.lower(): value for name, value in answer.headers.items()}
        answer = Answer(answer.status, headers, answer.body)
        self.assertEqual(answer.status, status, answer.body)
        self.check(answer)
        return answer

    def refuse(self, status: int, request: bytes, *, closed: bool | None = None) -> Connection:
        """Hold that a request is refused so, sent whole and in small pieces: of a byte if short."""
        for size in (len(request), 1 + len(request) // 1000):
            connection = self.connect()
            for at in range(0, len(request), size):
                if not connection.received:
                    connection.send(request[at : at + size])
            self.check_raw(connection.answer(), status)
            if closed is not None:
                self.assertEqual(connection.closed, closed)
        return connection


class CallerTestCase(WebTestCase):
    """A service with two callers."""

    configuration = Configuration(
        callers=CallerSettings(requests_per_minute=30, queued=1, running=1, kept=1)
    )
    tokens: ClassVar[Tokens] = {"alice": {}, "bob": {}}

    def add_token(self, name: str, **restriction: Any) -> None:
        """Give alice another token, whose header is that of `name`."""
        line = self.make_token(name, caller="alice", **restriction)
        self.file.write_text(f"{self.file.read_text()}\n{line}")
        read_again(self.service.access)

    def call(self, method: str, path: str, status: int, caller: str | None) -> Answer:
        headers = {} if caller is None else {"Authorization": self.headers[caller]}
        answer = self.request(method, path, status, headers=headers)
        if status == 401:
            self.assertEqual(answer.headers["www-authenticate"], "Bearer")
        return answer

    def begin(self, caller: str, status: int = 200, **headers: str) -> Answer:
        return self.post(status, **{"Authorization": self.headers[caller], **headers})


CAPACITY = 64 * 1024


class StreamTestCase(WebTestCase):
    """A service with deadlines, and a ring of a few pieces."""

    configuration = Configuration(
        buffers=with_constants(EventBufferSettings, max_page_bytes=4096)(),
        http=with_constants(HttpSettings, rate_window_seconds=20, min_bytes_per_second=1024)(),
        limits=LimitSettings(wall_clock=100_000),
    )

    def setUp(self) -> None:
        super().setUp()
        self.patch(streams, "MAX_STREAM_WRITE_BYTES", 4096)

    def turn(self) -> None:
        self.service.reactor.pump([0] * 6)

    def print(self, text: bytes) -> None:
        """Let the evaluator print, and what was printed be delivered."""
        super().print(text)
        self.turn()

    def finish(self, status: int = 0) -> None:
        """Let the evaluator end, and that be told."""
        super().finish(status)
        self.turn()

    def follow(self, kind: type[Follower], identifier: str, query: str = "", **more: Any) -> Any:
        """Return one who follows an evaluation, and whose answer is described."""
        follower = kind(self.service, identifier, query, **more)
        described.check("GET", f"/evaluation/{identifier}/events", follower.answer)
        return follower

    @property
    def calls(self) -> int:
        """How many calls are scheduled that are not a connection's: none of a stream's stay."""
        return len(
            [
                call
                for call in self.service.reactor.getDelayedCalls()
                if "loseConnection" not in repr(call)
            ]
        )

    def check_cut(self, follower: Follower, code: int) -> None:
        """Hold that a stream has broken off; a WebSocket tells this code."""
        self.assertFalse(follower.complete)
        if isinstance(follower, SocketFollower):
            self.assertEqual(follower.code, code)
        else:
            self.assertTrue(follower.connection.aborted)

    def check_nothing_left(self, identifier: str, *left: Follower) -> None:
        """Let these followers go; hold that nobody follows, and nothing waits."""
        for follower in left:
            follower.lose()
        record = self.service.registry.records[identifier]
        self.assertEqual(len(self.service.registry.events.subscriptions), 0)
        self.assertEqual(record.events.reader_count, 0)
        self.assertEqual(len(record.events.reader_wakeup_condition), 0)


PROXY = IPv4Address("TCP", "10.0.0.1", 1)

SETTINGS = HttpSettings(trusted_proxies=("10.0.0.1",), connections=6, connections_per_address=2)

LINK = re.compile(r'(?:href|src)="([^"]*)"')


def payload(number: int) -> str:
    """Return the payload of an event."""
    return "\n" if number % 2 else f"line {number // 2}"
