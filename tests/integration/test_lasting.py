"""Evaluations that outlive the daemon: their events are complete and exact, whatever ends it."""

from __future__ import annotations

import random
import signal

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from tests.integration.client import data, failure, joined, text
from tests.integration.harness import until
from tests.integration.keepers import KeptDaemonTestCase
from tests.integration.lasting_kinds import make_numbers, make_values
from tests.integration.resuming_readers import LineReader, PollReader, ResumingReader

KILLS = 12
PAUSES = (0.0, 0.02, 0.3)  # seconds between a reader's requests


class LastingTests(KeptDaemonTestCase):
    """The daemon is killed, and started again beside the same keeper."""

    async def follow(self, identifier: str) -> str:
        """Read all events; return what was printed as text."""
        return text(await self.client.follow(identifier))

    async def read(self, command: str, pause: float = 0) -> Deferred[ResumingReader]:
        """Begin an evaluation; return a reader of it at work, which pauses between requests."""
        reader = PollReader(self.client, await self.begin(command))
        reader.pause = pause
        return Deferred.fromCoroutine(reader.read())

    async def test_running(self) -> None:
        """An evaluator runs on, and its output is complete: what it prints while nobody reads."""
        identifier, gate = await self.begin_and_hold("echo late; echo no >&2; exit 3")
        before = await self.client.status(identifier)
        await self.daemon.restart()
        after = await self.client.status(identifier)
        self.assertEqual(after["state"], "running")
        for name in ("created", "running", "seed", "commit_oid", "tree_oid", "limits"):
            self.assertEqual(after[name], before[name], name)
        gate.write_text("\n")
        events = await self.client.follow(identifier)
        self.assertEqual(text(events), "readylate\n")
        error = failure(events, "exit")
        self.assertEqual((error["status"], error["stderr"]), (3, "no\n"))

    async def test_all_read(self) -> None:
        """After a client has read everything, however much it was, it gets what follows."""
        identifier = await self.begin("seq 8000; sleep 3; echo late")
        reader = PollReader(self.client, identifier)
        reading = Deferred.fromCoroutine(reader.read())
        await until(lambda: text(reader.events).endswith("\n8000"), "everything is read")
        await deferLater(reactor, 0.2)
        await self.daemon.restart()
        await reading
        self.assertEqual(text(reader.events), "".join(f"{n}\n" for n in range(1, 8001)) + "late\n")

    async def test_ended_meanwhile(self) -> None:
        """An evaluator that ends while there is no daemon has its exit and its output."""
        identifier = await self.begin_and_wait("echo ready; sleep 0.5; seq 1000")
        await self.daemon.end()
        await deferLater(reactor, 1)
        self.daemon.start()
        await self.daemon.ready()
        status = await self.client.ended(identifier)
        self.assertEqual(status["state"], "finished")
        printed = "".join(f"{n}\n" for n in range(1, 1001))
        self.assertEqual(await self.follow(identifier), f"ready\n{printed}")

    async def test_ended_unread(self) -> None:
        """The result of an evaluation that has ended is there, with its results and its times."""
        command, printed = make_values(20)
        identifier = await self.begin(command)
        before = await self.client.ended(identifier)
        await self.daemon.restart()
        self.assertEqual(await self.client.status(identifier), before)
        self.assertEqual(joined(await self.client.follow(identifier)), printed)
        self.assertEqual((await self.client.get(f"/evaluation/{identifier}")).code, 410)

    async def test_queued(self) -> None:
        """Queued evaluations keep their order, and run when there is a slot."""
        holding = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(4)]
        waiting = [await self.begin(f"echo {n}; cat $SUBMISSION_FILE_SOLUTION") for n in range(6)]
        await self.daemon.restart()
        places = [(await self.client.status(one))["queue_place"] for one in waiting]
        self.assertEqual(places, list(range(6)))
        for identifier in holding:
            await self.client.cancel(identifier)
        texts = [await self.follow(one) for one in waiting]
        self.assertEqual(texts, [f"{n}\n42\n" for n in range(6)])

    async def test_cancelled(self) -> None:
        """An evaluator of an earlier process is cancelled as any other."""
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        await self.daemon.restart()
        await self.client.cancel(identifier)
        failure(await self.client.follow(identifier), "cancelled")
        await until(lambda: self.daemon.remains() == [], "nothing is left")

    async def test_time_limit(self) -> None:
        """The time limit goes on, less the time without a daemon."""
        command = "echo ready; sleep 600"
        identifier = await self.begin_and_wait(command, **{"limits[wall_clock]": "3"})
        await self.daemon.restart()
        failure(await self.client.follow(identifier), "timeout")

    async def test_killed_often(self) -> None:
        """However often the daemon is killed, no event is lost, and none comes twice."""
        chance = random.Random(5)
        kinds = [make_numbers(300, 100, 0.01), make_numbers(30, 20_000), make_numbers(5, 3, 0.7)]
        expected = [[printed] for _ in PAUSES for _, printed in kinds]
        readings = [await self.read(command, pause) for pause in PAUSES for command, _ in kinds]
        command, printed = make_values(60, 0.025)
        expected.append(printed)
        readings.append(await self.read(command))
        everything = gatherResults(readings)
        kills = 0
        while not everything.called:
            await deferLater(reactor, chance.uniform(0.05, 1.0))
            if kills < KILLS:
                await self.daemon.restart()
                kills += 1
        for reader, printed in zip(await everything, expected, strict=True):
            same = joined(reader.events) == printed
            self.assertTrue(same)
        self.assertEqual(kills, KILLS)
        await until(lambda: self.daemon.remains() == [], "nothing is left")
        self.daemon.check_log()

    async def test_submissions(self) -> None:
        """Runs of a submission go on, those that run and those that follow."""
        runs = "for n in $(seq 20); do tawebeval-run -- sh -c 'sleep 0.1; echo yes'; done"
        identifier = await self.begin_and_wait(f"echo ready; {runs}; echo end")
        for _ in range(3):
            await deferLater(reactor, 0.3)
            await self.daemon.restart()
        self.assertEqual(await self.follow(identifier), "ready\n" + "yes\n" * 20 + "end\n")

    async def test_first_submission(self) -> None:
        """The first run of a submission comes after the restart."""
        run = "tawebeval-run --report report.json -- sh -c 'echo yes; exit 5'; cat report.json"
        identifier, gate = await self.begin_and_hold(run)
        await self.daemon.restart()
        gate.write_text("\n")
        self.assertIn('"exit_status": 5', await self.follow(identifier))

    async def test_files(self) -> None:
        """A file that stdout names is read after the restart; a block is continued."""
        block = (
            "printf '\\n%s\\nX-SEGI-As: path\\n\\nfile.txt' $EVALUATION_FILE_BEGIN; sleep 2;"
            "echo content >file.txt; printf '\\n%s\\n' $EVALUATION_FILE_END; echo end"
        )
        identifier = await self.begin_and_wait(f"echo ready; {block}")
        await self.daemon.restart()
        events = await self.client.follow(identifier)
        self.assertEqual([value["filename"] for value in data(events)], ["file.txt"])
        self.assertEqual(text(events), "ready\nend\n")

    async def test_key(self) -> None:
        """A repeated request with its Idempotency-Key gets the first evaluation."""
        headers = {"Idempotency-Key": "one"}
        first = await self.begin("echo one", headers=headers)
        await self.client.ended(first)
        await self.daemon.restart()
        self.assertEqual(await self.begin("echo one", headers=headers), first)

    async def test_rerun(self) -> None:
        """The submission of an ended evaluation is kept, and run again."""
        first = await self.begin("cat $SUBMISSION_FILE_SOLUTION")
        await self.client.ended(first)
        await self.daemon.restart()
        answer = await self.client.request("POST", f"/evaluation/{first}/rerun")
        self.assertEqual(answer.code, 200, answer.body)
        self.assertEqual(await self.follow(answer.json["evaluation_id"]), "42\n")

    async def test_results(self) -> None:
        """The summary of the results counts those before the restart and after it."""
        identifier = await self.begin(make_values(20, 0.05)[0])
        while (await self.client.status(identifier))["results"] is None:
            await deferLater(reactor, 0.05)
        await self.daemon.restart()
        status = await self.client.ended(identifier)
        self.assertEqual(status["results"]["cases"], {"accepted": 20})

    async def test_stream(self) -> None:
        """A client of a stream resumes with what it has."""
        command, printed = make_numbers(40, 100, 0.05)
        reader = LineReader(self.client, await self.begin(command))
        reading = Deferred.fromCoroutine(reader.read())
        for _ in range(3):
            await deferLater(reactor, 0.5)
            await self.daemon.restart()
        await reading
        self.assertEqual(text(reader.events), printed)

    async def test_restart(self) -> None:
        """An orderly stop leaves evaluations alone, and answers those who wait."""
        identifier, gate = await self.begin_and_hold("echo late")
        reading = Deferred.fromCoroutine(PollReader(self.client, identifier).read())
        await deferLater(reactor, 0.3)
        await self.daemon.restart(signal.SIGTERM)
        gate.write_text("\n")
        self.assertEqual(text((await reading).events), "readylate\n")
