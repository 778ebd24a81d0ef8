"""A daemon that is killed, beside one that lives: the next one ends and removes what it has left.

Both are of one user, and have directories of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.integration.client import Client, failure, python, text
from tests.integration.harness import CONFIGURATION, UNSANDBOXED, Daemon, DaemonTestCase, until
from tests.integration.processes import alive, command_line, new_word, processes
from tests.integration.repositories import HttpServer, stop_after
from tests.integration.unprivileged import give

# Leaves its session, its parent, and, as far as it is told, its environment or directory.
RUNAWAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    {shed}
    time.sleep(600)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(600)
"""
SHED = {
    "directory": "os.chdir('/')",
    "environment": "argv = [sys.executable, '-c', 'import time; time.sleep(600)', *sys.argv[1:]]\n"
    "    os.execve(sys.executable, argv, {})",
}


# Ends when a signal comes.
PATIENT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
print("to its end")
"""


def leave_cgroups(pids: list[int]) -> None:
    """Take processes out of all cgroups, as far as the tests may: as where there are none."""
    with open("/proc/mounts") as mounts:
        tops = [line.split()[1] for line in mounts if line.split()[2] in ("cgroup", "cgroup2")]
    for top in tops:
        for pid in pids:
            with contextlib.suppress(OSError):
                Path(top, "cgroup.procs").write_text(str(pid))


def overlay_mount_pid(pids: list[int]) -> set[int]:
    """Return the numbers of the mount namespaces that these processes are in, but for our own."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.stat(f"/proc/{pid}/ns/mnt").st_ino)
    return found - {os.stat("/proc/self/ns/mnt").st_ino}


def everywhere() -> list[int]:
    """Return the numbers of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


class KilledTests(DaemonTestCase):
    configuration = CONFIGURATION

    async def setUp(self) -> None:
        await super().setUp()
        self.other = Daemon(self.configuration)
        self.addCleanup(self.other.remove)
        self.other.start()
        await self.other.ready()
        self.others = Client(self.other.url)
        self.addCleanup(self.others.close)

    async def begin_beside(self, word: str) -> str:
        """Begin an evaluation of the other daemon, which ends when it is let."""
        identifier = await self.others.evaluate(
            self.repository.url, self.commit, python(PATIENT, word)
        )
        await self.others.printed(identifier, "ready")
        return identifier

    def before_start(self, word: str) -> None:
        """Do nothing: all is dead, or in cgroups."""

    async def test_next_daemon_kills_only_processes_left_by_the_killed_daemon(self) -> None:
        words = {shed: new_word() for shed in SHED}
        beside = new_word()
        kept = await self.begin_beside(beside)
        lost = [
            await self.begin_and_wait(python(RUNAWAY.format(shed=SHED[shed]), word))
            for shed, word in words.items()
        ]
        for word in words.values():
            await until(lambda word=word: len(processes(word)) >= 2, "it has run away")
        inside = overlay_mount_pid([pid for word in words.values() for pid in processes(word)])
        # These, for the kernel may soon give the same numbers to others.
        theirs = [pid for pid in everywhere() if overlay_mount_pid([pid]) & inside]
        await self.daemon.kill()
        for word in words.values():
            self.before_start(word)
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual([pid for word in words.values() for pid in processes(word)], [])
        await until(lambda: not inside & overlay_mount_pid(theirs), "what they saw is unmounted")
        for identifier in lost:
            failure(await self.client.follow(identifier), "lost")
        await until(lambda: not self.daemon.remains(), "what they have left is removed")
        self.client.evaluations.clear()
        for pid in processes(beside):
            if PATIENT.encode() in command_line(pid).split(b"\0"):
                os.kill(pid, signal.SIGUSR1)
        self.assertEqual(text(await self.others.follow(kept)), "ready\nto its end\n")

    async def test_fetch_interrupted_by_a_kill_begins_again(self) -> None:
        server = stop_after(self, HttpServer(self.folder))
        self.addCleanup(server.release)
        self.repository.write("big", os.urandom(2**20))
        self.commit = self.repository.commit()
        server.hold()
        url = f"{server.url}/repository/.git"
        repositories = self.daemon.cache / "repositories"
        before = {*repositories.glob("*.git")}
        await self.client.evaluate(url, self.commit, "true")
        await until(server.half_sent.is_set, "a pack is half sent")
        word = str(repositories)
        fetching = set(processes(word))
        self.assertNotEqual(fetching, set())
        await self.daemon.kill()
        self.before_start(word)
        (repository,) = {*repositories.glob("*.git")} - before
        left = list(repository.glob("objects/pack/*tmp*"))
        self.assertNotEqual(left, [])
        for name in (f"{repository.stem}-{'0' * 40}-1-1.tree.new7", "x.new", "x.old1"):
            (repositories / name / "tree").mkdir(parents=True)
            for path in (repositories / name, repositories / name / "tree"):
                give(path)
            left.append(repositories / name)
        self.daemon.start()
        await self.daemon.ready()
        self.assertEqual(fetching & set(processes(word)), set())
        await until(lambda: not any(path.exists() for path in left), "nothing is left over")
        server.release()
        self.client.evaluations.clear()
        identifier = await self.client.evaluate(url, self.commit, "wc -c <big")
        self.assertEqual(text(await self.client.follow(identifier)), f"{2**20}\n")
        self.assertTrue(self.other.running)


class UnheldTests(KilledTests):
    """Without a sandbox, and without cgroups: they go on when their daemon is dead."""

    configuration = UNSANDBOXED

    def before_start(self, word: str) -> None:
        """See to it that they are alive, and in no cgroup by which the next daemon would know."""
        left = processes(word)
        self.assertNotEqual(left, [])
        leave_cgroups(left)
        self.assertTrue(all(map(alive, left)))
