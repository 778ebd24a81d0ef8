"""A model of the registry: what must be known of each evaluation at any time.

The model knows of each evaluation the events that it must have by now, and the oldest
that a reader may still ask for.
"""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGTERM

import attrs
from hypothesis.stateful import RuleBasedStateMachine
from twisted.internet.defer import Deferred

from tawebeval import errors
from tawebeval.admission import Queue
from tawebeval.config import Buffers, Configuration, Evaluations, Limits
from tawebeval.identity import Identities
from tawebeval.pages import DUMMY_END, Page
from tawebeval.registry import Registry, directory_of
from tests.fake_children import FakeChild
from tests.fakes import IdleThreads, World, straw

RUNNING, QUEUED, ABANDON, CAPACITY, PAGE = 2, 2, 100, 1500, 1024


def line(event: str) -> bytes:
    """Return an event of the model as it is stored."""
    if event.startswith("!"):
        return b""  # an error, with a message for people
    return json.dumps({"type": "text", "payload": event}, separators=(",", ":")).encode() + b"\n"


@attrs.define
class Model:
    """What is known of one evaluation; `events` are payloads, `!reason` for an error."""

    asked: float
    events: list[str] = attrs.field(factory=list)
    oldest: int = 0
    printed: int = 0
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

    @property
    def size(self) -> int:
        """What the buffered events take, in bytes."""
        return sum(len(line(event)) for event in self.events[self.oldest :])

    def print(self, count: int) -> bytes:
        """Print some lines; the terminator of the last one is held back."""
        text = b""
        for _ in range(count):
            self.events += ["\n"] * bool(self.printed) + [f"line {self.printed}"]
            text += b"line %d\n" % self.printed
            self.printed += 1
        return text

    def close(self, reason: str | None) -> None:
        """End."""
        self.events += ["\n"] * bool(self.printed) + [f"!{reason}"] * bool(reason)
        self.closed, self.running = True, False


@attrs.frozen
class Poll:
    """A request that waits."""

    identifier: str
    after: int
    until: float
    answer: Deferred[Page]


class Comparison(RuleBasedStateMachine):
    """A registry and its model side by side."""

    def __init__(self) -> None:
        super().__init__()
        configuration = Configuration(
            evaluations=Evaluations(abandon_after=ABANDON),
            limits=Limits(wall_clock=10**6),
            buffers=Buffers(evaluation=CAPACITY, page=PAGE),
        )
        self.world = World(configuration=configuration, threads=IdleThreads())
        self.world.spawn.obeys = (SIGTERM,)
        self.identities = Identities(b"k" * 32, straw(1))
        queue = Queue(RUNNING, QUEUED)
        surroundings = self.world.surroundings()
        self.registry = Registry(surroundings, self.identities, queue, Path("/evaluations"))
        self.models: dict[str, Model] = {}
        self.waiting: list[str] = []
        self.keys: dict[str, tuple[str, bytes]] = {}
        self.polls: list[Poll] = []

    # The world

    @property
    def now(self) -> float:
        return self.world.clock.seconds()

    def pick(self, number: int) -> tuple[str, Model]:
        """Return one of the evaluations."""
        return list(self.models.items())[number % len(self.models)]

    def child(self, identifier: str) -> FakeChild:
        """Return the process of an evaluation."""
        (child,) = (
            child
            for child in self.world.spawn.children
            if Path(child.environment["HOME"]).parent.name == directory_of(identifier)
        )
        return child

    def end(self, model: Model, reason: str | None) -> None:
        """Let an evaluation of the model end, and the next one begin."""
        was_running = model.running
        model.close(reason)
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
        self.keys = {key: known for key, known in self.keys.items() if known[0] != identifier}

    def settle(self) -> None:
        """Let all happen that can."""
        self.world.turn()
        for poll in list(self.polls):
            model = self.models[poll.identifier]
            due = model.closed or model.newest > poll.after or self.now >= poll.until
            assert poll.answer.called == due, poll
            if due:
                self.polls.remove(poll)
                model.asked = self.now
                page = poll.answer.result
                assert isinstance(page, Page), page
                self.compare(page, model, poll.after, str(poll.after), early=True)
                if model.newest > poll.after:
                    assert page.events.count, "woken for nothing"

    # The registry against the model

    def request(self, identifier: str, after: str | None) -> Page | errors.RequestError:
        """Ask for a page, and hold that the answer is the one that the contract gives."""
        model = self.models[identifier]
        try:
            answer: Page | errors.RequestError = self.registry.page(identifier, after)
        except errors.RequestError as error:
            answer = error
        if model.forgotten:
            if after == DUMMY_END:
                assert isinstance(answer, Page)
                assert (answer.begin, answer.end, answer.events.count) == (after, None, 0)
            else:
                assert type(answer) is errors.EvaluationGone
            return answer
        model.asked = self.now
        number = model.newest + 1 if after == DUMMY_END else int(after or 0)
        if after == DUMMY_END and model.closed:
            self.forget(identifier)
            assert isinstance(answer, Page)
            assert (answer.begin, answer.end, answer.events.count) == (after, None, 0)
        elif number > model.newest:
            assert type(answer) is errors.InvalidCursor
        elif number < model.oldest:
            assert isinstance(answer, errors.DiscardedCursor)
            assert answer.members == {"oldest": str(model.oldest)}
        else:
            assert isinstance(answer, Page), answer
            model.oldest = number
            self.compare(answer, model, number, after)
        return answer

    def compare(
        self, page: Page, model: Model, number: int, after: str | None, *, early: bool = False
    ) -> None:
        """Hold that a page is what it should be.

        An `early` one may have been answered with the last text, before the end was reached.
        """
        value = json.loads(page.encode())
        events = [
            event["payload"] if event["type"] == "text" else "!" + event["payload"]["reason"]
            for event in value["data"]
        ]
        end = number + len(events)
        assert events == model.events[number:end]
        assert value["begin"] == after
        at_the_end = model.closed and end == model.newest
        if not (early and at_the_end and value["end"] == str(end)):
            assert value["end"] == (DUMMY_END if at_the_end else str(end))
        assert events or number == model.newest
        assert len(page.events.lines) <= PAGE or len(events) == 1
