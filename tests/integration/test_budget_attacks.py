"""Evaluators that take what the kernel counts for the whole machine, or for the daemon's user."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.integration.attacks import budgets, calls
from tests.integration.attacks.case import HONEST, HONEST_OUTPUT, MEMORY, AttackCase
from tests.integration.client import failure, joined, python, text
from tests.integration.harness import Daemon, DaemonTestCase

PIPE_PAGES = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())


class RefusedAttacks(AttackCase):
    """What the filter of system calls refuses."""

    async def test_filters(self) -> None:
        """No memory for BPF goes to filters of sockets or processes."""
        attacked = await self.attack(budgets.FILTERS, str(calls.number_of("seccomp")))
        self.assertEqual(attacked.text, "sockets 0\nprocess 0\nprocess 0\n")

    async def test_spies(self) -> None:
        """What the honest evaluation executes in /usr/bin is told to nobody."""
        attacked = await self.attack(budgets.SPY)
        self.assertEqual(attacked.text, "ready\n0\n")

    async def test_held_stdout(self) -> None:
        """No call keeps stdout locked while it waits: the daemon would hang in its read."""
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

    async def test_pipes(self) -> None:
        """With all pages for pipes taken those of others are small, and work."""
        self.assertGreater(await self.taken(budgets.PIPES), PIPE_PAGES)

    async def test_descriptors_in_flight(self) -> None:
        """Descriptors that nobody receives keep no evaluation from beginning."""
        self.assertEqual(await self.taken(budgets.IN_FLIGHT), 3)  # processes that were refused

    async def test_programs_of_submissions_run_beside_descriptors_in_flight(self) -> None:
        """Descriptors that nobody receives keep no other evaluation from running programs."""
        identifier = await self.begin_and_wait(python(budgets.IN_FLIGHT))
        printed = await self.run_command("echo given | tawebeval-run -- cat; echo $?")
        self.assertEqual(text(printed), "given\n0\n")
        await self.client.cancel(identifier)

    async def test_timers(self) -> None:
        """Signals that are pending count for the evaluation, timers among them."""
        self.assertLessEqual(await self.taken(budgets.TIMERS), 1024)

    async def test_watches(self) -> None:
        """What epoll watches counts as memory of the evaluation."""
        self.need_groups()
        self.stopped(await self.attack(budgets.WATCHES), "memory", "memory", MEMORY)

    async def test_watched_stdout(self) -> None:
        """Who makes the reads of stdout slow for the reactor is stopped."""
        attacked = await self.attack(budgets.WATCHED_STDOUT)
        self.assertEqual(failure(attacked.events, "output")["value"], 0.25)
        self.assertNotIn("unlimited", attacked.text)


class WithoutWatchesTests(DaemonTestCase):
    """A daemon when somebody has taken all that epoll may watch for its user."""

    async def setUp(self) -> None:
        cls = type(self)
        if cls._shared is None:
            cls._shared = Daemon(cls.configuration, cls.drain)
            twistd = Path(__file__).with_name("twistd_with_full_epoll.py")
            cls._shared.program = (sys.executable, str(twistd))
        await super().setUp()

    async def test_evaluations(self) -> None:
        """Evaluations are taken, begin, print and end, several at a time."""
        many = [await self.begin("printf 'a part'; seq 20000; echo late >&2") for _ in range(4)]
        for identifier in many:
            printed = text(await self.client.follow(identifier))
            self.assertEqual(printed, "a part" + "".join(f"{i}\n" for i in range(1, 20001)))
        self.assertEqual(len(re.findall("fs.epoll.max_user_watches", self.daemon.log)), 1)
