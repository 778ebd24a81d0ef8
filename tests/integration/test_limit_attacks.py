"""Programs that want more than their limits allow: of processes, memory, time and output."""

from __future__ import annotations

from pathlib import Path

from tests.integration.attacks import bombs
from tests.integration.attacks.case import CPU, MEMORY, MIB, PROCESSES, AttackCase
from tests.integration.client import python
from tests.integration.wire import floods


class ProcessAttacks(AttackCase):
    """Too many of them, and those that do not want to end."""

    async def test_fork_bomb(self) -> None:
        """A bomb that forks in all of its processes is over as soon as it meets the limit."""
        self.need_groups()
        self.stopped(await self.attack(bombs.FORK_BOMB), "processes", "processes", PROCESSES)

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


class OutputAttacks(floods.OutputCase):
    """More output than anybody wants to read."""
