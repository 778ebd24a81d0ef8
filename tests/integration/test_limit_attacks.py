"""Programs that want more than their limits allow: of processes, memory, time and output."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred

from tests.integration.attacks import bombs
from tests.integration.attacks.case import (
    CPU,
    HONEST,
    HONEST_OUTPUT,
    MEMORY,
    MIB,
    OUTPUT,
    PROCESSES,
    STDERR,
    AttackCase,
)
from tests.integration.client import failure, joined, python


class ProcessAttacks(AttackCase):
    """Too many of them, and those that do not want to end."""

    async def test_fork_bomb(self) -> None:
        """A bomb that forks in all of its processes is over as soon as it meets the limit."""
        self.need_groups()
        self.stopped(await self.attack(bombs.FORK_BOMB), "processes", "processes", PROCESSES)

    async def test_forks(self) -> None:
        """Many children that do nothing are too many, too."""
        self.need_groups()
        self.stopped(await self.attack(bombs.FORKS), "processes", "processes", PROCESSES)

    async def test_threads(self) -> None:
        """Threads count as processes do."""
        self.need_groups()
        self.stopped(await self.attack(bombs.THREADS), "processes", "processes", PROCESSES)

    async def test_stubborn_ones_end_with_the_evaluator(self) -> None:
        """Double forks in sessions of their own, deaf to all signals, holding stdout: gone."""
        attacked = await self.attack(bombs.STUBBORN, "go")
        self.assertEqual(attacked.status["state"], "finished")
        self.assertEqual(attacked.text, "ready\n")

    async def test_stubborn_ones_are_cancelled(self) -> None:
        """Whoever is told that it is cancelled can rely on it: not one of them lives."""
        await self.cancelled(python(bombs.STUBBORN, "stay"))


class MemoryAttacks(AttackCase):
    """Memory of every kind counts, wherever in the evaluation it is."""

    async def too_much(self, program: str) -> None:
        """Check that a program is stopped because of its memory, and what its status says."""
        self.need_groups()
        attacked = await self.attack(program)
        self.stopped(attacked, "memory", "memory", MEMORY)
        self.assertLessEqual(attacked.status["usage"]["peak_memory_bytes"], MEMORY)
        self.assertGreater(attacked.status["usage"]["peak_memory_bytes"], MEMORY - MIB)

    async def test_heap(self) -> None:
        """One process with too large a heap."""
        await self.too_much(bombs.HEAP)

    async def test_heap_of_children(self) -> None:
        """Several processes, each within the limit."""
        await self.too_much(bombs.HEAP_OF_CHILDREN)

    async def test_files_in_memory(self) -> None:
        """Files without a place in any file system (memfd_create)."""
        await self.too_much(bombs.MEMFD)

    async def test_shared_segments(self) -> None:
        """System V's shared memory, attached to by nobody."""
        await self.too_much(bombs.SHARED_SEGMENTS)

    async def test_shared_mappings(self) -> None:
        """Anonymous mappings that are shared."""
        await self.too_much(bombs.SHARED_MAPPINGS)

    async def test_out_of_memory_killer(self) -> None:
        """Where the machine has no memory left the evaluators end before the daemon, always.

        Nothing of what it takes from `/proc` to be spared can be written.
        """
        attacked = await self.attack_by(
            "cat /proc/self/oom_score_adj;"
            ' for score in -1000 0 499; do (echo $score >"/proc/$$/oom_score_adj") 2>&1; done;'
            " cat /proc/self/oom_score_adj"
        )
        daemon = int(Path(f"/proc/{self.daemon.pid}/oom_score_adj").read_text())
        before, *refused, after = attacked.text.splitlines()
        self.assertEqual((int(before), int(after)), (max(daemon, 500),) * 2)
        self.assertEqual(len(refused), 3, refused)
        for line in refused:
            self.assertIn("Read-only file system", line)

    async def test_no_file_system_in_memory_can_be_written(self) -> None:
        """There is none, so nothing can be hidden there: /dev and / are read-only."""
        attacked = await self.attack(
            """
import os
for line in open("/proc/self/mountinfo"):
    fields, _, rest = line.partition(" - ")
    place, options = fields.split()[4:6]
    if rest.split()[0] in ("tmpfs", "ramfs", "mqueue") and "ro" not in options.split(","):
        # A file of /dev that was bound there, with nothing below it.
        if os.path.isdir(place):
            print(place)
"""
        )
        self.assertEqual(attacked.text, "")


class TimeAttacks(AttackCase):
    """Processor time."""

    async def test_one_process(self) -> None:
        """A loop without an end."""
        self.stopped(await self.attack(bombs.BURN), "cpu", "cpu", CPU)

    async def test_several_processes(self) -> None:
        """The time of all processes together counts."""
        self.need_groups()
        self.stopped(await self.attack(bombs.BURN_TOGETHER), "cpu", "cpu", CPU)


class OutputAttacks(AttackCase):
    """More than anybody wants to read."""

    async def flood(self, command: str, reason: str, value: int) -> None:
        """Check that a flood is stopped, and that the daemon's memory does not grow with it."""
        before = self.daemon.memory
        identifier = await self.begin(command)
        reading = Deferred.fromCoroutine(self.client.follow(identifier))
        self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        error = failure(await reading, reason)
        self.assertEqual((await self.client.get("/health")).code, 200)
        self.assertEqual((error["limit"], error["value"]), (f"limits.{reason}", value))
        self.assertLess(self.daemon.memory - before, 48 * MIB)

    async def test_stdout(self) -> None:
        """Lines without end."""
        await self.flood(python(bombs.FLOOD, "1"), "output", OUTPUT)

    async def test_stderr(self) -> None:
        """Complaints without end, which nobody waits for."""
        await self.flood(python(bombs.FLOOD, "2"), "stderr", STDERR)

    async def test_a_line_of_ten_gigabytes(self) -> None:
        """A line that would not end before ten gigabytes."""
        await self.flood(python(bombs.LONG_LINE), "output", OUTPUT)

    async def test_broken_values(self) -> None:
        """Values that are none, which are much work and become nothing."""
        await self.flood(python(bombs.BROKEN_VALUES), "output", OUTPUT)

    async def test_the_same_file_again_and_again(self) -> None:
        """50 KB that name 836 MB of files: these are output, too."""
        await self.flood(python(bombs.SAME_FILE, "400"), "output", OUTPUT)

    async def test_floods_beside_others(self) -> None:
        """Floods that nobody reads wait, and others go on."""
        floods = [await self.begin(python(bombs.FLOOD, "1")) for _ in range(3)]
        self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        for identifier in floods:
            await self.client.cancel(identifier)
