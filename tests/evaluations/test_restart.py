"""`evaluations.restart`: what a daemon finds of an earlier one, with a fake keeper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
from tawebeval.evaluations.evaluation import Evaluation
from tawebeval.evaluations.journal import EvaluationJournal, JournalContent, JournaledBatch
from tawebeval.evaluations.run_keeper import RunDescriptors
from tawebeval.evaluations.snapshot import EvaluationSnapshot, RunSnapshot
from tawebeval.linux.keeper_client import DescriptorBundle, RunningKeeper
from tawebeval.linux.keeper_owned_process import KeeperOwnedDescriptors
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.form import pack_request
from tawebeval.core.states import EvaluationState
from tawebeval.evaluations import restart
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.run import RunProgress
from tawebeval.sandbox.workspace import Workspace
from tests.cases.evaluations import CANCELLED, EvaluationTestCase
from tests.fakes.world import OID, TREE, make_request

PID = 77
MARKERS = (b"a", b"b", b"c", b"d")

LIVING = SimpleNamespace(is_alive=True)
"""The client of a keeper that lives."""


class FakeKeeper:
    """A keeper with bundles: it is its own client, and notes what is dropped."""

    def __init__(self, bundles: dict[str, DescriptorBundle]) -> None:
        self.bundles = bundles
        self.client = self
        self.address = RunningKeeper("", PID)
        self.dropped: list[str] = []

    def drop_bundle(self, name: str) -> None:
        """Note it."""
        self.dropped.append(name)

    def take_over_heartbeat(self, bundle: DescriptorBundle | None) -> None:
        """Do nothing."""


class KindTests(SynchronousTestCase):
    """Evaluators that were begun by the other kind of runner."""

    def setUp(self) -> None:
        self.patch(restart, "_kill_unclaimed", lambda *_: None)

    def read(self, state: str, sandbox: dict[str, Any], kind: str) -> restart.RecoveredEvaluation:
        """Return what a daemon with `runner.kind` finds of a run that was described so."""
        run = RunSnapshot(
            PID, "/checkout", MARKERS, {"group": None, **sandbox}, RunProgress(0.0), 0.0
        )
        snapshot = EvaluationSnapshot("one", pack_request(make_request()), 1, state, run=run)
        journal = EvaluationJournal.create()
        self.addCleanup(journal.close)
        journal.write_snapshot(snapshot.pack())
        bundles = {
            "one.journal": DescriptorBundle([journal.descriptor], 0),
            "one.run": DescriptorBundle(self.open_files(5), PID),
        }
        self.keeper = FakeKeeper(bundles)
        found = restart.recover_evaluations(self.keeper, kind)  # type: ignore[arg-type]
        self.assertEqual(found.runner_kinds, {sandbox.get("kind", "local")})
        (evaluation,) = found.evaluations
        for descriptor in bundles["one.run"].descriptors if evaluation.run_descriptors else ():
            os.close(descriptor)
        return evaluation

    def open_files(self, count: int) -> Sequence[int]:
        """Return so many descriptors."""
        return [os.memfd_create("file") for _ in range(count)]

    def test_same(self) -> None:
        """A run of the same kind goes on; a journal without a kind is of this machine."""
        for sandbox, kind in (({}, "local"), ({"kind": "slurm"}, "slurm")):
            found = self.read("running", sandbox, kind)
            self.assertIsNotNone(found.run_descriptors)
            self.assertFalse(found.has_lost_evaluator)
            self.assertEqual(self.keeper.dropped, [])

    def test_other(self) -> None:
        """A run of the other kind is lost, and its process ends."""
        for sandbox, kind in (({}, "slurm"), ({"kind": "slurm"}, "local")):
            found = self.read("running", sandbox, kind)
            self.assertIsNone(found.run_descriptors)
            self.assertTrue(found.has_lost_evaluator)
            self.assertEqual(self.keeper.dropped, ["one.run"])

    def test_queued(self) -> None:
        """What had not begun is queued again, and the process that was to run it ends."""
        found = self.read("queued", {"kind": "slurm"}, "slurm")
        self.assertTrue(found.has_no_evaluator)
        self.assertFalse(found.has_lost_evaluator)
        self.assertEqual(self.keeper.dropped, ["one.run"])


class LostTests(EvaluationTestCase):
    """A run whose sandbox cannot go on."""

    def test_descriptors(self) -> None:
        """The evaluation ends as lost, and the descriptors of evaluator and broker are closed."""
        descriptors = [os.memfd_create("file") for _ in range(10)]
        run, broker = (
            RunDescriptors(KeeperOwnedDescriptors(PID, *descriptors[first : first + 5]))
            for first in (0, 5)
        )
        snapshot = EvaluationSnapshot(
            *("some", pack_request(make_request()), 1, EvaluationState.RUNNING.value),
            run=RunSnapshot(PID, "/checkout", MARKERS, {"group": None}, RunProgress(0.0), 0.0),
        )
        journal = EvaluationJournal.create()
        self.addCleanup(journal.close)
        content = JournalContent(b"", 0, [])
        found = restart.RecoveredEvaluation("one", journal, content, snapshot, run, broker)
        dropped: list[str] = []
        keeper: Any = SimpleNamespace(
            connect_run_to_protocol=dropped.append, drop_run=dropped.append, client=LIVING
        )
        self.evaluation.context = attrs.evolve(self.evaluation.context, run_keeper=keeper)
        self.evaluation.details.commit = Commit(OID, "")

        def fail(*_: object) -> Any:
            raise OSError(5, "Input/output error")

        self.evaluation.resume_run(found, fail, None, self)
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)
        for descriptor in descriptors:
            self.assertRaises(OSError, os.fstat, descriptor)
        assert self.evaluation.details.failure is not None
        self.assertEqual((self.evaluation.details.failure.reason, len(dropped)), ("lost", 1))


class ResumeTests(EvaluationTestCase):
    """A run that a second process of the daemon goes on with."""

    def setUp(self) -> None:
        super().setUp()
        self.snapshots: list[EvaluationSnapshot] = []
        self.batches: list[JournaledBatch] = []
        self.kept = RunDescriptors(KeeperOwnedDescriptors(PID, *range(5)))
        self.keeper: Any = SimpleNamespace(
            keep_run=lambda *_: self.kept,
            connect_run_to_protocol=lambda name, run, process: self.world.spawn.adopt_child(
                run, None
            ),
            drop_run=lambda name: None,
            client=LIVING,
        )
        self.evaluation = self.make_kept(self.evaluation.details)
        self.begin()
        assert self.evaluation.supervisor is not None
        self.markers = self.evaluation.supervisor.output_markers
        self.printed = b"one\n" + self.markers.data_begin + b"\n12"
        self.world.child.print(self.printed)
        self.world.clock.advance(3)

    def make_kept(self, details: EvaluationDetails) -> Evaluation:
        """Return an evaluation that the keeper holds."""
        context = attrs.evolve(self.world.context(), run_keeper=self.keeper)
        journal: Any = SimpleNamespace(
            is_open=True,
            write_snapshot=self.snapshots.append,
            write_events=self.batches.append,
            discard_acknowledged_events=lambda *_: None,
            hand_over=lambda: None,
        )
        return Evaluation(details, Workspace(self.root / "some"), context, journal=journal)

    def resume(self) -> None:
        """Hand the run over, which has used 3 of its 10 seconds, and go on with it."""
        self.evaluation.hand_over()
        snapshot, content = self.snapshots[-1], JournalContent(b"", 0, self.batches)
        journal: Any = None
        found = restart.RecoveredEvaluation("some", journal, content, snapshot, self.kept)
        self.evaluation = self.make_kept(
            EvaluationDetails.from_snapshot(snapshot, self.root / "upload")
        )
        self.evaluation.restore_events(snapshot, content)
        checkout = Checkout(Commit(OID, TREE), self.tree, lambda: None)
        self.evaluation.resume_run(found, lambda *_: checkout, 3.0, self)

    def test_stdout(self) -> None:
        """It goes on with the parser's state: the block that was begun is one event."""
        self.resume()
        self.assertIs(self.evaluation.details.state, EvaluationState.RUNNING)
        offset = self.batches[-1].checkpoint.stdout_offset
        self.world.child.print(self.printed[offset:] + b"3\n" + self.markers.data_end + b"\n")
        self.assertEqual([line["payload"] for line in self.lines()], ["one", 123])
        self.world.child.end()
        self.world.turn()
        self.assertIs(self.evaluation.details.state, EvaluationState.FINISHED)
        self.assertEqual(list(self.root.iterdir()), [])

    def test_clock(self) -> None:
        """It has the rest of its time, without that between the two processes."""
        self.resume()
        self.world.clock.advance(6)
        self.assertEqual(self.world.child.signals, [])
        self.world.clock.advance(1)
        self.assertEqual(self.world.child.signals, [15])

    def test_stopped(self) -> None:
        """A run that was being stopped is stopped again, for the same reason."""
        self.evaluation.stop(CANCELLED)
        self.resume()
        self.assertEqual(self.world.child.signals, [15])
        self.world.child.end(signal=15)
        self.world.turn()
        self.assertIs(self.evaluation.details.state, EvaluationState.CANCELLED)
