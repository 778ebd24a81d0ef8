"""`web`: uploads where the disk is slow, or takes nothing any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs

from tawebeval.config import Configuration, HttpSettings, LimitSettings
from tawebeval.web.upload import WRITE_BATCH_BYTES
from tests.cases.settings import with_constants
from tests.cases.web import RawTestCase
from tests.fakes.clients import Connection, Service, form, parts
from tests.fakes.world import SlowThreads

BODY = form(parts(source=b"x" * 4 * WRITE_BATCH_BYTES))
SMALL = form(parts())
READ = 64 * 1024  # bytes that a transport reads at once
WINDOW = 20.0


class SlowDiskTests(RawTestCase):
    """A service whose threads write when the test says so."""

    configuration = Configuration(
        limits=LimitSettings(request_body=len(BODY)),
        http=with_constants(
            HttpSettings,
            head_timeout=10,
            rate_window_seconds=WINDOW,
            min_bytes_per_second=1024,
            idle_timeout=40,
        )(),
    )

    def setUp(self) -> None:
        super().setUp()
        self.threads = SlowThreads()
        self.service = Service(
            self.root / "slow", self.configuration, running=4, uploading=self.threads
        )
        self.spool = self.service.registry.submissions.budget
        self.unwritten = self.service.context.form_receiver_factory.unwritten_uploads

    def close(self) -> None:
        self.threads.finish()
        super().close()

    def send(self, connection: Connection, body: bytes) -> bytes:
        while body and connection.transport.producerState == "producing":
            connection.send(body[:READ])
            body = body[READ:]
        return body

    def stuck(self) -> tuple[Connection, bytes]:
        """Return a connection that is not read, as the disk is slow, and the rest of its body."""
        connection = self.begin_form(len(BODY))
        rest = self.send(connection, BODY)
        self.assertTrue(rest)
        self.assertEqual(connection.transport.producerState, "paused")
        return connection, rest

    def check_gone(self, connections: Sequence[Connection] = ()) -> None:
        for connection in connections:
            connection.lose()
        self.threads.finish()
        self.assertEqual((self.spool.used, self.unwritten.size_bytes), (0, 0))
        self.assertEqual(self.service.leftovers(), [])
        self.assertEqual(self.service.reactor.getDelayedCalls(), [])

    def test_other_requests_are_answered_while_forms_wait_for_the_disk(self) -> None:
        waiting = [self.stuck() for _ in range(3)]
        other = self.connect()
        other.request("GET /health")
        self.assertEqual(other.answer().status, 200)
        self.assertEqual(len(self.threads.waiting), 3)
        for connection, rest in waiting:
            while rest:
                self.threads.finish()
                rest = self.send(connection, rest)
            self.assertEqual(connection.received, b"")
            self.threads.finish()
            self.assertEqual(connection.answer().status, 200)
        self.assertEqual(self.unwritten.size_bytes, 0)

    def test_time_paused_for_the_disk_does_not_count_for_the_deadline(self) -> None:
        connection, rest = self.stuck()
        self.service.reactor.advance(10 * WINDOW)
        self.assertEqual(connection.received, b"")
        self.threads.step()
        self.service.reactor.advance(WINDOW - 1)
        self.assertEqual(connection.received, b"")
        connection.send(rest[:1])
        self.service.reactor.advance(1)  # enough came before the pause
        self.assertEqual(connection.received, b"")
        self.service.reactor.advance(WINDOW)
        self.check_raw(connection.answer(), 408)
        self.check_gone([connection])

    def test_form_paused_for_the_disk_when_its_deadline_is_overdue_continues(self) -> None:
        reactor = self.service.reactor
        call_later = reactor.callLater

        def check_and_call(seconds: float, *call: Any) -> Any:
            self.assertGreaterEqual(seconds, 0)
            return call_later(seconds, *call)

        self.patch(reactor, "callLater", check_and_call)
        connection = self.begin_form(len(BODY))
        reactor.rightNow += WINDOW + 1  # and the reactor has had no time to call
        rest = self.send(connection, BODY)
        reactor.advance(0)
        self.threads.finish()
        self.assertEqual(connection.received, b"")
        self.assertTrue(rest)
        self.assertEqual(connection.transport.producerState, "producing")
        self.check_gone([connection])

    def test_slow_client_is_408_despite_pauses_for_the_disk(self) -> None:
        self.unwritten.size_bytes = 2**30
        connection = self.begin_form(len(BODY))
        start = BODY.index(b"x" * 100)
        connection.send(BODY[:start])
        for at in range(start, start + int(WINDOW) - 1):
            self.send(connection, BODY[at : at + 1])
            self.send(connection, BODY[at : at + 1])
            self.assertEqual(connection.transport.producerState, "paused")
            self.service.reactor.advance(1)
            self.threads.finish()
            self.service.reactor.advance(1)
            self.assertEqual(connection.received, b"")
        self.service.reactor.advance(1)
        self.check_raw(connection.answer(), 408)
        self.unwritten.size_bytes -= 2**30
        self.check_gone([connection])

    def test_client_that_goes_while_a_thread_writes_leaves_nothing(self) -> None:
        connection, _ = self.stuck()
        small = self.begin_form(len(SMALL))
        small.send(SMALL)
        for each in (connection, small):
            each.lose()
        self.assertGreater(self.spool.used, 0)
        self.check_gone()
        self.assertEqual(self.service.world.spawn.children, [])

    def test_failing_disk_is_503_for_large_and_small_forms(self) -> None:
        connection, rest = self.stuck()
        small = self.begin_form(len(SMALL))
        small.send(SMALL)
        (self.root / "slow" / "uploads").rmdir()
        with capturedLogs():
            self.threads.finish()
        for each in (connection, small):
            answer = self.check_raw(each.answer(), 503)
            self.assertIn(b"the form cannot be stored: No such file or directory", answer.body)
            self.assertIn("retry-after", answer.headers)
        self.assertEqual(self.send(connection, rest), b"")
        self.assertEqual(connection.received, b"")
        (self.root / "slow" / "uploads").mkdir()
        self.service.reactor.advance(60)
        self.check_gone([connection, small])

    def test_client_waiting_for_the_disk_gets_503_when_the_daemon_stops(self) -> None:
        connection, rest = self.stuck()
        self.successResultOf(Deferred.fromCoroutine(self.service.registry.drain_and_close()))
        connection.channel.drain_connection()
        self.check_raw(connection.answer(), 503)
        self.assertEqual(self.send(connection, rest), b"")
        self.service.reactor.advance(6)
        self.check_gone([connection])

    def test_body_that_ends_while_paused_is_complete(self) -> None:
        connection, rest = self.stuck()
        connection.send(rest)  # as TLS may, of what it has read before
        self.assertEqual(connection.transport.producerState, "producing")
        self.service.reactor.advance(10 * WINDOW)
        self.assertEqual(connection.received, b"")
        self.threads.finish()
        self.assertEqual(connection.answer().status, 200)
