"""Evaluations that outlive the daemon: a lost starter, and restarts."""

from __future__ import annotations

import signal
import sqlite3

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from tests.cases.event_source import EventSource
from tests.integration.client import failure, text
from tests.integration.harness import COMMAND, until
from tests.integration.resuming_readers import CUTS, LineReader
from tests.integration.starters import KeptDaemonTestCase


class RestartTests(KeptDaemonTestCase):
    async def test_kill_of_the_starter_loses_evaluations_and_stops_the_daemon(self) -> None:
        self.addCleanup(setattr, self.daemon, "program", self.daemon.program)
        self.daemon.program = ("sh", "-c", 'shift 3; exec "$0" serve "$@"', str(COMMAND))
        await self.daemon.restart()
        identifier = await self.begin_and_wait("echo ready; sleep 600")
        following = Deferred.fromCoroutine(self.client.follow(identifier))
        await deferLater(reactor, 0.3)
        self.daemon.kill_starter()
        failure(await following, "lost")
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.assertIn("the starter of evaluators has ended", self.daemon.log)
        self.assertEqual(self.daemon.exit_status, 1)
        self.daemon.check_log()

    async def test_restart_reports_a_run_as_lost_if_the_run_could_not_be_stored(
        self,
    ) -> None:
        running = [await self.begin_and_wait("echo ready; sleep 600") for _ in range(4)]
        identifier = await self.begin("head -c 8 /dev/urandom | od -An -tx1; sleep 600")
        other = sqlite3.connect(self.daemon.state / "evaluations.sqlite", isolation_level=None)
        self.addCleanup(other.close)
        other.execute("BEGIN IMMEDIATE")
        await self.client.request("DELETE", f"/evaluation/{running.pop()}")
        page = await self.client.page(identifier, wait=30)
        self.assertEqual(page["end"], "1")
        await self.daemon.end()
        other.close()
        self.daemon.start()
        await self.daemon.ready()
        for after in ("0", "1"):
            failure((await self.client.page(identifier, after, wait=30))["data"], "lost")
        for each in running:
            await self.client.request("DELETE", f"/evaluation/{each}")
        await self.daemon.nothing_left()

    async def test_restart_answers_polls_and_cuts_streams_without_an_end_event(self) -> None:
        identifier, gate = await self.begin_and_hold("echo late")
        page = await self.client.page(identifier)
        polls = [
            Deferred.fromCoroutine(self.client.page(identifier, page["end"], wait=30))
            for _ in range(3)
        ]
        source = EventSource()
        path = f"/evaluation/{identifier}/events?after={page['end']}"
        stream = Deferred.fromCoroutine(
            self.client.stream(path, source.feed, {"Accept": "text/event-stream"})
        )
        stream.addErrback(lambda failure: failure.trap(*CUTS) and None)
        await until(self.client.streams, "the stream begins")
        await self.daemon.restart(signal.SIGTERM)
        for poll in polls:
            self.assertEqual(await poll, {"begin": page["end"], "end": page["end"], "data": []})
        await stream
        self.assertEqual(source.events, [])
        gate.write_text("\n")
        reader = LineReader(self.client, identifier, page["data"])
        await reader.read()
        self.assertEqual(text(reader.events), "readylate\n")
        self.daemon.check_log()
