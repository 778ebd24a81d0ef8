"""`linux.cgroups.manager` against the kernel, as the root of this machine gives it away.

Each test is a process of its own, which opens the cgroups as root, becomes `nobody`, and does
what the daemon does. It moves itself out of the group that the tests are in.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.cases.own_python import printed_by
from tests.integration.cgroups import reason_to_skip
from tests.integration.processes import alive

DAEMON = '''
import ctypes, json, os, pathlib, signal, subprocess, sys, time
from tawebeval.linux.cgroups.manager import open_cgroups
from tawebeval.config import MIB, LimitSettings

NOBODY = 65534
name, proc, result = sys.argv[1], pathlib.Path(sys.argv[2]), {}
cgroups = open_cgroups(name, (NOBODY, NOBODY), proc=proc)
os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
result["enforced"] = sorted(cgroups.enforced_resources)
result["problem"] = cgroups.enforcement_warning
LIMITS = LimitSettings(memory=32 * MIB, processes=16)

def start(group, inside):
    """Run a function in a group, in a process whose parent is this one; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(300)
        for path in group.find_procs_files():
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
    with open(group.find_procs_files()[0]) as file:
        return file.read().split()

SCRIPT

if "left" not in result:
    cgroups.remove_all_cgroups()
print(json.dumps(result))
'''


def groups(name: str) -> list[Path]:
    """Return the groups on this machine that are of a daemon, outermost last."""
    found = [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if f"tawebeval-{name}" in path]
    return found[::-1]


class CgroupsTestCase(SynchronousTestCase):
    """Processes that open the cgroups which `proc` shows, and leave nothing there."""

    needed = frozenset({"memory", "processes"})

    def setUp(self) -> None:
        reason = reason_to_skip()
        if reason:
            raise SkipTest(reason)
        self.name = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.addCleanup(self._leave_nothing)

    def _leave_nothing(self) -> None:
        left = groups(self.name)
        for path in left:
            path.rmdir()
        self.assertEqual(left, [])

    def proc(self) -> str:
        """Return the directory in which the daemon finds what cgroups there are."""
        return "/proc/self"

    def daemon(self, script: str) -> dict[str, Any]:
        """Run a script in a process that has opened the cgroups; return its `result`."""
        printed = printed_by(DAEMON.replace("SCRIPT", script), self.name, self.proc())
        result: dict[str, Any] = json.loads(printed)
        if self.needed - set(result["enforced"]):
            raise SkipTest(result["problem"])
        return result


class LifeTests(CgroupsTestCase):
    """From the start to the end, in whatever cgroups there are."""

    def test_nothing_left(self) -> None:
        """A daemon that has lost root's rights removes its place; its user's group stays."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("group", LIMITS)
result["paths"] = [os.path.dirname(path) for path in group.find_procs_files()]
"""
        )
        self.assertEqual(groups(self.name), [])
        self.assertTrue(result["paths"])
        for path in result["paths"]:
            self.assertIn("/tawebeval-uid-65534/", path)
            self.assertEqual(Path(path).parent.parent.stat().st_uid, 65534)

    def test_within_the_limits(self) -> None:
        """Who keeps within the limits is left alone, and measured; a shell can be the starter."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("good", LIMITS)
script = "for file; do echo 0 > $file || exit; done; exec dd if=/dev/zero of=/dev/null bs=1M"
ran = subprocess.run(["sh", "-c", f"{script} count=2000", "sh", *group.find_procs_files()])
result["status"], result["exceeded"] = ran.returncode, sorted(group.find_exceeded_limits())
result["cpu"] = group.read_usage(None).cpu_seconds
group.remove_cgroup()
"""
        )
        self.assertEqual((result["status"], result["exceeded"]), (0, []))
        if "cpu" in result["enforced"]:
            self.assertTrue(0.001 < result["cpu"] < 10, result["cpu"])

    def test_leftovers(self) -> None:
        """The next daemon ends what one that was killed has left, and nobody else."""
        result = self.daemon(
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
        self.assertIn("evaluation-left", [path.name for path in groups(self.name)])
        self.daemon("")
        self.assertFalse(alive(result["left"]))
        self.assertNotIn("evaluation-left", [path.name for path in groups(self.name)])

    def test_closed_as_root(self) -> None:
        """A daemon that has kept its rights leaves not even its place."""
        script = (
            "import sys; from tawebeval.linux.cgroups.manager import open_cgroups\n"
            "before = open('/proc/self/cgroup').read()\n"
            "open_cgroups(sys.argv[1]).remove_all_cgroups()\n"
            "assert before == open('/proc/self/cgroup').read()"
        )
        self.assertEqual(printed_by(script, self.name), "")
        self.assertEqual(groups(self.name), [])

    def test_ordinary_user(self) -> None:
        """Who may not make groups gets none, a sentence instead, and no error."""
        script = (
            "import json, os, sys; from tawebeval.linux.cgroups.manager import open_cgroups\n"
            "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
            "cgroups = open_cgroups(sys.argv[1])\n"
            "cgroups.remove_all_cgroups()\n"
            "print(json.dumps([sorted(cgroups.enforced_resources), cgroups.enforcement_warning]))"
        )
        enforced, problem = json.loads(printed_by(script, self.name))
        self.assertEqual(enforced, [])
        self.assertIn("no cgroup limits memory, processes, cpu, weight", problem)


class UnifiedLifeTests(LifeTests):
    """The same where there is version 2 alone, with whatever controllers it has."""

    needed = frozenset({"cpu"})

    def proc(self) -> str:
        """Return a directory that shows version 2 only."""
        directory = Path(self.mktemp())
        directory.mkdir()
        for name, version_1 in (("mountinfo", " - cgroup "), ("cgroup", ":/")):
            lines = Path(f"/proc/self/{name}").read_text().splitlines(keepends=True)
            kept = [line for line in lines if version_1 not in line or line.startswith("0::")]
            (directory / name).write_text("".join(kept))
        return str(directory.absolute())
