"""Model of the registry: the events of each evaluation, and the cursors that readers may use.

Readers of pages, waiting polls and streams read the same evaluations.
"""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGTERM
from typing import Any

import attrs
from hypothesis.stateful import RuleBasedStateMachine
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from tawebeval import errors
from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings, LimitSettings
from tawebeval.core.checkout import Checkout
from tawebeval.core.framing import EVENT_STREAM, JSON_LINES, WEBSOCKET_MESSAGES, StreamFraming
from tawebeval.core.identifiers import IdentifierIssuer
from tawebeval.core.pages import ALL_RECEIVED_CURSOR, EventPage
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.web.streams import StreamFlowControl, write_events
from tests.cases.event_source import EventSource
from tests.cases.settings import with_constants
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.children import FakeChild
from tests.fakes.world import IdleThreads, World, straw

RUNNING, QUEUED, KEPT, RETAIN = 2, 2, 4, 100
DISK, MEMORY, PAGE = 700, 1800, 512
NEXT_PAGE = 30  # seconds for which the reader of a page is expected to ask for the next one


def line(event: str) -> bytes:
    """Return an event of the model as it is stored."""
    if event.startswith("!"):
        return b""  # an error, with a message for people
    return json.dumps({"type": "text", "payload": event}, separators=(",", ":")).encode() + b"\n"


def payload(event: dict[str, object]) -> str:
    """Return an event as the model has it."""
    value = event["payload"]
    return value if isinstance(value, str) else "!" + value["reason"]  # type: ignore[index]


@attrs.define
class Model:
    """Model of one evaluation; `events` are payloads, `!reason` for an error.

    Events before `acknowledged` are discarded.
    """

    asked: float
    real: Evaluation
    events: list[str] = attrs.field(factory=list)
    acknowledged: int = 0
    paged: float = float("-inf")  # time until which a request for the next page is expected
    printed: int = 0
    terminated: bool = False  # the last line's terminator is held back
    blocked: bool = False  # a data block has begun
    running: bool = False
    closed: bool = False
    forgotten: bool = False
    # A reader of all events, until another reader acknowledges events that it has not read.
    cursor: str | None = None
    read: list[str] | None = attrs.field(factory=list)

    @property
    def newest(self) -> int:
        """The cursor after the last event."""
        return len(self.events)

    def print(self, count: int) -> bytes:
        """Print some lines, after the end of a block; the last terminator is held back."""
        text = self.marker("END") if self.blocked else b""
        self.blocked = False
        for _ in range(count):
            self.events += ["\n"] * self.terminated + [f"line {self.printed}"]
            text += b"line %d\n" % self.printed
            self.terminated = True
            self.printed += 1
        return text

    def block(self) -> bytes:
        """Begin a data block, which makes no event, and takes a terminator with it."""
        assert not self.blocked
        self.blocked, self.terminated = True, False
        return self.marker("BEGIN")

    def marker(self, which: str) -> bytes:
        assert self.real.events.stdout is not None
        environment = self.real.events.stdout.markers.build_environment()
        return environment[f"EVALUATION_DATA_{which}"].encode() + b"\n"

    def close(self, reason: str | None) -> None:
        """End the evaluation, also inside a block, which is then an error."""
        self.events += ["\n"] * self.terminated + ["!protocol"] * self.blocked
        self.events += [f"!{reason}"] * bool(reason)
        self.closed, self.running = True, False


@attrs.frozen
class Poll:
    """Waiting request for a page."""

    identifier: str
    after: int
    until: float
    answer: Deferred[EventPage]


@attrs.define(eq=False)
class Stream:
    """Client of a stream of the events from `first` on, which has `received` some bytes.

    While the client is `slow` its connection takes nothing.
    """

    identifier: str
    first: int
    framing: StreamFraming
    subscription: Subscription
    flow: StreamFlowControl
    received: bytearray = attrs.field(factory=bytearray)
    slow: bool = False
    is_cut: bool = False
    over: Deferred[None] = attrs.field(init=False)

    def begin(self) -> None:
        self.over = Deferred.fromCoroutine(
            write_events(self.subscription, self.flow, self.framing, self.write, lambda: None, 1e6)
        )
        self.over.addErrback(self.on_error)

    def on_error(self, failure: Failure) -> None:
        """Note that a page has acknowledged what the stream has not sent."""
        self.is_cut = failure.trap(CancelledError, errors.DiscardedCursor) is errors.DiscardedCursor

    def write(self, data: bytes) -> None:
        """Receive bytes; as a transport does, pause the producer if the client is slow."""
        self.received += data
        if self.slow:
            self.flow.pauseProducing()

    def resume(self) -> None:
        """Receive everything that is left."""
        self.slow = False
        self.flow.resumeProducing()

    @property
    def events(self) -> list[str]:
        data = bytes(self.received)
        if self.framing is JSON_LINES:
            lines = data.splitlines()
        elif self.framing is EVENT_STREAM:
            source = EventSource()
            source.feed(data)
            found = [event for event in source.events if event.type == "message"]
            for number, event in enumerate(found, self.first + 1):
                assert event.last_event_id == str(number)
            lines = [event.data.encode() for event in found]
        else:
            lines = []
            while data:
                at, length = 2, data[1]
                if length == 126:
                    at, length = 4, int.from_bytes(data[2:4], "big")
                assert data[0] == 0x81
                lines.append(data[at : at + length])
                data = data[at + length :]
        return [payload(json.loads(line)) for line in lines]


class Comparison(RuleBasedStateMachine):
    """A registry and its model side by side."""

    def __init__(self) -> None:
        super().__init__()
        configuration = Configuration(
            evaluations=EvaluationSettings(
                retain=RETAIN,
                kept=KEPT,
            ),
            limits=LimitSettings(wall_clock=10**6),
            buffers=with_constants(EventBufferSettings, max_page_bytes=PAGE)(
                total=MEMORY, disk=DISK
            ),
        )
        self.world = World(configuration=configuration, threads=IdleThreads())
        self.world.spawn.obeys = (SIGTERM,)
        self.identities = IdentifierIssuer(b"k" * 32, straw(1))
        self.registry = self.make_registry()
        self.models: dict[str, Model] = {}
        self.waiting: list[str] = []
        self.keys: dict[str, tuple[str, bytes]] = {}
        self.polls: list[Poll] = []
        self.streams: list[Stream] = []
        self.sent: list[str] = []  # evaluations that streams have sent to the end, in this order
        self.gone: list[Stream] = []  # streams that have ended, or were cut by their clients

    def make_registry(self) -> EvaluationRegistry:
        """Return the registry of another process of the daemon."""
        callbacks: Any = FakeCallbacks()
        bounds = (RUNNING, QUEUED, 0, 0)
        return EvaluationRegistry(
            self.world.context(), self.identities, bounds, Path("/evaluations"), callbacks
        )

    # The world

    @property
    def now(self) -> float:
        return self.world.clock.seconds()

    def pick(self, number: int) -> tuple[str, Model]:
        return list(self.models.items())[number % len(self.models)]

    def add_model(self, identifier: str, *, running: bool = True) -> None:
        real = self.registry.records[identifier].evaluation
        self.models[identifier] = Model(self.now, real, running=running)

    def child(self, identifier: str) -> FakeChild:
        run = self.models[identifier].real.run
        assert run is not None
        child: Any = run._process
        return child  # type: ignore[no-any-return]

    def restart(self) -> None:
        """Kill the daemon; what its clients had open is cut, and another process goes on."""
        for poll in self.polls:
            poll.answer.addErrback(lambda failure: None)
            poll.answer.cancel()
        for one in self.streams:
            one.over.cancel()
        self.polls, self.streams, self.sent = [], [], []
        rows = self.world.kill_daemon()
        self.registry = self.make_registry()
        self.registry.restore_evaluations(
            rows, {}, Path("/uploads"), lambda commit, path: Checkout(commit, path, lambda: None)
        )
        for identifier, model in self.models.items():
            if identifier in self.registry.records:
                assert not model.forgotten
                model.real = self.registry.records[identifier].evaluation
                model.acknowledged = model.real.events.log.begin_cursor
                model.asked, model.paged = self.now, float("-inf")
            else:
                assert model.forgotten
                model.real.details.event_bytes = 0
                model.real.events.log.discard()
                model.acknowledged = model.newest

    @property
    def kept(self) -> int:
        """Number of evaluations that have ended and are not forgotten."""
        return sum(model.closed and not model.forgotten for model in self.models.values())

    def is_awaited(self, identifier: str) -> bool:
        """Return whether a poll or a stream of the evaluation is open."""
        readers: list[Poll | Stream] = [*self.polls, *self.streams]
        return any(reader.identifier == identifier for reader in readers)

    def end(self, model: Model, reason: str | None) -> None:
        """End an evaluation of the model, and start the next one."""
        was_running = model.running
        model.close(reason)
        model.asked = self.now
        if was_running and self.waiting:
            self.models[self.waiting.pop(0)].running = True

    def stop(self, identifier: str, reason: str) -> None:
        """End an evaluation of the model from outside."""
        model = self.models[identifier]
        if identifier in self.waiting:
            self.waiting.remove(identifier)
        if not model.closed:
            self.end(model, reason)

    def forget(self, identifier: str) -> None:
        self.models[identifier].forgotten = True
        if identifier in self.sent:
            self.sent.remove(identifier)
        self.keys = {key: known for key, known in self.keys.items() if known[0] != identifier}

    def make_room(self) -> bool:
        """Forget evaluations that were sent, as far as needed; return whether that is enough."""
        used, kept = self.world.disk.used, self.kept
        for identifier in list(self.sent):
            model = self.models[identifier]
            if used < DISK and kept < KEPT:
                break
            if self.now >= model.paged and not self.is_awaited(identifier):
                self.forget(identifier)
                used -= model.real.details.event_bytes
                kept -= 1
        return used < DISK and kept < KEPT

    def settle(self) -> None:
        """Run the reactor, and compare all polls and streams with the model."""
        for _ in range(4):
            self.world.turn()
        for poll in list(self.polls):
            model = self.models[poll.identifier]
            due = model.closed or model.newest > poll.after or self.now >= poll.until
            assert poll.answer.called == due, poll
            if due:
                self.polls.remove(poll)
                model.asked, model.paged = self.now, self.now + NEXT_PAGE
                page = poll.answer.result
                assert isinstance(page, EventPage), page
                self.compare(page, model, poll.after, str(poll.after), early=True)
                if model.newest > poll.after:
                    assert page.events.count, "woken for nothing"
        for one in list(self.streams):
            model = self.models[one.identifier]
            events = one.events
            end = one.first + len(events)
            assert events == model.events[one.first : end], "a stream repeats, loses or moves"
            if one.is_cut:
                assert end < model.acknowledged, "a stream is cut that has missed nothing"
            elif not one.slow:
                assert end == model.newest, "a stream is behind"
                assert one.over.called == model.closed
            if one.over.called:
                self.remove_stream(one)
                if not one.is_cut and not model.forgotten and one.identifier not in self.sent:
                    self.sent.append(one.identifier)

    def remove_stream(self, one: Stream) -> None:
        """Remove a stream that has ended, or was cut."""
        self.streams.remove(one)
        self.gone.append(one)
        if not self.models[one.identifier].forgotten:
            self.models[one.identifier].asked = self.now

    def check_discarded(self, model: Model) -> None:
        """Assert that what was acknowledged is discarded, and nothing else."""
        assert model.real.events.log.begin_cursor == model.acknowledged
        if model.read is not None and model.acknowledged > len(model.read):
            model.read = None  # others have acknowledged events that this reader has not read

    # The registry against the model

    def request(self, identifier: str, after: str | None) -> EventPage | errors.RequestError:
        """Request a page, and assert that the answer is the contract's."""
        model = self.models[identifier]
        oldest = model.real.events.log.begin_cursor
        asked = Deferred.fromCoroutine(self.registry.events.read_page(identifier, after))
        asked.addErrback(lambda failure: failure.value)
        answer: EventPage | errors.RequestError = asked.result
        if model.forgotten:
            if after == ALL_RECEIVED_CURSOR:
                assert isinstance(answer, EventPage)
                assert (answer.begin_cursor, answer.end_cursor, answer.events.count) == (
                    after,
                    None,
                    0,
                )
            else:
                assert type(answer) is errors.EvaluationExpired
            return answer
        model.asked = self.now
        number = model.newest + 1 if after == ALL_RECEIVED_CURSOR else int(after or 0)
        if after == ALL_RECEIVED_CURSOR and model.closed:
            self.forget(identifier)
            assert isinstance(answer, EventPage)
            assert (answer.begin_cursor, answer.end_cursor, answer.events.count) == (after, None, 0)
        elif number > model.newest:
            assert type(answer) is errors.InvalidCursor
        elif number < oldest:
            assert isinstance(answer, errors.DiscardedCursor)
            assert answer.extra_members == {"oldest": str(oldest)}
        else:
            assert isinstance(answer, EventPage), answer
            model.acknowledged = max(model.acknowledged, number)
            model.paged = self.now + NEXT_PAGE
            self.compare(answer, model, number, after)
        return answer

    def compare(
        self, page: EventPage, model: Model, number: int, after: str | None, *, early: bool = False
    ) -> None:
        """Compare a page with the model.

        An `early` page may have been returned with the last text, before the end was reached.
        """
        value = json.loads(page.encode_json())
        events = [payload(event) for event in value["data"]]
        end = number + len(events)
        assert events == model.events[number:end]
        assert value["begin"] == after
        at_the_end = model.closed and end == model.newest
        if not (early and at_the_end and value["end"] == str(end)):
            assert value["end"] == (ALL_RECEIVED_CURSOR if at_the_end else str(end))
        assert events or number == model.newest
        assert len(page.events.lines) <= PAGE or len(events) == 1


FRAMINGS = (JSON_LINES, EVENT_STREAM, WEBSOCKET_MESSAGES)
