"""`cli`: the command, as far as the operator needs it."""

from __future__ import annotations

import re

from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import __version__
from tawebeval.cli import main
from tawebeval.core.tokens import parse_tokens


class CliTests(SynchronousTestCase):
    """The command, as from a shell."""

    def run_command(self, *arguments: str) -> Result:
        """Run it."""
        return CliRunner().invoke(main, arguments)

    def test_new(self) -> None:
        """The token stands there once; the line makes the file that lets it in."""
        result = self.run_command("token", "new", "alice")
        self.assertEqual(result.exit_code, 0, result.output)
        (token,) = re.findall(r"tawebeval_\S+", result.output)
        (line,) = re.findall(r"alice sha256:\S+", result.output)
        tokens = parse_tokens(line)
        self.assertEqual(tokens.authenticate([b"Bearer " + token.encode()]), "alice")

    def test_name(self) -> None:
        """What is no name is refused with what would be one."""
        result = self.run_command("token", "new", "a b")
        self.assertEqual(result.exit_code, 2)
        self.assertIn("64", result.output)
        self.assertNotIn("sha256", result.output)

    def test_help(self) -> None:
        """Help teaches: what to do with what it prints."""
        for words in ("tokens = ", "Bearer", "SIGHUP", "take a token away"):
            self.assertIn(words, self.run_command("token", "--help").output)
        self.assertIn("once", self.run_command("token", "new", "--help").output)
        self.assertIn("tawebeval serve", self.run_command("--help").output)
        self.assertIn("twistd", self.run_command("serve", "--help").output)
        self.assertEqual(self.run_command("--version").output, f"tawebeval {__version__}\n")
