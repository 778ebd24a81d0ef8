"""`web.server.channel`: the end of all connections, in whatever phase each is."""

from __future__ import annotations

from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IHalfCloseableDescriptor, IReadDescriptor
from zope.interface import alsoProvides

from tests.cases.web import RawTestCase, StreamTestCase
from tests.fakes.clients import Connection, form, head, parts
from tests.fakes.streams import LineFollower, SocketFollower

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
STOPPING = "the daemon is stopping"


class CloseConnectionTests(StreamTestCase, RawTestCase):
    """What each phase of a connection is entitled to."""

    def leave(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.service.site.drain_connections())

    def check_told(self, connection: Connection) -> None:
        """Hold that a request is refused because of the end, and its connection closed."""
        answer = self.check_raw(connection.answer(), 503)
        self.assertIn(STOPPING, answer.json()["detail"])
        self.assertEqual(answer.headers["retry-after"], "5")
        self.assertEqual(answer.headers["connection"], "close")

    def check_over(self, over: Deferred[None], *connections: Connection) -> None:
        """Hold that these are closed, and that it is over when they are gone."""
        for connection in connections:
            self.assertTrue(connection.closed)
            connection.lose()
        self.successResultOf(over)

    def test_drain_without_connections_is_over_at_once(self) -> None:
        connection = self.connect()
        connection.send(HEALTH)
        connection.lose()
        self.successResultOf(self.leave())

    def waiting(self) -> tuple[Connection, Connection]:
        """Return connections without a request: one that never had any, and one that is idle."""
        new, idle = self.connect(), self.connect()
        idle.send(HEALTH)
        answer = idle.answer()
        self.assertEqual((answer.status, answer.headers["Connection"]), (200, None))
        return new, idle

    def test_idle_connection_is_closed_without_an_answer(self) -> None:
        connections = self.waiting()
        over = self.leave()
        self.service.reactor.advance(0.49)
        self.assertEqual([connection.closed for connection in connections], [False] * 2)
        self.service.reactor.advance(0.02)
        for connection in connections:
            self.assertEqual((connection.received, connection.closed), (b"", True))
            self.assertNoResult(over)
            connection.lose()
        self.successResultOf(over)
        self.assertEqual(self.service.reactor.getDelayedCalls(), [])

    def test_request_on_its_way_is_answered(self) -> None:
        connections = self.waiting()
        over = self.leave()
        for connection in connections:
            connection.send(HEALTH)
            answer = connection.answer()
            self.assertEqual((answer.status, answer.headers["Connection"]), (200, "close"))
        self.check_over(over, *connections)

    def test_request_sent_after_the_half_close_is_discarded_without_a_reset(self) -> None:
        connections = self.waiting()
        halves: list[bool] = []
        for connection in connections:
            transport: Any = connection.transport
            alsoProvides(transport, IHalfCloseableDescriptor)
            transport.loseWriteConnection = lambda: halves.append(True)
        over = self.leave()
        self.service.reactor.advance(0.5)
        self.assertEqual(halves, [True, True])
        for connection in connections:
            connection.send(HEALTH)
        self.service.reactor.advance(0.49)
        for connection in connections:
            self.assertEqual((connection.received, connection.closed), (b"", False))
        self.service.reactor.advance(0.02)
        for connection in connections:
            self.assertEqual((connection.closed, connection.aborted), (True, False))
            connection.lose()
        self.successResultOf(over)

    def test_unread_request_in_the_socket_is_answered_at_the_end_of_the_drain(self) -> None:
        connections = self.waiting()
        for connection in connections:
            transport: Any = connection.transport
            alsoProvides(transport, IReadDescriptor)
            transport.doRead = partial(connection.send, HEALTH)
        over = self.leave()
        self.service.reactor.advance(0.5)
        for connection in connections:
            self.assertEqual(connection.answer().status, 200)
        self.check_over(over, *connections)

    def test_incomplete_head_sent_during_the_drain_is_503_after_a_second(self) -> None:
        connection, _ = self.waiting()
        over = self.leave()
        connection.send(HEALTH[:-2])
        self.service.reactor.advance(0.9)
        self.assertEqual(connection.received, b"")
        self.service.reactor.advance(0.2)
        self.check_told(connection)
        connection.lose()
        self.service.reactor.advance(5)
        self.successResultOf(over)

    def test_announcement_closes_idle_connections_and_spares_open_requests(self) -> None:
        identifier = self.evaluate()
        idle, half, asking = self.connect(), self.connect(), self.connect()
        half.send(HEALTH[:-2])
        asking.send(head(f"GET /evaluation/{identifier}/events?wait=30", {}))
        self.service.site.close_idle_connections()
        self.service.reactor.advance(0.5)
        self.assertTrue(idle.closed)
        self.service.reactor.advance(20)
        self.assertFalse(asking.closed)
        self.assertEqual(half.answer().status, 408)
        self.finish()
        self.assertEqual(asking.answer().headers["Connection"], "close")
        self.assertTrue(asking.closed)

    def test_answer_during_the_drain_closes_the_connection(self) -> None:
        identifier = self.evaluate()
        self.service.site.is_draining = True
        for path in ("/health", f"/evaluation/{identifier}/events?wait=0", "/missing"):
            connection = self.connect()
            connection.send(head(f"GET {path}", {}))
            self.assertEqual(connection.answer().headers.get_all("Connection"), ["close"])
            self.assertTrue(connection.closed)
        self.assertEqual(
            self.exchange_bytes(head("GET /health", {"Connection": "close"})).headers.get_all(
                "Connection"
            ),
            ["close"],
        )
        follower = self.follow(SocketFollower, identifier)
        self.print(b"a\n")
        self.assertEqual(follower.payloads, ["a"])
        connection = self.connect()
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "12"}
        connection.send(head(f"GET /evaluation/{identifier}/events", upgrade))
        answer = connection.answer()
        self.assertEqual((answer.status, answer.headers["Connection"]), (426, "Upgrade"))

    def test_incomplete_request_head_is_503_at_the_drain(self) -> None:
        for before in (b"", HEALTH):
            for half in (HEALTH[:5], HEALTH[:-2]):
                connection = self.connect()
                if before:
                    connection.send(before)
                    self.assertEqual(connection.answer().status, 200)
                connection.send(half)
                over = self.leave()
                self.check_told(connection)
                self.check_over(over, connection)
                self.service.site.is_draining = False

    def upload(self) -> tuple[Connection, bytes]:
        """Return a connection on which half a form has come, and the rest of it."""
        body = form(parts(source=b"x" * 5000))
        connection = self.begin_form(len(body))
        connection.send(body[:3000])
        return connection, body[3000:]

    def test_stalled_upload_is_503_and_leaves_nothing(self) -> None:
        connection, _ = self.upload()
        over = self.leave()
        self.check_told(connection)
        self.assertEqual(self.service.leftovers(), [])
        self.assertFalse(connection.closed)
        self.service.reactor.pump([1, 3.9])
        self.assertFalse(connection.aborted)
        self.assertNoResult(over)
        self.service.reactor.advance(0.1)
        self.assertTrue(connection.aborted)
        self.successResultOf(over)

    def test_upload_gets_503_and_its_connection_closes_at_the_end_of_the_body(self) -> None:
        connection, rest = self.upload()
        over = self.leave()
        self.check_told(connection)
        connection.send(rest)
        self.assertEqual((connection.received, connection.closed), (b"", True))
        self.check_over(over, connection)

    def test_upload_refused_before_the_drain_gets_no_second_answer(self) -> None:
        connection, rest = self.upload()
        self.successResultOf(Deferred.fromCoroutine(self.service.registry.drain_and_close()))
        connection.send(rest[:10])
        self.check_told(connection)
        self.assertNoResult(self.leave())
        self.assertEqual(connection.received, b"")

    def test_answer_being_sent_is_completed_and_its_connection_closed(self) -> None:
        identifier = self.evaluate(b"a\n" * 1000)
        connection = self.connect()
        connection.channel.pauseProducing()  # as transports do that are full
        connection.request(f"GET /evaluation/{identifier}/events")
        self.turn()
        over = self.leave()
        self.assertFalse(connection.closed)
        connection.channel.resumeProducing()
        self.assertEqual(connection.answer().status, 200)
        self.check_over(over, connection)

    def test_waiting_poll_is_answered_by_the_end_of_its_evaluation(self) -> None:
        identifier = self.evaluate()
        connection = self.connect()
        connection.send(head(f"GET /evaluation/{identifier}/events?wait=20", {}))
        over = self.leave()
        self.assertEqual((connection.received, connection.closed), (b"", False))
        self.finish()
        self.assertEqual(connection.answer().json()["end"], "end")
        self.check_over(over, connection)

    def test_stream_is_aborted_five_seconds_into_the_drain_if_the_client_reads_nothing(
        self,
    ) -> None:
        identifier = self.evaluate()
        follower = self.follow(LineFollower, identifier)
        follower.full = True
        self.print(b"a\n" * 5000)
        over = self.leave()
        self.service.reactor.pump([1, 3.9])
        self.assertFalse(follower.connection.aborted)
        self.service.reactor.advance(0.1)
        self.assertTrue(follower.connection.aborted)
        self.assertFalse(follower.complete)
        self.successResultOf(over)

    def test_websocket_of_a_running_evaluation_is_closed_with_code_1001(self) -> None:
        identifier = self.evaluate()
        follower = self.follow(SocketFollower, identifier)
        self.print(b"a\n")
        over = self.leave()
        self.turn()
        self.assertEqual((follower.payloads, follower.code), (["a"], 1001))
        follower.send(8, (1001).to_bytes(2, "big"))
        self.assertTrue(follower.connection.closed)
        follower.lose()
        self.successResultOf(over)
        self.check_nothing_left(identifier)

    def test_slow_websocket_gets_the_close_frame_and_no_more_events(self) -> None:
        identifier = self.evaluate()
        follower = self.follow(SocketFollower, identifier)
        follower.full = True
        self.print(b"a\n" * 50_000)
        over = self.leave()
        self.turn()
        follower.take()
        self.turn()
        self.assertEqual((follower.code, follower.frames[-1][0]), (1001, 8))
        self.assertLess(len(follower.payloads), 99_999)
        follower.lose()
        self.successResultOf(over)

    def test_closed_websocket_gets_no_second_close_frame(self) -> None:
        identifier = self.evaluate()
        follower = self.follow(SocketFollower, identifier)
        transport: Any = follower.connection.transport
        alsoProvides(transport, IHalfCloseableDescriptor)
        transport.loseWriteConnection = lambda: None
        self.finish()
        self.assertEqual(follower.code, 1000)
        frames = len(follower.frames)
        over = self.leave()
        self.turn()
        self.assertNoResult(over)
        self.assertEqual(len(follower.frames), frames)
        self.assertFalse(follower.connection.closed)
