"""`slurm.job_transfer`: a job description with its files, through a pipe."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tawebeval.config import LimitSettings, SandboxSettings
from tawebeval.errors import EvaluationFailure
from tawebeval.slurm.frames import FrameKind
from tawebeval.slurm.job_description import JobDescription
from tawebeval.slurm.job_transfer import JobSender, encode_job, receive_job
from tawebeval.slurm.tree_stream import BrokenStream, StreamEnded, encode_tree
from tests.cases.pipes import PipeCase
from tests.fakes.world import InlineThreads


class TransferTests(PipeCase):
    """An evaluation that is sent, and received below another directory."""

    def setUp(self) -> None:
        super().setUp()
        base = Path(self.mktemp()).resolve()
        self.root = base / "evaluations" / "one"
        self.checkout = base / "cache" / "repository-tree-1-2"
        (self.root / "submission" / "source").mkdir(parents=True)
        (self.root / "submission" / "source" / "a.py").write_text("x")
        (self.checkout / "sub").mkdir(parents=True)
        (self.checkout / "README").write_text("hi")
        self.job = JobDescription(
            *("true", {"A": "b"}, self.root / "tree" / "sub", self.root, self.checkout, 2, 1),
            *(LimitSettings(), SandboxSettings(), None),
        )
        self.file = self.job.write_file()
        self.place = base / "node" / "place"
        self.place.mkdir(parents=True)
        self.told: list[FrameKind] = []
        self.failures: list[EvaluationFailure] = []

    def make_sender(self, threads: Any = None) -> JobSender:
        """Return the sender."""
        sender = JobSender(
            self.reactor,
            threads or InlineThreads(),
            *(self.file, self.checkout, 0, 0, self.writing, self.failures.append),
        )
        os.close(self.writing)
        return sender

    def receive(self, stream: bytes) -> JobDescription:
        """Receive a job description."""
        with ExitStack() as opened:
            return receive_job(
                io.BytesIO(stream), self.place, opened.enter_context, self.told.append
            )

    def test_whole(self) -> None:
        """The node has the same files below its own directory."""
        sender = self.make_sender()
        sender.on_frame(FrameKind.READY_FOR_JOB)
        stream = self.pump()
        sender.on_frame(FrameKind.TREE_WANTED)
        job = self.receive(stream + self.pump())
        self.assertEqual(self.told, [FrameKind.READY_FOR_JOB, FrameKind.TREE_WANTED])
        root = self.place / "evaluation"
        self.assertEqual((job.root, job.directory), (root, root / "tree" / "sub"))
        self.assertEqual((job.command, job.variables), ("true", {"A": "b"}))
        self.assertEqual((job.checkout / "README").read_text(), "hi")
        self.assertEqual((root / "submission" / "source" / "a.py").read_text(), "x")
        self.assertTrue((root / "home").is_dir())
        sender.stop()
        self.assertEqual((os.read(self.reading, 9), self.failures), (b"", []))

    def test_cached(self) -> None:
        """The tree is not wanted a second time, and no other tree is taken for it."""
        job = b"".join(encode_job(self.file, self.checkout, 10**6, 0))
        self.receive(job + b"".join(encode_tree(self.checkout)))
        self.place = self.place.with_name("second")
        self.place.mkdir()
        self.told.clear()
        self.assertEqual((self.receive(job).checkout / "README").read_text(), "hi")
        self.assertEqual(self.told, [FrameKind.READY_FOR_JOB])
        other = self.checkout.rename(self.checkout.with_name("repository-other-1-2"))
        self.place = self.place.with_name("third")
        self.place.mkdir()
        job = b"".join(encode_job(self.file, other, 10**6, 0))
        self.assertRaises(StreamEnded, self.receive, job)
        self.assertEqual(self.told[1:], [FrameKind.READY_FOR_JOB, FrameKind.TREE_WANTED])

    def test_broken(self) -> None:
        """Other streams are refused."""
        for number, (stream, error) in enumerate(
            (
                (b"", StreamEnded),
                (b"5\n{}", StreamEnded),
                (b"GET / HTTP/1.1\r\n", BrokenStream),
                (b"99999999999\n", BrokenStream),
            )
        ):
            self.place = self.place.with_name(f"place-{number}")
            self.place.mkdir()
            self.assertRaises(error, self.receive, stream)

    def test_full_disk(self) -> None:
        """A node without room for the tree refuses, before it takes the submission."""
        job = b"".join(encode_job(self.file, self.checkout, 0, 2**20))
        tree = b"".join(encode_tree(self.checkout))
        usage = SimpleNamespace(free=2**20 + 2 * self.job.commit_bytes)
        self.patch(shutil, "disk_usage", lambda _: usage)
        self.receive(job + tree)
        usage.free = 2**20 + self.job.commit_bytes - 1
        self.place = self.place.with_name("second")
        self.place.mkdir()
        error = self.assertRaises(OSError, self.receive, job)
        self.assertIn("1 MiB (limits.free_disk) must remain beside a tree of 2 bytes", str(error))
        self.assertEqual(list(self.place.iterdir()), [])
        usage.free += 1  # enough for a tree in the cache, not for one that is received and copied
        error = self.assertRaises(OSError, self.receive, job + tree)
        self.assertIn("must remain beside a tree of 4 bytes", str(error))

    def test_unreadable(self) -> None:
        """A file that is gone is told, without its path; after a stop nothing is told."""
        (self.root / "submission" / "source" / "a.py").unlink()
        (self.root / "submission" / "source").rmdir()
        (self.root / "submission").rmdir()
        self.make_sender().on_frame(FrameKind.READY_FOR_JOB)
        self.pump()
        self.assertEqual(
            [str(one) for one in self.failures],
            ["the daemon could not send the files: No such file or directory"],
        )
        self.reading, self.writing = os.pipe()
        sender = self.make_sender()
        sender.stop()
        sender.on_frame(FrameKind.READY_FOR_JOB)
        self.assertEqual(len(self.failures), 1)
        os.close(self.reading)
