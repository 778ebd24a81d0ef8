"""Programs that want more than their limits allow: of processes, memory, time and output."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred

from tests.integration.attacks import bombs
from tests.integration.attacks.case import (
    CPU,
    FILE_SIZE,
    HONEST,
    HONEST_OUTPUT,
    MEMORY,
    MIB,
    OUTPUT,
    PROCESSES,
    STDERR,
    AttackCase,
)
from tests.integration.cgroups import DELEGATED, needs_cgroups
from tests.integration.client import failure, joined, python


class ProcessAttacks(AttackCase):
    @needs_cgroups
    async def test_fork_bomb_is_stopped(self) -> None:
        self.stopped(await self.attack(bombs.FORK_BOMB), "processes", "processes", PROCESSES)

    @needs_cgroups
    async def test_threads_count_as_processes(self) -> None:
        self.stopped(await self.attack(bombs.THREADS), "processes", "processes", PROCESSES)

    async def test_processes_that_ignore_signals_end_with_the_evaluator(self) -> None:
        attacked = await self.attack(bombs.STUBBORN, "go")
        self.assertEqual(attacked.status["state"], "finished")
        self.assertEqual(attacked.text, "ready\n")

    async def test_processes_that_ignore_signals_end_at_a_cancellation(self) -> None:
        await self.cancelled(python(bombs.STUBBORN, "stay"))


class MemoryAttacks(AttackCase):
    @needs_cgroups
    async def test_memory_of_each_kind_is_limited(self) -> None:
        for program in (
            bombs.HEAP,
            bombs.HEAP_OF_CHILDREN,
            bombs.MEMFD,
            bombs.SHARED_SEGMENTS,
            bombs.SHARED_MAPPINGS,
        ):
            attacked = await self.attack(program)
            self.stopped(attacked, "memory", "memory", MEMORY)
            self.assertLessEqual(attacked.status["usage"]["peak_memory_bytes"], MEMORY)
            self.assertGreater(attacked.status["usage"]["peak_memory_bytes"], MEMORY - MIB)

    async def test_evaluators_are_killed_before_the_daemon(self) -> None:
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


class ProcessLimits(AttackCase):
    async def test_each_process_has_limits_of_its_own(self) -> None:
        attacked = await self.attack_by("ulimit -n; ulimit -f; ulimit -c; ulimit -d; ulimit -p")
        open_files, file_size, core, memory, processes = attacked.text.split()
        self.assertEqual((open_files, int(file_size) * 512, core), ("256", FILE_SIZE, "0"))
        if DELEGATED is None:  # the first process in the sandbox has a place of its own
            self.assertEqual((int(memory) * 1024, int(processes) - 1), (MEMORY, PROCESSES))


class TimeAttacks(AttackCase):
    async def test_processor_time_is_limited(self) -> None:
        self.stopped(await self.attack(bombs.BURN), "cpu", "cpu", CPU)

    @needs_cgroups
    async def test_processor_time_of_all_processes_counts(self) -> None:
        self.stopped(await self.attack(bombs.BURN_TOGETHER), "cpu", "cpu", CPU)


class OutputAttacks(AttackCase):
    """More output than anybody wants to read."""

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

    async def test_output_floods_are_stopped_while_an_honest_evaluation_finishes(self) -> None:
        for command, reason, value in (
            (python(bombs.FLOOD, "1"), "output", OUTPUT),
            (python(bombs.FLOOD, "2"), "stderr", STDERR),
            (python(bombs.LONG_LINE), "output", OUTPUT),
            (python(bombs.BROKEN_VALUES), "output", OUTPUT),
            (python(bombs.SAME_FILE, "400"), "output", OUTPUT),  # 50 KB that name 836 MB
        ):
            await self.flood(command, reason, value)
