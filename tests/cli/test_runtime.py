"""`cli.runtime`: server and token, signals, exit statuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.runtime import (
    CommandContext,
    Interrupted,
    InterruptHandler,
    RetryMessages,
    ServerAccess,
    UploadProgressBar,
    run_with_client,
)
from tawebeval.config import MIB
from tawebeval.core.tokens import generate_token
from tests.cases.agents import Fate
from tests.cases.command import REPOSITORY, CommandTestCase
from tests.cases.screen import CLEAR, Shown

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalTests(SynchronousTestCase):
    """Signals that this process sends itself."""

    def setUp(self) -> None:
        for number in NUMBERS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            signal.signal(number, signal.SIG_DFL)

    def test_first_signal_interrupts_and_the_next_ctrl_c_ends_the_program(self) -> None:
        for number in NUMBERS:
            with InterruptHandler() as interrupt_handler:
                self.assertRaises(Interrupted, signal.raise_signal, number)
                self.assertEqual(signal.getsignal(signal.SIGINT), signal.SIG_DFL)
                self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
                signal.raise_signal(signal.SIGHUP)  # shell and kernel may both send one
            self.assertEqual(interrupt_handler.received_signals[0], number)
            for each in NUMBERS:
                self.assertEqual(signal.getsignal(each), signal.SIG_DFL)

    def test_deferred_signal_interrupts_once_at_the_end_of_the_block(self) -> None:
        with InterruptHandler() as interrupt_handler:
            done = False
            with self.assertRaises(Interrupted), interrupt_handler.defer_interrupt():
                signal.raise_signal(signal.SIGINT)
                done = True
            self.assertTrue(done)
            with interrupt_handler.defer_interrupt():
                pass

    def test_ignored_sighup_stays_ignored(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with InterruptHandler() as interrupt_handler:
            signal.raise_signal(signal.SIGHUP)
        self.assertEqual(interrupt_handler.received_signals, [])
        self.assertEqual(signal.getsignal(signal.SIGHUP), signal.SIG_IGN)


class ExitStatusTests(CommandTestCase):
    """How commands end."""

    def test_signal_ends_a_request_with_the_status_of_a_shell(self) -> None:
        self.line.agent.fate = lambda: Fate.SILENT
        for number, status in zip(NUMBERS, (130, 143, 129), strict=True):
            presses = iter([number])
            self.meanwhile = lambda presses=presses: [*map(signal.raise_signal, presses)]
            result = self.run_command("cancel", "x")
            self.assertEqual((result.exit_code, result.stderr), (status, "interrupted\n"))
        self.assertEqual(self.line.agent.cancelled, 3)

    def test_unreadable_file_is_named_and_exits_with_status_2(self) -> None:
        def work(context: CommandContext) -> int:
            raise PermissionError(13, "Permission denied", "a.py")

        shown = Shown()
        with self.assertRaises(SystemExit) as caught:
            run_with_client(ServerAccess("http://localhost"), shown.screen, work)
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
    """A line that breaks."""

    def test_terminal_shows_each_retry_and_one_recovery(self) -> None:
        shown = Shown(terminal=True)
        notes = RetryMessages(shown.screen)
        shown.show()
        notes.on_recovery()
        shown.out.write("half")
        notes.on_retry("the connection broke", 3.0)
        notes.on_retry("no connection", 6.0)
        notes.on_recovery()
        notes.on_recovery()
        self.assertEqual(
            shown.out.getvalue(),
            f"half{CLEAR}the connection broke; retrying in 3 s"
            f"{CLEAR}no connection; retrying in 6 s{CLEAR}the server answers again\n",
        )

    def test_pipe_gets_one_line_for_each_outage(self) -> None:
        shown = Shown()
        notes = RetryMessages(shown.screen)
        for _ in range(2):
            notes.on_retry("the server answered 429", 6.0)
            notes.on_retry("no connection", 6.0)
            notes.on_recovery()
        self.assertEqual(shown.notes.getvalue(), "the server answered 429; retrying\n" * 2)


class UploadBarTests(SynchronousTestCase):
    """An upload in pieces."""

    def test_slow_upload_shows_progress_at_most_ten_times_a_second(self) -> None:
        clock, shown = Clock(), Shown(terminal=True)
        bar = UploadProgressBar(shown.screen, clock.seconds)
        for attempt in range(2):
            shown.out.truncate(0)
            for sent in range(0, 80 * MIB + 1, MIB):
                bar.show(sent, 80 * MIB)
                clock.advance(0.0625)
            lines = shown.out.getvalue().split(CLEAR)[1:]
            self.assertEqual(
                lines[0], f"uploading [{'#' * 6}{'-' * 24}] 20% (16 MiB of 80 MiB)", attempt
            )
            self.assertEqual(len(lines), 32)

    def test_short_upload_and_pipe_show_no_progress(self) -> None:
        for terminal, step in ((True, 0.09), (False, 1.0)):
            clock, shown = Clock(), Shown(terminal=terminal)
            bar = UploadProgressBar(shown.screen, clock.seconds)
            for sent in range(11):
                bar.show(sent, 10)
                clock.advance(step)
            self.assertEqual((shown.out.getvalue(), shown.notes.getvalue()), ("", ""))


class ServerTests(CommandTestCase):
    """Where the server and the token come from."""

    def asked(self, *options: str, **env: str) -> ServerAccess:
        """Return what is asked."""
        self.run_command("list", *options, env={f"TAWEBEVAL_{k}": v for k, v in env.items()})
        assert self.server is not None
        return self.server

    def test_server_comes_from_option_or_environment_or_is_this_machine(self) -> None:
        self.assertEqual(self.asked().url, "http://127.0.0.1:8080")
        self.assertEqual(self.asked(SERVER="https://a/").url, "https://a")
        self.assertEqual(self.asked("--server", "http://b", SERVER="https://a").url, "http://b")

    def test_token_comes_from_file_or_environment_and_is_not_in_the_repr(self) -> None:
        one, two = Path(self.mktemp()), Path(self.mktemp())
        one.write_text("one\n")
        two.write_text("two\n")
        self.assertIsNone(self.asked().token)
        self.assertEqual(self.asked(TOKEN="three").token, "three")
        self.assertEqual(self.asked(TOKEN="three", TOKEN_FILE=str(two)).token, "two")
        self.assertEqual(self.asked("--token-file", str(one), TOKEN_FILE=str(two)).token, "one")
        self.assertNotIn("three", repr(self.asked(TOKEN="three")))

    def test_token_sent_in_clear_text_is_warned_of(self) -> None:
        for url, token, warns in (
            ("http://judge.example.org", "t", True),
            ("http://192.0.2.1:8080", "t", True),
            ("http://judge.example.org", None, False),
            ("https://judge.example.org", "t", False),
            ("http://127.0.0.1:8080", "t", False),
            ("http://[::1]:8080", "t", False),
            ("http://localhost", "t", False),
        ):
            shown = Shown()
            ServerAccess(url, token).make_client(shown.screen)
            secure = url.replace("http:", "https:")
            warning = f"warning: {url} gets the token in clear text; try {secure}\n"
            self.assertEqual(shown.notes.getvalue(), warning if warns else "", (url, token))

    def test_invalid_tokens_are_refused(self) -> None:
        empty = Path(self.mktemp())
        empty.write_text("\n")
        for options, env, words in (
            (["--token-file", str(empty)], {}, "has no token; put the token alone into it"),
            ([], {"TAWEBEVAL_TOKEN": "a b"}, "TAWEBEVAL_TOKEN: a token is one word"),
            ([], {"TAWEBEVAL_TOKEN": "a\nb"}, "one word"),
        ):
            result = self.run_command("list", *options, env=env)
            self.assertEqual(result.exit_code, 2)
            self.assertIn(words, result.stderr)

    def test_unauthorized_caller_learns_how_to_give_a_token(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / "tokens").write_text(generate_token("alice", os.urandom)[1])
        self.line = self.make(tokens=folder / "tokens")
        result = self.run_command("list")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("--token-file", result.stderr)
