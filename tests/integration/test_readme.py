"""The commands of README.md do what it says, as they are printed there."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.cases.documented import find_block, run_script
from tests.cases.patience import LONG_PATIENCE
from tests.integration.harness import COMMAND
from tests.integration.ports import free_port
from tests.integration.repositories import git
from tests.integration.unprivileged import USER, give, temporary_folder
from tests.run import ROOT

BIN = Path(sys.executable).parent
EXPORT = 'export PATH="$PWD/.venv/bin:$PATH"'
MEASURED = re.compile(r"\d+\.\d+ s")


def block(language: str, words: str) -> str:
    """Return the only block of README.md in that language that has these words."""
    return find_block(ROOT / "README.md", language, words)


class ReadmeTests(TestCase):
    """README.md in a checkout of the examples, with a virtualenv in `.venv`."""

    timeout = LONG_PATIENCE

    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.checkout = self.folder / "checkout"
        ignored = shutil.ignore_patterns("__pycache__")  # where others may be writing
        shutil.copytree(ROOT / "examples", self.checkout / "examples", ignore=ignored)
        programs = self.checkout / ".venv" / "bin"
        programs.mkdir(parents=True)
        for program in BIN.iterdir():
            (programs / program.name).symlink_to(
                COMMAND if program.name == COMMAND.name else program
            )
        for name in ("state", "cache"):
            (self.folder / name).mkdir()
            give(self.folder / name)

    async def run_script(self, script: str) -> str:
        """Run a script in the checkout, and return what it prints to stdout."""
        places = {
            f"{name.upper()}_DIRECTORY": f"{self.folder}/{name}" for name in ("state", "cache")
        }
        environment = {**os.environ, **places}
        return str(await deferToThread(run_script, script, self.checkout, environment))

    async def test_try_prints_the_lines_of_the_example(self) -> None:
        lines = block("console", "tawebeval try")
        commands, printed = re.split(r"\nrepeat this run with --seed [0-9]+\n", lines)
        script = commands.replace("$ ", "")
        self.assertIn(EXPORT, script)
        # Root has to name a user, as the text says.
        script += f" --user {USER.pw_name}" if USER else ""
        found = MEASURED.sub("", await self.run_script(f"{script} 2>&1"))
        printed, last, _ = printed.partition("used ")  # what follows depends on the machine
        parts = MEASURED.sub("", printed + last).split("...\n")
        pattern = "(?s:.*)".join(map(re.escape, parts))
        self.assertRegex(found, pattern)

    async def test_curl_example_prints_its_events(self) -> None:
        script = block("sh", "curl -s")
        self.assertEqual(len(script.splitlines()), 11)
        self.assertIn("--retry-delay ", script)  # else nine minutes pass if no daemon starts
        git(self.checkout, "init", "--quiet")
        git(self.checkout, "add", "examples")
        git(self.checkout, "commit", "--quiet", "--message", "The examples")
        port = free_port()
        changes = {
            "/tmp/": f"{self.folder}/",
            "8080": str(port),
            "tawebeval serve": f"tawebeval serve --listen tcp:{port}:interface=127.0.0.1",
        }
        for before, after in changes.items():
            self.assertIn(before, script)
            script = script.replace(before, after)
        found = MEASURED.sub("", await self.run_script(f"{EXPORT}\n{script}wait $! || true"))
        shown = MEASURED.sub("", block("json", "case 1"))
        self.assertTrue(found.startswith(shown), found)
        self.assertIn('"goal": "ordered", "result": false', found)
