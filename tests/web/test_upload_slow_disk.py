"""`web`: uploads where the disk is slow, or takes nothing any more."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs

from tawebeval.config import Configuration, HttpSettings, LimitSettings
from tawebeval.evaluations.uploads import WRITE_BATCH_BYTES
from tests.cases.settings import with_constants
from tests.cases.web import RawTestCase
from tests.fakes.clients import MULTIPART, Connection, Service, form, head, parts
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
        self.spool = self.service.registry.submissions.share
        self.unwritten = self.service.registry.submissions.unwritten

    def close(self) -> None:
        """Let the disk be quick, and end what still runs."""
        self.threads.finish()
        super().close()

    def begin(self, body: bytes = BODY) -> Connection:
        """Send the head of a form."""
        connection = self.connect()
        fields = {"Content-Type": MULTIPART, "Content-Length": str(len(body))}
        connection.send(head("POST /evaluate", fields))
        return connection

    def send(self, connection: Connection, body: bytes) -> bytes:
        """Send of a body as much as is read; return the rest."""
        while body and connection.transport.producerState == "producing":
            connection.send(body[:READ])
            body = body[READ:]
        return body

    def stuck(self) -> tuple[Connection, bytes]:
        """Return a connection that is not read, as the disk is slow, and the rest of its body."""
        connection = self.begin()
        rest = self.send(connection, BODY)
        self.assertTrue(rest)
        self.assertEqual(connection.transport.producerState, "paused")
        return connection, rest

    def check_gone(self, connections: Sequence[Connection] = ()) -> None:
        """Hold that of connections which have ended nothing is left."""
        for connection in connections:
            connection.lose()
        self.threads.finish()
        self.assertEqual((self.spool.used, self.unwritten.size), (0, 0))
        self.assertEqual(self.service.leftovers(), [])
        self.assertEqual(self.service.reactor.getDelayedCalls(), [])

    def test_others_are_served(self) -> None:
        """While forms wait for the disk, which gets them bit by bit, others have their answers."""
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
        self.assertEqual(self.unwritten.size, 0)

    def test_memory(self) -> None:
        """Of one form there are two batches in memory, and a read beyond each."""
        connection, rest = self.stuck()
        for _ in range(3):
            self.assertLess(self.unwritten.size, 2 * (WRITE_BATCH_BYTES + READ) + 10_000)
            self.threads.step()
            rest = self.send(connection, rest)
        self.check_gone([connection])

    def test_small(self) -> None:
        """A small form is answered when it is on the disk, by one call."""
        connection = self.begin(SMALL)
        connection.send(SMALL)
        self.assertEqual((connection.received, len(self.threads.waiting)), (b"", 1))
        self.threads.step()
        self.assertEqual(connection.answer().status, 200)
        self.assertEqual(self.threads.waiting, [])

    def test_not_too_slow(self) -> None:
        """The time in which we do not read is ours; the client's goes on after it."""
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

    def test_pauses_do_not_help_the_slow(self) -> None:
        """A client is no faster for a disk that makes it pause all the time."""
        self.unwritten.size = 2**30
        connection = self.begin()
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
        self.unwritten.size -= 2**30
        self.check_gone([connection])

    def test_client_goes(self) -> None:
        """A client that goes while a thread writes leaves nothing, when the thread has."""
        connection, _ = self.stuck()
        small = self.begin(SMALL)
        small.send(SMALL)
        for each in (connection, small):
            each.lose()
        self.assertGreater(self.spool.used, 0)
        self.check_gone()
        self.assertEqual(self.service.world.spawn.children, [])

    def test_disk_fails(self) -> None:
        """503 for who is still sending, and what comes then is thrown away; and for the small."""
        connection, rest = self.stuck()
        small = self.begin(SMALL)
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

    def test_stop(self) -> None:
        """A daemon that stops says so at once, also to who waits for the disk."""
        connection, rest = self.stuck()
        self.successResultOf(Deferred.fromCoroutine(self.service.registry.drain_and_close()))
        connection.channel.drain_connection()
        self.check_raw(connection.answer(), 503)
        self.assertEqual(self.send(connection, rest), b"")
        self.service.reactor.advance(6)
        self.check_gone([connection])

    def test_last_bytes_while_paused(self) -> None:
        """A body that ends while it is not read is complete, and its client is heeded again."""
        connection, rest = self.stuck()
        connection.send(rest)  # as TLS may, of what it has read before
        self.assertEqual(connection.transport.producerState, "producing")
        self.service.reactor.advance(10 * WINDOW)
        self.assertEqual(connection.received, b"")
        self.threads.finish()
        self.assertEqual(connection.answer().status, 200)
