"""`cli.runtime`: signals, exit statuses, and messages about retries."""

from __future__ import annotations

import signal

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.runtime import (
    Interrupted,
    InterruptHandler,
    RetryMessages,
    ServerAccess,
    handle_signals,
    open_command_context,
)
from tests.cases.client import Fate
from tests.cases.command import REPOSITORY, CommandTestCase
from tests.cases.screen import Shown

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalTests(SynchronousTestCase):
    def setUp(self) -> None:
        for number in NUMBERS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            signal.signal(number, signal.SIG_DFL)

    def test_first_signal_interrupts_and_the_next_ctrl_c_ends_the_program(self) -> None:
        for number in NUMBERS:
            interrupt_handler = InterruptHandler()
            with handle_signals(interrupt_handler.on_signal):
                self.assertRaises(Interrupted, signal.raise_signal, number)
                self.assertEqual(signal.getsignal(signal.SIGINT), signal.SIG_DFL)
                self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
                signal.raise_signal(signal.SIGHUP)  # shell and kernel may both send one
            self.assertEqual(interrupt_handler.received_signals[0], number)
            for each in NUMBERS:
                self.assertEqual(signal.getsignal(each), signal.SIG_DFL)

    def test_deferred_signal_interrupts_once_at_the_end_of_the_block(self) -> None:
        interrupt_handler = InterruptHandler()
        with handle_signals(interrupt_handler.on_signal):
            done = False
            with self.assertRaises(Interrupted), interrupt_handler.defer_interrupt():
                signal.raise_signal(signal.SIGINT)
                done = True
            self.assertTrue(done)
            with interrupt_handler.defer_interrupt():
                pass

    def test_ignored_sighup_stays_ignored(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        interrupt_handler = InterruptHandler()
        with handle_signals(interrupt_handler.on_signal):
            signal.raise_signal(signal.SIGHUP)
        self.assertEqual(interrupt_handler.received_signals, [])
        self.assertEqual(signal.getsignal(signal.SIGHUP), signal.SIG_IGN)


class ExitStatusTests(CommandTestCase):
    def test_signal_interrupts_a_request_and_exits_with_128_plus_the_signal_number(self) -> None:
        self.line.agent.fate = lambda: Fate.SILENT
        for number, status in zip(NUMBERS, (130, 143, 129), strict=True):
            presses = iter([number])
            self.meanwhile = lambda presses=presses: [*map(signal.raise_signal, presses)]
            result = self.run_command("cancel", "x")
            self.assertEqual((result.exit_code, result.stderr), (status, "interrupted\n"))
        self.assertEqual(self.line.agent.cancelled, 3)

    def test_unreadable_file_is_named_and_exits_with_status_2(self) -> None:
        shown = Shown()
        with (
            self.assertRaises(SystemExit) as caught,
            open_command_context(ServerAccess("http://localhost"), shown.screen),
        ):
            raise PermissionError(13, "Permission denied", "a.py")
        self.assertEqual(
            (caught.exception.code, shown.notes.getvalue()), (2, "a.py: Permission denied\n")
        )

    def test_refusal_exits_with_status_2_and_unreachable_server_with_3(self) -> None:
        result = self.run_command("evaluate", *REPOSITORY, "--directory", "/x", "a=1")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("directory: '/x' is absolute", result.stderr)
        self.line.agent.fate = lambda: Fate.REFUSED
        result = self.run_command("list")
        self.assertEqual(result.exit_code, 3)
        self.assertEqual(
            result.stderr,
            "cannot connect to http://localhost:8080: connection refused; is the daemon running?"
            " Start it with `tawebeval serve`, or name another with `--server`\n",
        )


class RetryNotesTests(SynchronousTestCase):
    def test_terminal_shows_an_outage_and_its_end(self) -> None:
        shown = Shown(terminal=True)
        notes = RetryMessages(shown.screen)
        notes.on_recovery()
        notes.on_retry("the connection broke", 3.0)
        notes.on_retry("no connection", 6.0)
        notes.on_recovery()
        notes.on_recovery()
        words = "the connection broke; retrying\nthe server answers again\n"
        self.assertEqual(shown.out.getvalue(), words)

    def test_pipe_gets_one_line_for_each_outage(self) -> None:
        shown = Shown()
        notes = RetryMessages(shown.screen)
        for _ in range(2):
            notes.on_retry("the server answered 429", 6.0)
            notes.on_retry("no connection", 6.0)
            notes.on_recovery()
        self.assertEqual(shown.notes.getvalue(), "the server answered 429; retrying\n" * 2)
