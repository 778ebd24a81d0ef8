"""SIGTERM while evaluations run: they may end by themselves, and everybody is told."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from tests.cases.patience import PATIENCE
from tests.integration.client import failure, text
from tests.integration.harness import CONFIGURATION, DaemonTestCase, until
from tests.integration.ports import listens
from tests.integration.raw import Connection, RawAnswer, body_of, head_of, part

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
MIB = 2**20


class DrainTestCase(DaemonTestCase):
    """Each test stops the daemon, and starts it again for the next."""

    configuration = CONFIGURATION.replace("running = 4", "running = 2")

    async def run_to_the_gate(self) -> str:
        """Begin an evaluation that goes on when it is let."""
        identifier, self.gate = await self.begin_and_hold("echo; echo done")
        return identifier

    def interrupt(self) -> None:
        os.kill(self.daemon.pid, signal.SIGTERM)

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

    def stream(self, identifier: str, media_type: str) -> Connection:
        """Return a connection on which the first event of an evaluation has come.

        Later it may be discarded: who reads pages acknowledges it.
        """
        connection = Connection(self.daemon.port)
        self.addCleanup(connection.close)
        request = f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: x\r\n"
        connection.send(f"{request}Connection: close\r\nAccept: {media_type}\r\n\r\n".encode())
        connection.read_until(b"ready")
        return connection

    def lines(self, connection: Connection) -> list[Any]:
        """Return what else a stream of JSON Lines brings, as payloads, when it is over."""
        rest = connection.rest()
        self.assertTrue(rest.endswith(b"0\r\n\r\n"), f"the stream broke off: {rest!r}")
        return [json.loads(line)["payload"] for line in rest.split(b"\n") if line[:1] == b"{"]


class DrainTests(DrainTestCase):
    drain = 2 * PATIENCE

    async def test_what_runs_ends_by_itself_and_everybody_reads_it(self) -> None:
        identifier = await self.run_to_the_gate()
        stream = self.stream(identifier, "application/jsonl")
        polled = Deferred.fromCoroutine(self.client.follow(identifier))
        since = len(self.daemon.log)
        self.interrupt()
        await self.stopping(since)
        answer = await self.client.post(self.repository.url, self.commit, "true")
        answer.problem(503)
        self.assertGreater(int(answer.header("Retry-After") or 0), 0)
        self.assertEqual((await self.client.get("/health")).code, 200)
        self.gate.write_text("go\n")
        self.assertEqual(text(await polled), "ready\ndone\n")
        self.assertEqual("".join(self.lines(stream)), "\ndone\n")
        await self.begin_again()
        (await self.client.get(f"/evaluation/{identifier}")).problem(410)

    async def test_what_is_queued_ends_at_once(self) -> None:
        first = await self.run_to_the_gate()
        await self.begin("exec sleep 600")
        queued = await self.begin("true")
        waiting = Deferred.fromCoroutine(self.client.follow(queued))
        await self.client.status(queued)
        self.interrupt()
        failure(await waiting, "shutdown")
        self.assertEqual((await self.client.status(first))["state"], "running")
        self.interrupt()
        await self.begin_again()

    async def test_second_signal_before_the_stop_ends_the_drain(self) -> None:
        identifier = await self.run_to_the_gate()
        polled = Deferred.fromCoroutine(self.client.follow(identifier))
        await self.client.status(identifier)
        for number in (signal.SIGTERM, signal.SIGINT):  # two of one kind may become one on the way
            os.kill(self.daemon.pid, number)
        failure(await polled, "shutdown")
        await self.begin_again()

    async def test_many_signals_in_a_row_log_no_defect(self) -> None:
        while self.daemon.running:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(self.daemon.pid, number)
            await deferLater(reactor, 0.001)
        await self.begin_again()


class ShortDrainTests(DrainTestCase):
    drain = 1

    async def test_evaluations_beyond_the_drain_end_with_shutdown(self) -> None:
        whole_line = await self.begin_and_wait("echo ready; exec sleep 600")
        identifiers = [await self.run_to_the_gate(), whole_line]
        reading = [Deferred.fromCoroutine(self.client.follow(one)) for one in identifiers]
        await self.client.status(identifiers[0])
        began = time.monotonic()
        self.interrupt()
        for events in await gatherResults(reading):
            failure(events, "shutdown")
        self.assertGreaterEqual(time.monotonic() - began, 1)
        await self.begin_again()

    def connect(self, *data: bytes) -> Connection:
        """Return a connection on which this was sent."""
        connection = Connection(self.daemon.port)
        self.addCleanup(connection.close)
        for one in data:
            connection.send(one)
        return connection

    def check_told(self, answer: RawAnswer) -> None:
        """Hold that a request was refused because of the end."""
        self.assertIn("the daemon is stopping", str(answer.problem(503)["detail"]))
        self.assertGreater(int(answer.headers["retry-after"]), 0)
        self.assertEqual(answer.headers["connection"], "close")

    async def test_unfinished_requests_get_503(self) -> None:
        await self.run_to_the_gate()
        form = body_of([part("submission[s]", b"x" * 2_000_000, "s")])
        half = head_of(len(form)) + form[:1_000_000]  # so much that it is on its way to the disk
        stalled, sending = self.connect(half), self.connect(half)
        headless = self.connect(HEALTH[:-2])
        idle = self.connect(HEALTH)
        self.assertEqual(idle.answer().code, 200)
        uploads = self.daemon.state / "uploads"
        await until(lambda: len(list(uploads.iterdir())) == 2, "both uploads have begun")
        since = len(self.daemon.log)
        self.interrupt()
        await self.stopping(since)
        sending.send(form[1_000_000:1_000_001])
        answers = [deferToThread(one.answer) for one in (sending, stalled, headless)]
        for answer in await gatherResults(answers):
            self.check_told(answer)
        for one in (sending, stalled):
            one.close()  # or what it has yet to send is waited for
        for one in (headless, idle):
            self.assertEqual(await deferToThread(one.rest), b"")
            one.close()
        await self.begin_again()

    async def test_slow_websocket_is_closed_with_1001(self) -> None:
        identifier = await self.begin("seq 1000000")
        request = f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: x\r\n{UPGRADE}\r\n"
        slow = self.connect(request.encode())
        self.assertEqual(slow.answer().code, 101)
        while (await self.client.status(identifier))["buffered_bytes"] < MIB:
            await deferLater(reactor, 0.01)
        self.interrupt()
        await until(lambda: not listens(self.daemon.port), "it listens no more")
        self.assertTrue(self.daemon.running)
        rest = await deferToThread(slow.rest)
        self.assertEqual(rest[-4:], b"\x88\x02" + (1001).to_bytes(2, "big"))
        slow.close()
        await self.begin_again()
