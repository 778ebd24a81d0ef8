"""The starter by its command, and under a systemd that has booted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from benchmarks.booted import wait_until
from tawebeval.linux.cgroups import find_own_cgroup
from tawebeval.linux.starter_client import StarterClient
from tests.integration.harness import COMMAND
from tests.integration.service_case import GATE, SERVICE, STARTER, WAIT, ServiceTestCase, reasons
from tests.integration.unprivileged import USER, give, temporary_folder
from tests.run import NEEDS_CGROUPS

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
        own = find_own_cgroup()
        if USER is None or own is None or not os.access(own, os.W_OK):
            raise SkipTest(f"{NEEDS_CGROUPS}none can be made here")
        self.folder = temporary_folder("tawebeval-starter-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.folder.chmod(0o700)
        self.own = Path(own, self.folder.name)
        self.own.mkdir()
        self.addCleanup(self.own.rmdir)
        for path in (self.own, self.own / "cgroup.procs", self.own / "cgroup.subtree_control"):
            give(path)

    def start(self) -> StarterClient:
        path = self.folder / "socket"
        path.unlink(missing_ok=True)
        script = f'echo 0 >{self.own}/cgroup.procs; exec "$@"'
        options = ("starter", "--socket", str(path))
        self.process = subprocess.Popen(["sh", "-c", script, "sh", str(COMMAND), *options])
        self.addCleanup(self.process.wait)
        self.addCleanup(self.process.kill)
        wait_until(path.exists, "the starter listens")
        client = StarterClient.connect(path)
        self.addCleanup(client.close)
        self.assertEqual(client.pid, self.process.pid)
        return client

    def groups(self) -> list[str]:
        """Return the names of the cgroups that starters have made."""
        return [Path(path).name for path, _, _ in os.walk(self.own)][1:]

    def test_cgroups_of_a_killed_starter_are_removed_by_the_next(self) -> None:
        first = self.start()
        parent = Path(json.loads(first.cgroups)["evaluations"])
        (parent / "evaluation-abc").mkdir()
        self.process.kill()
        self.process.wait()
        second = self.start()
        self.assertFalse(parent.exists())
        status = Path(f"/proc/{second.pid}/status").read_text()
        self.assertIn("NoNewPrivs:\t1", status)
        self.assertNotIn("Uid:\t0", status)
        self.process.terminate()
        self.process.wait()
        self.assertEqual(self.groups(), [])

    def test_starter_leaves_no_cgroup_behind(self) -> None:
        parent = Path(json.loads(self.start().cgroups)["evaluations"])
        (parent / "evaluation-abc").mkdir()
        self.assertIn("daemon", self.groups())
        self.process.terminate()
        self.assertEqual(self.process.wait(), 0)
        self.assertEqual(self.groups(), [])
