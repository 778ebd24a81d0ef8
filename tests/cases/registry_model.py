"""A model of the registry: what must be known of each evaluation at any time.

The model knows of each evaluation the events that it must have by now, and what readers may
still ask for. Readers of pages, polls that wait and streams read the same evaluations.
"""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGTERM

import attrs
from hypothesis.stateful import RuleBasedStateMachine
from twisted.internet.defer import CancelledError, Deferred

from tawebeval import errors
from tawebeval.config import BufferSettings, Configuration, EvaluationSettings, LimitSettings
from tawebeval.core.framing import EVENT_STREAM, LINES, MESSAGES, Framing
from tawebeval.core.identifiers import Identifiers
from tawebeval.core.pages import DUMMY_END, EventPage
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.records import RESUME, Subscription
from tawebeval.evaluations.registry import Registry
from tawebeval.sandbox.workspace import directory_of
from tawebeval.web.streams import Flow, stream
from tests.cases.event_source import EventSource
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.children import FakeChild
from tests.fakes.world import IdleThreads, World, straw

RUNNING, QUEUED, KEPT, ABANDON, RETAIN = 2, 2, 4, 100, 70
TOTAL, CAPACITY, PAGE = 1800, 700, 512
NEXT_PAGE = 30  # seconds for which pages hold up streams after the last answer
READ = 1000  # bytes in the ring of what is printed at once, and of a final error, at most


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
    """What is known of one evaluation; `events` are payloads, `!reason` for an error.

    What may be discarded lies before `oldest`: pages have acknowledged it, or streams may have
    taken it.
    """

    asked: float
    real: Evaluation
    events: list[str] = attrs.field(factory=list)
    oldest: int = 0
    acknowledged: int = 0  # by pages
    paged: float = float("-inf")  # until when somebody is expected to ask for the next
    cut: float = float("-inf")  # until when the client of a stream that was cut is expected
    printed: int = 0
    terminated: bool = False  # the last line's terminator is held back
    blocked: bool = False  # a data block has begun
    running: bool = False
    closed: bool = False
    forgotten: bool = False
    # A faithful reader, until somebody acknowledges what it has not read.
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
        """Return a line that is a marker."""
        assert self.real.markers is not None
        return self.real.markers.environment()[f"EVALUATION_DATA_{which}"].encode() + b"\n"

    def close(self, reason: str | None) -> None:
        """End, also in a block, which is then broken."""
        self.events += ["\n"] * self.terminated + ["!protocol"] * self.blocked
        self.events += [f"!{reason}"] * bool(reason)
        self.closed, self.running = True, False


@attrs.frozen
class Poll:
    """A request that waits."""

    identifier: str
    after: int
    until: float
    answer: Deferred[EventPage]


@attrs.define(eq=False)
class Stream:
    """One who follows by a stream from the event `first` on, and has `received` some bytes.

    While it is `slow` its connection takes nothing.
    """

    identifier: str
    first: int
    framing: Framing
    subscription: Subscription
    flow: Flow
    received: bytearray = attrs.field(factory=bytearray)
    slow: bool = False
    over: Deferred[None] = attrs.field(init=False)

    def begin(self) -> None:
        """Come to life."""
        self.over = Deferred.fromCoroutine(
            stream(self.subscription, self.flow, self.framing, self.write, lambda: None, 1e6)
        )
        self.over.addErrback(lambda failure: failure.trap(CancelledError))

    def write(self, data: bytes) -> None:
        """Take some; as transports do, one that is slow says that it has enough."""
        self.received += data
        if self.slow:
            self.flow.pauseProducing()

    def resume(self) -> None:
        """Take what there is."""
        self.slow = False
        self.flow.resumeProducing()

    @property
    def events(self) -> list[str]:
        """The events that have come."""
        data = bytes(self.received)
        if self.framing is LINES:
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
                abandon_after=ABANDON, paused=10**6, retain=RETAIN, kept=KEPT
            ),
            limits=LimitSettings(wall_clock=10**6),
            buffers=BufferSettings(total=TOTAL, evaluation=CAPACITY, page=PAGE),
        )
        self.world = World(configuration=configuration, threads=IdleThreads(), running=RUNNING)
        self.world.spawn.obeys = (SIGTERM,)
        self.budget = self.world.budget
        self.identities = Identifiers(b"k" * 32, straw(1))
        bounds = (RUNNING, QUEUED, 0, 0)
        context = self.world.context()
        self.registry = Registry(
            context, self.identities, bounds, Path("/evaluations"), FakeCallbacks()
        )
        self.models: dict[str, Model] = {}
        self.waiting: list[str] = []
        self.keys: dict[str, tuple[str, bytes]] = {}
        self.polls: list[Poll] = []
        self.streams: list[Stream] = []
        self.sent: list[str] = []  # what streams have sent to the end, the first that was so first
        self.gone: list[Stream] = []  # those that have ended, or been left by their clients

    # The world

    @property
    def now(self) -> float:
        return self.world.clock.seconds()

    def pick(self, number: int) -> tuple[str, Model]:
        """Return one of the evaluations."""
        return list(self.models.items())[number % len(self.models)]

    def note(self, identifier: str, *, running: bool = True) -> None:
        """Let the model know of an evaluation that was accepted."""
        real = self.registry._records[identifier].evaluation
        self.models[identifier] = Model(self.now, real, running=running)

    def child(self, identifier: str) -> FakeChild:
        """Return the process of an evaluation."""
        (child,) = (
            child
            for child in self.world.spawn.children
            if Path(child.environment["HOME"]).parent.name == directory_of(identifier)
        )
        return child

    @property
    def kept(self) -> int:
        """How many have ended and are not forgotten."""
        return sum(model.closed and not model.forgotten for model in self.models.values())

    def awaited(self, identifier: str) -> bool:
        """Whether somebody waits for an evaluation, or follows it."""
        return any(one.identifier == identifier for one in (*self.polls, *self.streams))

    def end(self, model: Model, reason: str | None) -> None:
        """Let an evaluation of the model end, and the next one begin."""
        was_running = model.running
        model.close(reason)
        model.asked = self.now
        if was_running and self.waiting:
            self.models[self.waiting.pop(0)].running = True

    def stop(self, identifier: str, reason: str) -> None:
        """Let an evaluation of the model be ended from outside."""
        model = self.models[identifier]
        if identifier in self.waiting:
            self.waiting.remove(identifier)
        if not model.closed:
            self.end(model, reason)

    def forget(self, identifier: str) -> None:
        """Let the model forget."""
        self.models[identifier].forgotten = True
        if identifier in self.sent:
            self.sent.remove(identifier)
        self.keys = {key: known for key, known in self.keys.items() if known[0] != identifier}

    def make_room(self) -> bool:
        """Let the model forget what was sent, as far as need be; return whether that is enough."""
        used, kept = self.budget.used, self.kept
        for identifier in list(self.sent):
            model = self.models[identifier]
            if used < TOTAL - TOTAL // 4 and kept < KEPT:
                break
            if self.now >= model.paged and not self.awaited(identifier):
                self.forget(identifier)
                used -= model.real.share.size
                kept -= 1
        return used < TOTAL - TOTAL // 4 and kept < KEPT

    def settle(self) -> None:
        """Let all happen that can."""
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
            if not one.slow:
                assert end == model.newest, "a stream is behind"
                assert one.over.called == model.closed
            if one.over.called:
                self.leave(one)
                if not model.forgotten and one.identifier not in self.sent:
                    self.sent.append(one.identifier)

    def leave(self, one: Stream) -> None:
        """Note that a stream has ended, or was cut."""
        self.streams.remove(one)
        model = self.models[one.identifier]
        if not (model.closed and one.subscription.position == model.newest):
            model.cut = self.now + RESUME
        self.gone.append(one)
        if not self.models[one.identifier].forgotten:
            self.models[one.identifier].asked = self.now

    def look(self, model: Model) -> None:
        """Take over what the registry has discarded, which it must have been allowed to.

        Events before where live streams stand may go when the ring is short of room, and nobody is
        expected to ask for pages of them. How many is for the ring's batches to say.
        """
        live = [one for one in self.streams if self.models[one.identifier] is model]
        oldest = model.real.ring.oldest
        assert oldest >= model.oldest, "what was discarded is there again"
        for one in live:
            assert oldest <= one.first + len(one.events), "a live stream misses something"
        if not live:
            assert oldest >= model.acknowledged, "what was acknowledged is kept"
        if self.now < model.paged:
            most = max(model.oldest, model.acknowledged)
            assert oldest <= most, "a reader of pages misses something"
        model.oldest = oldest
        if model.read is not None and oldest > len(model.read) and not model.forgotten:
            model.read = None  # streams have used up what this reader has not read

    # The registry against the model

    def request(self, identifier: str, after: str | None) -> EventPage | errors.RequestError:
        """Ask for a page, and hold that the answer is the one that the contract gives."""
        model = self.models[identifier]
        oldest = model.real.ring.oldest
        try:
            answer: EventPage | errors.RequestError = self.registry.read_page(identifier, after)
        except errors.RequestError as error:
            answer = error
        if model.forgotten:
            if after == DUMMY_END:
                assert isinstance(answer, EventPage)
                assert (answer.begin, answer.end, answer.events.count) == (after, None, 0)
            else:
                assert type(answer) is errors.EvaluationExpired
            return answer
        model.asked = self.now
        number = model.newest + 1 if after == DUMMY_END else int(after or 0)
        if after == DUMMY_END and model.closed:
            self.forget(identifier)
            assert isinstance(answer, EventPage)
            assert (answer.begin, answer.end, answer.events.count) == (after, None, 0)
        elif number > model.newest:
            assert type(answer) is errors.InvalidCursor
        elif number < oldest:
            assert isinstance(answer, errors.DiscardedCursor)
            assert answer.members == {"oldest": str(oldest)}
        else:
            assert isinstance(answer, EventPage), answer
            model.acknowledged = max(model.acknowledged, number)
            model.paged = self.now + NEXT_PAGE
            self.compare(answer, model, number, after)
        return answer

    def compare(
        self, page: EventPage, model: Model, number: int, after: str | None, *, early: bool = False
    ) -> None:
        """Hold that a page is what it should be.

        An `early` one may have been answered with the last text, before the end was reached.
        """
        value = json.loads(page.encode())
        events = [payload(event) for event in value["data"]]
        end = number + len(events)
        assert events == model.events[number:end]
        assert value["begin"] == after
        at_the_end = model.closed and end == model.newest
        if not (early and at_the_end and value["end"] == str(end)):
            assert value["end"] == (DUMMY_END if at_the_end else str(end))
        assert events or number == model.newest
        assert len(page.events.lines) <= PAGE or len(events) == 1


FRAMINGS = (LINES, EVENT_STREAM, MESSAGES)
