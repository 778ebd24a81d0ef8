"""The rights of the daemon, and what root is told."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import SkipTest

from twisted.trial.unittest import TestCase

import tawebeval
import tawebeval_client
from tawebeval.sandbox.bubblewrap import EVALUATOR_TOOLS_DIRECTORY_NAME
from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import Client, text
from tests.integration.harness import (
    CONFIGURATION,
    UNSANDBOXED,
    Daemon,
    DaemonTestCase,
    environment,
)
from tests.integration.ports import free_port
from tests.integration.repositories import GitRepository
from tests.integration.unprivileged import PYTHON, USER, temporary_folder

# Prints the directory of the module for evaluators.
EVALUATOR = """\
import os, sys
sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi
print(os.path.dirname(segi.__file__))
"""

# The command line, as if setpriv(1) could not execute this Python.
CLOSED_COMMAND = """\
import sys
from tawebeval.cli import main
sys.executable = "/closed/python"
main()
"""


def status(pid: int) -> dict[str, list[str]]:
    """Return what /proc/PID/status says."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


class PrivilegeTests(DaemonTestCase):
    """A daemon that runs, whoever has started it, without a sandbox that would protect it."""

    configuration = UNSANDBOXED

    async def test_evaluators_cannot_look_into_the_daemon(self) -> None:
        uid = status(self.daemon.pid)["Uid"][0]
        events = await self.run_command(
            "id -u; grep -Ec 'Cap(Inh|Prm|Eff|Amb):.*[1-9a-f]' /proc/self/status;"
            f" cat /proc/{self.daemon.pid}/environ 2>/dev/null || echo refused;"
            f" head -c 1 /proc/{self.daemon.pid}/mem 2>/dev/null || echo refused"
        )
        self.assertEqual(text(events), f"{uid}\n0\nrefused\nrefused\n")


class RootTestCase(TestCase):
    """Tests that only root can make, with a folder which everybody can enter."""

    timeout = LONG_PATIENCE

    def setUp(self) -> None:
        if USER is None:
            raise SkipTest("only root can be refused")
        self.folder = temporary_folder()
        self.folder.chmod(0o755)
        self.addCleanup(shutil.rmtree, self.folder)
        self.places = {
            "STATE_DIRECTORY": str(self.folder / "state"),
            "CACHE_DIRECTORY": str(self.folder / "cache"),
        }


class ClosedDirectoryTests(RootTestCase):
    """tawebeval in a directory that root alone can read, as `/root` is."""

    def setUp(self) -> None:
        super().setUp()
        self.closed = self.folder / "closed"
        ignored = shutil.ignore_patterns("__pycache__")
        for package in (tawebeval, tawebeval_client):
            folder = Path(package.__file__).parent
            shutil.copytree(folder, self.closed / folder.name, ignore=ignored)
        subprocess.run(["chown", "-R", "root:", str(self.closed)], check=True)
        subprocess.run(["chmod", "-R", "go=", str(self.closed)], check=True)
        self.variables = {"PYTHONPATH": str(self.closed), **self.places}

    def start_for_nobody(self, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CLOSED_COMMAND, *arguments, "--user", "nobody"],
            cwd=cwd,
            env=environment(**self.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.__exit__, None, None, None)
        self.addCleanup(process.kill)
        return process

    def run_for_nobody(self, *arguments: str) -> str:
        """Run such a command beside an evaluator; return its stdout."""
        evaluator = self.closed / "evaluator"
        evaluator.mkdir(exist_ok=True)
        (evaluator / "evaluator.sh").write_text("cat $SUBMISSION_FILE_SOURCE")
        (evaluator / "solution").write_text("solution")
        process = self.start_for_nobody(evaluator, *arguments)
        stdout, stderr = process.communicate(timeout=LONG_PATIENCE)
        self.assertIn(process.returncode, (0, 1), stderr)
        return stdout

    async def test_daemon_runs_evaluators_from_a_closed_directory(self) -> None:
        repository = GitRepository(self.folder / "repository")
        repository.write("evaluator.py", EVALUATOR)
        commit = repository.commit()
        for kind in ("auto", "none"):
            settings = f'{CONFIGURATION}[sandbox]\nkind = "{kind}"\n'
            daemon = Daemon(settings, PYTHONPATH=str(self.closed))
            self.addCleanup(daemon.remove)
            daemon.start()
            await daemon.ready()
            async with Client(daemon.url) as client:
                command = f"{PYTHON} evaluator.py && command -v tawebeval-run"
                identifier = await client.evaluate(repository.url, commit, command)
                events = await client.follow(identifier)
            place = daemon.state / "accounts" / EVALUATOR_TOOLS_DIRECTORY_NAME
            tools = "/evaluation/tools" if kind == "auto" else place
            self.assertEqual(text(events), f"{tools}/lib\n{tools}/bin/tawebeval-run\n")
            await daemon.stop()

    def test_doctor_started_by_root_switches_to_the_given_user(self) -> None:
        found = {each["part"]: each for each in json.loads(self.run_for_nobody("doctor", "--json"))}
        self.assertEqual(found["user"]["what"], "the daemon runs as nobody")
        self.assertEqual(found["sandbox"]["health"], "ok")

    def test_daemon_started_by_root_switches_to_the_given_user(self) -> None:
        listen = f"tcp:{free_port()}:interface=127.0.0.1"
        process = self.start_for_nobody(self.closed, "serve", "--listen", listen)
        assert process.stdout is not None
        log = ""
        while "ready: " not in log:
            line = process.stdout.readline()
            log += line
            self.assertTrue(line, log)
        self.assertNotIn("0", status(process.pid)["Uid"])
        process.terminate()
        self.assertEqual(process.wait(LONG_PATIENCE), -signal.SIGTERM)

    def test_try_command_run_by_root_for_a_user_reads_the_working_directory(self) -> None:
        for directory in (".", str(self.closed / "evaluator")):
            options = ("--evaluator", "sh evaluator.sh", "solution")
            self.assertEqual(self.run_for_nobody("try", directory, *options), "solution")
