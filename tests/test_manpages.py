"""`scripts/manpages`: a manual page for each command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tests.run import ROOT


def commands(command: click.Command, name: str = "tawebeval") -> Iterator[tuple[str, str]]:
    """Yield the names of all pages, and the help that is to be in them."""
    yield name, command.help or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from commands(found, f"{name}-{below}")


class PageTests(SynchronousTestCase):
    def test_each_command_has_a_page(self) -> None:
        folder = Path(self.mktemp())
        script = [sys.executable, str(ROOT / "scripts" / "manpages"), str(folder)]
        subprocess.run(script, check=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
        known = dict(commands(main))
        self.assertEqual({path.stem for path in folder.iterdir()}, set(known))
        for name, text in known.items():
            page = (folder / f"{name}.1").read_text()
            self.assertIn(".SH SYNOPSIS\n", page)
            self.assertEqual(page.count("\n.nf\n"), text.count("\b"))
            self.assertNotIn("\b", page)
