"""`linux.child` with real children: what they print, and the back-pressure on it."""

from __future__ import annotations

import signal

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

    async def test_rest_of_an_ended_child_is_nothing(self) -> None:
        child = self.shell("true")
        await child.ended.wait()
        child.child.read_remaining_output()
        await turn()
        self.assertEqual(child.calls.count("ended"), 1)
