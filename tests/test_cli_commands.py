"""The commands that ask a server: against our own site, in memory."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from twisted.internet.defer import Deferred

from tawebeval.cli import evaluate, evaluations
from tawebeval.cli import main as command
from tawebeval.cli.evaluate import attend
from tawebeval.cli.follow import Reading
from tawebeval.cli.runtime import Server, judged
from tawebeval.cli.saving import Folder
from tawebeval.cli.streams import OutputLost
from tawebeval.client import Page, Text
from tawebeval.client.errors import refusal
from tawebeval.core.tokens import new_token
from tawebeval.errors import DiscardedCursor, EvaluationGone, RequestError, UnknownEvaluation
from tests.client_line import STEP, ClientTestCase
from tests.fake_agents import Fate
from tests.fakes import OID
from tests.test_cli_screen import CLEAR, Shown

REPOSITORY = ("--repository", "https://example.org/p.git", "--commit", OID, "--evaluator", "./e")

UNSET = dict.fromkeys(("TAWEBEVAL_SERVER", "TAWEBEVAL_TOKEN", "TAWEBEVAL_TOKEN_FILE"))


class CommandTestCase(ClientTestCase):
    """The command, of which the part that asks runs in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.server: Server | None = None
        self.meanwhile: Any = lambda: None
        self.file = Path(self.mktemp())
        self.file.write_bytes(b"print(1)\n")
        for module in (evaluate, evaluations):
            self.patch(module, "run", self.run_work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def run_work(self, server: Server, screen: Any, work: Any) -> None:
        """Do what `run` does, with another client."""
        self.server = server
        reactor = self.line.service.reactor
        status = self.line.wait(
            judged(screen, work(self.line.client, reactor), reactor), self.meanwhile
        )
        raise SystemExit(status)

    def run_command(self, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
        """Run it as from a shell."""
        result = CliRunner(env=UNSET).invoke(command, arguments, env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def lose(self, *errors: RequestError) -> None:
        """Let the server answer these to all who read, polls that wait included; then the last."""
        answers = iter(errors)

        def page(*_: object) -> None:
            raise next(answers, errors[-1])

        self.patch(self.line.service.registry, "page", page)

    def end(self, status: int = 0) -> Any:
        """Return what lets the evaluator print and end, once it has been started."""

        def meanwhile() -> None:
            children = self.line.service.world.spawn.children
            if children and children[-1].running:
                children[-1].print(b"hello\n" + self.block('{"type": "x", "n": 1.50}'))
                children[-1].end(status)

        return meanwhile


async def discarded(oldest: str) -> AsyncIterator[Page]:
    """Yield no page, for only what follows that cursor is there."""
    for never in ():
        yield never
    raise refusal(410, b'{"oldest": "%s"}' % oldest.encode())


class EvaluateTests(CommandTestCase):
    """`tawebeval evaluate`."""

    def evaluate(self, *arguments: str, **settings: Any) -> Result:
        """Run it to its end."""
        self.meanwhile = self.end(settings.pop("status", 0))
        return self.run_command("evaluate", *REPOSITORY, str(self.file), *arguments, **settings)

    def test_good(self) -> None:
        """What was printed is on stdout, and nothing else; all else is on stderr."""
        tree = self.line.service.world.repositories.tree = Path(self.mktemp()).resolve()
        (tree / "a").mkdir(parents=True)
        result = self.evaluate("--seed", "5", "--directory", "a", "--branch", "b", "--depth", "2")
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertEqual(result.stdout, "hello\n")
        self.assertEqual(result.stderr, "x: n: 1.5\n")
        ((repository, oid),) = self.line.service.world.repositories.asked
        self.assertEqual((repository.url, oid), ("https://example.org/p.git", OID))
        self.assertEqual((repository.branch, repository.depth), ("b", 2))
        self.assertEqual(self.line.child.environment["TURINGARENA_SEED"], "5")

    def test_failed(self) -> None:
        """An evaluation error is 1."""
        result = self.evaluate(status=4)
        self.assertEqual(result.exit_code, 1)
        self.assertIn("failed: the evaluator exited with status 4", result.stderr)

    def test_lines(self) -> None:
        """Events for programs."""
        result = self.evaluate("--events")
        lines = result.stdout.splitlines()
        self.assertEqual(json.loads(lines[0]), {"type": "text", "payload": "hello"})
        self.assertIn("1.50", lines[-1])
        self.assertEqual(result.stderr, "")

    def test_fields(self) -> None:
        """Fields are those of the arguments."""
        self.evaluate("language=c++")
        names = [n for n in self.line.child.environment if n.startswith("SUBMISSION_FILE_")]
        self.assertEqual(sorted(names), ["SUBMISSION_FILE_LANGUAGE", "SUBMISSION_FILE_SOURCE"])

    def test_detach(self) -> None:
        """The identifier, and no waiting."""
        result = self.run_command("evaluate", *REPOSITORY, str(self.file), "--detach")
        self.assertEqual(result.exit_code, 0)
        self.assertRegex(result.stdout, r"\A[a-z2-7]{40}\n\Z")
        self.assertTrue(self.line.child.running)

    def test_usage(self) -> None:
        """What is wrong with the command is 2, and asks nobody."""
        for arguments, words in (
            (["evaluate", *REPOSITORY], "nothing to evaluate"),
            (["evaluate", *REPOSITORY, "none.py"], "no file none.py"),
            (["evaluate", *REPOSITORY[:4], str(self.file)], "--evaluator"),
            (["evaluate", *REPOSITORY, "--seed", "-1", "x=1"], "--seed"),
            (["evaluate", *REPOSITORY, "--server", "localhost", "x=1"], "no URL of a server"),
            (["evaluate", *REPOSITORY, "--token-file", "/nonexistent", "x=1"], "cannot be read"),
            (["evaluate", *REPOSITORY, os.fsdecode(b"x=\xff")], "x: must be UTF-8"),
            (["evaluate", *REPOSITORY[:5], os.fsdecode(b"e\xff"), "x=1"], "--evaluator"),
            (["evaluate", *REPOSITORY, "-d", os.fsdecode(b"\xff"), "x=1"], "must be UTF-8"),
            (["follow"], "ID"),
            (["follow", os.fsdecode(b"\xff")], "must be UTF-8"),
            (["follow", "--after", "1+x", "x"], "'1+x' is no cursor"),
            (["nonsense"], "nonsense"),
        ):
            result = self.run_command(*arguments)
            self.assertEqual(result.exit_code, 2, result.output)
            self.assertIn(words, result.stderr)
        self.assertEqual(self.line.agent.asked, [])

    def test_refused(self) -> None:
        """What the server refuses is 2, with the server's words."""
        result = self.run_command(
            "evaluate", *REPOSITORY[:2], "--commit", "x", *REPOSITORY[4:], "a=1"
        )
        self.assertEqual(result.exit_code, 2)
        self.assertIn("commit_oid: must be the 40 hexadecimal digits", result.stderr)

    def test_unreachable(self) -> None:
        """A server that is not there is 3."""
        self.line.agent.fate = lambda: Fate.REFUSED
        result = self.run_command("evaluate", *REPOSITORY, str(self.file))
        self.assertEqual(result.exit_code, 3)
        self.assertIn("http://localhost:8080: no connection", result.stderr)

    def test_checkout(self) -> None:
        """Without a repository it says why there is none."""
        folder = Path("/")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder)
        result = self.run_command("evaluate", "--evaluator", "./e", "x=1")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("this is no git checkout", result.stderr)

    def test_completion(self) -> None:
        """The shell offers files for fields."""
        result = self.run_command(
            env={
                "_MAIN_COMPLETE": "bash_complete",
                "COMP_WORDS": "main evaluate s",
                "COMP_CWORD": "2",
            }
        )
        self.assertEqual(result.stdout, "file,s\n")


class WaitingTests(CommandTestCase):
    """A line that breaks, on a terminal."""

    def test_told(self) -> None:
        """That it is broken stands there, in a line of its own, and once that it is not."""
        shown = Shown(terminal=True)
        client = Server("http://localhost:8080").client(self.line.service.reactor, shown.screen)
        shown.screen.show(Text("half"))
        exchange = client._exchange
        exchange._told("the connection broke", 3.0)
        exchange._told("no connection", 6.0)
        exchange._answered()
        exchange._answered()
        shown.screen.show(Text(" of it"))
        self.assertEqual(
            shown.out.getvalue(),
            f"half\n{CLEAR}the connection broke; trying again in 3 s"
            f"{CLEAR}no connection; trying again in 6 s{CLEAR}connected again\n of it",
        )
        piped = Shown()
        exchange = Server("http://a").client(self.line.service.reactor, piped.screen)._exchange
        exchange._told("no connection", 6.0)
        exchange._answered()
        self.assertEqual(piped.notes.getvalue(), "")


class ServerTests(CommandTestCase):
    """Where the server and the token come from."""

    def asked(self, *options: str, **env: str) -> Server:
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

    def test_no_token(self) -> None:
        """What cannot be a token is told."""
        empty = Path(self.mktemp())
        empty.write_text("\n")
        for options, env, words in (
            (["--token-file", str(empty)], {}, "there is no token in it"),
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
        (folder / "tokens").write_text(new_token("alice", os.urandom)[1])
        self.line = self.make(tokens=folder / "tokens")
        result = self.run_command("list")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("--token-file", result.stderr)


class QuestionTests(CommandTestCase):
    """`status`, `cancel`, `list`, `follow`."""

    def test_status(self) -> None:
        """For people without what is not known yet, for programs whole."""
        identifier = self.line.begin()
        shown = self.run_command("status", identifier).stdout
        self.assertRegex(shown, r"(?m)^state +running$")
        self.assertNotIn("None", shown)
        document = json.loads(self.run_command("status", "--json", identifier).stdout)
        self.assertEqual(document["evaluation_id"], identifier)
        self.line.child.complain(b"one\ntwo \x1b[2J\n")
        self.line.child.end(3)
        shown = self.run_command("status", identifier).stdout
        self.assertRegex(shown, r"(?m)^exit +status: 3$")
        self.assertRegex(shown, r"(?m)^stderr +one\n +two \\u001b\[2J$")

    def test_cancel_and_follow(self) -> None:
        """An evaluation that is cancelled is followed to that end."""
        self.line.service.world.spawn.obeys = (15,)
        identifier = self.line.begin()
        self.line.child.print(b"a\n")
        self.assertEqual(self.run_command("cancel", identifier).exit_code, 0)
        result = self.run_command("follow", identifier)
        self.assertEqual((result.exit_code, result.stdout), (1, "a\n"))
        self.assertIn("failed: ", result.stderr)
        result = self.run_command("follow", identifier)
        self.assertEqual(result.exit_code, 1)
        self.assertIn("failed: nothing is kept", result.stderr)
        self.assertEqual(self.run_command("status", identifier).exit_code, 2)

    def test_terminal(self) -> None:
        """What strangers have written into JSON does nothing to a terminal, and stays JSON."""
        shown = Shown(terminal=True)
        text = "\x9b2J\x7f\u202eü"
        shown.screen.print(evaluations._dump({"a": text}))
        self.assertEqual(json.loads(shown.out.getvalue()), {"a": text})
        self.assertIn('"\\u009b2J\\u007f\\u202eü"', shown.out.getvalue())
        plain = Shown()
        plain.screen.print(evaluations._dump({"a": text}))
        self.assertIn(text, plain.out.getvalue())

    def test_list(self) -> None:
        """A line for each, or JSON."""
        identifiers = [self.line.begin() for _ in range(2)]
        lines = self.run_command("list").stdout.splitlines()
        self.assertEqual(
            [line.split()[:2] for line in lines], [[i, "running"] for i in identifiers]
        )
        listed = json.loads(self.run_command("list", "--json").stdout)
        self.assertEqual([one["evaluation_id"] for one in listed], identifiers)


class FollowTests(CommandTestCase):
    """Following on a screen."""

    def follow(
        self, identifier: str, shown: Shown, folder: Folder | None = None, after: str | None = None
    ) -> Awaitable[int]:
        """Follow an evaluation that somebody else has begun."""
        reading = Reading(self.line.client, identifier, shown.screen, after)
        return reading.follow(self.line.service.reactor, folder)

    def test_files(self) -> None:
        """Files are saved under their base names; one that cannot be is told of, and makes it 2."""
        identifier = self.line.begin()
        shown, root = Shown(), Path(self.mktemp())
        start = '{"type":"file","content_type":"text/plain","content_base64":"aGk=","filename":'
        self.line.child.print(self.block(f'{start}"../a.txt"}}'))
        self.line.child.end()
        following = self.follow(identifier, shown, Folder(root))
        self.assertEqual(self.line.wait(following), 0)
        self.assertEqual((root / "a.txt").read_bytes(), b"hi")
        self.assertIn(f"saved as {root}/a.txt", shown.notes.getvalue())
        identifier = self.line.begin()
        self.line.child.print(self.block(f'{start}".."}}') + b"more\n")
        self.line.child.end()
        following = self.follow(identifier, shown, Folder(root))
        self.assertEqual(self.line.wait(following), 2)
        self.assertIn("not saved: ", shown.notes.getvalue())
        self.assertEqual(shown.out.getvalue(), "more\n")

    def test_progress(self) -> None:
        """On a terminal one sees what it is waiting for, until the first event."""
        self.line = self.make(running=1)
        before = self.line.begin()
        identifier = self.line.begin()
        shown = Shown(terminal=True)
        steps = iter(range(1000))

        def meanwhile() -> None:
            step = next(steps)
            if step == 8:
                self.line.service.world.spawn.children[0].end()
            if step == 16:
                self.line.child.print(self.block("1"))
            if step == 40:
                self.line.child.end()

        following = self.follow(identifier, shown)
        self.assertEqual(self.line.wait(following, meanwhile), 0)
        seen = shown.out.getvalue().split(CLEAR)
        self.assertEqual(seen[1], "queued, 0 before it …")
        self.assertIn("running …", seen)
        self.assertEqual(seen[-1], "1\n")
        self.line.follow(before)

    def test_no_status(self) -> None:
        """Where the status does not come nothing is said of it, and nothing is left of the wait."""
        identifier = self.line.begin()
        self.line.agent.fate = lambda: (
            Fate.WELL if "/events" in self.line.agent.asked[-1][1] else Fate.SILENT
        )
        shown = Shown(terminal=True)
        self.meanwhile = self.end()
        following = self.follow(identifier, shown)
        self.assertEqual(self.line.wait(following, self.meanwhile), 0)
        self.assertEqual(shown.out.getvalue(), "hello\nx: n: 1.5\n")
        self.assertEqual(self.line.agent.cancelled, 1)
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_interrupt(self) -> None:
        """Ctrl-C cancels, and the end is still shown; the next one would end the program."""
        self.line.service.world.spawn.obeys = (15,)
        identifier = self.line.begin()
        shown = Shown()
        reactor = self.line.service.reactor
        before = signal.getsignal(signal.SIGINT)
        attending = Deferred.fromCoroutine(
            judged(
                shown.screen,
                attend(self.line.client, identifier, shown.screen, reactor, None),
                reactor,
            )
        )
        self.line.settle()
        self.assertNoResult(attending)
        signal.raise_signal(signal.SIGINT)
        self.assertEqual(signal.getsignal(signal.SIGINT), signal.SIG_DFL)

        async def result() -> int:
            return await attending

        self.assertEqual(self.line.wait(result()), 1)
        self.assertIn(f"tawebeval follow {identifier}", shown.notes.getvalue())
        self.assertIn("failed: ", shown.notes.getvalue())
        self.assertIs(signal.getsignal(signal.SIGINT), before)

    def test_interrupt_before(self) -> None:
        """Ctrl-C before there is an evaluation just ends it all."""
        self.line.agent.fate = lambda: Fate.SILENT
        shown = Shown()
        work = Deferred.fromCoroutine(
            judged(shown.screen, self.line.client.status("x"), self.line.service.reactor)
        )
        self.line.settle()
        signal.raise_signal(signal.SIGINT)
        self.line.settle()
        self.assertEqual(self.successResultOf(work), 130)
        self.assertEqual(self.line.agent.cancelled, 1)

    def test_terminated(self) -> None:
        """SIGTERM does what Ctrl-C does, also the end is shown; the status tells of it."""
        self.line.service.world.spawn.obeys = (15,)
        identifier = self.line.begin()
        self.line.child.print(b"a\n")
        shown = Shown()
        reactor = self.line.service.reactor
        work = attend(self.line.client, identifier, shown.screen, reactor, None)
        judging = Deferred.fromCoroutine(judged(shown.screen, work, reactor))
        self.line.settle()
        signal.raise_signal(signal.SIGTERM)

        async def result() -> int:
            return await judging

        self.assertEqual(self.line.wait(result()), 143)
        self.assertEqual(shown.out.getvalue(), "a\n")
        self.assertIn("failed: the evaluation was cancelled", shown.notes.getvalue())

    def test_leave_and_follow(self) -> None:
        """Who leaves is told how to go on, and goes on there; from the beginning a part is lost."""
        identifier = self.line.begin()
        self.line.child.print(b"a\nb\n")
        shown = Shown()
        reactor = self.line.service.reactor
        attending = Deferred.fromCoroutine(
            attend(self.line.client, identifier, shown.screen, reactor, None)
        )
        attending.addErrback(lambda _: None)
        for _ in range(4):
            self.line.settle()
            reactor.advance(STEP)
        self.line.agent.fate = lambda: Fate.SILENT
        signal.raise_signal(signal.SIGINT)
        self.line.settle()
        (cursor,) = re.findall(
            f"`tawebeval follow --after (.+) {identifier}`", shown.notes.getvalue()
        )
        attending.cancel()
        self.line.settle()
        self.line.agent.fate = lambda: Fate.WELL
        self.line.child.print(b"c\n")
        self.line.settle()
        again = Shown()
        reading = Reading(self.line.client, identifier, again.screen)
        following = Deferred.fromCoroutine(reading.follow(reactor))
        following.addErrback(lambda _: None)
        self.line.settle()
        following.cancel()
        self.line.settle()
        self.assertEqual((shown.out.getvalue(), again.out.getvalue()), ("a\nb", "\nc"))
        self.assertIn(f"before {cursor} was read already", again.notes.getvalue())
        self.line.child.end()
        result = self.run_command("follow", *reading.resumption.split()[2:])
        self.assertEqual((result.exit_code, result.stdout, result.stderr), (0, "\n", ""))

    def test_where_it_was(self) -> None:
        """Ctrl-C while following says how to go on, also before there was anything."""
        identifier = self.line.begin()
        pressed = iter([lambda: signal.raise_signal(signal.SIGINT)])
        self.meanwhile = lambda: next(pressed, lambda: None)()
        result = self.run_command("follow", identifier)
        self.assertEqual(result.exit_code, 130)
        self.assertIn(f"`tawebeval follow {identifier}` goes on here", result.stderr)

    def test_lost(self) -> None:
        """What the server has lost has come to a bad end; what it has never had is refused."""
        for error, follows in ((EvaluationGone(""), 1), (UnknownEvaluation(), 2)):
            self.line = self.make()
            identifier = self.line.begin()
            self.lose(error)
            result = self.run_command("follow", identifier)
            self.assertEqual(result.exit_code, follows, result.stderr)
            self.assertIn(str(error), result.stderr)
            shown, reactor = Shown(), self.line.service.reactor
            attending = attend(self.line.client, identifier, shown.screen, reactor, None)
            self.assertEqual(self.line.wait(judged(shown.screen, attending, reactor)), 1)
            self.assertEqual(shown.notes.getvalue(), f"failed: {error}\n")

    def test_lost_meanwhile(self) -> None:
        """It has done so whatever it had printed, nothing included, and whoever has begun it."""
        for error in (EvaluationGone(""), UnknownEvaluation()):
            for printed in ("", "a"):
                self.line = self.make()
                self.check_lost(error, printed, "evaluate", *REPOSITORY, "x=1")
                self.line = self.make()
                self.check_lost(error, printed, "follow", self.line.begin())

        self.lose(DiscardedCursor("0"), UnknownEvaluation())
        self.assertEqual(self.run_command("follow", self.line.begin()).exit_code, 1)

    def check_lost(self, error: RequestError, printed: str, *arguments: str) -> None:
        """Hold that a command says so, and how it ends, after it has shown what was printed."""
        steps = iter(range(1000))

        def meanwhile() -> None:
            step = next(steps)
            if step == 4 and printed:
                self.line.child.print(printed.encode())
            if step == 100:  # when a poll has been answered, if only by an empty page
                self.lose(error)

        self.meanwhile = meanwhile
        result = self.run_command(*arguments)
        self.assertEqual(result.exit_code, 1, result.output)
        self.assertEqual((result.stdout, result.stderr), (printed, f"failed: {error}\n"))

    def test_nowhere(self) -> None:
        """A server that calls the cursor too old that it has named itself is not asked for ever."""
        shown = Shown()
        self.patch(self.line.client, "pages", lambda *_: discarded("3"))
        self.assertEqual(self.line.wait(self.follow("x", shown, after="3")), 1)
        self.assertIn("failed: the server answers 410", shown.notes.getvalue())

    def test_not_cancelled(self) -> None:
        """Where cancelling fails it is said, and following goes on."""
        identifier = self.line.begin()
        shown = Shown()
        attending = Deferred.fromCoroutine(
            attend(self.line.client, identifier, shown.screen, self.line.service.reactor, None)
        )
        self.line.settle()
        self.line.agent.fate = lambda: (
            Fate.REFUSED if self.line.agent.asked[-1][0] == "DELETE" else Fate.WELL
        )
        signal.raise_signal(signal.SIGINT)

        async def result() -> int:
            return await attending

        def meanwhile() -> None:
            if "not cancelled" in shown.notes.getvalue() and self.line.child.running:
                self.line.child.end()

        self.assertEqual(self.line.wait(result(), meanwhile), 0)
        self.assertIn("no connection", shown.notes.getvalue())

    def test_unreadable(self) -> None:
        """A file that cannot be read is named, and makes it 2."""

        async def work() -> int:
            raise PermissionError(13, "Permission denied", "a.py")

        shown = Shown()
        status = self.line.wait(judged(shown.screen, work(), self.line.service.reactor))
        self.assertEqual((status, shown.notes.getvalue()), (2, "a.py: Permission denied\n"))

    def test_nobody_reads(self) -> None:
        """Where stdout is closed, as by `head`, the evaluation is cancelled."""
        self.line.service.world.spawn.obeys = (15,)
        identifier = self.line.begin()
        self.line.child.print(b"a\nb\n")
        shown = Shown()

        def broken(text: str) -> int:
            raise BrokenPipeError

        self.patch(shown.out, "write", broken)
        attending = attend(
            self.line.client, identifier, shown.screen, self.line.service.reactor, None
        )
        with self.assertRaises(OutputLost):
            self.line.wait(attending)
        status = self.line.wait(self.line.client.status(identifier))
        self.assertEqual(status["state"], "cancelled")
