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

NOBODY = 65534 name, proc, result = sys.argv[1], pathlib.Path(sys.argv[2]), {} cgroups =
open_cgroups(name, (NOBODY, NOBODY), proc=proc) os.setgroups([]) os.setresgid(NOBODY, NOBODY,
NOBODY) os.setresuid(NOBODY, NOBODY, NOBODY) result["enforced"], result["problems"] =
sorted(cgroups.enforced_resources), cgroups.enforcement_warnings LIMITS = LimitSettings(memory=32 *
MIB, processes=16)

def start(group, inside):
    """Run a function in a group, in a process whose parent is this one; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(300)
        for path in group.list_procs_files():
            with open(path, "w") as file:
                file.write("0")
        inside()
    finally:
        os._exit(1)

def end(pid):
    """Wait for a process; return the signal that has ended it, 0 for its own end."""
    return os.WTERMSIG(os.waitpid(pid, 0)[1])

def heap():
    block = bytearray(100 * MIB)

def memfd():
    file = os.memfd_create("x")
    for _ in range(100):
        os.write(file, bytes(MIB))

def shared():
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    identifier = libc.shmget(0, ctypes.c_size_t(100 * MIB), 0o1600)
    address = libc.shmat(identifier, None, 0)
    libc.shmctl(identifier, 0, None)  # it goes with the last process that has it
    ctypes.memset(address, 1, 100 * MIB)

def children():
    for _ in range(8):
        if os.fork() == 0:
            block = bytearray(10 * MIB)
            time.sleep(300)
    time.sleep(300)

def many():
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(300)

def bomb():
    while True:
        try:
            os.fork()
        except OSError:
            pass

def until(true):
    end = time.monotonic() + 120
    while not true() and time.monotonic() < end:
        time.sleep(0.005)

def members(group):
    with open(group.list_procs_files()[0]) as file:
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
            raise SkipTest("; ".join(result["problems"]))
        return result


class LifeTests(CgroupsTestCase):
    """From the start to the end, in whatever cgroups there are."""

    def test_nothing_left(self) -> None:
        """A daemon that has lost root's rights removes its place; its user's group stays."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("group", LIMITS)
result["paths"] = [os.path.dirname(path) for path in group.list_procs_files()]
"""
        )
        self.assertEqual(groups(self.name), [])
        self.assertTrue(result["paths"])
        for path in result["paths"]:
            self.assertIn("/tawebeval-uid-65534/", path)
            self.assertEqual(Path(path).parent.parent.stat().st_uid, 65534)

    def test_within_the_limits(self) -> None:
        """Who keeps within the limits is left alone, and measured; a shell can be the launcher."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("good", LIMITS)
script = "for file; do echo 0 > $file || exit; done; exec dd if=/dev/zero of=/dev/null bs=1M"
ran = subprocess.run(["sh", "-c", f"{script} count=2000", "sh", *group.list_procs_files()])
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
        """Who may not make groups gets none, sentences instead, and no error."""
        script = (
            "import json, os, sys; from tawebeval.linux.cgroups.manager import open_cgroups\n"
            "os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
            "cgroups = open_cgroups(sys.argv[1])\n"
            "cgroups.remove_all_cgroups()\n"
            "print(json.dumps([sorted(cgroups.enforced_resources), cgroups.enforcement_warnings]))"
        )
        enforced, problems = json.loads(printed_by(script, self.name))
        self.assertEqual(enforced, [])
        self.assertEqual(len(problems), 5, problems)
        self.assertIn("Permission denied", problems[0])


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


class LimitsTests(CgroupsTestCase):
    """Real limits, met by real processes."""

    def test_memory(self) -> None:
        """Whatever memory is taken as, the one who takes too much is killed, and that is seen."""
        result = self.daemon(
            """
for inside in (heap, memfd, shared):
    group = cgroups.make_evaluation_cgroup(inside.__name__, LIMITS)
    killed = end(start(group, inside))
    peak = group.read_usage(None).peak_memory_bytes
    result[inside.__name__] = killed, sorted(group.find_exceeded_limits()), peak
    group.remove_cgroup()
"""
        )
        for inside in ("heap", "memfd", "shared"):
            killed, exceeded, peak = result[inside]
            self.assertEqual((killed, exceeded), (9, ["memory"]), inside)
            if peak is not None:
                self.assertTrue(31 * 2**20 < peak <= 32 * 2**20, peak)

    def test_memory_of_many(self) -> None:
        """Processes of which each keeps within the limit exceed it together."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("many", LIMITS)
pid = start(group, children)
until(group.find_exceeded_limits)
result["exceeded"] = sorted(group.find_exceeded_limits())
group.remove_cgroup()
result["killed"] = end(pid)
"""
        )
        self.assertEqual((result["exceeded"], result["killed"]), (["memory"], 9))

    def test_processes(self) -> None:
        """There are no more processes than may be; all of them are killed."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("many", LIMITS)
pid = start(group, many)
until(group.find_exceeded_limits)
end(pid)
result["number"] = len(members(group))
result["exceeded"] = sorted(group.find_exceeded_limits())
group.remove_cgroup()
result["entrances"] = [each for each in group.list_procs_files() if os.path.exists(each)]
"""
        )
        self.assertEqual(result["number"], 15)  # the one that found no place has ended
        # The kernel removes no group in which somebody is.
        self.assertEqual((result["exceeded"], result["entrances"]), (["processes"], []))

    def test_fork_bomb(self) -> None:
        """Processes that fork as fast as they can are gone within the time of `remove`."""
        result = self.daemon(
            """
group = cgroups.make_evaluation_cgroup("bomb", LimitSettings(processes=100, memory=512 * MIB))
pid = start(group, bomb)
until(group.find_exceeded_limits)
group.remove_cgroup()
result["entrances"] = [each for each in group.list_procs_files() if os.path.exists(each)]
result["killed"] = end(pid)
"""
        )
        self.assertEqual((result["killed"], result["entrances"]), (9, []))
