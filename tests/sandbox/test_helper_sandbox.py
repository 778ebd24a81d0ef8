"""`sandbox.helper_sandbox`: what commands of git are given of the machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox import bubblewrap
from tawebeval.sandbox.helper_sandbox import (
    READ_ONLY_ACCESS,
    BubblewrapHelperSandbox,
    NoHelperSandbox,
    SandboxAccess,
)
from tests.fakes.children import FakeChild

REPOSITORY = Path("/cache/x.git")


class ArgumentTests(SynchronousTestCase):
    def argv(self, reach: SandboxAccess = READ_ONLY_ACCESS) -> Sequence[str]:
        box = BubblewrapHelperSandbox(
            "/usr/bin/bwrap", (7, 8), ("--ro-bind", "/usr", "/usr"), ("--ro-bind", "/n", "/n")
        )
        return box.build_argv_prefix(REPOSITORY, reach, (9, 10))

    def binds(self, option: str, reach: SandboxAccess = READ_ONLY_ACCESS) -> list[str]:
        argv = self.argv(reach)
        return [argv[i + 2] for i, one in enumerate(argv) if one == option]

    def test_command_has_no_privileges_and_ends_with_the_daemon(self) -> None:
        argv = self.argv()
        self.assertEqual(argv[0], "/usr/bin/bwrap")
        for option in ("--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"):
            self.assertIn(option, argv)
        at = argv.index("--add-seccomp-fd")
        self.assertEqual(argv[at : at + 4 : 3], ["--add-seccomp-fd", "10"])
        self.assertEqual(argv[argv.index("--cap-drop") + 1], "ALL")
        self.assertEqual(argv[-1], "--")

    def test_command_reads_its_repository_without_network(self) -> None:
        self.assertEqual(self.binds("--ro-bind"), ["/usr", "/cache/x.git"])
        self.assertEqual(self.binds("--bind") + self.binds("--ro-bind-try"), [])
        self.assertNotIn("--share-net", self.argv())

    def test_command_without_a_repository_sees_none(self) -> None:
        box = BubblewrapHelperSandbox("/usr/bin/bwrap", (7, 8), ())
        argv = box.build_argv_prefix(None, READ_ONLY_ACCESS, (9, 10))
        self.assertNotIn("--ro-bind", argv)

    def test_fetch_writes_and_has_the_network(self) -> None:
        reach = SandboxAccess((REPOSITORY,), ("/k/id",), has_network=True)
        argv = self.argv(reach)
        self.assertIn("--share-net", argv)
        self.assertEqual(self.binds("--ro-bind", reach), ["/usr", "/n", "/cache/x.git"])
        self.assertEqual(self.binds("--bind", reach), ["/cache/x.git"])
        self.assertEqual(self.binds("--ro-bind-try", reach), ["/etc/ssh/ssh_known_hosts", "/k/id"])
        self.assertLess(argv.index("--tmpfs"), argv.index("/k/id"))
        self.assertLess(argv.index("--ro-bind-try"), argv.index("--bind"))
        read_only = argv[argv.index("--remount-ro") :][:6]
        self.assertEqual(read_only[::2], ["--remount-ro"] * 3)
        self.assertEqual(read_only[1::2], ["/proc", "/dev", "/"])


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
