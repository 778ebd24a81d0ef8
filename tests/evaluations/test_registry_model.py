"""`evaluations.registry` against a model: readers, writers and time in any order.

After each step all that can happen has happened.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import errors
from tawebeval.core import event_log
from tawebeval.core.framing import StreamFraming
from tawebeval.core.pages import ALL_RECEIVED_CURSOR, EventPage
from tawebeval.evaluations.uploads import ReceivedForm
from tawebeval.web import events
from tawebeval.web.streams import StreamFlowControl
from tests.cases.registry_model import (
    FRAMINGS,
    KEPT,
    NEXT_PAGE,
    QUEUED,
    RETAIN,
    RUNNING,
    Comparison,
    Model,
    Poll,
    Stream,
)
from tests.fakes.world import answer, make_request


class Reading(Comparison):
    """How evaluations are read while they run."""

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
        if after < model.real.events.log.begin_cursor:
            return
        poll = events.EventPoll("", identifier, str(after), seconds)
        waiting = Deferred.fromCoroutine(answer(poll, self.registry))
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
        self.models[poll.identifier].paged = self.now + NEXT_PAGE
        self.settle()

    @precondition(lambda self: self.models)
    @rule(
        number=st.integers(0, 20),
        back=st.integers(0, 30),
        framing=st.sampled_from(FRAMINGS),
        slow=st.booleans(),
    )
    def stream(self, number: int, back: int, framing: StreamFraming, slow: bool) -> None:
        """Let somebody follow an evaluation by a stream, from some events back on."""
        identifier, model = self.pick(number)
        first = max(model.newest - back, 0)
        oldest = model.real.events.log.begin_cursor
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
        one = Stream(
            identifier, first, framing, subscription, StreamFlowControl(self.world.clock), slow=slow
        )
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
            patience = RETAIN
            if (
                not model.forgotten
                and model.asked <= self.now - patience
                and not self.is_awaited(identifier)
            ):
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
        counted = sum(model.real.details.event_bytes for model in self.models.values())
        assert self.world.disk.used == counted
        logs = [model.real.events.log for model in self.models.values()]
        rings = [one.ring for log in logs for one in log.segments if one.ring is not None]
        assert self.world.memory.share.used == sum(ring.memory_bytes for ring in rings)
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
        self.world.clock.advance(5)  # for the readers who might go on
        assert closed.called
        assert not self.polls
        assert (self.world.disk.used, self.world.memory.share.used) == (0, 0)
        assert not self.world.store.rows
        assert not self.world.clock.getDelayedCalls(), self.world.clock.getDelayedCalls()


class OneAtATime(Reading):
    """One evaluation, and the next when it is forgotten, so that its readers often meet."""

    @precondition(lambda self: all(model.forgotten for model in self.models.values()))
    @rule()
    def begin(self) -> None:
        if self.make_room():
            self.add_model(
                self.registry.accept_form(ReceivedForm(make_request(), Path("/uploads/some")))
            )
            self.settle()

    def pick(self, number: int) -> tuple[str, Model]:
        return super().pick(-1)


class Machine(Reading):
    """What else may happen to a registry, and to its model."""

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
    @rule(number=st.integers(0, 20))
    def begin_block(self, number: int) -> None:
        identifier, model = self.pick(number)
        if model.running and not model.blocked:
            self.child(identifier).print(model.block())
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

    @rule(
        text=st.text("abc234", max_size=40), after=st.sampled_from([None, "0", ALL_RECEIVED_CURSOR])
    )
    def stray(self, text: str, after: str | None) -> None:
        if text not in self.models:
            try:
                self.registry.events.read_page_now(text, after)
            except errors.EvaluationNotFound:
                return
            raise AssertionError(text)


class RegistryModelTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.patch(event_log, "MIN_SEGMENT_BYTES", 300)

    def test_no_event_is_lost_repeated_or_moved_and_every_refusal_is_the_contracts(self) -> None:
        run_state_machine_as_test(Machine, settings=settings(stateful_step_count=40))

    def test_page_readers_miss_nothing_beside_streams(self) -> None:
        run_state_machine_as_test(OneAtATime, settings=settings(stateful_step_count=40))
