"""`web.streams`: handshakes, what clients send, and the ends of connections."""

from __future__ import annotations

import base64
from typing import Any

from twisted.internet.interfaces import IHalfCloseableDescriptor
from zope.interface import alsoProvides

from tawebeval.config import CallerSettings, Configuration
from tawebeval.web.auth import EVENTS_ROUTE
from tests.cases.web import StreamTestCase
from tests.fakes.clients import Answer
from tests.fakes.streams import KEY, UPGRADE, SocketFollower

PING, PONG, CLOSE, TEXT, BINARY, MORE = 9, 10, 8, 1, 2, 0


class SocketTestCase(StreamTestCase):
    def open(self, printed: bytes = b"", **headers: str) -> SocketFollower:
        self.identifier = self.evaluate(printed)
        follower: SocketFollower = self.follow(SocketFollower, self.identifier, **headers)
        return follower


class HandshakeTests(SocketTestCase):
    def test_websocket_is_counted_with_its_status_when_over(self) -> None:
        follower = self.open()
        counted = self.service.site.request_log.response_counts
        self.assertNotIn(EVENTS_ROUTE, [route for _, route, _ in counted])
        follower.connection.lose()
        self.assertEqual(counted["GET", EVENTS_ROUTE, 101], 1)

    def test_malformed_handshake_is_refused_with_the_version(self) -> None:
        identifier = self.evaluate()
        keyless = {name: value for name, value in UPGRADE.items() if not name.endswith("Key")}
        kind = type("Keyless", (SocketFollower,), {"hello": lambda self: keyless})
        for refused, change in (
            (kind, {}),
            (SocketFollower, {"Connection": ""}),
            (SocketFollower, {"Connection": "keep-alive"}),
        ):
            follower = self.follow(refused, identifier, **change)
            self.assertEqual(follower.answer.status, 400)
            self.check_problem(follower.answer)
            self.assertEqual(follower.answer.headers["sec-websocket-version"], "13")
        self.check_nothing_left(identifier)

    def test_unsupported_websocket_version_is_426_with_the_supported_one(self) -> None:
        identifier = self.evaluate()
        for version in ("", "8", "12", "8, 13", "x"):
            follower = self.follow(SocketFollower, identifier, Sec_WebSocket_Version=version)
            answer = follower.answer
            self.assertEqual(answer.status, 426, version)
            self.check_problem(answer)
            self.assertEqual(
                answer.json()["message"],
                f"Sec-WebSocket-Version: '{version}' is not supported; supported: 13",
            )
            self.assertEqual(answer.headers["sec-websocket-version"], "13")
            self.assertEqual(answer.headers["upgrade"], "websocket")
            self.assertEqual(answer.headers["connection"], "Upgrade")
        self.check_nothing_left(identifier)

    def test_websocket_key_is_refused_unless_it_encodes_16_bytes(self) -> None:
        identifier = self.evaluate()
        short, long = (base64.b64encode(bytes(size)).decode() for size in (15, 17))
        for key in ("", "abc", short, long, f"{KEY}=", KEY.replace("d", "-"), f"{KEY}, {KEY}"):
            follower = self.follow(SocketFollower, identifier, Sec_WebSocket_Key=key)
            self.assertEqual(follower.answer.status, 400, key)
            self.check_problem(follower.answer)
            detail = follower.answer.json()["detail"]
            self.assertIn(f"Sec-WebSocket-Key '{key}' is not the base64", detail)
            self.assertEqual(follower.answer.headers["sec-websocket-version"], "13")
        for key in ("/+" * 11 + "==", base64.b64encode(b"\xff" * 16).decode()):
            follower = self.follow(SocketFollower, identifier, Sec_WebSocket_Key=key)
            self.assertEqual(follower.answer.status, 101, key)
            self.check_nothing_left(identifier, follower)

    def test_websocket_opens_with_any_valid_upgrade_and_any_accept_header(self) -> None:
        for headers in (
            *({"Upgrade": each} for each in ("h2c, websocket", "WebSocket,h2c", ", websocket ,")),
            {"Upgrade": "WebSocket", "Connection": "keep-alive, Upgrade"},
            {"Accept": "text/html"},
        ):
            self.assertEqual(self.open(b"a\n", **headers).payloads, ["a"])
            self.finish()
        identifier = self.evaluate(b"a\n")
        lines = [f"{name}: {value}" for name, value in UPGRADE.items()]
        lines += ["Upgrade: h2c", "Connection: keep-alive", "Host: localhost"]
        connection = self.connect()
        start = f"GET /evaluation/{identifier}/events HTTP/1.1"
        connection.send("\r\n".join([start, *lines, "", ""]).encode())
        connection.settle()
        self.assertEqual(connection.received.split(b"\r\n")[0], b"HTTP/1.1 101 Switching Protocols")

    def test_other_upgrade_is_ignored(self) -> None:
        identifier = self.evaluate()
        follower = self.follow(SocketFollower, identifier, Upgrade="h2c")
        self.assertEqual(follower.answer.status, 200)
        self.assertEqual(follower.answer.headers["content-type"], "application/json")

    def test_head_is_no_websocket(self) -> None:
        connection = self.connect()
        path = f"/evaluation/{self.evaluate()}/events"
        connection.request(f"HEAD {path}", **{k.replace("-", "_"): v for k, v in UPGRADE.items()})
        self.assertEqual(connection.answer("HEAD").status, 200)


class OriginTests(SocketTestCase):
    def test_page_of_any_origin_opens_a_websocket_by_default(self) -> None:
        for origin in ("https://elsewhere.example", "null"):
            self.assertEqual(self.open(b"a\n", Origin=origin).payloads, ["a"])
            self.finish()


class NamedOriginTests(SocketTestCase):
    configuration = Configuration(callers=CallerSettings(origins=("https://judge.example.org",)))

    def check(self, answer: Answer) -> None:
        """Hold nothing: what is promised of every answer is not so here."""

    def test_only_own_pages_named_origins_and_programs_open_a_websocket(self) -> None:
        for headers, allowed in (
            ({}, True),
            ({"Origin": "https://judge.example.org"}, True),
            ({"Origin": "http://localhost"}, True),
            ({"Origin": "https://elsewhere.example"}, False),
            ({"Origin": "https://judge.example.org.make_sandboxed_view.example"}, False),
            ({"Origin": "null"}, False),
        ):
            follower = self.open(b"a\n", **headers)
            if allowed:
                self.assertEqual(follower.payloads, ["a"])
            else:
                self.assertEqual(follower.answer.status, 403, headers)
                self.assertEqual(
                    follower.answer.headers["content-type"], "application/problem+json"
                )
            self.finish()


class ClientTests(SocketTestCase):
    def test_messages_of_the_client_change_nothing(self) -> None:
        follower = self.open()
        follower.send(TEXT, b'{"acknowledge": 1}')
        follower.send(TEXT, b"hel", final=False)
        follower.send(MORE, b"lo")
        follower.send(BINARY, b"\xff" * 1000)
        follower.send(PONG, b"unasked")
        self.print(b"a\n")
        self.assertEqual([opcode for opcode, _ in follower.frames], [TEXT])

    def test_one_turn_reads_few_frames(self) -> None:
        self.assertEqual(self.open().connection.transport.bufferSize, 1024)

    def test_frames_of_clients_are_parsed_in_the_turns_of_streams(self) -> None:
        follower = self.open()
        connection = follower.connection
        connection.send(bytes([0x80 | PING, 0x81]) + bytes(4) + b"x")
        self.assertEqual(follower.frames, [])
        self.assertEqual(connection.transport.producerState, "paused")
        self.turn()
        self.assertEqual(follower.frames, [(PONG, b"x")])
        self.assertEqual(connection.transport.producerState, "producing")

    def test_frames_of_a_client_that_has_gone_are_dropped(self) -> None:
        follower = self.open()
        follower.connection.send(bytes([0x80 | PING, 0x80]) + bytes(4))
        follower.lose()
        self.turn()
        self.assertEqual(follower.frames, [])
        self.check_nothing_left(self.identifier)

    def test_quiet_client_is_pinged(self) -> None:
        follower = self.open()
        for count in range(1, 4):
            self.service.reactor.advance(14.9)
            self.turn()
            self.assertEqual(len(follower.frames), count - 1)
            self.service.reactor.advance(0.1)
            self.turn()
            self.assertEqual(follower.frames[-1], (PING, b""))
            follower.send(PONG)

    def test_websocket_closes_after_the_client_sends_over_64_kib(self) -> None:
        for opcode, size, final in ((TEXT, 60_000, True), (TEXT, 1000, False), (PONG, 100, True)):
            follower = self.open()
            sent = 0
            while follower.code is None and sent < 99_999:
                follower.send(opcode if final or not sent else MORE, b"x" * size, final)
                sent += size
            self.assertGreater(sent, 60_000)
            self.assertLess(sent, 65_536 + size)
            self.assertEqual(follower.code, 1009)
            self.assertTrue(follower.connection.closed)
            self.check_nothing_left(self.identifier, follower)
            self.finish()

    def test_malformed_frame_closes_with_1002_and_invalid_utf_8_with_1007(self) -> None:
        for opcode, content, code in (
            (TEXT, b"\xff", 1007),
            (3, b"", 1002),
            (PING, b"x" * 126, 1002),
        ):
            follower = self.open()
            follower.send(opcode, content)
            self.assertEqual(follower.code, code)
            self.assertTrue(follower.connection.closed)
            self.print(b"a\n")
            self.assertEqual(follower.events, [])
            follower.lose()
            self.finish()

    def test_close_is_answered_and_nothing_is_sent_after_it(self) -> None:
        follower = self.open(b"a\n")
        follower.send(CLOSE, (1001).to_bytes(2, "big"))
        self.assertEqual(follower.code, 1001)
        self.assertTrue(follower.connection.closed)
        self.print(b"b\n")
        self.service.reactor.advance(15)
        self.turn()
        self.assertEqual([opcode for opcode, _ in follower.frames], [TEXT, CLOSE])
        self.check_nothing_left(self.identifier, follower)

    def test_slow_client_can_close(self) -> None:
        follower = self.open()
        follower.full = True
        self.print(b"a\n" * 5000)
        count = len(follower.events)
        follower.send(CLOSE)
        follower.send(TEXT, b"more")
        follower.take()
        self.assertEqual(len(follower.events), count)
        self.assertTrue(follower.connection.closed)
        self.service.reactor.advance(100)
        self.assertTrue(follower.connection.aborted)
        self.check_nothing_left(self.identifier, follower)


class EndTests(SocketTestCase):
    def test_daemon_half_closes_after_the_close_frame_of_the_client(self) -> None:
        follower = self.open(b"a\n")
        transport: Any = follower.connection.transport
        alsoProvides(transport, IHalfCloseableDescriptor)
        ended = []
        transport.loseWriteConnection = lambda: ended.append(True)
        self.finish()
        self.assertEqual((follower.code, ended), (1000, []))
        follower.send(PING)
        self.assertEqual(ended, [])
        follower.send(CLOSE, (1000).to_bytes(2, "big"))
        self.assertEqual(ended, [True])
        self.assertFalse(follower.connection.closed)
        self.assertEqual([opcode for opcode, _ in follower.frames], [TEXT, TEXT, CLOSE])
        self.service.reactor.advance(60)
        self.assertTrue(follower.connection.aborted)

    def test_connection_is_closed_in_time_if_the_client_does_not_answer_the_close(self) -> None:
        follower = self.open(b"a\n")
        self.finish()
        self.assertEqual(follower.code, 1000)
        self.assertFalse(follower.connection.closed)
        self.service.reactor.advance(self.service.configuration.http.rate_window_seconds + 1)
        self.assertTrue(follower.connection.closed)
        self.check_nothing_left(self.identifier, follower)

    def test_client_that_sends_over_64_kib_after_the_end_is_cut_off(self) -> None:
        follower = self.open(b"a\n")
        self.finish()
        for _ in range(2):
            follower.send(TEXT, b"x" * 40_000)
        self.assertTrue(follower.connection.closed)
        self.check_nothing_left(self.identifier, follower)

    def test_websocket_counts_as_a_connection_until_it_is_gone(self) -> None:
        connections = self.service.site
        before = connections.connection_count
        follower = self.open()
        self.assertEqual(connections.connection_count, before + 1)
        follower.lose()
        self.assertEqual(connections.connection_count, before)
