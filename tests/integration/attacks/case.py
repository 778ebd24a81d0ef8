"""A daemon with low limits that is attacked, and what must hold during and after each attack."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from tests.integration.cgroups import DELEGATED
from tests.integration.client import Event, failure, joined, python, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import Namespaces, new_word, processes

MIB = 2**20

CPU = 15 if DELEGATED else 2  # seconds; the machines with cgroups are emulated, and slow
MEMORY, PROCESSES = 64 * MIB, 40
FILE_SIZE, DISK, DISK_FILES = 8 * MIB, 24 * MIB, 500
OUTPUT, STDERR = 4 * MIB, MIB

LIMITS = f"""
[limits]
wall_clock = 300
cpu = {CPU}
memory = {MEMORY}
processes = {PROCESSES}
file_size = {FILE_SIZE}
disk = {DISK}
disk_files = {DISK_FILES}
output = {OUTPUT}
stderr = {STDERR}
"""

# Uses a little of everything that the attacks use up.
HONEST = """
import os, subprocess, tempfile
with open("file", "wb") as file:
    file.write(b"x" * 2**20)
with tempfile.TemporaryFile() as file:
    file.write(bytearray(b"x") * (8 * 2**20 - 1))
done = subprocess.run(["sort", "-n"], input=b"2\\n1\\n", capture_output=True, check=True)
print(done.stdout.decode() + str(sum(range(1000000))))
"""
HONEST_OUTPUT = "1\n2\n499999500000\n"

# Where a program might leave something that outlives it.
_SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run")


@attrs.frozen
class Attacked:
    """What became of an attack: its events and its last status."""

    events: Sequence[Event]
    status: dict[str, Any]

    @property
    def text(self) -> str:
        return text(self.events)


class AttackCase(DaemonTestCase):
    """Runs attacks beside honest evaluations."""

    configuration = CONFIGURATION + LIMITS

    async def attack(self, program: str, *arguments: str, **fields: str) -> Attacked:
        return await self.attack_by(python(program, *arguments), **fields)

    async def attack_by(self, command: str, **fields: str) -> Attacked:
        """Return what became of a command, when all has been looked at that must hold.

        `{word}` in it stands for a word of this attack alone.
        """
        word, mounts = new_word(), self._mounts()
        command = f"export WORD={word}; " + command.replace("{word}", word)
        identifier = await self.begin(command, **fields)
        seen = Namespaces()
        self.addCleanup(seen.close)
        watching = Deferred.fromCoroutine(self._watch(identifier, word, seen))
        self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        status = await watching
        self.assertEqual((await self.client.get("/health")).code, 200)
        events = await self.client.follow(identifier)
        self.assertEqual(processes(word), [], "processes are left")
        self.assertEqual(seen.inhabitants(), [], "processes in its namespace are left")
        await self.daemon.nothing_left()
        self.assertEqual(self._mounts(), mounts)
        self.assertEqual(_named(word), [], "files are left")
        self.daemon.check_log()
        return Attacked(events, status)

    def _mounts(self) -> list[str]:
        """Return the mounts of this daemon, as the daemon and this process see them.

        Other programs on the machine may mount something meanwhile.
        """
        text = Path("/proc/self/mountinfo").read_text()
        with suppress(PermissionError):  # to ordinary users the daemon does not show them
            text += Path(f"/proc/{self.daemon.pid}/mountinfo").read_text()
        return [line for line in text.splitlines() if self.daemon.folder.name in line]

    async def _watch(self, identifier: str, word: str, seen: Namespaces) -> dict[str, Any]:
        """Take what is printed until the end, and note the namespaces of who has the word."""
        pause = 0.02  # more rarely the longer it runs: to look at all processes takes long
        while (status := await self.client.status(identifier))["ended"] is None:
            seen.note(processes(word))
            await deferLater(reactor, pause)
            pause = min(1.3 * pause, 0.3)
        return status

    def stopped(self, attacked: Attacked, reason: str, limit: str, value: int) -> None:
        error = failure(attacked.events, reason)
        self.assertEqual((error["limit"], error["value"]), (f"limits.{limit}", value))
        self.assertNotIn("unlimited", attacked.text)
        self.assertEqual(attacked.status["state"], "failed")

    async def cancelled(self, command: str) -> None:
        """Check that nothing is left of a command when its cancellation has been answered."""
        word = new_word()
        identifier = await self.begin_and_wait(f"export WORD={word}; {command}")
        seen = Namespaces()
        self.addCleanup(seen.close)
        seen.note(processes(word))
        self.assertEqual(len(seen), 1)
        await self.client.cancel(identifier)
        self.assertEqual(processes(word) + seen.inhabitants(), [])
        self.assertEqual(self.daemon.remains(), [])
        await until(lambda: not _named(word), "no files are left")


def _named(word: str) -> list[str]:
    """Return what carries a name with that word where everybody may write."""
    # Not os.walk, which fails at trees that other tests make there, thousands of levels deep. find
    # exits with 1 where something is removed meanwhile.
    find = ["find", *_SHARED, "-name", f"*{word}*"]
    done = subprocess.run(find, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.splitlines()
