"""Programs and commands of the documents, as printed there; and docs/gallery.md."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase

from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.cgroups import DELEGATED
from tests.integration.harness import DaemonTestCase
from tests.integration.repositories import ENVIRONMENT, git
from tests.integration.terminal import COMMAND
from tests.integration.unprivileged import USER, give
from tests.run import ROOT

_BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n```(?P<language>\w+)\n(?P<text>.*?)^```$", re.S | re.M)
_FILE = re.compile(r"`(\w+\.(?:sh|py))`")
_VARYING = {
    r"(?m)^stderr:\n  Killed\n": "",  # where a shell outlives its command
    r"(?m)^repeat this run with --seed \d+\n": "",  # not where a command names the seed
    r"(?m)^used \d.*\n": "",  # the page shows the line once
    r"(?<= at )[0-9a-f]{12}\b": "COMMIT",
    r"\b[a-z2-7]{40}\b": "ID",
    r" +\d+ s  ": " AGE  ",
    r"\b\d+\.\d{1,3} s\b": "TIME",
    r"(?<=TIME, )\d+(\.\d)? MiB\b": "SIZE",
    r"\btawebeval_\S+": "TOKEN",
    r"\bsha256:\w+": "HASH",
    r"(?m)(?<=^.{25})[0-9a-f]{12}\b": "HASH",  # of `token list`
}
_SERVER, _ORIGIN = "https://judge.example.org", "https://git.example.org/sums.git"
EXAMPLES = ROOT / "examples"
EVALUATORS, CLI = ROOT / "docs" / "evaluators.md", ROOT / "docs" / "cli.md"


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


def parse_session(text: str) -> tuple[str, str]:
    """Return the commands at the prompts of a console, and the lines between them."""
    lines = text.replace("\\\n", "").splitlines(keepends=True)
    commands = "".join(line[2:] for line in lines if line.startswith("$ "))
    return commands, "".join(line for line in lines if not line.startswith("$ "))


class SessionTestCase(DaemonTestCase):
    """A daemon as the server of the pages, an empty `place`, and an empty `origin` to push to."""

    timeout = LONG_PATIENCE
    maxDiff = None

    def _describe_daemon(self) -> object:
        return self.id()  # a daemon of its own: the pages list all evaluations

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
            "XDG_CONFIG_HOME": str(self.folder / "config"),
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

    def write_programs(self, *, patient: bool) -> None:
        """Write the programs of docs/evaluators.md.

        Solutions get more time, as the machine may be slow; processor time only if `patient`.
        """
        limits = "time|wall" if patient else "wall"
        for block in blocks(EVALUATORS):
            if block.files and block.language in ("bash", "python"):
                text = re.sub(rf"(\b(?:{limits})[ =])(?:2|10)\b", r"\g<1>300", block.text)
                (self.place / block.files[-1]).write_text(text)

    def check(self, shown: str, expected: str) -> None:
        """Compare output with a page, where `...` stands for any lines."""
        for pattern, word in _VARYING.items():
            shown, expected = (re.sub(pattern, word, text) for text in (shown, expected))
        if "...\n" in expected.replace(" ...", ""):
            parts = re.split(r"(?m)^\.\.\.\n", expected)
            self.assertRegex(shown, "\\A" + "(?s:.*)".join(map(re.escape, parts)) + "\\Z")
        else:
            self.assertEqual(shown, expected)


class EvaluatorTests(SessionTestCase):
    """docs/evaluators.md, followed from its beginning to its end in one directory."""

    async def test_documented_evaluators_print_the_documented_lines(self) -> None:
        for block in blocks(EVALUATORS):
            # Without cgroups the limit of memory is that of each process, as the page says.
            if block.language == "console" and ("bytearray" not in block.text or DELEGATED):
                self.write_programs(patient="endless" not in block.text)
                commands, expected = parse_session(block.text)
                self.check(await self.run_script(commands), expected)

    async def test_documented_events_are_those_of_the_evaluators(self) -> None:
        self.write_programs(patient=True)
        block = r'printf "\n%s\nnot json\n%s\n" $EVALUATION_DATA_BEGIN $EVALUATION_DATA_END'
        shown = await self.run_script(
            f"tawebeval try . --evaluator 'bash table.sh; {block}' --events solution.py"
        )
        events = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
        expected = [
            json.loads(block.text) for block in blocks(EVALUATORS) if block.language == "json"
        ]
        self.assertEqual([event for event in events if event["type"] == "data"], expected)


class CommandTests(SessionTestCase):
    """docs/cli.md, in a checkout of the evaluator that docs/evaluators.md pushes."""

    async def test_documented_commands_print_the_documented_lines(self) -> None:
        self.write_programs(patient=True)
        (begin,) = (block.text for block in blocks(EVALUATORS) if "git init" in block.text)
        commands, _ = parse_session(begin)
        await self.run_script(commands.replace("git add judge.sh", "git add ."))
        self.environment["TAWEBEVAL_SERVER"] = self.daemon.url
        for block in blocks(CLI):
            commands, expected = block.text, ""
            if block.language == "console":
                commands, expected = parse_session(block.text)
            self.check(await self.run_script(commands), expected)

    async def test_documented_examples_print_the_documented_lines(self) -> None:
        ignored = shutil.ignore_patterns("__pycache__")  # where others may be writing
        shutil.copytree(EXAMPLES, self.place / "examples", ignore=ignored)
        (block,) = (one for one in blocks(EXAMPLES / "README.md") if one.language == "console")
        commands, expected = parse_session(block.text)
        self.check(await self.run_script(commands), expected)


GALLERY = ROOT / "docs" / "gallery.md"


class GalleryTests(SynchronousTestCase):
    maxDiff = None

    def test_gallery_shows_what_the_commands_print(self) -> None:
        copy = Path(self.mktemp())
        shutil.copy(GALLERY, copy)
        script = [sys.executable, str(ROOT / "scripts" / "recordings"), str(copy)]
        subprocess.run(script, check=True, timeout=PATIENCE)
        self.assertEqual(copy.read_text(), GALLERY.read_text())
