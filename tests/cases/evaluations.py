"""Base cases of the tests of `tawebeval.evaluations`: an evaluation, a run, a pump, a registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings, LimitSettings
from tawebeval.core.budget import RingBudget
from tawebeval.core.events import EventBatch
from tawebeval.core.fileblock import FileReference
from tawebeval.core.form import pack_request
from tawebeval.core.identifiers import IdentifierIssuer
from tawebeval.core.pages import EventPage
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import SegiParser
from tawebeval.core.states import EvaluationState
from tawebeval.errors import EvaluationFailure, RequestError
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.registry import EvaluationRegistry
from tawebeval.evaluations.run import EvaluatorRun
from tawebeval.evaluations.stdout_pump import StdoutPump
from tawebeval.evaluations.uploads import ReceivedForm
from tawebeval.sandbox.base import EvaluatorExit
from tawebeval.sandbox.workspace import Workspace
from tawebeval.web.events import EventPoll
from tests.cases.strategies import MARKERS, Event, classify, decode
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.children import FakeChild
from tests.fakes.gates import Gate
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import (
    IdleThreads,
    InlineThreads,
    TurnClock,
    World,
    answer,
    make_request,
    straw,
)

CANCELLED = EvaluationFailure("cancelled", "the evaluation was cancelled")
GRACE = 2.0
KEY = b"k" * 32
END = "end"
PATIENT = Configuration(
    evaluations=EvaluationSettings(
        abandon_after_seconds=900, max_pause_seconds=100_000, retention_seconds=600
    ),
    limits=LimitSettings(wall_clock=100_000),
)
"""Under these settings evaluations are abandoned long before they are over their time."""


class EvaluationTestCase(SynchronousTestCase):
    """One evaluation with directories of its own; `slot` holds its run slot back."""

    configuration = Configuration(
        evaluations=EvaluationSettings(environment_variables={"TZ": "UTC", "LANG": "it"}),
        limits=LimitSettings(wall_clock=10),
        buffers=EventBufferSettings(max_evaluation_bytes=1024),
    )

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        self.world = World(configuration=self.configuration)
        self.tree = self.world.repositories.tree = self.root.with_name("checkout")
        self.tree.mkdir(exist_ok=True)
        self.slot = Gate()
        self.reserved = self.released = 0
        self.evaluation = self.make()
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        """End what still runs."""
        if self.evaluation.details.state_times:
            self.evaluation.stop(CANCELLED)
        self.slot.open()
        self.world.end()

    def make(self, **changes: Any) -> Evaluation:
        """Return an evaluation that has not begun."""
        upload = self.root / "upload"
        (upload / "submission" / "source").mkdir(parents=True)
        (upload / "submission" / "source" / "solution.py").write_text("print()")
        details = EvaluationDetails("some", pack_request(make_request(**changes)), 7, upload)
        return Evaluation(details, Workspace(self.root / "some"), self.world.context())

    def reserve_queue_place(self, name: str, caller: str) -> None:
        """Count reserved turns."""
        self.reserved += 1

    def acquire_slot(self, name: str, caller: str) -> Deferred[None]:
        """Give a slot once `slot` is open."""
        return Deferred.fromCoroutine(self.slot.wait())

    def release_slot(self, name: str) -> None:
        """Count released slots."""
        self.released += 1

    def begin(self) -> None:
        """Begin the evaluation, with this case as its queue."""
        self.evaluation.enter_queue(self)

    def write_file(self) -> bytes:
        """Write a file as the evaluator may; return the block that names it."""
        (self.root / "some/tmp/plot.svg").write_text("<svg/>")
        environment = self.world.child.environment
        block = "{}\nX-SEGI-As: path\n\n{}\n{}\n".format(
            environment["EVALUATION_FILE_BEGIN"],
            environment["TEMPORARY_DIRECTORY"] + "/plot.svg",
            environment["EVALUATION_FILE_END"],
        )
        return block.encode()

    def lines(self) -> list[dict[str, Any]]:
        """Return the events, as clients will see them."""
        batch = self.evaluation.ring.read_events(self.evaluation.ring.begin_cursor, 10**9)
        return [json.loads(line) for line in batch.lines.splitlines()]

    def assert_over(
        self, state: EvaluationState, reason: str | None, printed: str = ""
    ) -> dict[str, Any]:
        """Hold that it has ended so, with one final event, and that nothing is left of it.

        Returns the final event's payload.
        """
        self.world.turn()
        self.assertTrue(self.evaluation.cleanup_event.is_set)
        self.assertTrue(self.evaluation.ring.has_ended)
        self.assertIs(self.evaluation.details.state, state)
        self.assertTrue(state.has_ended)
        self.assertEqual(list(self.root.iterdir()), [])
        self.assertEqual(self.world.repositories.users, 0)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        lines = self.lines()
        errors = [line["payload"] for line in lines if line["type"] == "data"]
        self.assertEqual("".join(e["payload"] for e in lines if e["type"] == "text"), printed)
        if reason is None:
            self.assertEqual(errors, [])
            self.assertIsNone(self.evaluation.details.failure)
            return {}
        self.assertEqual([error["reason"] for error in errors], [reason])
        self.assertEqual(lines[-1]["payload"], errors[0])
        self.assertEqual(errors[0]["type"], "evaluation_error")
        self.assertTrue(errors[0]["message"])
        return errors[0]


class RunTestCase(SynchronousTestCase):
    """A run, its child and its ring; `capacity` is when the ring is full."""

    capacity = 2**40
    limits = LimitSettings(wall_clock=10, output=100_000)

    def setUp(self) -> None:
        self.clock = Clock()
        self.ring = EventRing()
        budget = RingBudget(2**41, self.capacity, 1, lambda call: self.clock.callLater(0, call))
        self.orphans = Gate()
        self.file: Deferred[bytes] = Deferred()  # of one that the evaluator names
        self.held: list[bool] = []
        self.pump = StdoutPump(
            self.clock,
            SegiParser(MARKERS),
            self.ring,
            budget.allocate_ring(on_room=lambda: self.pump.on_ring_has_room()),
            self,
        )
        self.sandboxed = FakeSandboxedRun(
            self.limits, Workspace(Path("/some")).make_unsandboxed_view(), self.orphans
        )
        self.evaluator_run = EvaluatorRun(
            self.clock, self.pump, GRACE, self.sandboxed, InlineThreads()
        )
        self.child = FakeChild(self.clock, self.evaluator_run)
        self.evaluator_run.makeConnection(self.child)

    def on_new_events(self) -> None:
        """Do nothing."""

    def on_lost_events(self) -> None:
        """Pass on that events are lost, as an evaluation does."""
        self.evaluator_run.on_lost_events()

    def read_referenced_file(self, wanted: FileReference) -> Deferred[bytes]:
        """Let the test supply the file."""
        return self.file

    def on_pause_change(self, paused: bool) -> None:
        """Pass on that the ring is full, or is not any more, as an evaluation does."""
        self.held.append(paused)
        self.evaluator_run.set_clock_paused(paused)

    def turn(self) -> None:
        """Let happen what is due now."""
        self.clock.pump([0] * 3)

    def text(self) -> str:
        """Return what is in the ring, which is text."""
        batch: EventBatch = self.ring.read_events(self.ring.begin_cursor, 10**9)
        return "".join(str(event) for event in decode(batch))

    def assert_over(self, status: int | None = None, number: int | None = None) -> None:
        """Hold that the run has ended so, and that nothing of it is left to happen."""
        self.turn()
        self.assertTrue(self.evaluator_run.run_ended.is_set)
        self.assertEqual(self.evaluator_run.exit_status, EvaluatorExit(status, number))
        self.assertEqual(self.clock.getDelayedCalls(), [])


class FakeProducer:
    """A producer that keeps the calls of `pauseProducing` and `resumeProducing`."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def paused(self) -> bool:
        """Whether stdout is not read now."""
        return self.calls[-1:] == ["pause"]

    def pauseProducing(self) -> None:
        self.calls.append("pause")

    def resumeProducing(self) -> None:
        self.calls.append("resume")


class PumpTestCase(SynchronousTestCase):
    """A pump; the test supplies the `files` that it asks for."""

    capacity = 2**40
    max_value, max_file = 1000, 1000

    def setUp(self) -> None:
        self.clock = TurnClock()
        self.ring = EventRing()
        self.budget = RingBudget(
            2**41, self.capacity, 1, lambda call: self.clock.callLater(0, call)
        )
        self.share = self.budget.allocate_ring(on_room=lambda: self.pump.on_ring_has_room())
        self.changes = 0
        self.held: list[bool] = []
        self.loss_counts_by_reason = 0
        self.files: list[tuple[FileReference, Deferred[bytes]]] = []
        self.producer = FakeProducer()
        self.pump = StdoutPump(
            self.clock,
            SegiParser(MARKERS, max_value=self.max_value, max_file=self.max_file),
            self.ring,
            self.share,
            self,
        )
        self.pump.start(self.producer)

    def on_new_events(self) -> None:
        """Count that there are new events."""
        self.changes += 1

    def on_pause_change(self, paused: bool) -> None:
        """Note that the ring is full, or is not any more."""
        self.held.append(paused)

    def read_referenced_file(self, wanted: FileReference) -> Deferred[bytes]:
        """Let the test supply the file."""
        content: Deferred[bytes] = Deferred()
        self.files.append((wanted, content))
        return content

    def on_lost_events(self) -> None:
        """Count defects."""
        self.loss_counts_by_reason += 1

    def turn(self, count: int = 1) -> None:
        """Let so many turns of the reactor pass."""
        self.clock.turn(count)

    def read_all(self) -> None:
        """Discard all events, as a reader does who has them."""
        self.ring.acknowledge(self.ring.end_cursor)
        self.pump.on_acknowledge()

    def events(self) -> list[Event]:
        """Return the events in the ring."""
        return classify(decode(self.ring.read_events(self.ring.begin_cursor, 10**9)))

    def end(self) -> None:
        """End stdout, and hold that all is done then."""
        self.assertFalse(self.pump.output_stored_event.is_set)
        self.pump.on_stdout_end()
        self.assertTrue(self.pump.output_stored_event.is_set)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class RegistryTestCase(SynchronousTestCase):
    """A registry in a world without a disk."""

    configuration = Configuration(
        evaluations=EvaluationSettings(abandon_after_seconds=900, max_pause_seconds=10**6),
        buffers=EventBufferSettings(max_evaluation_bytes=4096, max_page_bytes=1024),
    )
    running, queued = 2, 2
    own = (0, 0)  # of each caller, that run and that wait

    def setUp(self) -> None:
        self.world = World(
            configuration=self.configuration, threads=IdleThreads(), running=self.running
        )
        self.registry = self.make()
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        """End what still runs."""
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.world.end()
        self.world.clock.advance(5)  # for those who might read on
        self.successResultOf(closed)

    def make(self, seed: int = 1) -> EvaluationRegistry:
        """Return a registry, such as a daemon makes at its start; it has new `callbacks`."""
        self.callbacks: Any = FakeCallbacks()
        return EvaluationRegistry(
            self.world.context(),
            IdentifierIssuer(KEY, straw(seed)),
            (self.running, self.queued, *self.own),
            Path("/evaluations"),
            self.callbacks,
        )

    def upload(self, key: str | None = None, digest: bytes = b"", **changes: Any) -> ReceivedForm:
        """Return a form that has arrived."""
        return ReceivedForm(make_request(**changes), Path("/uploads/some"), key, digest)

    def list_all(self) -> list[dict[str, Any]]:
        """Return the list."""
        listed = Deferred.fromCoroutine(self.registry.lister.list_evaluations(None))
        return [json.loads(one.encoded_json) for one in self.successResultOf(listed).entries]

    def accept(self, **settings: Any) -> str:
        """Begin an evaluation."""
        return self.registry.accept_form(self.upload(**settings))

    def expire(self, seconds: float) -> None:
        """Look, that much later, for what nobody has asked for in time."""
        self.world.clock.advance(seconds)
        self.registry.expire_evaluations()
        self.world.turn()

    def start(self, printed: bytes = b"") -> tuple[str, FakeChild]:
        """Begin an evaluation that runs, and let it print."""
        identifier = self.accept()
        child = self.world.child
        if printed:
            child.print(printed)
        return identifier, child

    def page(self, identifier: str, after: str | None = None) -> dict[str, Any]:
        """Return a page, as clients see it."""
        return self.decode(self.registry.events.read_page_now(identifier, after))

    def decode(self, page: EventPage) -> dict[str, Any]:
        """Return a page as clients see it: payloads only, for text."""
        value = json.loads(page.encode_json())
        self.assertEqual(list(value), ["begin", "end", "data"])
        for cursor in (value["begin"], value["end"]):
            self.assertTrue(cursor is None or re.fullmatch("[A-Za-z0-9_-]+", cursor), cursor)
        value["data"] = [
            event["payload"] if event["type"] == "text" else event["payload"]["reason"]
            for event in value["data"]
        ]
        return value

    def ask(self, identifier: str, after: str | None, wait: int) -> Deferred[EventPage]:
        """Ask for a page and wait for it."""
        return Deferred.fromCoroutine(answer(EventPoll("", identifier, after, wait), self.registry))

    def finish(self, child: FakeChild, status: int = 0) -> None:
        """Let a run end."""
        child.end(status)
        self.world.turn()

    def consume(self, identifier: str) -> list[str]:
        """Read an evaluation that has ended as clients do, and forget it; return its events."""
        events: list[str] = []
        page = self.page(identifier)
        while page["end"] is not None:
            events += page["data"]
            following = self.page(identifier, page["end"])
            self.assertEqual(following["begin"], page["end"])
            page = following
        self.assertEqual(page["data"], [])
        return events

    def assert_refused(
        self, error: type[RequestError], identifier: str, *cursors: str | None
    ) -> None:
        """Hold that these cursors, or any one, are refused so."""
        for cursor in cursors or (None, "", "0", "1"):
            with self.assertRaises(error):
                self.registry.events.read_page_now(identifier, cursor)
