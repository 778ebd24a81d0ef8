"""`linux.child` with real children: how they end, and what they leave behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import weakref
from types import SimpleNamespace
from typing import Any

from twisted.internet import reactor
from twisted.internet.error import ProcessDone, ProcessTerminated

from tawebeval.linux.child import spawn_child
from tawebeval.linux.kernel_files import list_children
from tests.cases.children import LOOK, PATH, ProcessTestCase, Recorder, descriptors, turn


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

    async def test_nothing_is_kept_of_an_ended_child(self) -> None:
        recorder = Recorder()
        spawn_child(reactor, recorder, ["/bin/true"], PATH, "/")
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
                spawn_child(reactor, recorder, [program], PATH, directory)
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
            spawn_child(reactor, Recorder(), ["/bin/sleep", "60"], PATH, "/")
        self.assertEqual(descriptors(), before)
        self.assertFalse(os.path.exists(f"/proc/{started[0]}"))

    async def test_child_without_epoll_watch_is_killed(self) -> None:
        started: list[Any] = []

        def add_first(reader: Any) -> None:
            started.append(reader)
            if len(started) > 1:
                raise OSError(errno.ENOSPC, "no watch")
            reactor.addReader(reader)

        full: Any = SimpleNamespace(addReader=add_first, removeReader=reactor.removeReader)
        await turn()
        before, children = descriptors(), set(list_children("self"))
        with self.assertRaises(OSError):
            spawn_child(full, Recorder(), ["/bin/sleep", "60"], PATH, "/")
        self.assertEqual(descriptors(), before)
        self.assertEqual(set(list_children("self")), children)
        self.assertNotIn(started[0], reactor.getReaders())


class InheritanceTests(ProcessTestCase):
    async def look(self, *arguments: str, **settings: Any) -> dict[str, Any]:
        # Without -E: its environment is the one given. `-S` for speed.
        child = self.spawn(sys.executable, "-S", "-c", LOOK, *arguments, **settings)
        await child.ended.wait()
        self.assertEqual(bytes(child.stderr), b"")
        return json.loads(bytes(child.stdout))

    async def test_arguments_environment_and_directory_are_those_given(self) -> None:
        self.patch(os, "environ", {**os.environ, "SECRET": "of the daemon"})
        before, directory = os.getcwd(), os.path.realpath(self.mktemp())
        os.mkdir(directory)
        arguments = ["", "a b", "$HOME", "*", "--", "ü", "'\""]
        given = {"A": "1", "EMPTY": "", "UMLAUT": "ü \n x", "LC_ALL": "C.UTF-8"}
        seen = await self.look(*arguments, environment=given, directory=directory)
        self.assertEqual(seen["argv"], arguments)
        self.assertEqual(seen["environment"], given)
        self.assertEqual(seen["directory"], directory)
        self.assertEqual(os.getcwd(), before)
        self.assertEqual((seen["session"], seen["group"]), (seen["pid"], seen["pid"]))

    async def test_stdin_is_at_its_end(self) -> None:
        reading, writing = os.pipe()
        self.addCleanup(os.close, writing)
        own = os.dup(0)
        self.addCleanup(os.close, own)
        self.addCleanup(os.dup2, own, 0)
        os.dup2(reading, 0)
        os.close(reading)
        os.write(writing, b"x")
        self.assertEqual((await self.look())["stdin"], "")

    async def test_umask_and_signals_are_not_inherited(self) -> None:
        self.addCleanup(os.umask, os.umask(0o077))
        seen = await self.look()
        self.assertEqual((seen["umask"], seen["blocked"]), (0o022, []))

    async def test_descriptors_of_the_daemon_and_other_children_are_not_inherited(self) -> None:
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)
        os.set_inheritable(writing, True)
        self.shell("sleep 600")
        self.assertEqual((await self.look())["descriptors"], [0, 1, 2])

    async def test_given_descriptors_keep_their_numbers(self) -> None:
        opened = os.open("/dev/null", os.O_RDONLY)
        self.addCleanup(os.close, opened)
        self.assertEqual(
            (await self.look(descriptors=[opened]))["descriptors"], sorted([0, 1, 2, opened])
        )

    async def test_children_start_beside_more_descriptors_than_select_takes(self) -> None:
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(2000)]
        for descriptor in opened:
            self.addCleanup(os.close, descriptor)
        os.set_inheritable(opened[-1], True)
        self.assertEqual((await self.look(environment=PATH))["descriptors"], [0, 1, 2])


class OutputTests(ProcessTestCase):
    async def test_stdout_and_stderr_arrive_apart_before_the_end(self) -> None:
        child = self.shell("printf out; printf err >&2; printf put")
        await child.ended.wait()
        self.assertEqual((bytes(child.stdout), bytes(child.stderr)), (b"output", b"err"))
        self.assertEqual(child.calls[-1], "ended")
        self.assertEqual(sorted(child.calls), ["ended", "exited", "stderr lost", "stdout lost"])

    async def test_much_output_arrives_in_order(self) -> None:
        script = (
            "import sys\nfor i in range(300000): sys.stdout.write(f'{i}\\n')"
            "\nsys.stderr.write('e' * 500000)"
        )
        child = self.python(script)
        await child.ended.wait()
        self.assertEqual(bytes(child.stdout), b"".join(b"%d\n" % i for i in range(300000)))
        self.assertEqual(len(child.stderr), 500000)

    async def test_child_that_closes_its_outputs_has_not_ended(self) -> None:
        child = self.shell("exec 1>&- 2>&-; exec sleep 600")
        while len(child.calls) < 2:
            await turn()
        self.assertEqual(sorted(child.calls), ["stderr lost", "stdout lost"])
        self.assertTrue(child.child.is_running)
        child.child.signal_group(signal.SIGKILL)
        await child.ended.wait()
        self.assertEqual(child.calls[2:], ["exited", "ended"])

    async def test_rest_of_an_ended_child_is_nothing(self) -> None:
        child = self.shell("true")
        await child.ended.wait()
        child.child.read_remaining_output()
        await turn()
        self.assertEqual(child.calls.count("ended"), 1)
