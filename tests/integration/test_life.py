"""An evaluation's life, seen from outside: pages, status, cancelling, waiting, being forgotten."""

from __future__ import annotations

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from tawebeval.sandbox.workspace import derive_log_pseudonym
from tests.integration.client import failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.processes import new_word, processes

"""Seconds that no test waits for."""


class StatusTests(DaemonTestCase):
    configuration = CONFIGURATION.replace("running = 4", "running = 1\nqueued = 1")

    async def test_status_through_a_life(self) -> None:
        first = await self.begin_and_wait("printf ready; exec sleep 600")
        second = await self.begin("echo out; echo err >&2", seed="5")
        queued = await self.client.status(second)
        self.assertEqual((queued["state"], queued["queue_place"]), ("queued", 0))
        self.assertIsNone(queued["running"])
        running = await self.client.status(first)
        self.assertEqual((running["state"], running["queue_place"]), ("running", None))
        self.assertIsNone(running["exit"])
        self.assertEqual(running["commit_oid"], self.commit)
        self.assertEqual(running["events"], {"buffered": 1, "discarded": 0})
        await self.client.page(first, (await self.client.page(first))["end"])
        self.assertEqual(
            (await self.client.status(first))["events"], {"buffered": 0, "discarded": 1}
        )
        await self.client.cancel(first)
        ended = await self.client.ended(second)
        self.assertEqual(ended["state"], "finished")
        self.assertEqual(ended["seed"], 5)
        self.assertEqual(ended["exit"], {"status": 0, "signal": None})
        self.assertEqual(ended["stderr"], "err\n")
        self.assertGreaterEqual(ended["usage"]["cpu_seconds"], 0)
        times = [ended[name] for name in ("created", "fetching", "running", "ended")]
        self.assertEqual(times, sorted(times))

    async def test_delete_kills_the_whole_tree_and_is_repeatable(self) -> None:
        word = new_word()
        command = "(trap '' TERM; sleep 600; sleep 600) & (sleep 600) & echo ready; wait"
        identifier = await self.begin_and_wait(f"export WORD={word}; {command}")
        self.assertGreaterEqual(len(processes(word)), 4)
        twice = [Deferred.fromCoroutine(self.client.cancel(identifier)) for _ in range(2)]
        for one in twice:
            await one
            self.assertEqual(processes(word), [])
        await self.daemon.nothing_left()
        await self.client.cancel(identifier)
        failure(await self.client.follow(identifier), "cancelled")
        await self.client.cancel(identifier)


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
    configuration = CONFIGURATION + "retain = 3\n"

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
