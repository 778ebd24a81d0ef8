"""`linux.cgroups` against the kernel, in a cgroup that root gives to `nobody`.

Each test is a process of its own, which enters the cgroup, becomes `nobody`, and does what the
daemon does. The kernel of the tests may have no controller in version 2: then what is measured and
killed is tested. `make test-machine` tests the limits.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.linux.cgroups import find_own_cgroup
from tests.cases.own_python import printed_by
from tests.integration.processes import alive
from tests.run import NEEDS_CGROUPS

DAEMON = '''
import json, os, pathlib, signal, subprocess, sys, time
from tawebeval.linux.cgroup_report import describe_missing_limits
from tawebeval.linux.cgroups import open_cgroups
from tawebeval.config import MIB, LimitSettings

NOBODY = 65534
name, result = sys.argv[1], {}
pathlib.Path(sys.argv[2], "cgroup.procs").write_text("0")
os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
before = pathlib.Path("/proc/self/cgroup").read_text()
cgroups = open_cgroups(name)
result["enforced"] = sorted(cgroups.enforced_resources)
result["problem"] = describe_missing_limits(cgroups)
LIMITS = LimitSettings(memory=32 * MIB, processes=16)

def start(group, inside):
    """Run a function in a group, in a process whose parent is this one; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(300)
        for path in group.procs_files:
            with open(path, "w") as file:
                file.write("0")
        inside()
    finally:
        os._exit(1)

def until(true):
    end = time.monotonic() + 120
    while not true() and time.monotonic() < end:
        time.sleep(0.005)

def members(group):
    with open(group.procs_files[0]) as file:
        return file.read().split()

SCRIPT

if "left" not in result:
    cgroups.remove_all_cgroups()
    assert before == pathlib.Path("/proc/self/cgroup").read_text()
print(json.dumps(result))
'''


class CgroupTests(SynchronousTestCase):
    """Processes of `nobody` in a cgroup of their own, which leave nothing there."""

    def setUp(self) -> None:
        own = find_own_cgroup()
        if os.geteuid() or own is None or not os.access(own, os.W_OK):
            raise SkipTest(f"{NEEDS_CGROUPS}none can be made here")
        self.name = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.own = Path(own, f"tests-of-{self.name}")
        self.own.mkdir()
        self.addCleanup(self.own.rmdir)
        for file in (
            self.own,
            *(self.own / name for name in ("cgroup.procs", "cgroup.subtree_control")),
        ):
            shutil.chown(file, "nobody")

    def groups(self) -> list[str]:
        """Return the names of all groups below that of the daemon."""
        return [Path(path).name for path, _, _ in os.walk(self.own)][1:]

    def run_daemon(self, script: str) -> dict[str, Any]:
        """Run a script in a process that has opened the cgroups; return its `result`."""
        printed = printed_by(DAEMON.replace("SCRIPT", script), self.name, str(self.own))
        result: dict[str, Any] = json.loads(printed)
        self.assertIn("cpu", result["enforced"], result["problem"])
        return result

    def test_end_leaves_nothing(self) -> None:
        result = self.run_daemon(
            """
group = cgroups.make_evaluation_cgroup("group", LIMITS)
result["path"] = os.path.dirname(group.procs_files[0])
result["found"] = cgroups.find_evaluation_cgroup(group.name).directory.path
start(group, lambda: time.sleep(600))
until(lambda: members(group))
result["has_process"] = [group.has_process(int(pid)) for pid in (*members(group), os.getpid())]
"""
        )
        self.assertEqual(self.groups(), [])
        path = f"{self.own}/tawebeval-{self.name}/evaluation-group"
        self.assertEqual((result["path"], result["found"]), (path, path))
        self.assertEqual(result["has_process"], [True, False])

    def test_run_within_its_limits_is_measured(self) -> None:
        result = self.run_daemon(
            """
group = cgroups.make_evaluation_cgroup("good", LIMITS)
script = "echo 0 > $1 || exit; exec dd if=/dev/zero of=/dev/null bs=1M count=2000"
ran = subprocess.run(["sh", "-c", script, "sh", *group.procs_files])
result["status"], result["exceeded"] = ran.returncode, sorted(group.find_exceeded_limits())
result["cpu"] = group.read_usage(None).cpu_seconds
group.remove_cgroup()
"""
        )
        self.assertEqual((result["status"], result["exceeded"]), (0, []))
        self.assertTrue(0.001 < result["cpu"] < 10, result["cpu"])

    def test_next_daemon_ends_what_a_killed_one_has_left(self) -> None:
        result = self.run_daemon(
            """
group = cgroups.make_evaluation_cgroup("left", LIMITS)
def inside():
    os.setsid()
    signal.alarm(600)
    os.close(1), os.close(2)
    time.sleep(600)
result["left"] = start(group, inside)
until(lambda: members(group))
"""
        )
        self.assertTrue(alive(result["left"]))
        self.assertIn("evaluation-left", self.groups())
        self.run_daemon("")
        self.assertFalse(alive(result["left"]))
        self.assertEqual(self.groups(), [])

    def test_user_without_a_cgroup_of_its_own_has_none(self) -> None:
        script = (
            "import json, os, sys; from tawebeval.linux.cgroups import open_cgroups\n"
            "from tawebeval.linux.cgroup_report import describe_missing_limits\n"
            "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
            "cgroups = open_cgroups(sys.argv[1])\n"
            "cgroups.remove_all_cgroups()\n"
            "problem = describe_missing_limits(cgroups)\n"
            "print(json.dumps([sorted(cgroups.enforced_resources), problem]))"
        )
        enforced, problem = json.loads(printed_by(script, self.name))
        self.assertEqual(enforced, [])
        self.assertIn("no cgroup limits memory, processes, cpu, weight", problem)
