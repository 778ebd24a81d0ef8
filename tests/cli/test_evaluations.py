"""`cli.evaluations`: `status`, `cancel`, `list`, `follow`."""

from __future__ import annotations

import json
import signal

from tawebeval.cli.evaluations import dump_json
from tests.cases.command import CommandTestCase
from tests.cases.screen import Shown


class EvaluationsTests(CommandTestCase):
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
        """Control characters in JSON are escaped on a terminal only, and it stays JSON."""
        text = "\x9b2J\x7f\u202eü"
        for terminal, written in ((True, "\\u009b2J\\u007f\\u202eü"), (False, text)):
            shown = Shown(terminal=terminal)
            shown.screen.print(dump_json({"a": text}))
            self.assertIn(f'"{written}"', shown.out.getvalue())
            self.assertEqual(json.loads(shown.out.getvalue(), strict=False), {"a": text})

    def test_list(self) -> None:
        """A line for each, or JSON."""
        identifiers = [self.line.begin() for _ in range(2)]
        lines = self.run_command("list").stdout.splitlines()
        self.assertEqual(
            [line.split()[:2] for line in lines], [[i, "running"] for i in identifiers]
        )
        listed = json.loads(self.run_command("list", "--json").stdout)
        self.assertEqual([one["evaluation_id"] for one in listed], identifiers)

    def test_where_it_was(self) -> None:
        """Ctrl-C while following prints the command that continues, even before any event."""
        identifier = self.line.begin()
        presses = iter([signal.SIGINT])
        self.meanwhile = lambda: [signal.raise_signal(number) for number in presses]
        result = self.run_command("follow", identifier)
        self.assertEqual(result.exit_code, 130)
        self.assertIn(f"continue here with `tawebeval follow {identifier}`\n", result.stderr)
