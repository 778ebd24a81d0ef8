"""`evaluations.restart`: what a daemon finds of an earlier one, with a fake keeper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.checkout import Commit
from tawebeval.core.form import pack_request
from tawebeval.core.states import EvaluationState
from tawebeval.evaluations import restart
from tawebeval.evaluations.journal import EvaluationJournal, JournalContent
from tawebeval.evaluations.run import RunProgress
from tawebeval.evaluations.run_keeper import RunDescriptors
from tawebeval.evaluations.snapshot import EvaluationSnapshot, RunSnapshot
from tawebeval.linux.keeper_client import DescriptorBundle, KeeperAddress
from tawebeval.linux.kept_process import KeptDescriptors
from tests.cases.evaluations import EvaluationTestCase
from tests.fakes.world import OID, make_request

PID = 77
MARKERS = (b"a", b"b", b"c", b"d")


class FakeKeeper:
    """A keeper with bundles: it is its own client, and notes what is dropped."""

    def __init__(self, bundles: dict[str, DescriptorBundle]) -> None:
        self.bundles = bundles
        self.client = self
        self.address = KeeperAddress("", PID)
        self.dropped: list[str] = []

    def drop_bundle(self, name: str) -> None:
        """Note it."""
        self.dropped.append(name)

    def resume_heartbeat(self, bundle: DescriptorBundle | None) -> None:
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
            self.assertFalse(found.is_lost)
            self.assertEqual(self.keeper.dropped, [])

    def test_other(self) -> None:
        """A run of the other kind is lost, and its process ends."""
        for sandbox, kind in (({}, "slurm"), ({"kind": "slurm"}, "local")):
            found = self.read("running", sandbox, kind)
            self.assertIsNone(found.run_descriptors)
            self.assertTrue(found.is_lost)
            self.assertEqual(self.keeper.dropped, ["one.run"])

    def test_queued(self) -> None:
        """What had not begun is queued again, and the process that was to run it ends."""
        found = self.read("queued", {"kind": "slurm"}, "slurm")
        self.assertTrue(found.is_waiting)
        self.assertFalse(found.is_lost)
        self.assertEqual(self.keeper.dropped, ["one.run"])


class LostTests(EvaluationTestCase):
    """A run whose sandbox cannot go on."""

    def test_descriptors(self) -> None:
        """The evaluation ends as lost, and the descriptors of evaluator and broker are closed."""
        descriptors = [os.memfd_create("file") for _ in range(10)]
        run, broker = (
            RunDescriptors(KeptDescriptors(PID, *descriptors[first : first + 5]))
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
        keeper: Any = SimpleNamespace(connect_run=dropped.append, drop_run=dropped.append)
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
