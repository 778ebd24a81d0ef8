"""SIGTERM while evaluations run: they may end by themselves, and everybody is told."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from tests.cases.patience import PATIENCE
from tests.integration.client import text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.raw import Connection


class DrainTests(DaemonTestCase):
    """Each test stops the daemon, and starts it again for the next."""

    configuration = CONFIGURATION.replace("running = 4", "running = 2")
    drain = 2 * PATIENCE

    async def stopping(self, since: int = 0) -> None:
        """Wait until the daemon has begun to stop."""
        await until(lambda: "SIGTERM" in self.daemon.log[since:], "it has begun to stop")

    async def begin_again(self) -> None:
        """Start the daemon that was stopped, of which nothing may be left."""
        await until(lambda: not self.daemon.running, "the daemon stops")
        self.assertEqual(self.daemon.leftovers(), [])
        self.daemon.check_log()
        self.daemon.start()
        await self.daemon.ready()

    def stream(self, identifier: str) -> Connection:
        """Return a connection on which the first event of an evaluation has come.

        Later it may be discarded: who reads pages acknowledges it.
        """
        connection = Connection(self.daemon.port)
        self.addCleanup(connection.close)
        head = f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        connection.send(f"{head}Accept: application/jsonl\r\n\r\n".encode())
        connection.read_until(b"ready")
        return connection

    def lines(self, connection: Connection) -> list[Any]:
        """Return what else a stream of JSON Lines brings, as payloads, when it is over."""
        rest = connection.rest()
        self.assertTrue(rest.endswith(b"0\r\n\r\n"), f"the stream broke off: {rest!r}")
        return [json.loads(line)["payload"] for line in rest.split(b"\n") if line[:1] == b"{"]

    async def test_what_runs_ends_by_itself_and_everybody_reads_it(self) -> None:
        identifier, gate = await self.begin_and_hold("echo; echo done")
        stream = self.stream(identifier)
        polled = Deferred.fromCoroutine(self.client.follow(identifier))
        since = len(self.daemon.log)
        self.daemon.interrupt()
        await self.stopping(since)
        answer = await self.client.post(self.repository.url, self.commit, "true")
        answer.problem(503)
        self.assertGreater(int(answer.header("Retry-After") or 0), 0)
        self.assertEqual((await self.client.get("/health")).code, 200)
        gate.write_text("go\n")
        self.assertEqual(text(await polled), "ready\ndone\n")
        self.assertEqual("".join(self.lines(stream)), "\ndone\n")
        await self.begin_again()
        (await self.client.get(f"/evaluation/{identifier}")).problem(410)
        forged = identifier[:-1] + ("A" if identifier[-1] != "A" else "B")
        (await self.client.get(f"/evaluation/{forged}")).problem(404)

    async def test_many_signals_in_a_row_log_no_defect(self) -> None:
        while self.daemon.running:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(self.daemon.pid, number)
            await deferLater(reactor, 0.001)
        await self.begin_again()
