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
    """Others who hold a child's stdout."""

    async def test_grandchild_delays_the_end(self) -> None:
        """The child's exit is told, but its end not while a grandchild may still print."""
        child = self.shell("sleep 600 & echo $!")
        await child.exited.wait()
        await child.first.wait()
        await turn()
        self.assertFalse(child.ended.is_set)
        os.kill(int(child.stdout), signal.SIGKILL)
        await child.ended.wait()

    async def test_read_the_rest(self) -> None:
        """What was printed so far is read, however much, and the holder is not waited for."""
        child = self.shell("head -c 200000 /dev/zero; sleep 600 &")
        await child.exited.wait()
        child.child.read_remaining_output()
        reason = await child.ended.wait()
        self.assertEqual((len(child.stdout), type(reason)), (200000, ProcessDone))

    async def test_spawner_forgets(self) -> None:
        """A child is known from its start to its exit."""
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

    async def test_spawner_keeps_nothing(self) -> None:
        """Of a child that has ended the spawner keeps nothing, whether it is asked or not."""
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
    """How children end."""

    async def test_status(self) -> None:
        """The exit status is told."""
        for status in (0, 1, 77, 255):
            child = self.shell(f"exit {status}")
            reason = await child.ended.wait()
            self.assertIsInstance(reason, ProcessTerminated if status else ProcessDone)
            self.assertEqual((reason.exitCode, reason.signal), (status, None))
            self.assertFalse(child.child.is_running)

    async def test_signals(self) -> None:
        """A signal reaches the whole process group; after the child's end nobody is hurt."""
        for number in (signal.SIGHUP, signal.SIGKILL):
            child = self.shell("sleep 600 & echo ready; wait")
            await child.first.wait()
            child.child.signal_group(number)
            reason = await child.ended.wait()  # which the sleeper would hold up
            self.assertEqual(reason.signal, number)
            child.child.signal_group(number)

    async def test_usage(self) -> None:
        """What it has used is known when it has ended."""
        child = self.python("sum(range(2000000))")
        self.assertIsNone(child.child.resource_usage)
        await child.ended.wait()
        assert child.child.resource_usage is not None
        self.assertGreater(child.child.resource_usage.ru_utime, 0)

    async def test_many(self) -> None:
        """Children that end together are told apart."""
        children = [self.shell(f"echo {number}; exit {number}") for number in range(12)]
        for number, child in enumerate(children):
            reason = await child.ended.wait()
            self.assertEqual(bytes(child.stdout), b"%d\n" % number)
            self.assertEqual(reason.exitCode, number)


class FailureTests(ProcessTestCase):
    """Children that cannot be started."""

    def test_missing_program(self) -> None:
        """A missing program raises OSError, and leaves no descriptor and no reader behind."""
        before, readers = descriptors(), len(reactor.getReaders())
        recorder = Recorder()
        for _ in range(3):
            with self.assertRaises(FileNotFoundError):
                Spawner(reactor)(recorder, ["/nonexistent/program"], PATH, "/")
        self.assertEqual((descriptors(), len(reactor.getReaders())), (before, readers))
        self.assertEqual(recorder.calls, [])

    def test_missing_directory(self) -> None:
        """So does a missing working directory, and what is no program."""
        before = descriptors()
        with self.assertRaises(FileNotFoundError):
            Spawner(reactor)(Recorder(), ["/bin/true"], PATH, "/nonexistent")
        with self.assertRaises(PermissionError):
            Spawner(reactor)(Recorder(), ["/etc/passwd"], PATH, "/")
        self.assertEqual(descriptors(), before)

    async def test_no_descriptor_left(self) -> None:
        """One that has ended leaves no descriptor behind either."""
        await turn()  # in which a reactor that starts opens what it needs itself
        before = descriptors()
        for _ in range(3):
            child = self.shell("echo; sleep 600 &")
            await child.exited.wait()
            child.child.signal_group(signal.SIGKILL)
            await child.ended.wait()
        self.assertEqual(descriptors(), before)

    async def test_no_pidfd(self) -> None:
        """Where its end could not be told, the child is killed and nothing is left."""
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
