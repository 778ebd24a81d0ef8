"""`cli.operate`: new tokens. The other commands are tested beside what they call."""

from __future__ import annotations

import re

from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tawebeval.core.tokens import parse_tokens


class TokenTests(SynchronousTestCase):
    """`tawebeval token new`."""

    def test_new(self) -> None:
        """Stdout has the token alone; stderr has the line that makes a file accept it."""
        result = CliRunner().invoke(main, ["token", "new", "alice"])
        self.assertEqual(result.exit_code, 0, result.output)
        self.assertRegex(result.stdout, r"\Atawebeval_\S+\n\Z")
        self.assertNotIn("tawebeval_", result.stderr)
        token = result.stdout.strip()
        (line,) = re.findall(r"^alice sha256:\S+$", result.stderr, re.MULTILINE)
        tokens = parse_tokens(line)
        self.assertEqual(tokens.find_token([b"Bearer " + token.encode()]).caller, "alice")

    def test_name(self) -> None:
        """An invalid name is refused with the rule for names."""
        result = CliRunner().invoke(main, ["token", "new", "a b"])
        self.assertEqual(result.exit_code, 2)
        self.assertIn("64", result.output)
        self.assertNotIn("sha256", result.output)
