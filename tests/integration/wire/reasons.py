"""Reasons for which an evaluator comes to no good end, as the last event tells them."""

from __future__ import annotations

import signal
import time

from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import failure, python, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase

OUTPUT = 100_000
SECONDS = 5.0


class ReasonCase(DaemonTestCase):
    """There is time enough for all that is to happen, and for last words."""

    configuration = CONFIGURATION + f"[limits]\nwall_clock = {LONG_PATIENCE}\noutput = {OUTPUT}\n"

    async def test_exit_status_comes_with_the_end_of_stderr(self) -> None:
        command = "printf 'one\\ntwo'; seq 5000 >&2; echo the end >&2; exit 3"
        identifier = await self.begin(command)
        status = await self.client.ended(identifier)
        events = await self.client.follow(identifier)
        error = failure(events, "exit")
        self.assertEqual(text(events), "one\ntwo")
        self.assertEqual(error["status"], 3)
        self.assertNotIn("signal", error)
        self.assertEqual(len(error["stderr"]), 8192)
        self.assertTrue(error["stderr"].endswith("\n4999\n5000\nthe end\n"))
        self.assertEqual(status["exit"], {"status": 3, "signal": None})
        self.assertEqual(status["stderr"], error["stderr"])
        self.assertEqual(status["state"], "failed")

    async def test_death_by_a_signal_is_reported_after_the_output(self) -> None:
        for number in (signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM):
            events = await self.run_command(f"printf partial; kill -{number} $$")
            error = failure(events, "exit")
            self.assertEqual(text(events), "partial")
            self.assertEqual(error["signal"], number)
            self.assertNotIn("status", error)

    async def test_output_is_cut_at_exactly_its_limit(self) -> None:
        events = await self.run_command("yes 0123456789")
        error = failure(events, "output")
        self.assertEqual(error["value"], OUTPUT)
        self.assertEqual(text(events), ("0123456789\n" * OUTPUT)[:OUTPUT])

    async def test_output_on_term_is_kept(self) -> None:
        program = """
import signal, sys, time
def end(*_):
    sys.stdout.write("last words\\n" * 5000)
    sys.stdout.flush()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
        identifier = await self.begin_and_wait(python(program))
        await self.client.cancel(identifier)
        events = await self.client.follow(identifier)
        failure(events, "cancelled")
        self.assertEqual(text(events), "ready\n" + "last words\n" * 5000)


class TimeoutCase(DaemonTestCase):
    """There is not, though an evaluator has begun long before it is over."""

    configuration = f"{CONFIGURATION}[limits]\nwall_clock = {SECONDS}\n"

    async def test_timeout_comes_at_its_limit_after_the_output(self) -> None:
        began = time.monotonic()
        events = await self.run_command("printf 'before\\nand'; exec sleep 600")
        self.assertGreater(time.monotonic() - began, SECONDS)
        error = failure(events, "timeout")
        self.assertEqual(error["value"], SECONDS)
        self.assertEqual(text(events), "before\nand")

    async def test_timeout_kills_what_ignores_term(self) -> None:
        program = "trap '' TERM; (trap '' TERM; sleep 600) & echo before; sleep 600; sleep 600"
        events = await self.run_command(program)
        failure(events, "timeout")
        self.assertEqual(text(events), "before\n")
