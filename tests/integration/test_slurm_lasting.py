"""Evaluators on a cluster that outlive the daemon: no event is lost, and none comes twice."""

from __future__ import annotations

import signal
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.task import deferLater

from tests.integration.client import failure, joined, text
from tests.integration.harness import until
from tests.integration.processes import new_word, processes
from tests.integration.rounds_case import RoundsCase
from tests.integration.slurm_case import CPUS, KeptSlurmTestCase


class LastingTests(KeptSlurmTestCase):
    """The daemon is killed, and started again beside the same keeper and the same jobs."""

    async def test_running(self) -> None:
        """An evaluator runs on in its job, and its output is complete."""
        identifier, gate = await self.begin_and_hold("echo late; echo no >&2; exit 3")
        before = await self.client.status(identifier)
        await self.daemon.restart()
        after = await self.client.status(identifier)
        self.assertEqual(after["state"], "running")
        for name in ("created", "running", "seed", "commit_oid", "limits", "runner"):
            self.assertEqual(after[name], before[name], name)
        await self.daemon.restart(signal.SIGTERM)
        gate.write_text("\n")
        status = await self.client.ended(identifier)
        self.assertEqual(status["runner"], before["runner"])
        await self.daemon.restart()
        self.assertEqual(await self.client.status(identifier), status)
        events = await self.client.follow(identifier)
        self.assertEqual(text(events), "readylate\n")
        error = failure(events, "exit")
        self.assertEqual((error["status"], error["stderr"]), (3, "no\n"))
        await self.nothing_left()

    async def test_ended_meanwhile(self) -> None:
        """An evaluator that ends while there is no daemon has its exit and its output."""
        word = new_word()
        identifier = await self.begin_and_wait(f": {word}; echo ready; sleep 0.5; seq 1000; exit 3")
        await self.daemon.end()
        await until(lambda: not processes(word), "it has ended")
        self.daemon.start()
        await self.daemon.ready()
        events = await self.client.follow(identifier)
        self.assertEqual(failure(events, "exit")["status"], 3)
        printed = "".join(f"{n}\n" for n in range(1, 1001))
        self.assertEqual(text(events), f"ready\n{printed}")
        await self.nothing_left()

    async def test_other_kind(self) -> None:
        """An evaluator on a node does not go on under a daemon without a cluster."""
        word = new_word()
        identifier = await self.begin_and_wait(f"echo ready; sleep 600 && : {word}")
        await self.daemon.end()
        path = self.daemon.folder / "tawebeval.toml"
        path.write_text(path.read_text().replace('kind = "slurm"', 'kind = "local"'))
        self.daemon.start()
        await self.daemon.ready()
        failure(await self.client.follow(identifier), "lost")
        await self.daemon.logged("the evaluator ends: runner.kind was")
        await until(lambda: not processes(word), "nothing is left on the node")
        await until(lambda: not self.cluster.list_jobs(), "no job is left")

    async def nothing_left(self) -> None:
        """Wait until nothing is left of any evaluation."""
        await until(lambda: not self.cluster.list_jobs(), "no job is left")
        await until(lambda: self.daemon.remains() == [], "nothing is left")
        self.daemon.check_log()


class QueueTests(KeptSlurmTestCase):
    """A cluster without a free node."""

    configuration = KeptSlurmTestCase.configuration.replace("cpus = 1", f"cpus = {CPUS}")

    async def test_queued(self) -> None:
        """What waits in Slurm's queue is queued again, and begins when a node is free."""
        running = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(2)]
        waiting = await self.begin("cat $SUBMISSION_FILE_SOLUTION")
        await until(lambda: len(self.cluster.list_jobs()) == 3, "the third job waits")
        await self.daemon.restart()
        for identifier in running:
            await self.client.cancel(identifier)
        self.assertEqual(joined(await self.client.follow(waiting)), ["42\n"])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")


class NodeLossTests(KeptSlurmTestCase):
    """A node that fails, with one retry allowed."""

    configuration = KeptSlurmTestCase.configuration + "retries = 1\n"

    async def test_loss(self) -> None:
        """The second begin has its whole time, and both outlive the daemon."""
        fields = {"limits[wall_clock]": "8"}
        identifier = await self.begin("mkfifo ~/gate; read line < ~/gate; echo again", **fields)

        def find_gates() -> list[Path]:
            return list(self.daemon.state.glob("evaluations/*/home/gate"))

        async def node(retries: int) -> object:
            runner = (await self.client.status(identifier))["runner"]
            return runner and runner["retries"] == retries and runner["node"]

        first = await until(lambda: node(0), "it runs")
        await until(find_gates, "it waits")
        await self.daemon.restart()
        await deferLater(reactor, 4)
        self.cluster.kill_node(str(first))
        # A job that is completing is asked for again for two minutes.
        second = await until(lambda: node(1), "it runs on the other node", 240)
        self.assertNotEqual(second, first)
        await self.daemon.restart()
        await deferLater(reactor, 5)  # with the first begin over its time
        self.assertEqual((await self.client.status(identifier))["state"], "running")
        (gate,) = await until(find_gates, "it waits")
        gate.write_text("\n")
        self.assertEqual(joined(await self.client.follow(identifier)), ["again\n"])
        await until(lambda: not self.cluster.list_jobs(), "no job is left")


class RoundsTests(KeptSlurmTestCase, RoundsCase):
    """Evaluations of all kinds, and a daemon that is killed at random moments."""

    configuration = KeptSlurmTestCase.configuration

    async def test_killed(self) -> None:
        """No event is lost and none comes twice, each status is right, and nothing is left."""
        await self.run_rounds(15, 4, signal.SIGKILL)
        await until(lambda: not self.cluster.list_jobs(), "no job is left")
