"""The starter by its command, and under a systemd that has booted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from benchmarks.booted import wait_until
from tawebeval.linux.starter_client import StarterClient
from tests.integration.cgroups import reason_to_skip
from tests.integration.service_case import GATE, SERVICE, STARTER, WAIT, ServiceTestCase, reasons

GATED = f"{GATE}; echo ready; {WAIT}; sleep 23456"


class StarterTests(ServiceTestCase):
    def is_running(self) -> bool:
        """Tell whether the evaluator has gone on to its end."""
        return self.machine.attempt("pgrep", "--full", "^sleep 23456").returncode == 0

    def begin_and_wait(self, command: str) -> tuple[str, str]:
        """Begin an evaluation that prints `ready`; return its identifier and the cursor then."""
        identifier = self.begin(command)
        return identifier, self.printed(identifier, "ready")

    def fail_to_start(self) -> None:
        """Have the daemon fail at its start, several times."""
        self.override("RestartSec=10ms", "ExecStartPre=/bin/false")
        self.machine.attempt("systemctl", "restart", SERVICE)
        wait_until(lambda: int(self.show("NRestarts")) > 3, "it was tried again and again")
        self.override()

    def test_evaluator_outlives_restarts_of_the_daemon_until_a_stop(self) -> None:
        identifier, after = self.begin_and_wait(GATED)
        for end in (
            lambda: self.control("kill", "--signal=KILL", SERVICE),
            lambda: self.control("restart", SERVICE),
            self.fail_to_start,
            lambda: self.control("restart", SERVICE),
        ):
            daemon = int(self.show("MainPID"))
            end()
            self.healthy()
            self.assertNotEqual(int(self.show("MainPID")), daemon)
        self.let_go()
        self.assertEqual(self.printed(identifier, "done"), str(int(after) + 2))
        wait_until(self.is_running, "it goes on")
        (pid,) = self.machine.run("pgrep", "--full", "^sleep 23456").split()
        group = self.machine.run("cat", f"/proc/{pid}/cgroup").rpartition("::")[2].strip()
        self.assertTrue(group.startswith(self.show("ControlGroup", STARTER)), group)
        self.control("stop", SERVICE)
        wait_until(lambda: not self.is_running(), "the evaluator has ended")
        wait_until(lambda: self.show("ActiveState", STARTER) == "inactive", "the starter has ended")

    def test_lost_starter_is_started_again(self) -> None:
        identifier, _ = self.begin_and_wait(GATED)
        self.control("kill", "--kill-whom=main", "--signal=KILL", STARTER)
        wait_until(lambda: self.show("NRestarts", STARTER) == "1", "another starter is there")
        wait_until(lambda: self.show("ActiveState", STARTER) == "active", "it listens")
        wait_until(lambda: self.post("echo again")[0] == 200, "evaluations are accepted again")
        self.assertEqual(reasons(self.follow(identifier)), ["lost"])


class CommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        if reason := reason_to_skip():
            raise SkipTest(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="tawebeval-starter-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.folder.chmod(0o755)
        (self.folder / "starter").mkdir(mode=0o700)
        (self.folder / "toml").write_text('[service]\nuser = "nobody"\n')
        shutil.chown(self.folder / "starter", "nobody")

    def start(self) -> StarterClient:
        path = self.folder / "starter" / "socket"
        path.unlink(missing_ok=True)
        options = ["--config", str(self.folder / "toml"), "--socket", str(path)]
        command = "from tawebeval.cli import main; main()"
        process = subprocess.Popen([sys.executable, "-c", command, "starter", *options])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_until(path.exists, "the starter listens")
        client = StarterClient.connect(path)
        self.addCleanup(client.close)
        self.assertEqual(client.pid, process.pid)
        self.addCleanup(self.remove, client)
        self.process = process
        return client

    def parents(self, client: StarterClient) -> list[Path]:
        return [Path(json.loads(client.cgroups)["evaluations"])]

    def remove(self, client: StarterClient) -> None:
        self.process.kill()
        self.process.wait()
        for parent in self.parents(client):
            for path, _, _ in reversed([*os.walk(parent)]):
                os.rmdir(path)

    def test_starter_removes_cgroups_of_a_killed_one(self) -> None:
        first = self.start()
        parents = self.parents(first)
        self.assertTrue(parents)
        (parents[0] / "evaluation-abc").mkdir()
        self.process.kill()
        self.process.wait()
        second = self.start()
        self.assertEqual([path for path in parents if path.exists()], [])
        self.assertTrue(all(path.exists() for path in self.parents(second)))
        status = Path(f"/proc/{second.pid}/status").read_text()
        self.assertIn("NoNewPrivs:\t1", status)
        self.assertNotIn("Uid:\t0", status)
