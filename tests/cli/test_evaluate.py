"""`cli.evaluate`: the command, its fields, and the checkout around the current directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click import UsageError
from click.testing import Result
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.evaluate import (
    GitCheckout,
    follow_submitted_evaluation,
    inspect_checkout,
    parse_submission_fields,
    strip_userinfo,
)
from tawebeval.cli.follow import EvaluationReader
from tawebeval.cli.runtime import ServerAccess, open_command_context
from tawebeval.config import Configuration, ProblemSettings
from tawebeval_client import Client
from tests.cases.client import FOR_EVER, Fate
from tests.cases.command import REPOSITORY, CommandTestCase, LineClient
from tests.cases.screen import Shown
from tests.fakes.world import OID
from tests.integration.repositories import git


class EvaluateTests(CommandTestCase):
    def evaluate(self, *arguments: str, **settings: Any) -> Result:
        self.meanwhile = self.end(settings.pop("status", 0))
        return self.run_command("evaluate", *REPOSITORY, str(self.file), *arguments, **settings)

    def add_problem(self, **settings: Any) -> None:
        """Have the server know the problem `one`."""
        problem = ProblemSettings("https://example.org/p.git", "./run", commit=OID, **settings)
        self.line.service.registry.context.configuration = Configuration(problems={"one": problem})

    def test_text_goes_to_stdout_and_options_reach_fetch_sandbox_and_environment(self) -> None:
        tree = self.line.service.world.repositories.tree = Path(self.mktemp()).resolve()
        (tree / "a").mkdir(parents=True)
        options = ("--seed", "5", "--directory", "a", "--branch", "b", "--depth", "2")
        options += ("--limit", "memory=64M", "--limit", "wall_clock=2.5")
        result = self.evaluate(*options, "language=c++")
        self.assertEqual(
            (result.exit_code, result.stdout, result.stderr), (0, "hello\n", "x: n: 1.5\n")
        )
        ((repository, oid),) = self.line.service.world.repositories.asked
        self.assertEqual((repository.url, oid), ("https://example.org/p.git", OID))
        self.assertEqual((repository.branch, repository.depth), ("b", 2))
        environment = self.line.child.environment
        self.assertEqual(environment["TURINGARENA_SEED"], "5")
        limits = self.line.service.world.sandbox.last.limits
        self.assertEqual((limits.memory, limits.wall_clock), (64 * 2**20, 2.5))
        names = sorted(name for name in environment if name.startswith("SUBMISSION_FILE_"))
        self.assertEqual(names, ["SUBMISSION_FILE_LANGUAGE", "SUBMISSION_FILE_SOURCE"])

    def test_problem_option_replaces_evaluator_and_refuses_options_that_the_problem_sets(
        self,
    ) -> None:
        self.add_problem(title="T\x9b")
        shown = self.run_command("problems").stdout
        self.assertRegex(shown, r"\ANAME +FIELDS +TITLE\none +any +T\\u009b\n\Z")
        (listed,) = json.loads(self.run_command("problems", "--json").stdout)
        self.assertEqual(listed["name"], "one")
        self.meanwhile = self.end()
        arguments = ("evaluate", "--problem", "one", "--label", "a=b")
        result = self.run_command(*arguments, str(self.file))
        self.assertEqual((result.exit_code, result.stdout), (0, "hello\nfinished\n"))
        identifier = self.run_command(*arguments, "--detach", "x=1").stdout.strip()
        self.line.service.world.turn()
        status = json.loads(self.run_command("status", "--json", identifier).stdout)
        self.assertEqual(status["problem"], "one")
        self.assertRegex(self.run_command("list", "--problem", "one").stdout, r" one +a=b\n")
        self.assertNotIn("one", self.run_command("list", "--problem", "two").stdout)
        for option in (
            *(("--evaluator", "x"), ("--repository", "x"), ("--commit", OID), ("--branch", "b")),
            *(("--depth", "1"), ("--directory", "d"), ("--limit", "cpu=1")),
            *(("--seed", "0"), ("--environment", "e")),
        ):
            result = self.run_command(*arguments, *option, "x=1")
            self.assertEqual(result.exit_code, 2)
            self.assertIn(f"--problem sets {option[0]}", result.stderr)
        result = self.run_command("evaluate", "x=1")
        self.assertIn("give --evaluator CMD, or --problem NAME", result.stderr)

    def test_verdict_is_the_last_line_for_a_problem_and_sets_the_exit_status_on_request(
        self,
    ) -> None:
        self.add_problem()
        case = '{"type":"case","case":"1","verdict":"%s"}'
        evaluate = ("evaluate", "--problem", "one", "x=1")
        for arguments, verdict, status, exits, stdout in (
            (evaluate, "accepted", 0, 0, "hello\naccepted\n"),
            (evaluate, "wrong_answer", 0, 4, "hello\nwrong answer\n"),
            (evaluate, "accepted", 3, 1, "hello\nevaluation failed\n"),
            (("evaluate", *REPOSITORY, "x=1"), "accepted", 0, 0, "hello"),
            (("evaluate", *REPOSITORY, "x=1"), "skipped", 0, 4, "hello"),
        ):
            for lines in (False, True):
                self.meanwhile = self.print_and_end(b"hello", case % verdict, status)
                options = ("--exit-status", "--events") if lines else ("--exit-status",)
                result = self.run_command(*arguments, *options)
                self.assertEqual(result.exit_code, exits, result.stderr)
                if not lines:
                    self.assertEqual(result.stdout, stdout)
                else:
                    self.assertTrue(all(map(json.loads, result.stdout.splitlines())))
                    self.assertNotIn("summary", result.stderr)
        self.meanwhile = self.print_and_end(b"", case % "wrong_answer", 0)
        self.assertEqual(self.run_command(*evaluate).exit_code, 0)

    def print_and_end(self, text: bytes, value: str, status: int) -> Callable[[], None]:
        """Return what lets the evaluator print a value and a text, and end."""

        def meanwhile() -> None:
            children = self.line.service.world.spawn.children
            if children and children[-1].is_running:
                children[-1].print(self.block(value) + text)
                children[-1].end(status)

        return meanwhile

    def test_random_seed_is_printed_as_an_option_to_repeat_the_run(self) -> None:
        result = self.evaluate()
        (seed,) = re.findall(r"^repeat this run with --seed (\d+)$", result.stderr, re.MULTILINE)
        self.assertEqual(self.line.child.environment["TURINGARENA_SEED"], seed)
        result = self.run_command("evaluate", *REPOSITORY, "--detach", "x=1")
        self.assertRegex(result.stderr, r"\Arepeat this run with --seed \d+\n\Z")
        self.assertNotIn("--seed", self.evaluate("--seed", seed).stderr)

    def test_content_from_stdin_is_a_file_named_after_the_field(self) -> None:
        for path in ("-", "/dev/stdin", "data:-"):
            arguments = ("evaluate", *REPOSITORY, "--detach", path)
            result = self.run_command(*arguments, stdin=b"a\xff\r\n")
            self.assertEqual(result.exit_code, 0, result.stderr)
            name = "data" if path == "data:-" else "source"
            place = self.line.child.environment[f"SUBMISSION_FILE_{name.upper()}"]
            self.assertEqual(Path(place).name, f"{name}.txt")
            self.assertEqual(Path(place).read_bytes(), b"a\xff\r\n")
            self.line.child.end()

    def test_https_url_is_proposed_where_the_server_does_not_fetch_over_ssh(self) -> None:
        for url in ("git@github.com:me/p.git", "ssh://git@github.com:22/me/p.git"):
            arguments = ("--repository", url, *REPOSITORY[2:], "x=1")
            result = self.run_command("evaluate", *arguments)
            self.assertEqual(result.exit_code, 2)
            self.assertIn("; try https://github.com/me/p.git\n", result.stderr)
        arguments = ("--repository", "ftp://a/b", *REPOSITORY[2:], "x=1")
        self.assertNotIn("try `", self.run_command("evaluate", *arguments).stderr)

    def test_error_outside_a_checkout_names_the_next_step(self) -> None:
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir("/")
        short = "`git rev-parse main` in a clone of the repository prints"
        for arguments, words in (
            ((*REPOSITORY[:3], "main", *REPOSITORY[4:]), short),
            (("--evaluator", "./e"), "not in a git checkout; change to one"),
        ):
            result = self.run_command("evaluate", *arguments, "x=1")
            self.assertEqual(result.exit_code, 2)
            self.assertIn(words, result.stderr)
        self.assertEqual(self.line.agent.asked, [])

    def test_wrong_usage_exits_with_status_2_without_a_request(self) -> None:
        for arguments, words in (
            (["evaluate", *REPOSITORY], "no FIELD is given; name a file"),
            (["evaluate", *REPOSITORY, "none.py"], "no such file: none.py"),
            (["evaluate", *REPOSITORY[:4], str(self.file)], "--evaluator"),
            (["evaluate", *REPOSITORY[:2], *REPOSITORY[4:], "x=1"], "--repository needs --commit"),
            (["evaluate", *REPOSITORY, "--seed", "-1", "x=1"], "--seed"),
            (["evaluate", *REPOSITORY, "--seed", "x", "x=1"], "'x' is not a valid integer range"),
            (["evaluate", *REPOSITORY, "--limit", "memroy=1G", "x=1"], "'memroy=1G' is not NAME="),
            (["evaluate", *REPOSITORY, "--limit", "memory", "x=1"], "'memory' is not NAME=VALUE"),
            (["list", "--label", "Team=x"], "'Team=x' is not NAME=VALUE, where NAME is 1 to 64"),
            (["list", "--state", "drained"], "--state"),
            (["evaluate", *REPOSITORY, *("--limit", "cpu=1") * 2, "x=1"], "cpu is given twice"),
            (
                ["evaluate", *REPOSITORY, "--server", "localhost", "x=1"],
                "is not the URL of a server",
            ),
            (
                ["evaluate", *REPOSITORY, "--token-file", "/nonexistent", "x=1"],
                "--token-file: /nonexistent: cannot read the file",
            ),
            (["evaluate", *REPOSITORY, os.fsdecode(b"x=\xff")], "x: must be UTF-8"),
            (["evaluate", *REPOSITORY[:5], os.fsdecode(b"e\xff"), "x=1"], "--evaluator"),
            (["evaluate", *REPOSITORY, "-d", os.fsdecode(b"\xff"), "x=1"], "not UTF-8"),
            (["follow"], "ID"),
            (["follow", os.fsdecode(b"\xff")], "not UTF-8"),
            (["follow", "--after", "1+x", "x"], "'1+x' is not a cursor"),
            (["nonsense"], "nonsense"),
        ):
            result = self.run_command(*arguments)
            self.assertEqual(result.exit_code, 2, result.output)
            self.assertIn(words, result.stderr)
        self.assertEqual(self.line.agent.asked, [])

    def test_shell_completes_fields_with_file_names(self) -> None:
        words = {"COMP_WORDS": "main evaluate s", "COMP_CWORD": "2"}
        result = self.run_command(env={"_MAIN_COMPLETE": "bash_complete", **words})
        self.assertEqual(result.stdout, "file,s\n")


class InterruptTests(CommandTestCase):
    """An evaluation that the command has begun, and that it cancels."""

    def setUp(self) -> None:
        super().setUp()
        self.line.service.world.spawn.obeys = (15,)
        self.identifier = self.line.begin()
        self.shown = Shown()

    def follow(self, *presses: int, fate: Fate = Fate.WELL) -> int:
        """Follow the evaluation; send these signals one after the other, the first after a second.

        `fate` is that of the requests after the first signal.
        """
        steps = iter(range(FOR_EVER))
        coming = iter(presses)
        others = self.meanwhile

        def meanwhile() -> None:
            others()
            if next(steps) < 4:
                return
            for number in coming:
                self.line.agent.fate = lambda: fate
                signal.raise_signal(number)

        self.meanwhile = meanwhile
        server = ServerAccess("http://localhost:8080")
        with (
            self.assertRaises(SystemExit) as caught,
            open_command_context(server, self.shown.screen) as context,
        ):
            follow_submitted_evaluation(context, self.identifier, None)
        status = caught.exception.code
        assert isinstance(status, int)
        return status

    def test_signal_cancels_the_evaluation_and_following_continues_to_its_end(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        for number, status in ((signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            self.identifier, self.shown = self.line.begin(), Shown()
            self.line.child.print(b"a\n")
            self.assertEqual(self.follow(number), status)
            self.assertEqual(self.shown.out.getvalue(), "a\n")
            resumption = rf"continue here with `tawebeval follow .*{self.identifier}`\n"
            self.assertRegex(self.shown.notes.getvalue(), resumption)
            self.assertIn("failed: the evaluation was cancelled", self.shown.notes.getvalue())
            self.assertIs(signal.getsignal(signal.SIGINT), before)

    def test_printed_command_continues_after_the_events_that_were_shown(self) -> None:
        self.line.child.print(b"a\nb\n")
        self.line.service.world.spawn.obeys = ()
        self.patch(LineClient, "cancel", leave)
        self.assertEqual(self.follow(signal.SIGINT), LEFT)
        (cursor,) = re.findall(
            f"`tawebeval follow --after (.+) {self.identifier}`", self.shown.notes.getvalue()
        )
        self.line.child.print(b"c\n")
        self.line.settle()
        again = Shown()
        reader = EvaluationReader(self.make_context(again.screen), self.identifier)

        def stop() -> None:
            if again.out.getvalue():
                raise SystemExit

        self.meanwhile = stop
        self.assertRaises(SystemExit, reader.follow_evaluation)
        self.assertEqual((self.shown.out.getvalue(), again.out.getvalue()), ("a\nb", "\nc"))
        self.assertIn(f"the events before {cursor} are discarded", again.notes.getvalue())
        self.line.child.end()
        self.meanwhile = lambda: None
        result = self.run_command("follow", *reader.resume_command.split()[2:])
        self.assertEqual((result.exit_code, result.stdout, result.stderr), (0, "\n", ""))

    def test_failed_cancellation_is_reported_and_following_goes_on(self) -> None:
        def meanwhile() -> None:
            if "not cancelled" in self.shown.notes.getvalue():
                self.line.agent.fate = lambda: Fate.WELL
                if self.line.child.is_running:
                    self.line.child.end()

        self.meanwhile = meanwhile
        self.assertEqual(self.follow(signal.SIGINT, fate=Fate.REFUSED), 0)
        self.assertIn("not cancelled: cannot connect to", self.shown.notes.getvalue())

    def test_stdout_without_reader_cancels_the_evaluation(self) -> None:
        self.line.child.print(b"a\nb\n")
        self.shown.out.broken = True
        self.assertEqual(self.follow(), 141)
        status = self.line.wait(self.line.client.status(self.identifier))
        self.assertEqual(status["state"], "cancelled")


LEFT = 99
"""The exit status of a command that `leave` ends."""


def leave(client: Client, identifier: str) -> None:
    """End the command during a cancellation."""
    raise SystemExit(LEFT)


class FieldTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder)
        for name in ("a.py", "b.txt", "x=y", "C:z", os.fsdecode(b"\xff")):
            Path(name).touch()

    def test_arguments_become_fields_with_texts_or_files(self) -> None:
        for arguments, expected in (
            (["a.py"], {"source": Path("a.py")}),
            (["source:a.py"], {"source": Path("a.py")}),
            (["language=c++", "a.py"], {"language": "c++", "source": Path("a.py")}),
            (["a.py", "data:b.txt"], {"data": Path("b.txt"), "source": Path("a.py")}),
            (["x="], {"x": ""}),
            (["x=y"], {"x": "y"}),
            (["x=a:b=c\n"], {"x": "a:b=c\n"}),
            (["./x=y"], {"source": Path("./x=y")}),
            (["C:z"], {"source": Path("C:z")}),  # no field has a capital letter
        ):
            self.assertEqual(parse_submission_fields(arguments), expected)

    def test_content_of_a_pipe_is_read_when_fields_are_parsed(self) -> None:
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        os.write(writer, b"a")
        os.close(writer)
        self.assertEqual(parse_submission_fields([f"/dev/fd/{reader}"]), {"source": b"a"})

    def test_errors_name_the_wrong_field(self) -> None:
        for arguments, words in (
            ([], "no FIELD is given; name a file, such as solution.py"),
            (["none.py"], "no such file: none.py"),
            (["source:none.py"], "no such file: none.py"),
            (["source:."], ". is a directory; name a file in it"),
            (["/dev/null"], "/dev/null is not a regular file, a pipe or -"),
            (["a.py", "b.txt"], "b.txt needs a field name, as source is taken: write NAME:b.txt"),
            (["source=x", "a.py"], "write NAME:a.py"),
            (["x=1", "x=2"], "the field x is given twice"),
            (["x=1", "x:a.py"], "twice"),
            (["-", "x:/dev/stdin"], "stdin can be the content of one field only"),
            (["Source:a.py"], "no such file: Source:a.py; a field is NAME:PATH or NAME=TEXT"),
            ([os.fsdecode(b"\xff")], "must be UTF-8"),
            ([os.fsdecode(b"x=\xff")], "x: must be UTF-8"),
            (["x" * 5000], f"{'x' * 100}: File name too long"),
        ):
            error = self.assertRaises(ValueError, parse_submission_fields, arguments)
            self.assertIn(words, str(error))


class CheckoutTests(SynchronousTestCase):
    def setUp(self) -> None:
        # Not below this checkout.
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(shutil.rmtree, root)
        self.upstream = root / "upstream"
        self.url = f"file://{self.upstream}"
        git(root, "init", "--quiet", "--bare", "upstream")
        git(root, "clone", "--quiet", self.url, "clone")
        self.clone = root / "clone"
        (self.clone / "word_count").mkdir()
        (self.clone / "word_count" / "evaluator.sh").write_text("true\n")
        self.change()
        git(self.clone, "push", "--quiet", "origin", "HEAD:main")
        self.commit = git(self.clone, "rev-parse", "HEAD")

    def change(self) -> None:
        git(self.clone, "add", ".")
        git(self.clone, "commit", "--quiet", "--allow-empty", "-m", "new")

    def test_clean_checkout_gives_url_commit_and_directory_without_warnings(self) -> None:
        self.assertEqual(
            inspect_checkout(self.clone / "word_count"),
            GitCheckout(self.url, self.commit, "word_count", ()),
        )
        self.assertEqual(inspect_checkout(self.clone).directory, "")

    def warned(self, words: str, **given: str) -> None:
        (warning,) = inspect_checkout(self.clone, **given).warnings
        self.assertIn(words, warning)

    def test_unpushed_commits_and_changed_tracked_files_are_warned_of(self) -> None:
        self.change()
        self.warned("HEAD is on no branch of origin that this checkout knows; push it")
        git(self.clone, "push", "--quiet", "origin", "HEAD:other")
        (self.clone / "solution.py").touch()
        self.assertEqual(inspect_checkout(self.clone).warnings, ())
        (self.clone / "word_count" / "evaluator.sh").write_text("false\n")
        self.warned("uncommitted changes are not evaluated")
        (self.clone / ".git" / "index").write_bytes(b"nonsense")
        self.warned("uncommitted changes")

    def refused(self, folder: Path) -> str:
        return str(self.assertRaises(UsageError, inspect_checkout, folder))

    def test_error_names_what_the_checkout_lacks(self) -> None:
        for folder in (self.clone / ".git", self.clone / ".git" / "refs", self.upstream):
            self.assertIn("not in a git checkout", self.refused(folder))
        for prepare, words in (
            (lambda: git(self.clone, "remote", "remove", "origin"), "--repository"),
            (lambda: git(self.clone, "update-ref", "-d", "HEAD"), "has no commit yet"),
            (lambda: (self.clone / ".git" / "HEAD").unlink(), "not in a git checkout"),
        ):
            prepare()
            self.assertIn(words, self.refused(self.clone))

    def test_given_commit_causes_a_warning_only_if_it_is_unpushed(self) -> None:
        self.change()
        (self.clone / "word_count" / "evaluator.sh").write_text("false\n")
        for commit in (self.commit, "0" * 40):
            self.assertEqual(inspect_checkout(self.clone, commit).warnings, ())
        head = git(self.clone, "rev-parse", "HEAD")
        self.warned("the commit is on no branch of origin", commit=head)

    def test_short_commits_branches_and_tags_are_resolved(self) -> None:
        git(self.clone, "tag", "v1")
        for commit in (self.commit[:7], "HEAD", "v1", "origin/main"):
            self.assertEqual(inspect_checkout(self.clone, commit).commit, self.commit)
        for commit in ("nonsense", "--all"):
            with self.assertRaises(UsageError) as caught:
                inspect_checkout(self.clone, commit)
            words = f"--commit {commit} is not a commit, branch or tag of this checkout"
            self.assertEqual(str(caught.exception), words)

    def test_shown_http_url_has_no_user_and_no_password(self) -> None:
        for url, shown in (
            ("https://ghp_x@example.org/a.git", "https://example.org/a.git"),
            ("HTTPS://me:pa@ss@example.org/a@b", "HTTPS://example.org/a@b"),
            ("https://example.org/@/a.git", "https://example.org/@/a.git"),
            ("git@example.org:a.git", "git@example.org:a.git"),
        ):
            self.assertEqual(strip_userinfo(url), shown)

    def test_secret_in_a_url_is_neither_sent_nor_shown(self) -> None:
        for start in (
            "https://me:hunter2",
            "https://hunter2",
            "HTTP://hunter2",
            "ssh://me:hunter2",
        ):
            git(self.clone, "remote", "set-url", "origin", f"{start}@example.org/a.git")
            self.assertIn("token", self.refused(self.clone))
            self.assertNotIn("hunter2", self.refused(self.clone))
        for url in ("ssh://git@example.org/a.git", "git@example.org:a.git"):
            git(self.clone, "remote", "set-url", "origin", url)
            self.assertEqual(inspect_checkout(self.clone).repository, url)
