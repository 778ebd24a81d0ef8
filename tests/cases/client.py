"""A client and the daemon's site in memory, connected by a line that may break."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from http.client import IncompleteRead
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.error import ConnectionLost
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    Configuration,
    EventBufferSettings,
    LimitSettings,
    LongPollSettings,
    ServiceSettings,
)
from tawebeval.web.server.channel import ApiSite
from tawebeval_client import AsyncClient, Event, Text
from tawebeval_client.http import HttpRequest, Repetition, RequestFailure, Response
from tests.cases.settings import with_constants
from tests.fakes.children import FakeChild
from tests.fakes.clients import Answer, Connection, Service, head
from tests.fakes.world import OID

T = TypeVar("T")
URL = "https://example.org/problem.git"
REQUEST: dict[str, Any] = {"repository": URL, "commit": OID, "evaluator_cmd": "./evaluate"}
STEP = 0.25  # seconds of a test's time between two looks
FOR_EVER = 40_000  # steps


def text(events: list[Event]) -> str:
    """Return what was printed."""
    return "".join(event.text for event in events if isinstance(event, Text))


class Fate(Enum):
    """What becomes of one request."""

    REFUSED = "there is no connection"
    LOST = "the server has it, and its answer is lost"
    CUT = "half of the answer comes, and looks whole"
    SILENT = "neither an answer comes nor the end of the connection"
    GATEWAY = "a proxy answers that the server is away"
    BUSY = "the server is busy, and says for how long"
    NONSENSE = "something else answers"
    WELL = "it is answered"

    @property
    def passes(self) -> bool:
        """Whether it is no answer, and the next time there may be one."""
        return self not in (Fate.WELL, Fate.NONSENSE)


_HTML = b"<html><body>Bad gateway</body></html>"
_MADE_ANSWERS = {
    Fate.GATEWAY: Response(502, {}, _HTML),
    Fate.NONSENSE: Response(200, {"content-type": "text/html"}, _HTML),
    Fate.BUSY: Response(503, {"retry-after": "3"}, b""),
}


@attrs.define
class BreakingAgent:
    """Sends requests to a site, and lets happen to each what `fate()` says; `asked` counts."""

    _site: ApiSite
    fate: Callable[[], Fate] = lambda: Fate.WELL
    asked: list[str] = attrs.field(factory=list)
    cancelled: int = 0
    _waiting: dict[Deferred[Any], tuple[Connection, str]] = attrs.field(factory=dict)

    def request(self, request: HttpRequest, body: bytes) -> Deferred[Response]:
        """Ask, or do not."""
        line = f"{request.method} /{request.url.split('/', 3)[3]}"
        self.asked.append(line)
        fate = self.fate()
        answered: Deferred[Any] = Deferred(self._cancel)
        if fate is Fate.REFUSED:
            answered.errback(ConnectionRefused(111, "Connection refused"))
        elif fate in _MADE_ANSWERS:
            answered.callback(_MADE_ANSWERS[fate])
        elif fate is not Fate.SILENT:
            connection = Connection(self._site)
            length = {"Content-Length": str(len(body))} if request.method != "GET" else {}
            connection.send(head(line, {**request.headers, **length}) + body)
            self._waiting[answered.addCallback(_spoil, fate)] = connection, request.method
        return answered

    def flush(self) -> None:
        """Hand over the answers that have come."""
        for answered, (connection, method) in list(self._waiting.items()):
            with suppress(IncompleteRead):
                if b"\r\n\r\n" in connection.received:
                    answer = connection.answer(method)
                    del self._waiting[answered]
                    connection.lose()
                    answered.callback(answer)

    def _cancel(self, answered: Deferred[Response]) -> None:
        self.cancelled += 1
        if answered in self._waiting:
            self._waiting.pop(answered)[0].lose()


def _spoil(answer: Answer, fate: Fate) -> Response:
    """Return what is left of an answer. Raises ConnectionLost."""
    if fate is Fate.LOST:
        raise ConnectionLost
    headers = {name.lower(): value for name, value in answer.headers.items()}
    size = len(answer.body) // 2 if fate is Fate.CUT else None
    return Response(answer.status, headers, answer.body[:size])


@attrs.define(eq=False, slots=False, kw_only=True)
class MemoryClient(AsyncClient):
    """A client whose requests go to an agent, while the reactor of a test goes on."""

    reactor: Any
    agent: BreakingAgent

    async def pause(self, seconds: float) -> None:
        await deferLater(self.reactor, seconds)

    async def exchange(self, request: HttpRequest) -> Response | RequestFailure:
        body = b""
        if request.form is not None:
            with ExitStack() as opened:
                body = b"".join(request.form.open_body(opened).iterate_pieces())
        reading = self.agent.request(request, body)
        try:
            return await reading.addTimeout(request.get_timeout(len(body)), self.reactor)
        except TookTooLong:
            return RequestFailure("no answer", Repetition.ALWAYS)
        except ConnectionRefused:
            why = f"cannot connect to {self.server}: connection refused"
            return RequestFailure(why, Repetition.IF_SERVER_MAY_START)
        except ConnectionLost:
            return RequestFailure("lost", Repetition.ALWAYS)


@attrs.define
class Line:
    """A client, the server that it asks, and what is between the two."""

    service: Service
    agent: BreakingAgent
    client: MemoryClient
    told: list[tuple[str, float]]

    @classmethod
    def make(
        cls,
        root: Path,
        settings: Configuration,
        token: str | None = None,
        client: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Line:
        """Return a line to a service below `root`; `client` and `more` are arguments of the two."""
        service = Service(root, settings, **more)
        reactor: Any = service.reactor
        reactor.callFromThread = lambda call: reactor.callLater(0, call)
        agent = BreakingAgent(service.site)
        told: list[tuple[str, float]] = []
        arguments = {
            "reactor": service.reactor,
            "agent": agent,
            "draw_random": random.Random(1).random,
            "get_time": service.reactor.seconds,
            "on_retry": lambda why, seconds: told.append((why, seconds)),
            **(client or {}),
        }
        made = MemoryClient("http://localhost:8080/", token, **arguments)
        return cls(service, agent, made, told)

    def add_silent_peer(self, name: str) -> None:
        """Have the server share its address with another daemon, which never answers."""
        context = self.service.registry.context
        service = ServiceSettings(name="a", peers={name: "http://10.0.0.9:8080"})
        context.configuration = msgspec.structs.replace(context.configuration, service=service)

    @property
    def child(self) -> FakeChild:
        """The evaluator that was started last."""
        return self.service.world.child

    def settle(self) -> None:
        for _ in range(6):
            self.agent.flush()
            self.service.reactor.advance(0)

    def pass_time(self, seconds: float) -> None:
        """Let time go on, and happen what is due by then."""
        for _ in range(round(seconds / STEP)):
            self.service.reactor.advance(STEP)
            self.settle()

    def fail_once(self, *fates: Fate) -> None:
        """Let these become of the next requests; those after them are answered."""
        coming = iter(fates)
        self.agent.fate = lambda: next(coming, Fate.WELL)

    def wait(self, awaitable: Awaitable[T], meanwhile: Callable[[], object] = lambda: None) -> T:
        """Return the result, while time goes on; `meanwhile` is called at every step."""

        async def whole() -> T:
            return await awaitable

        done = Deferred.fromCoroutine(whole())
        results: list[Any] = []
        done.addBoth(results.append)
        try:
            for _ in range(FOR_EVER):
                self.settle()
                if results:
                    break
                meanwhile()
                self.service.reactor.advance(STEP)
        except BaseException:  # `meanwhile` ends the wait
            done.cancel()
            raise
        assert results, "it waits for ever"
        if isinstance(results[0], Failure):
            results[0].raiseException()
        found: T = results[0]
        return found

    def begin(self, **changes: Any) -> str:
        fields = {**REQUEST, **changes}
        return self.wait(
            self.client.evaluate(fields.pop("submission", {"source": b"print()\n"}), **fields)
        )

    def follow(
        self,
        identifier: str,
        after: str | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Event]:
        return self.wait(gathered(self.client.events(identifier, after)), meanwhile)

    def close(self) -> None:
        """End what still runs."""
        self.agent.fate = lambda: Fate.WELL
        self.service.close()


async def gathered(items: AsyncIterator[T]) -> list[T]:
    """Return all that comes."""
    return [item async for item in items]


class ClientTestCase(SynchronousTestCase):
    """A client and a server."""

    settings = Configuration(
        limits=LimitSettings(request_body=1_000_000),
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
        polls=LongPollSettings(wait=20),
    )

    def setUp(self) -> None:
        self.line = self.make()

    def make(self, *, settings: Mapping[str, Any] | None = None, **more: Any) -> Line:
        """Return another pair, of which the server has other sections in its settings."""
        configuration = msgspec.structs.replace(self.settings, **(settings or {}))
        line = Line.make(Path(self.mktemp()).resolve(), configuration, **more)
        self.addCleanup(line.close)
        return line

    def printed(self, *output: bytes, status: int = 0) -> str:
        """Return the identifier of an evaluation that has printed all this, and has ended."""
        identifier = self.line.begin()
        for some in output:
            self.line.child.print(some)
        self.line.child.end(status)
        self.line.settle()
        return identifier

    def block(self, *lines: str) -> bytes:
        """Return a block of data as the current evaluator prints it."""
        return self.line.child.make_data_block(*lines)
