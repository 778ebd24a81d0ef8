"""Output beyond the memory: evaluators go on without readers, and nothing is lost."""

from __future__ import annotations

from hashlib import sha256

from tests.integration.client import python, text
from tests.integration.harness import DaemonTestCase

MIB = 2**20
LINES = 100_000
FILL = "x" * 1000

FLOOD = f"""
import sys
for i in range({LINES}):
    sys.stdout.write(f"{{i:08d}}" + {FILL!r} + "\\n")
"""


class FloodTests(DaemonTestCase):
    configuration = """
        [repositories]
        protocols = ["file"]
        [buffers]
        total = 8_388_608
        """

    async def test_100_mib_of_unread_output_are_buffered_on_disk_and_read_unchanged(self) -> None:
        small = self.daemon.memory
        identifier = await self.begin(python(FLOOD))
        status = await self.client.ended(identifier)
        self.assertEqual(status["state"], "finished")
        self.assertGreater(status["buffered_bytes"], 100 * MIB * 0.95)
        self.assertLess(self.daemon.memory - small, 48 * MIB)
        digest, cursor, most = sha256(), "0", 0
        while cursor is not None:
            page = await self.client.page(identifier, cursor)
            digest.update(text(page["data"]).encode())
            cursor = page["end"]
            most = max(most, self.daemon.memory)
        wanted = sha256()
        for i in range(LINES):
            wanted.update(f"{i:08d}{FILL}\n".encode())
        self.assertEqual(digest.hexdigest(), wanted.hexdigest())
        self.assertLess(most - small, 48 * MIB)
