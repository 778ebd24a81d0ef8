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

    def test_first(self) -> None:
        """Each of the three interrupts once, and leaves the next Ctrl-C to end the program."""
        for number in NUMBERS:
            with InterruptHandler() as interrupt_handler:
                with self.assertRaises(Interrupted):
                    signal.raise_signal(number)
                self.assertEqual(signal.getsignal(signal.SIGINT), signal.SIG_DFL)
                self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)
                signal.raise_signal(signal.SIGHUP)  # shell and kernel may both send one
            self.assertEqual(interrupt_handler.received_signals[0], number)
            for each in NUMBERS:
                self.assertEqual(signal.getsignal(each), signal.SIG_DFL)

    def test_held(self) -> None:
        """A signal in a block that is not to be interrupted interrupts at its end, once."""
        with InterruptHandler() as interrupt_handler:
            done = False
            with self.assertRaises(Interrupted), interrupt_handler.defer_interrupt():
                signal.raise_signal(signal.SIGINT)
                done = True
            self.assertTrue(done)
            with interrupt_handler.defer_interrupt():
                pass

    def test_ignored(self) -> None:
        """Under nohup SIGHUP has no effect, before and after."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with InterruptHandler() as interrupt_handler:
            signal.raise_signal(signal.SIGHUP)
        self.assertEqual(interrupt_handler.received_signals, [])
        self.assertEqual(signal.getsignal(signal.SIGHUP), signal.SIG_IGN)


class ExitStatusTests(CommandTestCase):
    """How commands end."""

    def test_signals(self) -> None:
        """A signal ends a command that has nothing to cancel, with the status of a shell."""
        self.line.agent.fate = lambda: Fate.SILENT
        for number, status in zip(NUMBERS, (130, 143, 129), strict=True):
            presses = iter([number])
            self.meanwhile = lambda presses=presses: [*map(signal.raise_signal, presses)]
            result = self.run_command("cancel", "x")
            self.assertEqual((result.exit_code, result.stderr), (status, "interrupted\n"))
        self.assertEqual(self.line.agent.cancelled, 3)

    def test_unreadable(self) -> None:
        """A file that cannot be read is named; the status is 2."""

        def work(context: CommandContext) -> int:
            raise PermissionError(13, "Permission denied", "a.py")

        shown = Shown()
        with self.assertRaises(SystemExit) as caught:
            run_with_client(ServerAccess("http://localhost"), shown.screen, work)
        self.assertEqual(
            (caught.exception.code, shown.notes.getvalue()), (2, "a.py: Permission denied\n")
        )

    def test_server(self) -> None:
        """A server that refuses is 2, with its words; one that cannot be reached is 3."""
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

    def test_terminal(self) -> None:
        """A terminal shows each retry on a line of its own, and once the recovery."""
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

    def test_slow(self) -> None:
        """After a second a terminal shows the progress, at most every tenth of a second."""
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

    def test_short(self) -> None:
        """An upload of less than a second shows nothing, and a pipe never gets anything."""
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

    def test_server(self) -> None:
        """From the option, the environment, or this machine."""
        self.assertEqual(self.asked().url, "http://127.0.0.1:8080")
        self.assertEqual(self.asked(SERVER="https://a/").url, "https://a")
        self.assertEqual(self.asked("--server", "http://b", SERVER="https://a").url, "http://b")

    def test_token(self) -> None:
        """From a file or the environment; it is not to be seen in what is printed of it."""
        one, two = Path(self.mktemp()), Path(self.mktemp())
        one.write_text("one\n")
        two.write_text("two\n")
        self.assertIsNone(self.asked().token)
        self.assertEqual(self.asked(TOKEN="three").token, "three")
        self.assertEqual(self.asked(TOKEN="three", TOKEN_FILE=str(two)).token, "two")
        self.assertEqual(self.asked("--token-file", str(one), TOKEN_FILE=str(two)).token, "one")
        self.assertNotIn("three", repr(self.asked(TOKEN="three")))

    def test_clear_text(self) -> None:
        """A token that crosses the network without TLS is warned of, once for each command."""
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

    def test_no_token(self) -> None:
        """What cannot be a token is told."""
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

    def test_advice(self) -> None:
        """Who has no token is told how to give one."""
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / "tokens").write_text(generate_token("alice", os.urandom)[1])
        self.line = self.make(tokens=folder / "tokens")
        result = self.run_command("list")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("--token-file", result.stderr)
