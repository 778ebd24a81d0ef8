"""`sandbox.helper_sandbox`: what commands of git are given of the machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox import bubblewrap
from tawebeval.sandbox.helper_sandbox import (
    READ_ONLY_ACCESS,
    BubblewrapHelperSandbox,
    NoHelperSandbox,
)
from tests.fakes.children import FakeChild

REPOSITORY = Path("/cache/x.git")


class EnterTests(SynchronousTestCase):
    def test_each_command_reads_the_filter_from_its_beginning(self) -> None:
        filter_ = os.memfd_create("filter")
        self.addCleanup(os.close, filter_)
        os.write(filter_, b"program")
        box = BubblewrapHelperSandbox("bwrap", (filter_, filter_), ())
        for _ in range(2):
            with box.prepare_command(REPOSITORY, READ_ONLY_ACCESS) as (argv, opened):
                self.assertEqual(len(opened), 2)
                for descriptor in opened:
                    self.assertIn(str(descriptor), argv)
                    self.assertEqual(os.read(descriptor, 100), b"program")
            for descriptor in opened:
                self.assertRaises(OSError, os.fstat, descriptor)

    def test_kill_reaches_what_is_inside_or_bwrap(self) -> None:
        sent: list[tuple[int, int]] = []
        self.patch(bubblewrap, "send_signal", lambda pid, number: sent.append((pid, number)))
        for inside in ([31, 32], []):
            child = FakeChild(Clock(), ProcessProtocol())
            self.patch(bubblewrap, "list_descendants", lambda pid, inside=inside: inside)
            BubblewrapHelperSandbox("bwrap", (7, 8), ()).kill_command(child)
            self.assertEqual(child.group_signals, [] if inside else [signal.SIGKILL])
        self.assertEqual(sent, [(31, signal.SIGKILL), (32, signal.SIGKILL)])

    def test_command_without_sandbox_is_killed_as_a_group(self) -> None:
        with NoHelperSandbox().prepare_command(REPOSITORY, READ_ONLY_ACCESS) as entered:
            self.assertEqual(entered, ((), ()))
        child = FakeChild(Clock(), ProcessProtocol())
        NoHelperSandbox().kill_command(child)
        self.assertEqual(child.group_signals, [signal.SIGKILL])
