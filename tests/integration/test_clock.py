"""A time of day that is set, by a day forward or a year back, while the daemon runs."""

from __future__ import annotations

import os
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

from twisted.internet.defer import Deferred

from tests.integration.client import Client, text
from tests.integration.harness import Daemon, DaemonTestCase
from tests.integration.unprivileged import PYTHON_AS_USER

DAY = 86400
YEAR = 365 * DAY

_TWISTD = Path(__file__).with_name("twistd_with_clock.py")


class ClockTests(DaemonTestCase):
    """A daemon whose time of day the tests set. What runs is let go on by a file."""

    configuration = """
        [repositories]
        protocols = ["file"]
        [evaluations]
        running = 8
        [limits]
        wall_clock = 3600
        [polls]
        wait = 100
        [sandbox]
        kind = "none"
        """

    def make_daemon(self) -> Daemon:
        daemon = Daemon(self.configuration)
        daemon.program = (*PYTHON_AS_USER, str(_TWISTD), str(daemon.folder / "clock"))
        return daemon

    async def start_daemon(self) -> None:
        self.write_clock(0)
        await super().start_daemon()

    async def setUp(self) -> None:
        await super().setUp()
        self.gate = self.folder / "gate"
        self.command = f"echo ready; until test -e {self.gate}; do sleep 0.01; done; echo went on"

    def write_clock(self, seconds: int) -> None:
        """Write how far the daemon's time of day is from the true one."""
        # It is read all the time, and is never to be found empty.
        clock = self.daemon.folder / "clock"
        new = clock.with_suffix(".new")
        new.write_text(str(seconds))
        os.replace(new, clock)

    async def set_clock(self, seconds: int) -> None:
        """Let the daemon's time of day be so far from the true one."""
        self.write_clock(seconds)
        date = (await self.client.get("/health")).header("Date")
        assert date is not None, "every answer has one"
        shown = parsedate_to_datetime(date).timestamp() - time.time()
        self.assertLess(abs(shown - seconds), DAY / 2)

    async def check(self, jump: int) -> None:
        """Hold that such a jump ends, loses and repeats nothing, and that timers still come.

        Neither `wall_clock` nor `retain` or a connection's deadline is over.
        """
        key = {"Idempotency-Key": f"key {jump}"}
        running = await self.client.post(
            self.repository.url, self.commit, self.command, headers=key
        )
        identifier = running.json["evaluation_id"]
        await self.client.printed(identifier, "ready")
        ended = await self.begin("echo kept")
        await self.client.ended(ended)
        page = await self.client.page(identifier)
        poll = Deferred.fromCoroutine(self.client.page(identifier, page["end"], wait=100))
        await self.set_clock(jump)
        again = await self.client.post(self.repository.url, self.commit, self.command, headers=key)
        self.assertEqual(again.json, running.json)
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        self.assertFalse(poll.called)
        in_vain = await self.client.page(identifier, page["end"], wait=1)
        self.assertEqual(in_vain["data"], [])
        self.gate.touch()
        self.assertIn("went on", text((await poll)["data"]))
        status = await self.client.ended(identifier)
        self.assertEqual(status["state"], "finished")
        times = [status[name] for name in ("created", "fetching", "running", "ended")]
        self.assertEqual(times, sorted(times))
        self.assertTrue(0 < status["usage"]["wall_seconds"] < 3600, status["usage"])
        self.assertEqual(text(await self.client.follow(ended)), "kept\n")
        async with Client(self.daemon.url) as other:  # on a connection of its own
            self.assertEqual((await other.get("/health/ready")).code, 200)

    async def test_clock_a_day_forward_or_a_year_back_changes_nothing(self) -> None:
        for jump in (DAY, -YEAR):
            await self.check(jump)
            self.gate.unlink()
            self.write_clock(0)
