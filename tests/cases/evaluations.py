"""Base cases of the tests of `tawebeval.evaluations`: an evaluation, a run, a registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EvaluationSettings, EventBufferSettings, LimitSettings
from tawebeval.core.evaluations import Checkout, Commit, EvaluationState, IdentifierIssuer
from tawebeval.core.events import (
    EMPTY_BATCH,
    EventBatch,
    EventLog,
    EventPage,
    EventsEvicted,
)
from tawebeval.core.form import pack_request
from tawebeval.errors import EvaluationFailure, RequestError
from tawebeval.evaluations.eventlog import EvaluationEvents, RecordedStdout
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import Subscription
from tawebeval.evaluations.run import KILL_GRACE_SECONDS, Run
from tawebeval.evaluations.service import EvaluationRegistry, ReceivedForm
from tawebeval.evaluations.starting import admit_evaluation
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.sandbox.base import EvaluatorExit
from tawebeval.sandbox.workspace import Workspace
from tests.cases.settings import with_constants
from tests.cases.strategies import MARKERS, Event, classify, decode
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.children import FakeChild
from tests.fakes.files import MemoryEventFiles
from tests.fakes.gates import Gate
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import (
    OID,
    TREE,
    IdleThreads,
    TurnClock,
    World,
    answer,
    make_request,
    straw,
)

CANCELLED = EvaluationFailure("cancelled", "the evaluation was cancelled")
GRACE = KILL_GRACE_SECONDS
KEY = b"k" * 32
END = "end"
PATIENT = Configuration(
    evaluations=EvaluationSettings(retain=900),
    limits=LimitSettings(wall_clock=100_000),
)
"""Under these settings evaluations are abandoned long before they are over their time."""


def read_all_segments(log: EventLog) -> EventBatch:
    """Return all events of a log."""
    batch = EMPTY_BATCH
    while log.begin_cursor + batch.count < log.end_cursor:
        batch += log.read_events(log.begin_cursor + batch.count, 10**9)
    return batch


class EvaluationTestCase(SynchronousTestCase):
    """One evaluation with directories of its own; `slot` holds its run slot back."""

    configuration = Configuration(
        evaluations=EvaluationSettings(environment={"TZ": "UTC", "LANG": "it"}),
        limits=LimitSettings(wall_clock=10),
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
        if self.evaluation.details.state_times:
            self.evaluation.stop(CANCELLED)
        self.slot.open()
        self.world.end()

    def make(self, **changes: Any) -> Evaluation:
        upload = self.root / "upload"
        (upload / "submission" / "source").mkdir(parents=True)
        (upload / "submission" / "source" / "solution.py").write_text("print()")
        details = EvaluationDetails(
            "some", pack_request(make_request(**changes)), 7, upload_directory=upload
        )
        return Evaluation(details, Workspace(self.root / "some"), self.world.context())

    def reserve_queue_place(self, name: str, caller: str) -> None:
        self.reserved += 1

    def acquire_slot(self, name: str, caller: str) -> Deferred[None]:
        """Give a slot once `slot` is open."""
        return Deferred.fromCoroutine(self.slot.wait())

    def release_slot(self, name: str) -> None:
        self.released += 1

    def return_to_queue(self, name: str) -> None:
        self.released += 1
        self.reserved += 1

    def begin(self) -> None:
        """Begin the evaluation, with this case as its queue."""
        admit_evaluation(self.evaluation, self)

    def finish(self, status: int = 0, signal: int | None = None) -> None:
        """Let the evaluator end so."""
        self.world.child.end(status, signal)
        self.world.turn()

    def finish_well(self, printed: str = "") -> None:
        """Let the evaluator end, and hold that the evaluation has finished."""
        self.finish()
        self.assert_over(EvaluationState.FINISHED, None, printed)

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
        lines = read_all_segments(self.evaluation.events.event_log).lines.splitlines()
        return [json.loads(line) for line in lines]

    def assert_removed(self) -> None:
        """Hold that nothing is left but the directory of the events."""
        left = {str(path.relative_to(self.root)) for path in self.root.rglob("*")}
        self.assertLessEqual(left, {"some", "some/output"})

    def assert_over(
        self, state: EvaluationState, reason: str | None, printed: str = ""
    ) -> dict[str, Any]:
        """Hold that it has ended so, with one final event, and that nothing is left of it.

        Returns the final event's payload.
        """
        self.world.turn()
        self.assertTrue(self.evaluation.cleanup_completion.is_set)
        self.assertTrue(self.evaluation.events.event_log.has_ended)
        self.assertIs(self.evaluation.details.state, state)
        self.assertTrue(state.has_ended)
        self.assert_removed()
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


def make_file_block(path: bytes) -> bytes:
    """Return a block that names a file."""
    lines = (MARKERS.file_begin, b"X-SEGI-As: path", b"", path, MARKERS.file_end, b"")
    return b"\n".join(lines)


class WatchedEvents(EvaluationEvents):
    """Events that count how often new ones were announced."""

    announcements = 0

    def notify_readers(self) -> None:
        self.announcements += 1
        super().notify_readers()


class RunTestCase(SynchronousTestCase):
    """A run of the limits `limits`, its child, its log of events and its files in memory.

    The test answers the files that stdout names: `wanted` has their paths.
    """

    limits = LimitSettings(wall_clock=10, output=100_000)

    def setUp(self) -> None:
        self.clock = TurnClock()
        self.world = World(
            configuration=Configuration(limits=self.limits),
            clock=self.clock,
        )
        self.orphans = Gate()
        self.files = MemoryEventFiles()
        self.log = EventLog(self.world.memory)
        self.stdout = RecordedStdout(
            self.log,
            self.files,  # type: ignore[arg-type]
            MARKERS,
            self.clock.seconds,
        )
        self.sandboxed = FakeSandboxedRun(
            self.limits,
            Workspace(Path("/some")).make_unsandboxed_view(),
            self.world.spawn,
            self.orphans,
        )
        self.wanted: list[tuple[str, Deferred[bytes]]] = []
        self.changes = 0
        self.events_ = WatchedEvents(
            self.log,
            "",
            "some",
            self.world.threads,
            self.world.fetches,
            self.world.disk,
            self.stdout,
        )
        self.run_ = self.make_run()
        self.child = FakeChild(self.clock, self.run_)
        self.child.stdout_file = self.files.stdout
        self.run_.makeConnection(self.child)

    def make_run(self, deadline: float | None = None) -> Run:
        details = EvaluationDetails("some", pack_request(make_request()), 7)
        run = Run(
            self.world.context(),
            details,
            Checkout(Commit(OID, TREE), Path("/"), lambda: None),
            self.sandboxed,  # type: ignore[arg-type]
            self.events_,
            self.on_change,
            deadline,
        )
        self.patch(run, "_read_evaluator_file", self.read_file)
        return run

    def on_change(self) -> None:
        self.changes += 1

    def read_file(self, path: str) -> Deferred[bytes]:
        content: Deferred[bytes] = Deferred()
        self.wanted.append((path, content))
        return content

    @property
    def failure(self) -> EvaluationFailure:
        """The failure of the run, which has one."""
        assert self.run_.failure is not None
        return self.run_.failure

    def turn(self, count: int = 3) -> None:
        """Let so many turns of the reactor pass."""
        self.clock.turn(count)

    def events(self) -> list[Event]:
        return classify(decode(read_all_segments(self.log)))

    def text(self) -> str:
        """Return the events, which are text."""
        return "".join(map(str, self.events()))

    def assert_over(self, status: int | None = None, number: int | None = None) -> None:
        """Hold that the run has ended so, and that nothing of it is left to happen."""
        self.turn()
        self.assertTrue(self.run_.run_ended.is_set)
        self.assertEqual(self.run_.exit_status, EvaluatorExit(status, number))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def end(self, status: int = 0, signal: int | None = None) -> None:
        """End the child so, and hold that this ends the run."""
        self.child.end(status, signal)
        self.assert_over(status if signal is None else None, signal)


class RegistryTestCase(SynchronousTestCase):
    """A registry in a world without a disk."""

    configuration = Configuration(
        evaluations=EvaluationSettings(retain=900),
        buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
    )
    running, queued = 2, 2
    own = (0, 0)  # of each caller, that run and that wait

    def setUp(self) -> None:
        self.world = World(configuration=self.configuration, threads=IdleThreads())
        self.registry = self.make()
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.world.end()
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
        return ReceivedForm(make_request(**changes), Path("/uploads/some"), key, digest)

    def list_all(self) -> list[dict[str, Any]]:
        listed = Deferred.fromCoroutine(self.registry.lister.list_evaluations(None))
        return [json.loads(one.encoded_json) for one in self.successResultOf(listed).entries]

    def accept(self, **settings: Any) -> str:
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

    def evaluate(self, printed: bytes = b"", status: int = 0) -> str:
        """Let an evaluation print, and end with a status."""
        identifier, child = self.start(printed)
        self.finish(child, status)
        return identifier

    def page(self, identifier: str, after: str | None = None) -> dict[str, Any]:
        """Return a page, as clients see it."""
        events = self.registry.events
        try:
            return self.decode(events.read_page_now(identifier, after))
        except EventsEvicted:
            page = Deferred.fromCoroutine(events.read_page(identifier, after))
            return self.decode(self.successResultOf(page))

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

    def subscribe(
        self, identifier: str, after: str | None = None, caller: str = "", **settings: bool
    ) -> Subscription:
        found = self.registry.events.subscribe(identifier, after, caller, **settings)
        assert found is not None
        return found

    def read(self, subscription: Subscription, max_bytes: int = 10**6) -> EventBatch:
        return self.successResultOf(Deferred.fromCoroutine(subscription.read_events(max_bytes)))

    def send_all(self, identifier: str, caller: str = "") -> None:
        subscription = self.subscribe(identifier, caller=caller)
        with subscription.reader_context:
            self.read(subscription)

    def ask(self, identifier: str, after: str | None, wait: int) -> Deferred[EventPage]:
        return Deferred.fromCoroutine(answer(self.registry, identifier, after, wait))

    def finish(self, child: FakeChild, status: int = 0, signal: int | None = None) -> None:
        child.end(status, signal)
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
