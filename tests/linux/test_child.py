"""`linux.child` with real children: how they end, and what they leave behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from twisted.internet import reactor
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.trial.unittest import TestCase

from tawebeval.linux.child import spawn_child
from tawebeval.linux.kernel_files import list_child_pids
from tests.cases.starters import PATH, Keeping, turn

LOOK = """
import json, os, signal, sys
umask = os.umask(0)
json.dump({
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "argv": sys.argv[1:],
    "descriptors": [
        int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    ],
    "stdin": os.read(0, 10).decode(),
    "umask": umask,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "is_leader": os.getpid() == os.getsid(0) == os.getpgrp(),
}, open(1, "w"))
"""


class ChildCase(TestCase):
    """Starts children that do not outlive their test."""

    def spawn(
        self,
        *argv: str,
        environment: Mapping[str, str] = PATH,
        directory: str = "/",
        descriptors: Sequence[int] = (),
    ) -> Any:
        """Start a child; return what notes what happens to it, with the child as `transport`."""
        noted = Keeping()
        child = spawn_child(reactor, noted, argv, environment, directory, descriptors=descriptors)

        async def end() -> None:
            child.signal_group(signal.SIGKILL)
            await noted.exited
            child.read_remaining_output()
            await noted.ended

        self.addCleanup(end)
        return noted

    def shell(self, command: str) -> Any:
        return self.spawn("/bin/sh", "-c", command)

    def list_descriptors(self) -> list[str]:
        return os.listdir("/proc/self/fd")


class InheritedStdoutTests(ChildCase):
    async def test_grandchild_that_holds_stdout_delays_the_end(self) -> None:
        child = self.shell("sleep 600 & echo $!")
        await child.exited
        while not child.printed[1]:
            await turn()
        await turn()
        self.assertNotIn("ended", child.told)
        os.kill(int(child.printed[1]), signal.SIGKILL)
        await child.ended

    async def test_remaining_output_is_read_while_a_grandchild_holds_stdout(self) -> None:
        child = self.shell("head -c 200000 /dev/zero; sleep 600 &")
        await child.exited
        child.transport.read_remaining_output()
        reason = await child.ended
        self.assertEqual((len(child.printed[1]), type(reason)), (200000, ProcessDone))

    async def test_nothing_is_kept_of_an_ended_child(self) -> None:
        noted = Keeping()
        spawn_child(reactor, noted, ["/bin/true"], PATH, "/")
        await noted.ended
        kept = weakref.ref(noted)
        del noted
        await turn()
        gc.collect()
        self.assertIsNone(kept())


class EndTests(ChildCase):
    async def test_each_child_reports_its_own_exit_status_if_several_end_together(self) -> None:
        statuses = (0, 1, 77, 255)
        children = [self.shell(f"echo {status}; exit {status}") for status in statuses]
        for status, child in zip(statuses, children, strict=True):
            reason = await child.ended
            self.assertEqual(child.printed[1], b"%d\n" % status)
            self.assertIsInstance(reason, ProcessTerminated if status else ProcessDone)
            self.assertEqual((reason.exitCode, reason.signal), (status, None))
            self.assertFalse(child.transport.is_running)

    async def test_signal_reaches_the_process_group_and_is_ignored_after_the_end(self) -> None:
        for number in (signal.SIGHUP, signal.SIGKILL):
            child = self.shell("sleep 600 & echo ready; wait")
            while not child.printed[1]:
                await turn()
            child.transport.signal_group(number)
            reason = await child.ended  # which the sleeper would hold up
            self.assertEqual(reason.signal, number)
            child.transport.signal_group(number)


class FailureTests(ChildCase):
    def test_child_that_cannot_be_started_is_an_error_and_leaves_nothing(self) -> None:
        before, readers = self.list_descriptors(), len(reactor.getReaders())
        noted = Keeping()
        for error, program, directory in (
            (FileNotFoundError, "/nonexistent/program", "/"),
            (FileNotFoundError, "/bin/true", "/nonexistent"),
            (PermissionError, "/etc/passwd", "/"),
        ):
            self.assertRaises(error, spawn_child, reactor, noted, [program], PATH, directory)
        self.assertEqual((self.list_descriptors(), len(reactor.getReaders())), (before, readers))
        self.assertEqual(noted.told, [])

    async def test_ended_child_leaves_no_descriptor(self) -> None:
        await turn()  # in which a reactor that starts opens what it needs itself
        before = self.list_descriptors()
        for _ in range(3):
            child = self.shell("echo; sleep 600 &")
            await child.exited
            child.transport.signal_group(signal.SIGKILL)
            await child.ended
        self.assertEqual(self.list_descriptors(), before)

    async def test_child_without_pidfd_or_epoll_watch_is_killed(self) -> None:
        added: list[Any] = []

        def add_first(reader: Any) -> None:
            added.append(reader)
            if len(added) > 1:
                raise OSError(errno.ENOSPC, "no watch")
            reactor.addReader(reader)

        def fail(pid: int) -> int:
            raise OSError("no more descriptors")

        full: Any = SimpleNamespace(addReader=add_first, removeReader=reactor.removeReader)
        await turn()
        before, children = self.list_descriptors(), set(list_child_pids("self"))
        self.assertRaises(OSError, spawn_child, full, Keeping(), ["/bin/sleep", "60"], PATH, "/")
        self.assertNotIn(added[0], reactor.getReaders())
        self.patch(os, "pidfd_open", fail)
        self.assertRaises(OSError, spawn_child, reactor, Keeping(), ["/bin/sleep", "60"], PATH, "/")
        self.assertEqual(self.list_descriptors(), before)
        self.assertEqual(set(list_child_pids("self")), children)


class InheritanceTests(ChildCase):
    async def test_child_inherits_only_the_given_environment_directory_and_descriptors(
        self,
    ) -> None:
        self.patch(os, "environ", {**os.environ, "SECRET": "of the daemon"})
        self.addCleanup(os.umask, os.umask(0o077))
        reading, writing = os.pipe()
        own = os.dup(0)
        self.addCleanup(os.close, own)
        self.addCleanup(os.dup2, own, 0)
        os.dup2(reading, 0)
        os.write(writing, b"x")
        os.set_inheritable(writing, True)
        before, directory = os.getcwd(), os.path.realpath(self.mktemp())
        os.mkdir(directory)
        arguments = ["", "a b", "$HOME", "*", "--", "ü", "'\""]
        given = {"A": "1", "EMPTY": "", "UMLAUT": "ü \n x", "LC_ALL": "C.UTF-8"}
        # Without -E: its environment is the one given. `-S` for speed.
        command = (sys.executable, "-S", "-c", LOOK, *arguments)
        child = self.spawn(
            *command,
            environment=given,
            directory=directory,
            descriptors=[reading],
        )
        await child.ended
        os.close(writing)
        os.close(reading)
        self.assertEqual(child.printed[2], b"")
        self.assertEqual(
            json.loads(child.printed[1]),
            {
                "environment": given,
                "directory": directory,
                "argv": arguments,
                "descriptors": [0, 1, 2, reading],
                "stdin": "",
                "umask": 0o022,
                "blocked": [],
                "is_leader": True,
            },
        )
        self.assertEqual(os.getcwd(), before)


class OutputTests(ChildCase):
    async def test_stdout_and_stderr_arrive_apart_in_order_and_before_the_end(self) -> None:
        script = (
            "import sys\nfor i in range(300000): sys.stdout.write(f'{i}\\n')"
            "\nsys.stderr.write('e' * 500000)"
        )
        child = self.spawn(sys.executable, "-IS", "-c", script)
        await child.ended
        self.assertEqual(child.printed[1], b"".join(b"%d\n" % i for i in range(300000)))
        self.assertEqual(child.printed[2], b"e" * 500000)
        self.assertEqual(child.told[-1], "ended")
        self.assertEqual(sorted(child.told), ["ended", "exited", "lost 1", "lost 2"])

    async def test_child_that_closes_its_outputs_has_not_ended(self) -> None:
        child = self.shell("exec 1>&- 2>&-; exec sleep 600")
        while len(child.told) < 2:
            await turn()
        self.assertEqual(sorted(child.told), ["lost 1", "lost 2"])
        self.assertTrue(child.transport.is_running)
        child.transport.signal_group(signal.SIGKILL)
        await child.ended
        self.assertEqual(child.told[2:], ["exited", "ended"])

    async def test_read_of_remaining_output_after_the_end_reports_no_second_end(self) -> None:
        child = self.shell("true")
        await child.ended
        child.transport.read_remaining_output()
        await turn()
        self.assertEqual(child.told.count("ended"), 1)
