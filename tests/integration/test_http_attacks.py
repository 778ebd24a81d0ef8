"""Clients that mean harm, each on real sockets; beside them the daemon serves honest ones."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from tests.integration.harness import DaemonTestCase, until
from tests.integration.raw import Connection
from tests.integration.uploads import MIB

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

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


class ManyTests(HoldingTestCase):
    configuration = """
        [repositories]
        protocols = ["file"]
        [http]
        connections = 40
        connections_per_address = 20
        """

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
