"""`linux.keeper_owned_process` with real children, as the keeper would hand them over."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from resource import struct_rusage
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ProcessDone, ProcessTerminated

from tawebeval.linux.child import StartedProcess, start_child
from tawebeval.linux.keeper_owned_process import (
    REPLAYABLE_STDERR_BYTES,
    KeeperOwnedDescriptors,
    KeeperOwnedProcess,
)
from tests.cases.children import PATH, ProcessTestCase, Recorder, descriptors, turn

_PRINTED = 8 * 2**20  # bytes


class KeptRecorder(Recorder):
    """Notes what happens to a kept process."""

    child: KeeperOwnedProcess


class KeptTestCase(ProcessTestCase):
    """Takes over children as if they were those of another process."""

    def keep(
        self, started: StartedProcess, wait: Any = None, known: bytes = b"", stdout_offset: int = 0
    ) -> KeptRecorder:
        """Take over a child, of whose stdout `known` lies in the memfd; return the recorder."""
        output, errors = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("output", "errors"))
        os.write(output, known)
        run = KeeperOwnedDescriptors(
            started.pid,
            started.pidfd,
            started.stdout,
            started.stderr,
            output,
            errors,
            stdout_offset,
        )
        recorder = KeptRecorder()
        kept = KeeperOwnedProcess(
            reactor, recorder, run, wait or (lambda: succeed(reap(started.pid)))
        )
        self.output, self.errors = output, errors

        async def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            kept.resumeProducing()
            if kept.is_running:
                await recorder.exited.wait()
            kept.read_remaining_output()
            await recorder.ended.wait()

        self.addCleanup(end)
        return recorder

    def run_shell(self, command: str, **settings: Any) -> KeptRecorder:
        """Start a shell command and take it over."""
        return self.keep(start_child(["/bin/sh", "-c", command], PATH, "/"), **settings)


def reap(pid: int) -> tuple[int, struct_rusage | None]:
    """Wait for a child that has ended."""
    return os.wait4(pid, 0)[1:]


class EndTests(KeptTestCase):
    """How kept processes end."""

    async def test_output_and_status(self) -> None:
        """Output arrives whole and apart; then the exit is told, with the usage, and the end."""
        await turn()
        before = descriptors()
        kept = self.run_shell("printf out; printf err >&2; printf put; exit 77")
        self.assertTrue(kept.child.is_running)
        reason = await kept.ended.wait()
        self.assertEqual((bytes(kept.stdout), bytes(kept.stderr)), (b"output", b"err"))
        self.assertEqual(sorted(kept.calls), ["ended", "exited", "stderr lost", "stdout lost"])
        self.assertEqual(kept.calls[-1], "ended")
        self.assertEqual((reason.exitCode, reason.signal), (77, None))
        self.assertFalse(kept.child.is_running)
        self.assertIsNotNone(kept.child.resource_usage)
        self.assertIsNone(kept.child.output_error)
        self.assertEqual(kept.child.delivered_bytes, 6)
        self.assertEqual(descriptors(), before)
        kept.child.release_output_memory(6)  # no longer of any effect
        kept.child.signal_group(signal.SIGKILL)

    async def test_other_ends(self) -> None:
        """Success and signals are told as of other children."""
        self.assertIsInstance(await self.run_shell("true").ended.wait(), ProcessDone)
        reason = await self.run_shell("kill -SEGV $$").ended.wait()
        self.assertEqual((reason.exitCode, reason.signal), (None, signal.SIGSEGV))

    async def test_exit_first(self) -> None:
        """Where others hold the pipes the exit is told before the ends, and the rest is read."""
        kept = self.run_shell("head -c 200000 /dev/zero; sleep 600 &")
        await kept.exited.wait()
        self.assertFalse(kept.ended.is_set)
        kept.child.read_remaining_output()
        self.assertIsInstance(await kept.ended.wait(), ProcessDone)
        self.assertEqual(len(kept.stdout), 200000)

    async def test_late_answer(self) -> None:
        """Until the keeper has answered the exit is not known, and the process counts as run."""
        answer: Deferred[tuple[int, struct_rusage | None]] = Deferred()
        asked: list[None] = []

        def wait() -> Deferred[tuple[int, struct_rusage | None]]:
            asked.append(None)
            return answer

        kept = self.run_shell("true", wait=wait)
        while not asked or len(kept.calls) < 2:
            await turn()
        self.assertTrue(kept.child.is_running)
        status, _ = reap(kept.child.pid)
        answer.callback((status, None))
        self.assertIsInstance(await kept.ended.wait(), ProcessDone)
        self.assertEqual((len(asked), kept.child.resource_usage), (1, None))

    async def test_keeper_gone(self) -> None:
        """Where nobody answers, the process counts as killed."""
        kept = self.run_shell("true", wait=lambda: fail(ConnectionError()))
        reason = await kept.ended.wait()
        self.assertIsInstance(reason, ProcessTerminated)
        self.assertEqual((reason.exitCode, reason.signal), (None, signal.SIGKILL))
        reap(kept.child.pid)


class GroupTests(KeptTestCase):
    """Signals to process groups."""

    async def test_group(self) -> None:
        """A signal reaches the whole group, and after the process's exit those that are left."""
        kept = self.run_shell("sleep 600 & echo ready; wait")
        await kept.first.wait()
        kept.child.signal_group(signal.SIGTERM)
        self.assertEqual((await kept.ended.wait()).signal, signal.SIGTERM)
        kept = self.run_shell("sleep 600 & sleep 600 &")
        await kept.exited.wait()
        kept.child.signal_group(signal.SIGKILL)
        await kept.ended.wait()

    async def test_reused_number(self) -> None:
        """Another process that has got the number, and its group, gets no signal."""
        with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as other:
            started = start_child(["/bin/true"], PATH, "/")
            os.waitid(os.P_PID, started.pid, os.WEXITED)
            reused = StartedProcess(other.pid, started.pidfd, started.stdout, started.stderr)
            kept = self.keep(reused, wait=lambda: succeed((0, None)))
            kept.child.signal_group(signal.SIGKILL)
            await kept.exited.wait()
            kept.child.signal_group(signal.SIGKILL)
            await kept.ended.wait()
            self.assertIsNone(other.poll())
            other.kill()


class OutputTests(KeptTestCase):
    """What they print."""

    async def test_resume(self) -> None:
        """Stdout begins where it was left, stderr at its beginning."""
        kept = self.run_shell("echo new; echo err >&2", known=b"old, unread, ", stdout_offset=5)
        self.assertEqual((bytes(kept.stdout), kept.child.delivered_bytes), (b"", 5))
        await kept.ended.wait()
        self.assertEqual(bytes(kept.stdout), b"unread, new\n")
        self.assertEqual(kept.child.delivered_bytes, 17)

    async def test_remaining_output(self) -> None:
        """The rest is what was not delivered, and what the pipe holds; nobody is waited for."""
        known = b"k" * 150_000
        kept = self.run_shell("echo new; sleep 600 &", known=known)
        kept.child.pauseProducing()
        await kept.exited.wait()
        kept.child.read_remaining_output()
        await turn()
        self.assertEqual(bytes(kept.stdout), b"")
        kept.child.resumeProducing()
        await kept.ended.wait()
        self.assertEqual(bytes(kept.stdout), known + b"new\n")

    async def test_discard(self) -> None:
        """The memory of what was discarded is given back; what is left can still be read."""
        script = f"import sys\nfor i in range({_PRINTED // 16}): sys.stdout.write('%015d\\n' % i)"
        kept = self.keep(start_child([sys.executable, "-IS", "-c", script], PATH, "/"))
        held = os.dup(self.output)
        self.addCleanup(os.close, held)
        most = 0
        while not kept.ended.is_set:
            kept.child.release_output_memory(kept.child.delivered_bytes - 100_000)
            most = max(most, os.fstat(held).st_blocks * 512)
            await turn()
        self.assertEqual(len(kept.stdout), _PRINTED)
        self.assertEqual(os.fstat(held).st_size, _PRINTED)
        # Not yet discarded, chunks of one turn, the rest of a hole, and the page at each end.
        self.assertLessEqual(most, 100_000 + 4 * 2**16)
        self.assertGreater(most, 100_000)
        self.assertEqual(os.pread(held, 100_000, _PRINTED - 100_000), kept.stdout[-100_000:])

    async def test_discard_too_much(self) -> None:
        """What was not delivered is not discarded."""
        known = b"k" * 200_000
        kept = self.run_shell("true", known=known, stdout_offset=70_000)
        kept.child.release_output_memory(200_000)
        self.assertEqual(os.pread(self.output, 2, 2**16 - 1), b"\0k")
        await kept.ended.wait()
        self.assertEqual(bytes(kept.stdout), known[70_000:])

    async def test_discard_range(self) -> None:
        """The memory of a range is given back in whole pages, and the bytes around it stay."""
        known = b"k" * 200_000
        kept = self.run_shell("true", known=known)
        kept.child.release_output_range(5000, 150_000)
        held = os.pread(self.output, 200_000, 0)
        self.assertEqual(held.count(b"\0"), 36 * 4096 - 2 * 4096)
        self.assertEqual((held[:8192].count(b"k"), held[-50_000:].count(b"k")), (8192, 50_000))
        self.assertLess(os.fstat(self.output).st_blocks * 512, 70_000)
        await kept.ended.wait()
        kept.child.release_output_range(0, 8192)  # no longer of any effect

    async def test_discard_errors(self) -> None:
        """Of stderr the last bytes are kept."""
        kept = self.run_shell("head -c 300000 /dev/zero >&2; sleep 600")
        while len(kept.stderr) < 300_000:
            await turn()
        held = os.fstat(self.errors).st_blocks * 512
        self.assertGreaterEqual(held, REPLAYABLE_STDERR_BYTES)
        self.assertLessEqual(held, 2 * REPLAYABLE_STDERR_BYTES + 4096)

    async def test_full_memfd(self) -> None:
        """A process whose output cannot be kept is killed, and an error tells why."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        kept = self.run_shell("trap '' PIPE; cat /dev/zero; sleep 600")
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
        reason = await kept.ended.wait()
        self.assertEqual((len(kept.stdout), reason.signal), (300_000, signal.SIGKILL))
        assert kept.child.output_error is not None
        self.assertIn("File too large", str(kept.child.output_error))
