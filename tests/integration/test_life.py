"""An evaluation's life, seen from outside: pages, status, cancelling, waiting, being forgotten."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.integration.client import failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until

"""Seconds that no test waits for."""


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


class AbandonedTests(DaemonTestCase):
    configuration = CONFIGURATION + "retain = 10\n"

    async def test_abandoned_evaluation_is_killed_whoever_reads_others(self) -> None:
        runs = self.daemon.state / "evaluations"
        abandoned = await self.begin_and_wait("trap '' TERM; echo ready; sleep 600; sleep 600")
        kept, gate = await self.begin_and_hold("echo; echo done")
        reading = Deferred.fromCoroutine(self.client.follow(kept))
        told = f"{derive_log_pseudonym(abandoned)}: stopped: no client has asked for the events in "
        await self.daemon.logged(told)
        await until(lambda: list(runs.iterdir()) == [gate.parent.parent], "it is killed")
        (await self.client.ask(abandoned)).problem(410)
        (await self.client.get(f"/evaluation/{abandoned}")).problem(410)
        gate.write_text("go\n")
        self.assertEqual(text(await reading), "ready\ndone\n")
