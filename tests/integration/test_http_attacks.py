"""Clients that take no answer, on real sockets; beside them the daemon serves honest ones."""

from __future__ import annotations

import socket
import time

from tests.integration.harness import DaemonTestCase
from tests.integration.raw import Connection

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

MIB = 2**20


class ClientAttacks(DaemonTestCase):
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
            with Connection(self.daemon.port) as honest:
                self.assertEqual(honest.ask(HEALTH).code, 200)
            self.assertLess(self.daemon.memory - memory, 100 * MIB)
