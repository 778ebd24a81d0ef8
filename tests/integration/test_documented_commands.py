"""The programs and commands of docs/evaluators.md print what the page shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
from twisted.internet.threads import deferToThread

from tests.cases.patience import LONG_PATIENCE
from tests.integration.harness import DaemonTestCase
from tests.integration.repositories import ENVIRONMENT, git
from tests.integration.terminal import COMMAND
from tests.integration.test_cgroups import reason_to_skip
from tests.integration.unprivileged import USER, give
from tests.run import ROOT

_BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n```(?P<language>\w+)\n(?P<text>.*?)^```$", re.S | re.M)
_FILE = re.compile(r"`(\w+\.(?:sh|py))`")
# What differs from run to run; a seed that was drawn is shown on a line of its own.
_VARYING = re.compile(r"(?<= at )[0-9a-f]{12}\b|^repeat this run with --seed \d+\n", re.M)
_SERVER, _ORIGIN = "https://judge.example.org", "https://git.example.org/sums.git"


@attrs.frozen
class Block:
    """A block of code, and the names of files in the line before it."""

    language: str
    text: str
    files: list[str]


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document in their order."""
    for found in _BLOCK.finditer(document.read_text("utf-8")):
        yield Block(found["language"], found["text"], _FILE.findall(found["before"]))


class EvaluatorTests(DaemonTestCase):
    """docs/evaluators.md, followed from its beginning to its end in one directory."""

    timeout = LONG_PATIENCE
    maxDiff = None
    page = ROOT / "docs" / "evaluators.md"

    async def setUp(self) -> None:
        await super().setUp()
        self.place = self.folder / "place"
        self.origin = self.folder / "sums.git"
        programs = self.folder / "bin"
        for folder in (self.place, self.origin, programs):
            folder.mkdir()
            give(folder)
        git(self.origin, "init", "--quiet", "--bare")
        command = programs / "tawebeval"
        user = f'[ "$1" != try ] || set -- "$@" --user {USER.pw_name}\n' if USER else ""
        command.write_text(f'#!/bin/sh\n{user}exec {shlex.join(COMMAND)} "$@"\n')
        command.chmod(0o755)
        # `git push` takes no GIT_CONFIG_KEY_0 to the repository that it writes to.
        settings = self.folder / "gitconfig"
        settings.write_text("[safe]\n    directory = *\n")
        self.environment = {
            **ENVIRONMENT,
            "GIT_CONFIG_GLOBAL": str(settings),
            "PATH": f"{programs}:{ENVIRONMENT['PATH']}",
            "PYTHONPATH": ":".join(sys.path),
        }

    async def run_script(self, script: str) -> str:
        """Return what a terminal would show of a script in `place`."""
        names = {_SERVER: self.daemon.url, _ORIGIN: f"file://{self.origin}"}
        for name, here in names.items():
            script = script.replace(name, here)
        done = await deferToThread(
            subprocess.run,
            ["bash", "-c", script],
            cwd=self.place,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, here in names.items():
            done.stdout = done.stdout.replace(here, name)
        return str(done.stdout)

    def write_files(self, *, patient: bool) -> None:
        """Write the programs; `patient` gives solutions time, as the machine may be slow."""
        for block in blocks(self.page):
            if block.files and block.language in ("bash", "python"):
                text = block.text
                if patient:
                    text = re.sub(r"(timeout[ =])2\b", r"\g<1>300", text)
                (self.place / block.files[-1]).write_text(text)

    async def test_session(self) -> None:
        """Each command prints the lines below it."""
        for block in blocks(self.page):
            # Without cgroups the limit of memory is that of each process, as the page says.
            if block.language == "console" and not ("bytearray" in block.text and reason_to_skip()):
                self.write_files(patient="no answer within" not in block.text)
                lines = block.text.splitlines(keepends=True)
                commands = "".join(line[2:] for line in lines if line.startswith("$ "))
                expected = "".join(line for line in lines if not line.startswith("$ "))
                shown = await self.run_script(commands)
                self.assertEqual(_VARYING.sub("", shown), _VARYING.sub("", expected))

    async def test_events(self) -> None:
        """The events of a file and of a broken block are those that the reference shows."""
        self.write_files(patient=True)
        block = r'printf "\n%s\nnot json\n%s\n" $EVALUATION_DATA_BEGIN $EVALUATION_DATA_END'
        shown = await self.run_script(
            f"tawebeval try . --evaluator 'bash table.sh; {block}' --events solution.py"
        )
        events = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
        expected = [
            json.loads(block.text) for block in blocks(self.page) if block.language == "json"
        ]
        self.assertEqual([event for event in events if event["type"] == "data"], expected)
