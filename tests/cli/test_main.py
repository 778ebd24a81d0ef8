"""`cli.main`: the help of the command."""

from __future__ import annotations

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tawebeval.cli import main


class MainTests(SynchronousTestCase):
    """The command as from a shell."""

    def test_help(self) -> None:
        """Help says what to do with the output of a command."""
        for command, words in (
            ("token", ("tokens = ", "Bearer", "SIGHUP", "take a token away")),
            ("token new", ("once",)),
            ("", ("tawebeval serve",)),
            ("serve", ("twistd",)),
        ):
            output = CliRunner().invoke(main, [*command.split(), "--help"]).output
            for each in words:
                self.assertIn(each, output)
        output = CliRunner().invoke(main, ["--version"]).output
        self.assertEqual(output, f"tawebeval {__version__}\n")
