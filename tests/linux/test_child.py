"""`linux.child` with real children: how they end, and what they leave behind."""

from __future__ import annotations

import gc
import os
import signal
import weakref

from twisted.internet import reactor
from twisted.internet.error import ProcessDone, ProcessTerminated

from tawebeval.linux.child import Spawner
from tests.cases.children import PATH, ProcessTestCase, Recorder, descriptors, turn


class HeirTests(ProcessTestCase):
    async def test_grandchild_that_holds_stdout_delays_the_end(self) -> None:
        child = self.shell("sleep 600 & echo $!")
        await child.exited.wait()
        await child.first.wait()
        await turn()
        self.assertFalse(child.ended.is_set)
        os.kill(int(child.stdout), signal.SIGKILL)
        await child.ended.wait()

    async def test_rest_is_read_without_waiting_for_the_holder(self) -> None:
        child = self.shell("head -c 200000 /dev/zero; sleep 600 &")
        await child.exited.wait()
        child.child.read_remaining_output()
        reason = await child.ended.wait()
        self.assertEqual((len(child.stdout), type(reason)), (200000, ProcessDone))

    async def test_child_is_known_from_start_to_exit(self) -> None:
        spawner = Spawner(reactor)
        child = self.shell("read line; echo; sleep 600 &", spawner=spawner)
        pid = child.child.pid
        self.assertTrue(spawner.is_child(pid))
        self.assertEqual(spawner.child_count, 1)
        self.assertFalse(spawner.is_child(os.getpid()))
        await child.exited.wait()
        self.assertEqual(spawner.child_count, 0)
        self.assertFalse(spawner.is_child(pid))
        self.assertFalse(spawner.is_child(pid))

    async def test_spawner_keeps_nothing_of_an_ended_child(self) -> None:
        spawner = Spawner(reactor)
        recorder = Recorder()
        spawner(recorder, ["/bin/true"], PATH, "/")
        await recorder.ended.wait()
        kept = weakref.ref(recorder)
        del recorder
        await turn()
        gc.collect()
        self.assertIsNone(kept())


class EndTests(ProcessTestCase):
    async def test_exit_status_is_told(self) -> None:
        for status in (0, 1, 77, 255):
            child = self.shell(f"exit {status}")
            reason = await child.ended.wait()
            self.assertIsInstance(reason, ProcessTerminated if status else ProcessDone)
            self.assertEqual((reason.exitCode, reason.signal), (status, None))
            self.assertFalse(child.child.is_running)

    async def test_signal_reaches_the_group_and_nobody_after_the_end(self) -> None:
        for number in (signal.SIGHUP, signal.SIGKILL):
            child = self.shell("sleep 600 & echo ready; wait")
            await child.first.wait()
            child.child.signal_group(number)
            reason = await child.ended.wait()  # which the sleeper would hold up
            self.assertEqual(reason.signal, number)
            child.child.signal_group(number)

    async def test_usage_is_known_after_the_end(self) -> None:
        child = self.python("sum(range(2000000))")
        self.assertIsNone(child.child.resource_usage)
        await child.ended.wait()
        assert child.child.resource_usage is not None
        self.assertGreater(child.child.resource_usage.ru_utime, 0)

    async def test_children_that_end_together_are_told_apart(self) -> None:
        children = [self.shell(f"echo {number}; exit {number}") for number in range(12)]
        for number, child in enumerate(children):
            reason = await child.ended.wait()
            self.assertEqual(bytes(child.stdout), b"%d\n" % number)
            self.assertEqual(reason.exitCode, number)


class FailureTests(ProcessTestCase):
    def test_child_that_cannot_be_started_is_an_error_and_leaves_nothing(self) -> None:
        before, readers = descriptors(), len(reactor.getReaders())
        recorder = Recorder()
        for error, program, directory in (
            (FileNotFoundError, "/nonexistent/program", "/"),
            (FileNotFoundError, "/bin/true", "/nonexistent"),
            (PermissionError, "/etc/passwd", "/"),
        ):
            with self.assertRaises(error):
                Spawner(reactor)(recorder, [program], PATH, directory)
        self.assertEqual((descriptors(), len(reactor.getReaders())), (before, readers))
        self.assertEqual(recorder.calls, [])

    async def test_ended_child_leaves_no_descriptor(self) -> None:
        await turn()  # in which a reactor that starts opens what it needs itself
        before = descriptors()
        for _ in range(3):
            child = self.shell("echo; sleep 600 &")
            await child.exited.wait()
            child.child.signal_group(signal.SIGKILL)
            await child.ended.wait()
        self.assertEqual(descriptors(), before)

    async def test_child_without_pidfd_is_killed(self) -> None:
        started = []

        def fail(pid: int) -> int:
            started.append(pid)
            raise OSError("no more descriptors")

        before = descriptors()
        self.patch(os, "pidfd_open", fail)
        with self.assertRaises(OSError):
            Spawner(reactor)(Recorder(), ["/bin/sleep", "60"], PATH, "/")
        self.assertEqual(descriptors(), before)
        self.assertFalse(os.path.exists(f"/proc/{started[0]}"))
