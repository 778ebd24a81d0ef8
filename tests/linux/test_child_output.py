"""`linux.child` with real children: what they print, and the back-pressure on it."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios

from twisted.internet.error import ProcessDone

from tests.cases.children import ProcessTestCase, turn


class OutputTests(ProcessTestCase):
    async def test_stdout_and_stderr_arrive_apart_before_the_end(self) -> None:
        child = self.shell("printf out; printf err >&2; printf put")
        await child.ended.wait()
        self.assertEqual((bytes(child.stdout), bytes(child.stderr)), (b"output", b"err"))
        self.assertEqual(child.calls[-1], "ended")
        self.assertEqual(sorted(child.calls), ["ended", "exited", "stderr lost", "stdout lost"])

    async def test_much_output_arrives_in_order_in_pieces_of_64_kib(self) -> None:
        script = (
            "import sys\nfor i in range(300000): sys.stdout.write(f'{i}\\n')"
            "\nsys.stderr.write('e' * 500000)"
        )
        child = self.python(script)
        await child.ended.wait()
        self.assertEqual(bytes(child.stdout), b"".join(b"%d\n" % i for i in range(300000)))
        self.assertEqual(len(child.stderr), 500000)
        self.assertLessEqual(child.largest, 2**16)

    async def test_child_that_closes_its_outputs_has_not_ended(self) -> None:
        child = self.shell("exec 1>&- 2>&-; exec sleep 600")
        while len(child.calls) < 2:
            await turn()
        self.assertEqual(sorted(child.calls), ["stderr lost", "stdout lost"])
        self.assertTrue(child.child.is_running)
        child.child.signal_group(signal.SIGKILL)
        await child.ended.wait()
        self.assertEqual(child.calls[2:], ["exited", "ended"])


class PauseTests(ProcessTestCase):
    async def test_paused_child_is_read_when_resumed(self) -> None:
        child = self.shell("echo one; read line; echo err >&2; echo two", directory="/")
        child.child.pauseProducing()
        reason = await child.exited.wait()
        while b"err" not in child.stderr:
            await turn()
        self.assertIsInstance(reason, ProcessDone)
        self.assertEqual(bytes(child.stdout), b"")
        self.assertFalse(child.ended.is_set)
        child.child.resumeProducing()
        await child.ended.wait()
        self.assertEqual(bytes(child.stdout), b"one\ntwo\n")

    async def test_child_blocks_while_paused(self) -> None:
        script = "import sys\nfor _ in range(64): sys.stdout.write('x' * 65536)"
        child = self.python(script + "\nsys.stderr.write('done')")
        child.child.pauseProducing()
        while not _stdout_is_full(child.child.pid):
            await turn()
        for _ in range(10):
            await turn()
        self.assertTrue(_stdout_is_full(child.child.pid))
        self.assertEqual((bytes(child.stdout), bytes(child.stderr)), (b"", b""))
        child.child.resumeProducing()
        await child.ended.wait()
        self.assertEqual((len(child.stdout), bytes(child.stderr)), (64 * 65536, b"done"))
        self.assertLessEqual(child.largest, 2**16)

    async def test_pausing_an_ended_child_does_nothing(self) -> None:
        child = self.shell("true")
        await child.ended.wait()
        child.child.pauseProducing()
        child.child.resumeProducing()
        child.child.read_remaining_output()
        await turn()
        self.assertEqual(child.calls.count("ended"), 1)


def _stdout_is_full(pid: int) -> bool:
    """Tell whether the pipe that is the stdout of a child holds as much as it can."""
    pipe = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        held = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
        return held == fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    finally:
        os.close(pipe)
