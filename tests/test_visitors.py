"""`benchmarks.visitors`: what befalls a client is counted as what it is."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from twisted.trial.unittest import SynchronousTestCase

from benchmarks.visitors import Conversation, Slowly, Visitors
from tests.cases.patience import PATIENCE

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 503 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"
NOTHING = b"HTTP/1.1 204 No Content\r\n\r\n"

Behaviour = Callable[[socket.socket], object]
"""What a server does with a connection, on which a request may have come."""


def reset(connection: socket.socket) -> None:
    """End a connection so that whoever has sent something learns of it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class VisitorsTests(SynchronousTestCase):
    """One visitor, and a server that does one thing after the other."""

    def setUp(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listening.close)
        self.visitors = Visitors(self.connect)
        self.addCleanup(self.visitors.close)
        self.server: list[socket.socket] = []
        self.addCleanup(lambda: [one.close() for one in self.server])
        self.connections = 0
        self.refuse = 0
        self.statuses: list[int] = []

    def connect(self) -> socket.socket:
        """Connect, unless it is to be refused."""
        if self.refuse:
            self.refuse -= 1
            raise ConnectionRefusedError
        self.connections += 1
        made = socket.create_connection(self.listening.getsockname())
        self.server.append(self.listening.accept()[0])
        return made

    def ask(self, request: bytes | Slowly = b"ask", pause: float = 0.01) -> Conversation:
        """Ask twice, and note the answers."""
        for _ in range(2):
            answer = yield request
            assert answer is not None
            self.statuses.append(answer.status)
            yield pause

    def check(self, *behaviours: Behaviour, **fates: int) -> None:
        """Do these things to a visitor, until it has two answers; hold what has befallen it."""
        self.visitors.begin("one", self.ask())
        for behave in (*behaviours, *[lambda one: one.sendall(ANSWER)] * 2):
            if len(self.statuses) == 2:
                break
            self.next_request()
            before = sum(self.visitors.fates.values())
            behave(self.server[-1])
            self.visitors.go_on(
                lambda before=before: sum(self.visitors.fates.values()) > before, PATIENCE
            )
        self.assertEqual(len(self.statuses), 2)
        found = {fate.name.lower(): number for (_, fate), number in self.visitors.fates.items()}
        self.assertEqual(found, {"answered": 2, **fates})

    def next_request(self) -> None:
        """Have a request arrive."""

        def arrived() -> bool:
            if not self.server:
                return False
            try:
                return bool(self.server[-1].recv(100, socket.MSG_DONTWAIT))
            except OSError:
                return False

        self.visitors.go_on(arrived, PATIENCE)

    def test_answered(self) -> None:
        """An answer is one, whatever it says; the connection is kept."""
        self.check()
        self.assertEqual((self.statuses, self.connections), ([200, 200], 1))

    def test_last_answer(self) -> None:
        """After an answer that was the last the next request is on a new connection."""
        self.check(lambda one: one.sendall(LAST))
        self.assertEqual((self.statuses, self.connections), ([503, 200], 2))

    def test_no_body(self) -> None:
        """One without a body ends with its head."""
        self.check(lambda one: one.sendall(NOTHING))
        self.assertEqual(self.statuses, [204, 200])

    def test_unanswered(self) -> None:
        """A connection that is closed before the answer, or within it, has lost the request."""
        self.check(
            lambda one: one.close(),
            lambda one: (one.sendall(ANSWER[:-1]), one.close()),
            unanswered=2,
        )
        self.assertEqual(self.connections, 3)

    def test_reset(self) -> None:
        """So has one that is reset."""
        self.check(reset, reset=1)

    def test_refused(self) -> None:
        """Who cannot connect comes again."""
        self.refuse = 2
        self.check(refused=2)

    def test_closed_while_idle(self) -> None:
        """A connection that is closed between two requests has lost nothing."""
        self.check(lambda one: (one.sendall(ANSWER), one.close()), closed=1)

    def test_slowly(self) -> None:
        """A request in pieces that was lost is sent anew, and nothing of the lost one with it."""
        self.visitors.begin("one", self.ask(Slowly([b"a", b"b", b"c"], 0.1)))
        self.next_request()
        reset(self.server[0])
        received = b""

        def arrived() -> bool:
            nonlocal received
            if len(self.server) > 1:
                try:
                    received += self.server[1].recv(100, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
            return len(received) >= 3

        self.visitors.go_on(arrived, PATIENCE)
        self.assertEqual(received, b"abc")
        self.server[1].sendall(ANSWER)
        self.visitors.go_on(lambda: self.statuses == [200], PATIENCE)
