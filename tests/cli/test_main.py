"""`cli.main`: the help of the command."""

from __future__ import annotations

import re

import click
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tawebeval.cli import main


class MainTests(SynchronousTestCase):
    """The command as from a shell."""

    def test_help(self) -> None:
        """Help says what to do with the output of a command."""
        for command, words in (
            ("token", ("tokens = ", "Bearer", "SIGHUP", "revoke a token")),
            ("token new", ("once",)),
            ("", ("tawebeval serve",)),
            ("serve", ("twistd",)),
        ):
            output = CliRunner().invoke(main, [*command.split(), "--help"]).output
            for each in words:
                self.assertIn(each, output)
        output = CliRunner().invoke(main, ["--version"]).output
        self.assertEqual(output, f"tawebeval {__version__}\n")

    def test_summaries(self) -> None:
        """On a terminal of 80 columns the list of commands cuts no first sentence."""
        output = CliRunner().invoke(main, ["--help"], terminal_width=80).output
        context = click.Context(main)
        for name in main.list_commands(context):
            command = main.get_command(context, name)
            assert command is not None
            first = (command.help or "").partition("\n")[0].removesuffix(".")
            self.assertRegex(output, rf"(?m)^  {name} +{re.escape(first)}\.?$")
