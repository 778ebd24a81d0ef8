"""Processor time: an evaluation has its share of it, however many processes another one has."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.cases.patience import LONG_PATIENCE
from tests.integration.cgroups import DELEGATED, needs_cgroups
from tests.integration.client import python
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import command_line, new_word, processes, state

# As many processes as are wanted, each in a session of its own, which without groups may be a share
# of its own (sched(7), autogroup).
_SPIN = """
import os, sys
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        while True:
            pass
os.wait()
"""
_ATTACKERS = 60
_SECONDS = 3.0  # of processor time, after which is compared
_TICK = os.sysconf("SC_CLK_TCK")


def used(pids: list[int]) -> float:
    """Return the seconds of processor time that processes have used."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(stat[11]) + int(stat[12]) for stat in fields) / _TICK


class ShareTests(DaemonTestCase):
    configuration = f"{CONFIGURATION}\n[limits]\nprocesses = 100\n"

    async def spin(self, count: int) -> tuple[str, list[int]]:
        """Begin an evaluation with so many processes; return its identifier, and these."""
        word = new_word()
        identifier = await self.begin(f"export WORD={word}; {python(_SPIN, str(count))}")

        def spinning() -> list[int]:
            found = [pid for pid in processes(word) if os.getsid(pid) == pid and state(pid) == "R"]
            return found if len(found) >= count else []

        return identifier, await until(spinning, "all processes run", LONG_PATIENCE)

    @needs_cgroups
    async def test_honest_evaluation_has_its_share_beside_60_processes(self) -> None:
        attack, attackers = await self.spin(_ATTACKERS)
        honest, its = await self.spin(len(os.sched_getaffinity(0)))
        before = used(its), used(attackers)
        await until(
            lambda: used(its) + used(attackers) - sum(before) > _SECONDS,
            "they have used processor time",
            LONG_PATIENCE,
        )
        time, taken = used(its) - before[0], used(attackers) - before[1]
        for identifier in (attack, honest):
            await self.client.cancel(identifier)
        self.assertGreater(time / (time + taken), 0.35)

    async def test_git_has_a_cgroup_and_is_killed_before_the_daemon(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            url = f"git://127.0.0.1:{port}/x"
            identifier = await self.client.evaluate(url, self.commit, "true")

            def fetching() -> list[int]:
                return [pid for pid in processes(url) if command_line(pid).startswith(b"git\0")]

            found = await until(fetching, "git runs")
            groups = [Path(f"/proc/{pid}/cgroup").read_text() for pid in found]
            scores = {int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in found}
            await self.client.cancel(identifier)
        self.assertGreaterEqual(min(scores), 500)
        if DELEGATED:
            for group in groups:
                self.assertRegex(group, r"/tawebeval-[^/]*/git\n")
