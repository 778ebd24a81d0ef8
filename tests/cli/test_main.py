"""`cli.main`: the help of the command."""

from __future__ import annotations

import re
import subprocess
import sys

import click
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tawebeval.cli import main
from tawebeval.core import tokens
from tests.cases.patience import PATIENCE


class MainTests(SynchronousTestCase):
    def test_help_of_a_command_names_the_next_step(self) -> None:
        for command, words in (
            ("token", ("tokens = ", "Bearer", "SIGHUP", "revoke the old")),
            ("token add", ("once",)),
            ("", ("tawebeval serve",)),
            ("serve", ("twistd",)),
        ):
            output = CliRunner().invoke(main, [*command.split(), "--help"]).output
            for each in words:
                self.assertIn(each, output)
        output = CliRunner().invoke(main, ["--version"]).output
        self.assertEqual(output, f"tawebeval {__version__}\n")

    def list_imported_modules(self, *arguments: str) -> set[str]:
        program = (
            "import sys; from tawebeval.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "except SystemExit: print(*sys.modules)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={"PYTHONPATH": ":".join(sys.path), "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        imported = set(done.stdout.split())
        self.assertIn("tawebeval.cli.main", imported, done.stderr)
        return imported

    def test_client_commands_import_neither_twisted_nor_the_daemon(self) -> None:
        for arguments, foreign in (
            (("status", "--server", "http://127.0.0.1:1", "x"), ()),
            (
                ("list", "--server", "http://127.0.0.1:1"),
                ("tawebeval.core.form", "tawebeval.core.evaluations", "tawebeval.cli.evaluate"),
            ),
            (("evaluate", "--help"), ()),
            (("logout",), ()),
            (
                ("token", "list", "--file", "/dev/null"),
                ("httpx", "tawebeval_client.http", "tawebeval.cli.runtime"),
            ),
        ):
            imported = self.list_imported_modules(*arguments)
            for name in ("twisted", "klein", "tawebeval.daemon", "tawebeval.sandbox", *foreign):
                self.assertNotIn(name, imported, arguments)

    def test_try_and_check_import_no_tls(self) -> None:
        for command in (("try", ".", "--evaluator", "true", "source=x"), ("check", ".")):
            imported = self.list_imported_modules(*command, "--environment", "none")
            self.assertIn("twisted.internet.pollreactor", imported, command)
            self.assertFalse({"OpenSSL.SSL", "cryptography", "ssl"} & imported, command)

    def test_full_disk_behind_stdout_is_reported_and_other_errors_are_raised(self) -> None:
        for error, status in ((OSError(28, "No space left on device"), 2), (OSError(13, "x"), 1)):

            def fail(*_: object, error: OSError = error, **__: object) -> None:
                raise error

            self.patch(tokens, "generate_token", fail)
            result = CliRunner().invoke(main, ["token", "add", "alice"])
            self.assertEqual(result.exit_code, status)
            self.assertEqual("stdout: No space left on device\n" in result.stderr, status == 2)

    def test_similar_commands_are_named_for_an_unknown_one(self) -> None:
        for name, words in (
            ("evalute", "no such command: evalute; did you mean evaluate?"),
            ("zzz", "No such command 'zzz'"),
            ("--jsn", "No such option"),
        ):
            result = CliRunner().invoke(main, [name])
            self.assertEqual(result.exit_code, 2)
            self.assertIn(words, result.stderr)

    def test_summaries_of_commands_fit_into_80_columns(self) -> None:
        output = CliRunner().invoke(main, ["--help"], terminal_width=80).output
        context = click.Context(main)
        for name in main.list_commands(context):
            command = main.get_command(context, name)
            assert command is not None
            first = (command.help or "").partition("\n")[0].removesuffix(".")
            self.assertRegex(output, rf"(?m)^  {name} +{re.escape(first)}\.?$")
