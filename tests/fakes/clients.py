"""HTTP clients in memory: forms, connections to our site, and an agent for treq."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from email.message import Message
from functools import partial
from http.client import HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any

import attrs
from klein import Klein
from treq.client import HTTPClient
from treq.testing import RequestTraversalAgent, _SynchronousProducer
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.web.resource import Resource

from tawebeval.archive.archive import EvaluationArchive
from tawebeval.config import Configuration
from tawebeval.core.evaluations import IdentifierIssuer
from tawebeval.core.tokens import LinkSigner
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.evaluations.store import format_rfc3339_time
from tawebeval.web.auth import Authenticator, EvaluationLinks, RateLimit
from tawebeval.web.lists import make_evaluation_lists
from tawebeval.web.routes import KleinApplication, WebContext
from tawebeval.web.server.channel import ApiSite
from tawebeval.web.upload import FormReceiverFactory
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.files import FakeStore
from tests.fakes.resolver import FakeResolver
from tests.fakes.world import EPOCH, OID, InlineThreads, World, straw

BOUNDARY = "----straw"
FRAMING = ("content-length", "transfer-encoding", "content-type")
"""The headers that come first, in this order."""
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


@attrs.frozen
class Part:
    """A part of a form; `filename` is None for one that is no file."""

    name: str
    content: bytes
    filename: str | None = None

    def encode(self) -> bytes:
        head = f'Content-Disposition: form-data; name="{self.name}"'
        if self.filename is not None:
            head += f'; filename="{self.filename}"\r\nContent-Type: application/octet-stream'
        return head.encode() + b"\r\n\r\n" + self.content


def form(parts: Iterable[Part | bytes]) -> bytes:
    """Return the body of a form; parts in bytes are taken as they are."""
    encoded = [part.encode() if isinstance(part, Part) else part for part in parts]
    delimiter = f"--{BOUNDARY}".encode()
    body = b"".join(delimiter + b"\r\n" + part + b"\r\n" for part in encoded)
    return body + delimiter + b"--\r\n"


def parts(**changes: bytes | None) -> list[Part]:
    """Return the parts of a good form; `None` leaves one out.

    `url`, `branch` and `depth` are fields of the repository, `source` a file.
    """
    fields: dict[str, bytes | None] = {
        "source": b"print()\n",
        "url": b"https://example.org/problem.git",
        "commit_oid": OID.encode(),
        "evaluator_cmd": b"./evaluate",
        **changes,
    }
    made = []
    for name, content in fields.items():
        if content is None:
            continue
        if name == "source":
            made.append(Part("submission[source]", content, "solution.py"))
        elif name in ("url", "branch", "depth"):
            made.append(Part(f"repository[{name}]", content))
        else:
            made.append(Part(name, content))
    return made


@attrs.frozen
class Answer:
    """What a client has received."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class _Stream(io.BytesIO):
    """What `http.client` reads from, as from a socket; it stays open for what is left."""

    def makefile(self, mode: str) -> _Stream:
        return self

    def close(self) -> None:
        pass


class Connection:
    """A connection to a site, byte by byte if need be."""

    def __init__(self, site: ApiSite, address: IAddress | None = None) -> None:
        address = address or IPv4Address("TCP", "127.0.0.1", 31337)
        self.transport: Any = StringTransport(IPv4Address("TCP", "127.0.0.1", 8080), address)
        channel = site.buildProtocol(address)
        assert channel is not None
        self.channel: Any = channel
        self.channel.makeConnection(self.transport)

    def send(self, data: bytes) -> None:
        self.channel.dataReceived(data)

    def settle(self) -> None:
        """Let the reactor have its next turns; no time passes."""
        self.channel.site.clock.advance(0)

    def take_no_more(self) -> None:
        """Let whatever is written fill the connection, until its channel is resumed."""
        write = self.transport.write

        def write_and_be_full(data: bytes) -> None:
            write(data)
            self.channel.pauseProducing()

        self.transport.write = write_and_be_full

    def request(self, line: str, body: bytes = b"", **headers: str) -> None:
        """Send a request; in names of headers `_` stands for `-`."""
        self.send(head(line, {"Content-Length": str(len(body)), **dash_names(headers)}) + body)

    @property
    def received(self) -> bytes:
        return bytes(self.transport.value())

    @property
    def closed(self) -> bool:
        return bool(self.transport.disconnecting)

    @property
    def aborted(self) -> bool:
        """Whether the server has ended it without waiting for what was still to be sent."""
        return bool(self.transport.disconnected)

    def answer(self, method: str = "GET") -> Answer:
        """Take the answer, of which all must have come and after which nothing may."""
        if not self.received:
            self.settle()  # a stream begins in another turn
        while True:
            taken = len(self.received)
            try:
                answer, rest = self._parse(method)
                break
            except IncompleteRead:  # a large body comes in parts, each in a turn of its own
                self.settle()
                if len(self.received) == taken:
                    raise
        assert not rest, rest
        names = [name.lower() for name in answer.headers]
        framing = [name for name in FRAMING if name in names]
        assert names[: len(framing)] == framing, "a head that is cut off looks whole"
        self.transport.clear()
        return answer

    def _parse(self, method: str) -> tuple[Answer, bytes]:
        assert self.received, "no answer"
        stream = _Stream(self.received)
        response = HTTPResponse(stream, method=method)  # type: ignore[arg-type]
        response.begin()
        body = response.read()
        return Answer(response.status, response.headers, body), stream.read()

    def lose(self) -> None:
        self.channel.connectionLost(Failure(ConnectionDone()))


def head(line: str, headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> bytes:
    """Return the head of a request; `line` has no version."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    fields = "".join(f"{name}: {value}\r\n" for name, value in pairs)
    return f"{line} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode("latin-1")


def dash_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as requests have them, by names with underscores."""
    return {name.replace("_", "-"): value for name, value in headers.items()}


@attrs.define
class Service:
    """The web over a world of fakes, with `uploads` and `evaluations` below `root`."""

    root: Path
    configuration: Configuration = attrs.field(factory=Configuration)
    running: int = 2
    queued: int = 2
    reactor: MemoryReactorClock = attrs.field(factory=MemoryReactorClock)
    tokens: Path | None = None
    random: Callable[[int], bytes] = attrs.field(factory=straw)
    uploading: Any = attrs.field(factory=InlineThreads)
    store: FakeStore = attrs.field(factory=FakeStore)
    access: Authenticator = attrs.field(init=False)
    world: World = attrs.field(init=False)
    registry: EvaluationRegistry = attrs.field(init=False)
    context: WebContext = attrs.field(init=False)
    app: Klein = attrs.field(init=False)
    application: KleinApplication = attrs.field(init=False)
    site: ApiSite = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        for name in ("uploads", "evaluations"):
            (self.root / name).mkdir(parents=True)
        self.world = World(
            configuration=self.configuration,
            clock=self.reactor,
            random=self.random,
            store=self.store,
            has_event_files=self.configuration.archive.enabled,  # which reads them
        )
        if self.configuration.archive.enabled:
            self.world.archive = self.open_archive()
        self.registry = EvaluationRegistry(
            self.world.context(),
            IdentifierIssuer(b"k" * 32, straw(1), self.configuration.service.name),
            (
                self.running,
                self.queued,
                self.configuration.callers.running,
                self.configuration.callers.queued,
            ),
            self.root / "evaluations",
            FakeCallbacks(),
        )
        uploads = self.root / "uploads"
        self.access = Authenticator(
            RateLimit(self.configuration.callers.requests_per_minute, self.reactor.seconds),
            self.tokens,
        )
        self.context = WebContext(
            self.registry,
            self.access,
            self.reactor,
            FormReceiverFactory(self.registry, uploads, self.uploading, straw(2)),
            make_evaluation_lists(self.registry, FakeResolver(), self.reactor),
            EvaluationLinks(
                self.world.store,
                LinkSigner(b"k" * 32),
                self.access,
                self.reactor,
                lambda: EPOCH + self.reactor.seconds(),
                straw(3),
            ),
        )
        self.application = application = KleinApplication(self.context)
        self.app = application.app
        self.site = ApiSite(application, self.registry.context, self.reactor)
        self.access.on_reload.append(
            partial(self.site.abort_requests_unless, application.is_still_permitted)
        )

    def open_archive(self) -> EvaluationArchive:
        """Return an archive in a directory of its own, with what is in it."""
        threads: Any = InlineThreads()
        return EvaluationArchive(
            self.root / "archive",
            self.configuration.archive,
            0,
            self.world.store,
            threads,
            threads,
            format_rfc3339_time,
        )

    def connect(self, address: IAddress | None = None) -> Connection:
        """Return a new connection, from 127.0.0.1 if nothing is said."""
        return Connection(self.site, address)

    def treq(self) -> tuple[HTTPClient, RequestTraversalAgent]:
        """Return a client as our users have one, and its agent."""
        agent = RequestTraversalAgent(Resource())
        agent._memoryReactor = self.reactor
        agent._realAgent._endpointFactory.reactor = self.reactor
        agent._serverFactory = self.site
        return HTTPClient(agent=agent, data_to_body_producer=_SynchronousProducer), agent

    def close(self) -> None:
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.world.end()
        assert closed.called

    def leftovers(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.glob("*/*"))
