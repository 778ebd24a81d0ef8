"""Clients that mean harm, each on real sockets; beside them the daemon serves honest ones."""

from __future__ import annotations

import json
import os
import socket
import time
from hashlib import sha256
from pathlib import Path

from tests.integration.client import text
from tests.integration.harness import DaemonTestCase, until
from tests.integration.raw import Connection, body_of, head_of, part

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

MIB = 2**20

_HELD = {"01", "08"}  # ESTABLISHED and CLOSE_WAIT: the server has not closed it


def peers(port: int) -> set[int]:
    """Return the ports from which there are connections to one, as far as it has closed none."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    ends = ((local[-4:], remote[-4:]) for _, local, remote, held, *_ in fields if held in _HELD)
    return {int(remote, 16) for local, remote in ends if int(local, 16) == port}


class ClientAttacks(DaemonTestCase):
    configuration = f"""
        [repositories]
        protocols = ["file"]
        [limits]
        request_body = {34 * MIB}
        [http]
        connections = 40
        connections_per_address = 20
        """

    async def test_unread_responses_take_little_memory(self) -> None:
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

    async def test_large_form_arrives_exactly_and_takes_little_memory(self) -> None:
        content = os.urandom(MIB) * 30
        small = self.daemon.memory
        fields = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": "sha256sum <$SUBMISSION_FILE_SOURCE",
        }
        parts = [part(name, value.encode()) for name, value in fields.items()]
        body = body_of([*parts, part("submission[source]", content, "large")])
        with Connection(self.daemon.port) as connection:
            connection.send(head_of(len(body)) + body)
            identifier = json.loads(connection.answer().body)["evaluation_id"]
        self.assertLess(self.daemon.memory - small, 20 * MIB)
        printed = text(await self.client.follow(identifier))
        self.assertEqual(printed, f"{sha256(content).hexdigest()}  -\n")

    async def test_form_over_the_limit_is_refused_before_its_end(self) -> None:
        for headers in ((), ("Expect: 100-continue",)):
            with Connection(self.daemon.port) as connection:
                connection.send(head_of(60 * MIB, *headers))
                connection.send_until_answered(b"x" * (60 * MIB))
                self.assertEqual(connection.answer().problem(413)["limit"], 34 * MIB)

    async def test_connections_are_bounded_in_total(self) -> None:
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
