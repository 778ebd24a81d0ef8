"""Evaluators that take what the kernel counts for the whole machine, or for the daemon's user."""

from __future__ import annotations

from pathlib import Path

from tests.integration.attacks import budgets
from tests.integration.attacks.case import HONEST, HONEST_OUTPUT, MEMORY, AttackCase
from tests.integration.cgroups import needs_cgroups
from tests.integration.client import failure, joined, python, text

PIPE_PAGES = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())


class RefusedAttacks(AttackCase):
    async def test_no_call_holds_stdout_while_it_waits(self) -> None:
        for call in ("splice", "sendfile"):
            identifier = await self.begin(python(budgets.HOLD_STDOUT, call))
            self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
            printed = text(await self.client.follow(identifier))
            self.assertEqual(printed.strip(), "EINVAL")


class SharedAttacks(AttackCase):
    """What evaluations of one user share, taken as far as it goes, and kept."""

    async def taken(self, program: str) -> int:
        """Return how much a program has taken beside honest evaluations."""
        identifier = await self.begin_and_wait(python(program))
        for _ in range(2):
            self.assertEqual(joined(await self.run_command(python(HONEST))), [HONEST_OUTPUT])
        self.assertEqual((await self.client.get("/health")).code, 200)
        printed = text((await self.client.first_page(identifier))["data"])
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        await self.client.cancel(identifier)
        return int(printed.split()[1])

    async def test_pipe_pages_taken_by_one_leave_others_working(self) -> None:
        self.assertGreater(await self.taken(budgets.PIPES), PIPE_PAGES)

    async def test_descriptors_in_flight_keep_no_evaluation_from_starting(self) -> None:
        self.assertEqual(await self.taken(budgets.IN_FLIGHT), 3)  # processes that were refused

    async def test_programs_of_submissions_run_beside_descriptors_in_flight(self) -> None:
        identifier = await self.begin_and_wait(python(budgets.IN_FLIGHT))
        printed = await self.run_command("echo given | tawebeval-run -- cat; echo $?")
        self.assertEqual(text(printed), "given\n0\n")
        await self.client.cancel(identifier)

    async def test_pending_timers_count_for_their_evaluation(self) -> None:
        self.assertLessEqual(await self.taken(budgets.TIMERS), 1024)

    @needs_cgroups
    async def test_epoll_watches_count_as_memory_of_the_evaluation(self) -> None:
        self.stopped(await self.attack(budgets.WATCHES), "memory", "memory", MEMORY)

    async def test_evaluator_that_slows_reads_of_its_stdout_is_stopped(self) -> None:
        attacked = await self.attack(budgets.WATCHED_STDOUT)
        self.assertEqual(failure(attacked.events, "output")["value"], 0.25)
        self.assertNotIn("unlimited", attacked.text)
