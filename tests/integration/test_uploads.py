"""Forms by treq and byte by byte: what arrives of them, and what is left of those that do not."""

from __future__ import annotations

import os
from io import BytesIO

from twisted.internet import reactor

from tests.integration.harness import until
from tests.integration.raw import Connection, head_of, part
from tests.integration.uploads import DESCRIBE, MIB, UploadTestCase, described


class UploadTests(UploadTestCase):
    async def test_large_file_arrives_exactly_in_little_memory(self) -> None:
        content = os.urandom(MIB) * 30
        small = self.daemon.memory
        identifier = await self.client.evaluate(
            self.repository.url, self.commit, DESCRIBE, files=[("s", "large", content)]
        )
        self.assertLess(self.daemon.memory - small, 20 * MIB)
        self.assertEqual(await self.describe(identifier), described(("s", "large", content)))

    async def test_over_the_limit_is_refused_before_it_is_read(self) -> None:
        with Connection(self.daemon.port) as connection:
            problem = connection.ask(head_of(34 * MIB + 1)).problem(413)
            self.assertEqual(problem["limit"], 34 * MIB)
        content = BytesIO(b"x" * 40 * MIB)
        answer = await self.client.request(
            "POST", "/evaluate", files=[("submission[s]", ("s", "text/plain", content))]
        )
        answer.problem(413)
        # treq goes on sending as long as it is let.
        await until(lambda: content.closed or content.tell() == 40 * MIB, "treq has sent all")
        await until(
            lambda: not any("Cooperator" in str(call) for call in reactor.getDelayedCalls()),
            "treq does nothing more",
        )

    async def test_a_dropped_connection_leaves_nothing(self) -> None:
        uploads = self.daemon.state / "uploads"
        start = b"".join([*self.fields(), part("submission[s]", b"x" * MIB, "s")])
        for framing in (head_of(30 * MIB), head_of(30 * MIB, "Idempotency-Key: k")):
            with Connection(self.daemon.port) as connection:
                connection.send(framing + start)
                await until(lambda: list(uploads.glob("*/submission/s/s")), "a part is there")
            await until(lambda: not list(uploads.iterdir()), "nothing is left")
