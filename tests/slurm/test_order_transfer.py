"""`slurm.order_transfer`: an order with its files, through a pipe."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings, SandboxSettings
from tawebeval.errors import EvaluationFailure
from tawebeval.slurm.frames import FrameKind
from tawebeval.slurm.order import Order
from tawebeval.slurm.order_transfer import (
    OrderSender,
    PipeClosed,
    PipeWriter,
    encode_order,
    receive_order,
)
from tawebeval.slurm.tree_stream import BrokenStream, StreamEnded, encode_tree
from tests.fakes.world import InlineThreads


class FakeReactor:
    """A reactor that has the writers of a test."""

    def __init__(self) -> None:
        self.writers: set[Any] = set()

    def addWriter(self, writer: Any) -> None:
        """Note a writer."""
        self.writers.add(writer)

    def removeWriter(self, writer: Any) -> None:
        """Forget a writer."""
        self.writers.discard(writer)

    def write(self) -> None:
        """Let all writers write once."""
        for writer in list(self.writers):
            if reason := writer.doWrite():
                writer.connectionLost(reason)


class PipeCase(SynchronousTestCase):
    """A pipe whose write end does not block."""

    def setUp(self) -> None:
        self.reactor = FakeReactor()
        self.reading, self.writing = os.pipe()
        self.addCleanup(os.close, self.reading)
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, False)

    def pump(self) -> bytes:
        """Let writers write, and return what has arrived."""
        arrived = bytearray()
        while self.reactor.writers:
            self.reactor.write()
            try:
                arrived += os.read(self.reading, 2**20)
            except BlockingIOError:
                break
        return bytes(arrived)


class WriterTests(PipeCase):
    """The writer waits for the pipe, and has a descriptor of its own."""

    def test_large(self) -> None:
        """A piece of any size is written as the pipe has room."""
        writer = PipeWriter(self.reactor, self.writing)
        os.close(self.writing)
        content = os.urandom(300_000)
        written = Deferred.fromCoroutine(writer.write(content))
        for _ in range(9):
            self.reactor.write()
        self.assertNoResult(written)
        self.assertEqual(self.pump(), content)
        self.successResultOf(written)
        writer.connectionLost(None)  # type: ignore[arg-type]
        self.assertEqual(os.read(self.reading, 9), b"")

    def test_closed(self) -> None:
        """A write ends with the writer, and no later one begins."""
        writer = PipeWriter(self.reactor, self.writing)
        os.close(self.writing)
        written = Deferred.fromCoroutine(writer.write(bytes(10**6)))
        for _ in range(2):
            writer.connectionLost(None)  # type: ignore[arg-type]
        self.failureResultOf(written, PipeClosed)
        self.failureResultOf(Deferred.fromCoroutine(writer.write(b"x")), PipeClosed)
        self.assertEqual(self.reactor.writers, set())


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
        self.order = Order(
            *("true", {"A": "b"}, self.root / "tree" / "sub", self.root, None, self.checkout, 2, 1),
            *(LimitSettings(), SandboxSettings(), None),
        )
        self.file = self.order.write_file()
        self.place = base / "node" / "place"
        self.place.mkdir(parents=True)
        self.told: list[FrameKind] = []
        self.failures: list[EvaluationFailure] = []

    def make_sender(self, threads: Any = None) -> OrderSender:
        """Return the sender."""
        sender = OrderSender(
            self.reactor,
            threads or InlineThreads(),
            *(self.file, self.checkout, 0, self.writing, self.failures.append),
        )
        os.close(self.writing)
        return sender

    def receive(self, stream: bytes) -> Order:
        """Receive an order."""
        with ExitStack() as opened:
            return receive_order(
                io.BytesIO(stream), self.place, opened.enter_context, self.told.append
            )

    def test_whole(self) -> None:
        """The node has the same files below its own directory."""
        sender = self.make_sender()
        sender.on_frame(FrameKind.READY)
        stream = self.pump()
        sender.on_frame(FrameKind.WANTED)
        order = self.receive(stream + self.pump())
        self.assertEqual(self.told, [FrameKind.READY, FrameKind.WANTED])
        root = self.place / "evaluation"
        self.assertEqual((order.root, order.directory), (root, root / "tree" / "sub"))
        self.assertEqual((order.command, order.variables), ("true", {"A": "b"}))
        self.assertEqual((order.checkout / "README").read_text(), "hi")
        self.assertEqual((root / "submission" / "source" / "a.py").read_text(), "x")
        self.assertTrue((root / "home").is_dir())
        sender.stop()
        self.assertEqual((os.read(self.reading, 9), self.failures), (b"", []))

    def test_cached(self) -> None:
        """The tree is not wanted a second time, and no other tree is taken for it."""
        order = b"".join(encode_order(self.file, self.checkout, 10**6))
        self.receive(order + b"".join(encode_tree(self.checkout)))
        self.place = self.place.with_name("second")
        self.place.mkdir()
        self.told.clear()
        self.assertEqual((self.receive(order).checkout / "README").read_text(), "hi")
        self.assertEqual(self.told, [FrameKind.READY])
        other = self.checkout.rename(self.checkout.with_name("repository-other-1-2"))
        self.place = self.place.with_name("third")
        self.place.mkdir()
        order = b"".join(encode_order(self.file, other, 10**6))
        self.assertRaises(StreamEnded, self.receive, order)
        self.assertEqual(self.told[1:], [FrameKind.READY, FrameKind.WANTED])

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

    def test_unreadable(self) -> None:
        """A file that is gone is told, without its path; after a stop nothing is told."""
        (self.root / "submission" / "source" / "a.py").unlink()
        (self.root / "submission" / "source").rmdir()
        (self.root / "submission").rmdir()
        self.make_sender().on_frame(FrameKind.READY)
        self.pump()
        self.assertEqual(
            [str(one) for one in self.failures],
            ["the daemon could not send the files: No such file or directory"],
        )
        self.reading, self.writing = os.pipe()
        sender = self.make_sender()
        sender.stop()
        sender.on_frame(FrameKind.READY)
        self.assertEqual(len(self.failures), 1)
        os.close(self.reading)
