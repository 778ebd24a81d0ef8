"""`web.websockets`: handshakes, what clients send, and the ends of connections."""

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
    """A WebSocket that is open."""

    def open(self, printed: bytes = b"", **headers: str) -> SocketFollower:
        """Begin an evaluation, and follow it."""
        self.identifier = self.evaluate()
        if printed:
            self.print(printed)
        follower: SocketFollower = self.follow(SocketFollower, self.identifier, **headers)
        return follower


class HandshakeTests(SocketTestCase):
    """Becoming a WebSocket."""

    def test_answer(self) -> None:
        """The answer is that of RFC 6455, section 1.3."""
        follower = self.open()
        start = follower.connection.received.partition(b"\r\n\r\n")[0].split(b"\r\n")
        self.assertEqual(start[0], b"HTTP/1.1 101 Switching Protocols")
        self.assertIn(b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", start)

    def test_counted(self) -> None:
        """It counts when it is over, as what it was."""
        follower = self.open()
        counted = self.service.context.request_log.response_counts
        self.assertNotIn(EVENTS_ROUTE, [route for _, route, _ in counted])
        follower.connection.lose()
        self.assertEqual(counted["GET", EVENTS_ROUTE, 101], 1)

    def test_whatever_it_accepts(self) -> None:
        """`Accept` says nothing about a WebSocket."""
        follower = self.open(b"a\n", Accept="text/html")
        self.assertEqual(follower.payloads, ["a"])

    def test_firefox(self) -> None:
        """`Connection` may have more than one word, and case does not matter."""
        follower = self.open(b"a\n", Connection="keep-alive, Upgrade", Upgrade="WebSocket")
        self.assertEqual(follower.payloads, ["a"])

    def test_broken(self) -> None:
        """A handshake that is broken is refused as a problem, and tells the version."""
        identifier = self.evaluate()
        for change in (
            {"Sec-WebSocket-Version": ""},
            {"Connection": ""},
            {"Connection": "keep-alive"},
        ):
            follower = self.follow(SocketFollower, identifier, **change)
            self.assertEqual(follower.answer.status, 400, change)
            self.check_problem(follower.answer)
            self.assertEqual(follower.answer.headers["sec-websocket-version"], "13")
        self.check_nothing_left(identifier)

    def test_other_versions(self) -> None:
        """One of another version is told which there is (RFC 6455, 4.4; RFC 9110, 15.5.22)."""
        identifier = self.evaluate()
        for version in ("8", "12", "8, 13", "x"):
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

    def test_names_of_hosts(self) -> None:
        """So is one that names a host that cannot be."""
        connection = self.connect()
        lines = "".join(f"{name}: {value}\r\n" for name, value in UPGRADE.items())
        start = f"GET /evaluation/x/events HTTP/1.1\r\nHost: xn--99999999999a\r\n{lines}\r\n"
        connection.send(start.encode())
        answer = connection.answer()
        self.assertEqual(answer.status, 400)
        self.assertEqual(answer.headers["Sec-WebSocket-Version"], "13")
        self.assertNotIn("codec", answer.json()["detail"])

    def test_without_a_key(self) -> None:
        """So is one without a key."""
        identifier = self.evaluate()
        kind = type("Keyless", (SocketFollower,), {"hello": lambda self: _without_key()})
        follower = self.follow(kind, identifier)
        self.assertEqual(follower.answer.status, 400)

    def test_keys(self) -> None:
        """So is one whose key is not 16 bytes in base64 (RFC 6455, 4.2.1), or that has two."""
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
            follower.lose()
        self.check_nothing_left(identifier)

    def test_among_others(self) -> None:
        """It may be one of several protocols that are offered (RFC 9110, 7.8), in many lines."""
        for upgrade in ("h2c, websocket", "WebSocket,h2c", ", websocket ,"):
            follower = self.open(b"a\n", Upgrade=upgrade)
            self.assertEqual(follower.payloads, ["a"])
            self.finish()
        identifier = self.evaluate()
        self.print(b"a\n")
        lines = [f"{name}: {value}" for name, value in UPGRADE.items()]
        lines += ["Upgrade: h2c", "Connection: keep-alive", "Host: localhost"]
        connection = self.connect()
        start = f"GET /evaluation/{identifier}/events HTTP/1.1"
        connection.send("\r\n".join([start, *lines, "", ""]).encode())
        connection.settle()
        self.assertEqual(connection.received.split(b"\r\n")[0], b"HTTP/1.1 101 Switching Protocols")

    def test_another_upgrade(self) -> None:
        """To another protocol nothing is upgraded: the request is answered as any."""
        identifier = self.evaluate()
        follower = self.follow(SocketFollower, identifier, Upgrade="h2c")
        self.assertEqual(follower.answer.status, 200)
        self.assertEqual(follower.answer.headers["content-type"], "application/json")

    def test_head(self) -> None:
        """HEAD does not become a WebSocket."""
        connection = self.connect()
        path = f"/evaluation/{self.evaluate()}/events"
        connection.request(f"HEAD {path}", **{k.replace("-", "_"): v for k, v in UPGRADE.items()})
        self.assertEqual(connection.answer("HEAD").status, 200)


def _without_key() -> dict[str, str]:
    return {name: value for name, value in UPGRADE.items() if not name.endswith("Key")}


class OriginTests(SocketTestCase):
    """Whose pages may open one."""

    def test_any(self) -> None:
        """Where every page may read answers, every page may."""
        for origin in ("https://elsewhere.example", "null"):
            self.assertEqual(self.open(b"a\n", Origin=origin).payloads, ["a"])
            self.finish()


class NamedOriginTests(SocketTestCase):
    """Where origins are named."""

    configuration = Configuration(callers=CallerSettings(origins=("https://judge.example.org",)))

    def check(self, answer: Answer) -> None:
        """Hold nothing: what is promised of every answer is not so here."""

    def test_origins(self) -> None:
        """The pages that are named may, our own, and programs; others learn no event."""
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
    """What clients send."""

    def test_messages_are_passed_over(self) -> None:
        """What a client says makes no difference."""
        follower = self.open()
        follower.send(TEXT, b"hello")
        follower.send(TEXT, b"hel", final=False)
        follower.send(MORE, b"lo")
        follower.send(BINARY, b"\xff" * 1000)
        follower.send(PONG, b"unasked")
        self.print(b"a\n")
        self.assertEqual([opcode for opcode, _ in follower.frames], [TEXT])

    @property
    def oldest(self) -> int:
        """The cursor before the oldest event that is kept."""
        return self.service.registry.records[self.identifier].events.log.begin_cursor

    def test_acknowledgements(self) -> None:
        """What a client says that it has counts; nothing else that it says has a meaning."""
        follower = self.open()
        follower.send(TEXT, b'{"acknowledge": 0}')
        self.print(b"a\nb\n")
        for said, taken in (
            (b"hello", 0),
            (b'{"acknowledge": 1}', 1),
            (b'{"acknowledge": 0}', 1),
            (b'{"acknowledge": -1}', 1),
            (b'{"acknowledge": 1.5}', 1),
            (b'{"acknowledge": "3"}', 1),
            (b"[" * 3000, 1),
            (b"3", 1),
            (b'{"more": null, "acknowledge": 3}', 3),
        ):
            follower.send(TEXT, said)
            self.assertEqual(self.oldest, taken, said)
        self.assertIsNone(follower.code)

    def test_acknowledged_from_a_cursor(self) -> None:
        """The messages are counted on each WebSocket anew."""
        self.identifier = self.evaluate()
        self.print(b"a\nb\n")
        follower: SocketFollower = self.follow(SocketFollower, self.identifier, "?after=1&skip=1")
        follower.send(TEXT, b'{"acknowledge": 1}')
        self.print(b"c\nd\n")
        follower.send(TEXT, b'{"acknowledge": 2}')
        self.assertEqual(self.oldest, 4)

    def test_acknowledged_too_much(self) -> None:
        """Who says to have what was not sent has lost count, and the WebSocket is closed."""
        follower = self.open(b"a\nb\n")
        follower.send(TEXT, b'{"acknowledge": 4}')
        self.assertEqual(follower.code, 1008)

    def test_acknowledged_after_the_end(self) -> None:
        """What comes when all was sent makes no difference."""
        follower = self.open(b"a\n")
        self.finish()
        self.assertEqual(follower.code, 1000)
        follower.send(TEXT, b'{"acknowledge": 99}')
        self.assertEqual(follower.code, 1000)

    def test_any_number_of_acknowledgements(self) -> None:
        """They do not count as what a client says for nothing."""
        follower = self.open(b"a\n")
        for _ in range(5000):
            follower.send(TEXT, b'{"acknowledge": 1}')
        self.assertIsNone(follower.code)

    def test_bytes_of_a_turn(self) -> None:
        """A turn of the reactor reads few frames, for each ping has an answer of its own."""
        self.assertEqual(self.open().connection.transport.bufferSize, 1024)

    def test_ping(self) -> None:
        """Its pings are answered."""
        follower = self.open()
        follower.send(PING, b"x")
        self.assertEqual(follower.frames, [(PONG, b"x")])

    def test_pinged(self) -> None:
        """It is pinged when there was nothing to send for some time."""
        follower = self.open()
        for count in range(1, 4):
            self.service.reactor.advance(14.9)
            self.turn()
            self.assertEqual(len(follower.frames), count - 1)
            self.service.reactor.advance(0.1)
            self.turn()
            self.assertEqual(follower.frames[-1], (PING, b""))
            follower.send(PONG)

    def test_too_much(self) -> None:
        """More than 64 KiB in all close it: as one message, in pieces, or by control frames."""
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
            follower.lose()
            self.check_nothing_left(self.identifier)
            self.finish()

    def test_nonsense(self) -> None:
        """What is no frame, and text that is not UTF-8, close it with the code for that."""
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

    def test_close(self) -> None:
        """A client's close is answered with its code, and nothing is sent after it."""
        follower = self.open(b"a\n")
        follower.send(CLOSE, (1001).to_bytes(2, "big"))
        self.assertEqual(follower.code, 1001)
        self.assertTrue(follower.connection.closed)
        self.print(b"b\n")
        self.service.reactor.advance(15)
        self.turn()
        self.assertEqual([opcode for opcode, _ in follower.frames], [TEXT, CLOSE])
        follower.lose()
        self.check_nothing_left(self.identifier)

    def test_close_in_quiet(self) -> None:
        """Nor is it pinged after that."""
        follower = self.open()
        follower.send(CLOSE)
        self.service.reactor.advance(15)
        self.turn()
        self.assertEqual([opcode for opcode, _ in follower.frames], [CLOSE])
        follower.lose()
        self.check_nothing_left(self.identifier)

    def test_close_of_a_slow_one(self) -> None:
        """Also in the midst of what it has yet to take, and what is sent then is thrown away."""
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
        follower.lose()
        self.check_nothing_left(self.identifier)


class EndTests(SocketTestCase):
    """The ends of connections."""

    def test_half_closed(self) -> None:
        """After the last message the client's close is waited for; then our half is closed."""
        follower = self.open(b"a\n")
        transport: Any = follower.connection.transport
        alsoProvides(transport, IHalfCloseableDescriptor)
        ended = []
        transport.loseWriteConnection = lambda: ended.append(True)
        self.finish()
        self.assertEqual((follower.code, ended), (1000, []))
        follower.send(TEXT, b'{"acknowledge": 1}')
        follower.send(PING)
        self.assertEqual(ended, [])
        follower.send(CLOSE, (1000).to_bytes(2, "big"))
        self.assertEqual(ended, [True])
        self.assertFalse(follower.connection.closed)
        self.assertEqual([opcode for opcode, _ in follower.frames], [TEXT, TEXT, CLOSE])
        self.service.reactor.advance(60)
        self.assertTrue(follower.connection.aborted)

    def test_no_answer(self) -> None:
        """A client that does not answer the close frame has as long as any has for an answer."""
        follower = self.open(b"a\n")
        self.finish()
        self.assertEqual(follower.code, 1000)
        self.assertFalse(follower.connection.closed)
        self.service.reactor.advance(self.service.configuration.http.rate_window_seconds + 1)
        self.assertTrue(follower.connection.closed)
        follower.lose()
        self.check_nothing_left(self.identifier)

    def test_too_much_after_the_end(self) -> None:
        """A client that does not answer, but goes on and on, is not heard to the end."""
        follower = self.open(b"a\n")
        self.finish()
        for _ in range(2):
            follower.send(TEXT, b"x" * 40_000)
        self.assertTrue(follower.connection.closed)
        follower.lose()
        self.check_nothing_left(self.identifier)

    def test_counted(self) -> None:
        """It is a connection like any other, until it is gone."""
        connections = self.service.site.connection_limits
        before = connections.connection_count
        follower = self.open()
        self.assertEqual(connections.connection_count, before + 1)
        follower.lose()
        self.assertEqual(connections.connection_count, before)
