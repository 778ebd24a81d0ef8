"""Evaluations that are cancelled as they start, or take their grace time."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.task import deferLater

from tests.integration.client import failure, text
from tests.integration.harness import DaemonTestCase


class StoppedAtOnceTests(DaemonTestCase):
    async def test_evaluation_cancelled_while_it_starts_ends_at_once(self) -> None:
        await self.run_command("true")  # from here on the commit is there
        for delay in range(0, 40, 2):
            identifier = await self.begin("sleep 600; echo too late; exec sleep 600")
            await deferLater(reactor, delay / 1000)
            await self.client.cancel(identifier)
            events = await self.client.follow(identifier)
            failure(events, "cancelled")
            self.assertEqual(text(events), "", f"after {delay} ms")

    async def test_cancelled_evaluation_may_take_its_grace_time(self) -> None:
        identifier = await self.begin_and_wait(
            "trap 'sleep 0.1; echo done; exit' TERM; echo ready; while :; do sleep 0.1; done"
        )
        await self.client.cancel(identifier)
        self.assertEqual(text(await self.client.follow(identifier)), "ready\ndone\n")
