"""`linux.child` with real processes, in a process of its own that is their subreaper."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import child
from tawebeval.linux.child import OrphanReaper, kill_stale_processes
from tests.cases.own_python import printed_by
from tests.cases.patience import PATIENCE
from tests.fakes.children import NO_PROCESS, FakeSpawner

SUBREAPER = '''
import asyncio, json, os, signal, subprocess, sys, time
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.protocol import ProcessProtocol
from tawebeval.linux import child as orphans
from tawebeval.linux.child import Spawner
from tests.fakes.children import NO_PROCESS

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
sys.stdout.write(f"{os.getpid()}\\\\n"); sys.stdout.flush()
os.close(0); os.close(1); os.close(2)
%s
"""
WAIT = "time.sleep(600)"

def daemon(mark="", directory="/", then=WAIT):
    """Leave a double-forked daemon behind; return its pid."""
    out = subprocess.run(
        [sys.executable, "-IS", "-c", DAEMON % then], cwd=directory, check=True,
        env={"MARK": mark}, stdout=subprocess.PIPE,
    )
    return int(out.stdout)

STARTER = """
import subprocess, sys, time
from tawebeval.linux import child
child.become_subreaper()
for mark in %r:
    code = "import os, time; pid = os.fork(); pid and (os.write(1, b'%%d ' %% pid), os._exit(0))"
    code += "; os.close(1); time.sleep(600)"
    subprocess.run([sys.executable, "-ISc", code], check=True, env={"MARK": mark})
print(flush=True)
time.sleep(600)
"""

def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def exists(pid):
    return os.path.exists(f"/proc/{pid}")

class Quiet(ProcessProtocol):
    pass

orphans.become_subreaper()
spawner = Spawner(reactor)
world = orphans.OrphanReaper(reactor, spawner)
result = {}

async def script():
    SCRIPT

def finish(failure):
    if failure is not None:
        result["error"] = failure.getTraceback()
    reactor.stop()

def begin():
    Deferred.fromCoroutine(script()).addBoth(finish)

reactor.callWhenRunning(begin)
reactor.run()
for pid in list(orphans.list_descendants("self")):
    orphans.send_signal(pid, signal.SIGKILL)
print(json.dumps(result))
'''


class OrphanTests(SynchronousTestCase):
    def play(self, script: str, *arguments: str) -> dict[str, Any]:
        """Play a script in a subreaper, and return what it notes in `result`."""
        indented = "\n".join("    " + line for line in script.strip().splitlines())
        whole = SUBREAPER.replace("    SCRIPT", indented)
        result: dict[str, Any] = json.loads(printed_by(whole, *arguments))
        self.assertNotIn("error", result, result.get("error"))
        return result

    def test_daemons_with_the_mark_are_killed(self) -> None:
        result = self.play(
            """
mine = [daemon("secret") for _ in range(3)]
other, none = daemon("other"), daemon()
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["mine"] = [exists(pid) for pid in mine]
result["others"] = [alive(other), alive(none)]
await world.kill_orphans_of_run(b"other", "/nonexistent", NO_PROCESS)
result["other"], result["none"] = exists(other), alive(none)
"""
        )
        self.assertEqual(result["mine"], [False] * 3)
        self.assertEqual(result["others"], [True, True])
        self.assertEqual((result["other"], result["none"]), (False, True))

    def test_lack_of_descriptors_is_an_error(self) -> None:
        result = self.play(
            """
import resource
pid, most = daemon("secret"), resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
try:
    await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
except OSError as error:
    result["number"] = error.errno
resource.setrlimit(resource.RLIMIT_NOFILE, most)
result["before"] = alive(pid)
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["after"] = alive(pid)
"""
        )
        self.assertEqual(result, {"number": errno.EMFILE, "before": True, "after": False})

    def test_processes_in_the_directory_of_the_run_are_killed(self) -> None:
        root = Path(self.mktemp()).resolve()
        for name in ("run/below", "run2"):
            (root / name).mkdir(parents=True)
        result = self.play(
            """
root = sys.argv[1]
mine = [daemon("", root + "/run"), daemon("", root + "/run/below")]
others = [daemon("", root + "/run2"), daemon("", root)]
await world.kill_orphans_of_run(b"no such mark", root + "/run", NO_PROCESS)
result["mine"] = [exists(pid) for pid in mine]
result["others"] = [alive(pid) for pid in others]
""",
            str(root),
        )
        self.assertEqual(result, {"mine": [False, False], "others": [True, True]})

    def test_process_in_a_removed_directory_is_killed(self) -> None:
        root = Path(self.mktemp()).resolve()
        (root / "run" / "gone").mkdir(parents=True)
        result = self.play(
            """
root = sys.argv[1]
pid = daemon("", root + "/run/gone")
os.rmdir(root + "/run/gone")
await world.kill_orphans_of_run(b"no such mark", root + "/run", NO_PROCESS)
result["exists"] = exists(pid)
""",
            str(root),
        )
        self.assertEqual(result, {"exists": False})

    def test_family_of_an_orphan_is_killed_and_waited_for(self) -> None:
        result = self.play(
            """
then = "import subprocess; p = subprocess.Popen(['/bin/sleep', '600'], env={}, cwd='/')" + chr(10)
pid = daemon("secret", then=then + WAIT)
while not list(orphans.list_children(pid)):
    time.sleep(0.01)
(child,) = orphans.list_children(pid)
while open(f"/proc/{child}/environ").read():  # as long as it is a copy of its parent
    time.sleep(0.01)
result["before"] = {pid, child} <= set(orphans.list_descendants("self"))
send = orphans.send_signal
delay = lambda one: 0.1 if one == child else 0
orphans.send_signal = lambda one, number: reactor.callLater(delay(one), send, one, number)
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["after"] = [alive(pid), alive(child)]
"""
        )
        self.assertEqual(result, {"before": True, "after": [False, False]})

    def test_exiting_orphan_is_judged_by_its_living_threads(self) -> None:
        result = self.play(
            """
then = "import ctypes, threading; threading.Thread(target=time.sleep, args=(600,)).start();"
then += "import subprocess; p = subprocess.Popen(['/bin/sleep', '600'], env={}, cwd='/');"
then += "ctypes.CDLL(None).pthread_exit(None)" + chr(10)
mine, other = daemon("secret", then=then), daemon("other", then=then)
while alive(mine) or alive(other):  # the first thread is
    time.sleep(0.01)
(child,) = orphans.list_descendants(other)
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["after"] = [exists(mine), exists(other), alive(child)]
orphans.does_thread_belong_to_run = lambda *_: None
reactor.callLater(0.1, os.kill, other, signal.SIGKILL)
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["later"] = [exists(other), alive(child)]
"""
        )
        self.assertEqual(result, {"after": [False, True, True], "later": [False, True]})

    def test_orphans_that_the_starter_adopted_are_killed_by_their_mark(self) -> None:
        result = self.play(
            """
starter = subprocess.Popen(
    [sys.executable, "-c", STARTER % (("secret", "other"),)], stdout=subprocess.PIPE
)
mine, other = map(int, starter.stdout.readline().split())
await world.kill_orphans_of_run(b"secret", "/nonexistent", starter.pid)
result["after"] = [alive(mine), alive(other)]
"""
        )
        self.assertEqual(result, {"after": [False, True]})

    def test_process_is_killed_if_it_is_of_the_run(self) -> None:
        result = self.play(
            """
class Group:
    def has_process(self, pid):
        return pid == grouped

starter = subprocess.Popen(
    [sys.executable, "-c", STARTER % (("x", "y"),)], stdout=subprocess.PIPE
)
adopted, spared = map(int, starter.stdout.readline().split())
grouped, stranger = daemon(), daemon()
for pid in (adopted, grouped, stranger, 2**22 + 1):
    await world.kill_process_of_run(pid, Group(), starter.pid)
result["alive"] = [alive(pid) for pid in (adopted, grouped, spared, stranger)]
"""
        )
        self.assertEqual(result, {"alive": [False, False, True, True]})

    def test_own_children_are_left_alone(self) -> None:
        result = self.play(
            """
child = spawner(Quiet(), ["/bin/sleep", "600"], {"MARK": "secret"}, "/")
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["running"] = child.is_running and alive(child.pid)
"""
        )
        self.assertEqual(result, {"running": True})

    def test_dead_orphans_are_reaped(self) -> None:
        result = self.play(
            """
dead = daemon("", then="pass")
while alive(dead):
    time.sleep(0.01)
result["zombie"] = exists(dead)
await world.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
result["after"] = exists(dead)
"""
        )
        self.assertEqual(result, {"zombie": True, "after": False})

    def test_signals_to_gone_processes_do_nothing(self) -> None:
        result = self.play(
            """
gone = subprocess.Popen(["/bin/true"])
gone.wait()
orphans.send_signal(gone.pid, signal.SIGKILL)
result["children"] = list(orphans.list_children(gone.pid))
result["children"] += list(orphans.list_descendants(gone.pid))
"""
        )
        self.assertEqual(result, {"children": []})


class LookTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.orphans = OrphanReaper(self.clock, FakeSpawner(self.clock))
        self.adopted = [NO_PROCESS]
        self.patch(OrphanReaper, "list_adopted_orphans", lambda orphans: iter(self.adopted))

    def test_reaper_waits_until_they_are_gone(self) -> None:
        ended = Deferred.fromCoroutine(
            self.orphans.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
        )
        self.clock.pump([0.002] * 100)
        self.assertNoResult(ended)
        self.adopted = []
        self.clock.advance(0.002)
        self.successResultOf(ended)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_process_that_hangs_is_waited_for_some_seconds_and_logged(self) -> None:
        logged: list[object] = []
        self.patch(child.log, "observer", logged.append)
        ended = Deferred.fromCoroutine(
            self.orphans.kill_orphans_of_run(b"secret", "/nonexistent", NO_PROCESS)
        )
        self.clock.pump([0.002] * 2000)
        self.assertNoResult(ended)
        self.clock.pump([0.002] * 600)
        self.successResultOf(ended)
        self.assertEqual(len(logged), 1)


SLEEP = ("sleep", "60")


class LeftoversTests(SynchronousTestCase):
    """Two daemons' directories, one beside the other; the first is dead."""

    def setUp(self) -> None:
        self.around = Path(self.mktemp()).resolve()
        self.dead, self.living = self.around / "daemon", self.around / "daemon-2"
        for root in (self.dead, self.living):
            (root / "e" / "tmp").mkdir(parents=True)

    def begin(
        self,
        directory: Path | str = "/",
        argv: Sequence[str] = SLEEP,
        terminal: int | None = None,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """Start a process; with a descriptor of a terminal, which is its own then."""
        before = () if terminal is None else ("setsid", "--ctty")
        child = subprocess.Popen(
            [*before, *argv],
            cwd=directory,
            env={"PATH": os.defpath, **environment},
            stdin=terminal,
            stdout=subprocess.PIPE,
            start_new_session=terminal is None,
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        deadline = time.monotonic() + PATIENCE
        while not Path(f"/proc/{child.pid}/environ").read_bytes():  # not yet set by execve(2)
            self.assertLess(time.monotonic(), deadline)
        return child

    def end(self) -> list[str]:
        with capturedLogs() as events:
            kill_stale_processes(self.dead)
        return [formatEvent(event) for event in events]

    def check(self, child: subprocess.Popen[bytes], *, ended: bool) -> None:
        said = self.end()
        if ended:
            self.assertEqual(child.wait(PATIENCE), -9)
            self.assertEqual(len(said), 1, said)
            self.assertIn("processes left by an earlier daemon", said[0])
            self.assertIn(str(child.pid), said[0])
        else:
            self.assertIsNone(child.poll())
            self.assertEqual(said, [])

    def test_evaluator_is_found_by_its_temporary_directory(self) -> None:
        self.check(self.begin(TEMPORARY_DIRECTORY=f"{self.dead}/e/tmp"), ended=True)

    def test_git_command_is_found_by_its_repository(self) -> None:
        self.check(self.begin(GIT_DIR=f"{self.dead}/e"), ended=True)

    def test_process_is_found_by_its_removed_working_directory(self) -> None:
        child = self.begin(self.dead / "e")
        (self.dead / "e" / "tmp").rmdir()
        (self.dead / "e").rmdir()
        self.check(child, ended=True)

    def test_descendants_are_ended_too(self) -> None:
        program = "cd /; env -i sleep 600 & echo $!; wait"
        child = self.begin(argv=("sh", "-c", program), GIT_DIR=f"{self.dead}/e")
        assert child.stdout is not None
        inner = int(child.stdout.readline())
        self.check(child, ended=True)
        deadline = time.monotonic() + PATIENCE
        while "sleep" in _name(inner):  # it was killed, and ends as soon as it has the processor
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def test_processes_of_another_daemon_are_spared(self) -> None:
        self.check(self.begin(TEMPORARY_DIRECTORY=f"{self.living}/e/tmp"), ended=False)
        self.check(self.begin(self.living / "e"), ended=False)

    def test_path_elsewhere_in_the_environment_does_not_count(self) -> None:
        self.check(self.begin(OLDPWD=f"{self.dead}/e", X_GIT_DIR=f"{self.dead}/e"), ended=False)

    def test_process_at_a_terminal_is_spared(self) -> None:
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        self.addCleanup(os.close, theirs)
        argv = ("sh", "-c", "echo there; sleep 600")
        child = self.begin(self.dead / "e", argv, terminal=theirs)
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), b"there\n")
        self.check(child, ended=False)

    def test_starter_of_the_next_daemon_is_spared(self) -> None:
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.dead / "e")
        self.assertEqual(self.end(), [])


def _name(pid: int) -> str:
    """Return a living process's name, nothing for one that is gone or dead."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().split()
    except OSError:
        return ""
    return "" if words[2] == "Z" else words[1]
