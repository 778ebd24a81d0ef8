"""`evaluations.service` against a model: readers, writers and time in any order.

After each step all that can happen has happened.
"""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGTERM
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import errors
from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings, LimitSettings
from tawebeval.core import events as core_events
from tawebeval.core.evaluations import Checkout, IdentifierIssuer
from tawebeval.core.events import (
    ALL_RECEIVED_CURSOR,
    JSON_LINES_FRAMING,
    EventPage,
    make_empty_last_page,
)
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.service import EvaluationRegistry, ReceivedForm
from tawebeval.web.streams import StreamFlowControl, StreamScheduler, write_events
from tests.cases.settings import with_constants
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.children import FakeChild
from tests.fakes.world import IdleThreads, World, answer, make_request, straw

RUNNING, QUEUED, KEPT, RETAIN = 2, 2, 4, 100
DISK, MEMORY, PAGE = 700, 1800, 512
NEXT_PAGE = 30  # seconds for which the reader of a page is expected to ask for the next one


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
        """Print some lines; the last terminator is held back."""
        text = b""
        for _ in range(count):
            self.events += ["\n"] * self.terminated + [f"line {self.printed}"]
            text += b"line %d\n" % self.printed
            self.terminated = True
            self.printed += 1
        return text

    def close(self, reason: str | None) -> None:
        self.events += ["\n"] * self.terminated + [f"!{reason}"] * bool(reason)
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
    subscription: Subscription
    flow: StreamFlowControl
    received: bytearray = attrs.field(factory=bytearray)
    slow: bool = False
    is_cut: bool = False
    over: Deferred[None] = attrs.field(init=False)

    def begin(self) -> None:
        self.over = Deferred.fromCoroutine(
            write_events(self.subscription, self.flow, JSON_LINES_FRAMING, self.write, lambda: None)
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
        return [payload(json.loads(line)) for line in self.received.splitlines()]


class Comparison(RuleBasedStateMachine):
    """A registry and its model side by side."""

    def __init__(self) -> None:
        super().__init__()
        configuration = Configuration(
            evaluations=EvaluationSettings(retain=RETAIN, kept=KEPT),
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
        real = self.registry.records[identifier]
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
            rows, Path("/uploads"), lambda commit, path: Checkout(commit, path, lambda: None)
        )
        for identifier, model in self.models.items():
            if identifier in self.registry.records:
                assert not model.forgotten
                model.real = self.registry.records[identifier]
                model.acknowledged = model.real.events.event_log.begin_cursor
                model.asked, model.paged = self.now, float("-inf")
            else:
                assert model.forgotten
                model.real.events.unread_bytes = 0
                model.real.events.event_log.discard()
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
                used -= model.real.events.unread_bytes
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
        assert model.real.events.event_log.begin_cursor == model.acknowledged
        if model.read is not None and model.acknowledged > len(model.read):
            model.read = None  # others have acknowledged events that this reader has not read

    # The registry against the model

    def request(self, identifier: str, after: str | None) -> EventPage | errors.RequestError:
        """Request a page, and assert that the answer is the contract's."""
        model = self.models[identifier]
        oldest = model.real.events.event_log.begin_cursor
        asked = Deferred.fromCoroutine(self.registry.events.read_page(identifier, after))
        asked.addErrback(lambda failure: failure.value)
        answer: EventPage | errors.RequestError = asked.result
        if model.forgotten:
            if after == ALL_RECEIVED_CURSOR:
                assert answer == make_empty_last_page()
            else:
                assert type(answer) is errors.EvaluationExpired
            return answer
        model.asked = self.now
        number = model.newest + 1 if after == ALL_RECEIVED_CURSOR else int(after or 0)
        if after == ALL_RECEIVED_CURSOR and model.closed:
            self.forget(identifier)
            assert answer == make_empty_last_page()
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


class Machine(Comparison):
    """All that may happen to a registry, and to its model."""

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20), count=st.integers(1, 12))
    def print(self, number: int, count: int) -> None:
        identifier, model = self.pick(number)
        if model.running:
            self.child(identifier).print(model.print(count))
        self.settle()

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20))
    def follow(self, number: int) -> None:
        identifier, model = self.pick(number)
        page = self.request(identifier, model.cursor)
        if isinstance(page, EventPage) and model.read is not None:
            begin = len(model.read)
            model.read += model.events[begin : begin + page.events.count]
            model.cursor = page.end_cursor or ALL_RECEIVED_CURSOR
        else:
            model.read = None
        self.settle()

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20), seconds=st.integers(1, 200))
    def wait(self, number: int, seconds: int) -> None:
        identifier, model = self.pick(number)
        after = model.newest
        if after < model.real.events.event_log.begin_cursor:
            return
        waiting = Deferred.fromCoroutine(answer(self.registry, identifier, str(after), seconds))
        if model.forgotten:
            assert isinstance(waiting.result, Failure)
            waiting.addErrback(lambda failure: failure.trap(errors.EvaluationExpired))
            return
        model.asked = self.now
        model.acknowledged = max(model.acknowledged, after)
        model.paged = self.now + NEXT_PAGE
        self.polls.append(Poll(identifier, after, self.now + seconds, waiting))
        self.settle()

    @precondition(lambda self: self.polls)
    @rule(number=st.integers(0, 20))
    def hang_up(self, number: int) -> None:
        poll = self.polls.pop(number % len(self.polls))
        poll.answer.addErrback(lambda failure: None)
        poll.answer.cancel()
        model = self.models[poll.identifier]
        model.asked, model.paged = self.now, self.now + NEXT_PAGE
        self.settle()

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20), back=st.integers(0, 30), slow=st.booleans())
    def stream(self, number: int, back: int, slow: bool) -> None:
        """Let somebody follow an evaluation by a stream, from some events back on."""
        identifier, model = self.pick(number)
        first = max(model.newest - back, 0)
        oldest = model.real.events.event_log.begin_cursor
        try:
            subscription = self.registry.events.subscribe(identifier, str(first))
        except errors.EvaluationExpired:
            assert model.forgotten
            return
        except errors.DiscardedCursor:
            assert first < oldest
            model.asked = self.now
            return
        assert subscription is not None
        assert not model.forgotten
        assert first >= oldest
        model.asked = self.now
        flow = StreamFlowControl(StreamScheduler(self.world.clock))
        one = Stream(identifier, first, subscription, flow, slow=slow)
        self.streams.append(one)
        one.begin()
        self.settle()

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 20), slow=st.booleans())
    def take(self, number: int, slow: bool) -> None:
        """Let the client of a stream take what has come, and go on to take it or not."""
        one = self.streams[number % len(self.streams)]
        one.resume()
        one.slow = slow
        self.settle()

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 20))
    def break_off(self, number: int) -> None:
        one = self.streams[number % len(self.streams)]
        one.flow.stopProducing()
        one.over.cancel()
        self.remove_stream(one)
        self.settle()

    @rule(seconds=st.integers(1, 120))
    def pass_time(self, seconds: int) -> None:
        """Let time pass; what is abandoned is forgotten."""
        self.world.clock.advance(seconds)
        self.settle()
        self.registry.expire_evaluations()
        for identifier, model in self.models.items():
            is_idle = model.asked <= self.now - RETAIN and not self.is_awaited(identifier)
            if is_idle and not model.forgotten:
                self.forget(identifier)
        for identifier, model in self.models.items():
            if model.forgotten and not model.closed:
                self.stop(identifier, "lost")
        self.settle()

    # What holds at any time

    @invariant()
    def readers_have_read(self) -> None:
        """Faithful readers have all that there was up to their cursor."""
        for model in self.models.values():
            if model.read is not None:
                assert model.read == model.events[: len(model.read)]
                if model.cursor == ALL_RECEIVED_CURSOR:
                    assert model.read == model.events

    @invariant()
    def as_many_run_as_may(self) -> None:
        """Who runs is as the model says, and nobody waits for readers."""
        for identifier, model in self.models.items():
            if model.running:
                assert self.child(identifier).is_running
                assert not self.child(identifier).paused
        running = sum(child.is_running for child in self.world.spawn.children)
        assert running == sum(model.running for model in self.models.values())

    @invariant()
    def disk_and_memory_are_counted(self) -> None:
        """Count what there is, and in memory no more than the newest segments beyond the bound."""
        counted = sum(model.real.events.unread_bytes for model in self.models.values())
        assert self.world.disk.used == counted
        logs = [model.real.events.event_log for model in self.models.values()]
        rings = [one.ring for log in logs for one in log.segments if one.ring is not None]
        assert self.world.memory.budget.used == sum(ring.memory_bytes for ring in rings)
        assert len(self.world.store.rows) <= RUNNING + QUEUED + KEPT + len(self.streams)
        assert self.kept <= KEPT + RUNNING + QUEUED

    @invariant()
    def discarded_rightly(self) -> None:
        """Only what nobody is to have any more is discarded."""
        for model in self.models.values():
            if not model.forgotten:
                self.check_discarded(model)

    def teardown(self) -> None:
        """In the end every reader that was not disturbed gets every event, and nothing is left."""
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        for identifier in [*self.waiting, *self.models]:
            self.stop(identifier, "shutdown")
        for one in self.streams:
            one.resume()
        self.settle()
        assert not self.streams
        self.discarded_rightly()
        for number, (identifier, model) in enumerate(self.models.items()):
            while (
                model.read is not None
                and model.cursor != ALL_RECEIVED_CURSOR
                and not model.forgotten
            ):
                self.follow(number)
            if not model.forgotten:
                self.request(identifier, ALL_RECEIVED_CURSOR)
        self.readers_have_read()
        assert closed.called
        assert not self.polls
        assert (self.world.disk.used, self.world.memory.budget.used) == (0, 0)
        assert not self.world.store.rows
        assert not self.world.clock.getDelayedCalls(), self.world.clock.getDelayedCalls()

    @rule(key=st.sampled_from([None, "a", "b"]), digest=st.sampled_from([b"1", b"1", b"2"]))
    def accept(self, key: str | None, digest: bytes) -> None:
        upload = ReceivedForm(make_request(), Path("/uploads/some"), key, digest)
        known = self.keys.get(key or "")
        running = sum(model.running for model in self.models.values())
        behind = known is None and not self.make_room()
        try:
            identifier = self.registry.accept_form(upload)
        except errors.IdempotencyKeyReused:
            assert known is not None
            assert known[1] != digest
        except errors.ServerBusy:
            assert known is None
            assert behind or (running, len(self.waiting)) == (RUNNING, QUEUED)
        else:
            if known is not None:
                assert known == (identifier, digest)
                return
            assert identifier not in self.models
            assert not behind
            self.add_model(identifier, running=running < RUNNING)
            if running == RUNNING:
                self.waiting.append(identifier)
            if key is not None:
                self.keys[key] = identifier, digest
        self.settle()

    @precondition(lambda self: self.models)
    @rule()
    def kill(self) -> None:
        self.restart()
        self.settle()

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20), status=st.sampled_from([0, 0, 1]))
    def exit(self, number: int, status: int) -> None:
        """Let an evaluator exit, if its stdout has been read."""
        identifier, model = self.pick(number)
        if model.running:
            self.child(identifier).end(status)
            self.end(model, "exit" if status else None)
        self.settle()

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        identifier, model = self.pick(number)
        asked = Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))
        if not model.forgotten:
            self.stop(identifier, "cancelled")
        self.settle()
        assert asked.called
        assert asked.result is None

    @precondition(lambda self: self.models)
    @rule(
        number=st.integers(0, 20),
        after=st.none() | st.just(ALL_RECEIVED_CURSOR) | st.integers(0, 30),
    )
    def ask(self, number: int, after: str | int | None) -> None:
        identifier, _ = self.pick(number)
        self.request(identifier, str(after) if isinstance(after, int) else after)
        self.settle()

    @precondition(lambda self: self.models)
    @rule(number=st.integers(0, 20))
    def look_at_status(self, number: int) -> None:
        """Let somebody ask for the status, which keeps none that has ended."""
        identifier, model = self.pick(number)
        try:
            self.registry.get_status(identifier)
        except errors.EvaluationExpired:
            assert model.forgotten
        else:
            assert not model.forgotten
            if not model.closed:
                model.asked = self.now


class RegistryModelTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(core_events, "MIN_SEGMENT_BYTES", 300)

    def test_no_event_is_lost_repeated_or_moved_and_every_refusal_is_documented(self) -> None:
        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))
