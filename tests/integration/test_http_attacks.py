"""Clients that mean harm, each on real sockets; beside them the daemon serves honest ones."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from tawebeval.config import HttpSettings
from tawebeval.web.server.channel import LINGER_SECONDS
from tests.cases.patience import PATIENCE
from tests.integration.harness import DaemonTestCase, until
from tests.integration.raw import BOUNDARY, Connection, body_of, chunked, head_of, part
from tests.integration.uploads import MIB, UploadTestCase

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

SECONDS = HttpSettings.rate_window_seconds  # that slow clients have

_HELD = {"01", "08"}  # ESTABLISHED and CLOSE_WAIT: the server has not closed it


def peers(port: int) -> set[int]:
    """Return the ports from which there are connections to one, as far as it has closed none."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    ends = ((local[-4:], remote[-4:]) for _, local, remote, held, *_ in fields if held in _HELD)
    return {int(remote, 16) for local, remote in ends if int(local, 16) == port}


class HoldingTestCase(DaemonTestCase):
    def connect(self) -> Connection:
        """Return a connection that is closed after the test."""
        connection = Connection(self.daemon.port)
        self.addCleanup(connection.close)
        return connection

    def ask_health(self) -> int:
        """Return the status that an honest client gets."""
        with Connection(self.daemon.port) as honest:
            return honest.ask(HEALTH).code


class SlowTests(HoldingTestCase):
    async def test_a_body_that_trickles_is_cut_off(self) -> None:
        began = time.monotonic()
        connection = self.connect()
        connection.send(head_of(MIB) + part("submission[s]", b"x", "s")[:-5])
        while not connection.has_come(0.1):
            self.assertLess(time.monotonic() - began, SECONDS + PATIENCE)
            connection.send(b"x")
        connection.answer().problem(408)
        await until(lambda: not list((self.daemon.state / "uploads").iterdir()), "it is removed")
        self.assertTrue(connection.ended)
        # What it sends is thrown away, for a while.
        self.assertGreater(time.monotonic() - began, SECONDS + LINGER_SECONDS)

    async def test_answers_that_nobody_reads_take_little_memory(self) -> None:
        line = "0123456789012345678901234567890123456789"
        identifier = await self.begin(f"yes {line} | head -c 2500000; sleep 600")
        url = f"/evaluation/{identifier}/events"

        async def grown() -> bool:
            return bool((await self.client.status(identifier))["buffered_bytes"] > 2_400_000)

        while not await grown():
            time.sleep(0.05)
        memory = self.daemon.memory
        for version in ("1.1", "1.0"):
            for _ in range(3):
                one = socket.socket()
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", self.daemon.port))
                self.addCleanup(one.close)
                one.sendall(f"GET {url} HTTP/{version}\r\n\r\n".encode() * 200)
            self.assertEqual(self.ask_health(), 200)
            self.assertLess(self.daemon.memory - memory, 100 * MIB)

    async def test_a_long_head_can_read_its_answer(self) -> None:
        for start, code in ((b"GET /", 414), (b"GET / HTTP/1.1\r\nX: ", 431)):
            connection = self.connect()
            connection.send(start + b"x" * 3 * MIB)
            connection.answer().problem(code)
            self.assertTrue(connection.ended)


class ManyTests(HoldingTestCase):
    configuration = """
        [repositories]
        protocols = ["file"]
        [http]
        connections = 40
        connections_per_address = 20
        """

    async def test_an_address_has_so_many_connections(self) -> None:
        held = [self.connect() for _ in range(20)]
        answer = self.connect().ask(HEALTH)
        answer.problem(503)
        self.assertEqual(answer.headers["retry-after"], "5")
        other = socket.create_connection(
            ("127.0.0.1", self.daemon.port), PATIENCE, source_address=("127.0.0.2", 0)
        )
        with other:
            other.sendall(HEALTH)
            self.assertTrue(other.recv(1000).startswith(b"HTTP/1.1 200"))
        for connection in held:
            connection.close()
        await until(lambda: self.ask_health() == 200, "they are given back")

    async def test_connections_have_an_end_in_all(self) -> None:
        flood = [socket.socket() for _ in range(300)]
        for one in flood:
            self.addCleanup(one.close)
            one.connect_ex(("127.0.0.1", self.daemon.port))  # it may be ended at once
        ports = {one.getsockname()[1] for one in flood}
        # Some more than are served are told that they are too many.
        await until(lambda: len(ports & peers(self.daemon.port)) <= 20 + 64, "most are ended")
        for one in flood:
            one.close()
        await until(lambda: not ports & peers(self.daemon.port), "all are gone")


class MultipartTests(UploadTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.post([part("x", b"")])  # what is imported and allocated once is there
        self.memory = self.daemon.memory

    async def check(self) -> None:
        """Hold that nothing is left, little memory was taken, and an honest form is served."""
        self.assertLess(self.daemon.memory - self.memory, 30 * MIB)
        uploads = self.daemon.state / "uploads"
        await until(lambda: not list(uploads.iterdir()), "nothing is left")
        self.assertEqual(len(await self.run_command("echo well")), 2)

    def bomb(self, code: int, body: bytes, *, content_type: str = "") -> None:
        for in_chunks in (False, True):
            head = head_of(None if in_chunks else len(body))
            if in_chunks:
                head = head[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
            if content_type:
                usual = f"multipart/form-data; boundary={BOUNDARY}"
                head = head.replace(usual.encode(), content_type.encode())
            with Connection(self.daemon.port) as connection:
                connection.send(head)
                try:
                    connection.send(chunked(body, 60_000) if in_chunks else body)
                except (BrokenPipeError, ConnectionResetError):
                    self.fail("refused without an answer")
                connection.answer().problem(code)

    async def test_parts_without_number_are_refused(self) -> None:
        for one in (part("x", b""), part("submission[s]", b"x", "s"), part("x", b"", "x")):
            self.bomb(413 if b"[" not in one else 400, body_of([one] * 100_000))
        names = [part(f"submission[s{number}]", b"x", "s") for number in range(10_000)]
        self.bomb(413, body_of(names))
        await self.check()

    async def test_headers_without_end_are_refused(self) -> None:
        start = f"--{BOUNDARY}\r\n".encode()
        self.bomb(413, start + b"X: y\r\n" * MIB)
        self.bomb(413, start + b"X: " + b"y" * 8 * MIB)
        self.bomb(413, start + b"X" * 8 * MIB)
        name = b'Content-Disposition: form-data; name="'
        self.bomb(413, start + name + b"x" * 8 * MIB + b'"\r\n\r\n')
        self.bomb(413, start + name + b'x"' + b';a="b"' * 600 + b"\r\n\r\n")
        await self.check()

    async def test_wrong_boundaries_are_refused(self) -> None:
        body = body_of([part("x", b"y")])
        for content_type in (
            "multipart/form-data",
            "multipart/form-data; boundary=",
            'multipart/form-data; boundary=""',
            "multipart/form-data; boundary=other",
            f"multipart/form-data; boundary={'x' * 900}",
            "multipart/form-data; boundary=" + "; boundary=".join(map(str, range(60))),
        ):
            self.bomb(400, body, content_type=content_type)
        for size in (1000, 10_000):
            self.bomb(431, body, content_type=f"multipart/form-data; boundary={'x' * size}")
        self.bomb(400, b"x" * 30 * MIB)
        self.bomb(400, b"\r\n" * 10 * MIB)
        self.bomb(400, f"--{BOUNDARY}".encode() * MIB)
        await self.check()

    async def test_part_without_an_end_is_refused(self) -> None:
        self.bomb(413, part("submission[s]", b"x" * 35 * MIB, "s"))
        self.bomb(413, part("evaluator_cmd", b"x" * 8 * MIB))
        self.bomb(400, part("x", b"x" * 8 * MIB))
        await self.check()
