"""`slurm.node`: the output of a fake evaluator."""

from __future__ import annotations

import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings
from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm import node
from tawebeval.slurm.frames import (
    END,
    GRANT,
    READ,
    STDOUT_WINDOW_BYTES,
    FrameKind,
    encode_file_request,
)
from tests.cases.roots import make_root
from tests.fakes.children import FakeChild, FakeSpawner
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import InlineThreads


class FakeWriter:
    """Writer that notes frames."""

    has_ended = False
    is_full = False

    def __init__(self, *_: Any) -> None:
        self.frames: list[tuple[FrameKind, bytes]] = []

    def write_frame(self, kind: FrameKind, content: bytes = b"") -> None:
        """Note a frame."""
        self.frames.append((kind, content))

    async def send_frame(self, kind: FrameKind, content: bytes) -> None:
        """Note a frame; if the pipe is full, never return."""
        self.write_frame(kind, content)
        if self.is_full:
            await Deferred[None]()

    def loseConnection(self) -> None:
        """Note the end."""
        self.has_ended = True


class FakeEvaluator:
    """The evaluator's process, and its sandbox with all parts of it."""

    is_running = True
    is_paused = False
    pipe_read_cpu_seconds = 0.0

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.launch = self.end = self.run_limits = self

    def pauseProducing(self) -> None:
        """Note a pause."""
        self.is_paused = True

    def resumeProducing(self) -> None:
        """Note the end of a pause."""
        self.is_paused = False

    def send_signal(self, process: Any, number: int) -> None:
        """Note a signal."""
        self.signals.append(number)


class OutputTests(SynchronousTestCase):
    """What the node sends, and where it stops reading stdout."""

    def setUp(self) -> None:
        self.patch(node, "FrameWriter", FakeWriter)
        self.evaluator = FakeEvaluator()
        job: Any = SimpleNamespace(limits=SimpleNamespace(stderr=99))
        unused: Any = None
        run: Any = self.evaluator
        self.clock = Clock()
        self.run_ = node.NodeRun(job, run, unused, self.clock)
        self.run_.makeConnection(self.evaluator)

    @property
    def frames(self) -> list[tuple[FrameKind, bytes]]:
        """What was sent."""
        writer: Any = self.run_._writer
        return list(writer.frames)

    def test_small_writes(self) -> None:
        """The first byte is sent at once; many come in one frame, and all before the outcome."""
        for _ in range(1000):
            self.run_.outReceived(b"x")
        self.assertEqual(self.frames, [(FrameKind.STDOUT, b"x")])
        self.clock.advance(0.002)
        self.assertEqual(self.frames[1:], [(FrameKind.STDOUT, b"x" * 999)])
        self.clock.advance(0.004)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        for data in (b"a", b"b", b"c" * 100_000, b"d"):
            self.run_.outReceived(data)
        self.run_.errReceived(b"e")
        self.run_.errReceived(b"f")
        self.assertEqual([len(content) for _, content in self.frames[2:]], [1, 100_001, 1])
        self.run_.send_outcome({})
        self.assertEqual(
            self.frames[5:],
            [(FrameKind.STDOUT, b"d"), (FrameKind.STDERR, b"f"), (FrameKind.OUTCOME, b"{}")],
        )

    def test_many_writes(self) -> None:
        """A stream without pauses has few frames; after a pause it begins anew."""
        for _ in range(1000):
            self.run_.outReceived(b"x")
            self.clock.advance(0.001)
        self.assertLess(len(self.frames), 70)
        self.clock.pump([0.02] * 3)
        before = len(self.frames)
        self.run_.outReceived(b"y")
        self.run_.outReceived(b"z")
        self.clock.advance(0.002)
        self.assertEqual(self.frames[before:], [(FrameKind.STDOUT, b"y"), (FrameKind.STDOUT, b"z")])

    def test_grants(self) -> None:
        """It stops at the largest offset that was granted."""
        self.run_.outReceived(b"x" * (STDOUT_WINDOW_BYTES + 5))
        self.assertTrue(self.evaluator.is_paused)
        self.run_.execute_command(GRANT, b"%d" % (STDOUT_WINDOW_BYTES + 5))
        self.assertTrue(self.evaluator.is_paused)
        self.run_.execute_command(GRANT, b"%d" % (STDOUT_WINDOW_BYTES + 6))
        self.assertFalse(self.evaluator.is_paused)
        self.run_.execute_command(GRANT, b"1")
        self.run_.outReceived(b"x")
        self.assertTrue(self.evaluator.is_paused)

    def test_deserted(self) -> None:
        """Without srun it kills the evaluator, and reads to the end: nobody grants any more."""
        for printed in (STDOUT_WINDOW_BYTES - 1, 1):
            self.run_.outReceived(b"x" * printed)
            self.run_.execute_command(None, b"")
            self.run_.outReceived(b"x" * STDOUT_WINDOW_BYTES)
            self.assertEqual(self.evaluator.signals, [9])
            self.assertFalse(self.evaluator.is_paused)
            self.setUp()

    def test_deserted_with_files(self) -> None:
        """A program that has files waits for a line after the outcome, but not without srun."""
        limits = LimitSettings()
        job: Any = SimpleNamespace(limits=limits)
        threads: Any = InlineThreads()
        for is_deserted in (False, True):
            view = Workspace(Path("/some")).make_unsandboxed_view()
            run: Any = FakeSandboxedRun(limits, view, FakeSpawner(self.clock))
            self.run_ = node.NodeRun(job, run, threads, self.clock, has_own_files=True)
            unused: Any = SimpleNamespace(remove_run=lambda _: None)
            self.run_._monitor = unused
            child = FakeChild(self.clock, self.run_)
            self.run_.makeConnection(child)
            if is_deserted:
                self.run_.execute_command(None, b"")
            child.end()
            writer: Any = self.run_._writer
            self.assertEqual(writer.frames[-1][0], FrameKind.OUTCOME)
            self.assertEqual(writer.has_ended, is_deserted)

    def test_files(self) -> None:
        """A file is sent in parts, or its refusal; the node ends by a line."""
        path = Path(self.mktemp()).resolve()
        for name in ("evaluation/tree", "evaluation/tmp"):
            (path / name).mkdir(parents=True)
        workspace = Workspace(path / "evaluation")
        (workspace.tree_directory / "a").write_bytes(b"x" * 300_000)
        job: Any = SimpleNamespace(
            limits=SimpleNamespace(stderr=99, file=300_000),
            workspace=workspace,
            directory=workspace.tree_directory,
        )
        run: Any = self.evaluator
        run.workspace_view = workspace.make_sandboxed_view(Path("/evaluation"))
        threads: Any = InlineThreads()
        self.run_ = node.NodeRun(job, run, threads, self.clock, has_own_files=True)
        for name in ("a", "../../etc/passwd"):
            self.run_.execute_command(READ, encode_file_request(b"12345678", name)[1:-1])
        *parts, end, refusal = self.frames
        self.assertEqual({kind for kind, _ in parts}, {FrameKind.FILE})
        self.assertEqual(b"".join(content[8:] for _, content in parts), b"x" * 300_000)
        self.assertEqual(end, (FrameKind.FILE_END, b"12345678null"))
        self.assertIn(b"is outside the directories", refusal[1])
        writer: Any = self.run_._writer
        self.assertFalse(writer.has_ended)
        before, writer.is_full = len(self.frames), True
        for _ in range(2):
            self.run_.execute_command(READ, encode_file_request(b"12345678", "a")[1:-1])
        self.assertEqual(len(self.frames), before + 1, "the rest waits for the pipe")
        self.run_.execute_command(END, b"")
        self.assertTrue(writer.has_ended)


class PlaceTests(SynchronousTestCase):
    """Directories of programs, and environments of a node."""

    def test_place(self) -> None:
        """A program removes its directory, and those of dead programs, but not of living ones."""
        parent = Path(self.mktemp()).resolve()
        parent.mkdir()
        self.patch(node, "_FRESH", -1.0)
        with node.make_temporary_directory(parent) as living:
            dead = parent / "tawebeval-node-dead"
            (dead / "evaluation").mkdir(parents=True)
            (dead / "evaluation").chmod(0)
            (parent / "other").mkdir()
            with node.make_temporary_directory(parent) as place:
                self.assertEqual(
                    set(parent.iterdir()), {living, place, parent / "other"}, "dead is removed"
                )
        self.assertEqual(list(parent.iterdir()), [parent / "other"])

    def test_environments(self) -> None:
        """A node names the roots that it lacks, and how they get there."""
        base = Path(self.mktemp()).resolve()
        digest = f"sha256-{'0' * 64}"
        environments = [
            ("good", str(make_root(base / "root")), {}),
            ("stored", str(base / digest), {}),
            ("plain", str(base / "x"), {}),
        ]
        stored, plain = node.find_missing_environments(environments)
        self.assertIn("environment 'stored' cannot be used", stored[0])
        self.assertIn("tawebeval environment import", stored[1])
        self.assertEqual(plain[1], f"make {base}/x on the node")

    def check(self, parent: Path, free_disk: int) -> dict[str, Any]:
        """Return what the doctor's job tells of a sound sandbox."""
        opened = SimpleNamespace(cgroup_manager=SimpleNamespace(enforced_resources=("memory",)))
        self.patch(node, "open_node_sandbox", lambda *_: nullcontext(opened))
        self.patch(node, "probe_bubblewrap", lambda _: None)
        told = {"token": "t", "sandbox": {}, "environments": [], "directory": str(parent)}
        content = json.dumps({**told, "cache": 9, "free_disk": free_disk})
        printed = io.StringIO()
        self.patch(sys, "stdin", io.StringIO(content))
        self.patch(sys, "stdout", printed)
        self.patch(sys, "stderr", io.StringIO())
        node.check_node(Path("-"))
        report: dict[str, Any] = json.loads(printed.getvalue())
        return report

    def test_check(self) -> None:
        """The doctor's job tells of a disk without room, and of a cache that others can use."""
        parent = Path(self.mktemp()).resolve()
        parent.mkdir()
        sound = self.check(parent, 1)
        self.assertEqual((sound["problem"], sound["cache_problem"]), (None, None))
        (cache,) = parent.iterdir()
        cache.chmod(0o755)
        report = self.check(parent, 1)
        self.assertEqual(report["problem"], None)
        self.assertIn(f"not a directory of this user alone: '{cache}'", report["cache_problem"])
        what, _ = self.check(parent, 2**60)["problem"]
        self.assertIn(f"runner.node_directory: {parent}: ", what)
        self.assertIn("limits.free_disk", what)
