"""Callers with tokens, against the real daemon, by treq, curl and byte by byte."""

from __future__ import annotations

import json
import subprocess
from io import BytesIO

from tests.cases.patience import PATIENCE
from tests.integration.client import Client
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase, new_token
from tests.integration.raw import Connection, head_of


class CallersTests(RepositoryTestCase):
    """One daemon for each test, and two callers: whose evaluations are whose."""

    async def setUp(self) -> None:
        await super().setUp()
        self.tokens, lines = {}, []
        for name in ("alice", "bob"):
            self.tokens[name], line = new_token(name)
            lines.append(line)
        file = self.folder / "tokens"
        file.write_text("# callers\n" + "\n".join(lines))
        self.daemon = Daemon(f"{CONFIGURATION}\n[callers]\ntokens = '{file}'\n")
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        self.alice = Client(self.daemon.url, self.tokens["alice"])
        self.bob = Client(self.daemon.url, self.tokens["bob"])
        self.stranger = Client(self.daemon.url)
        for client in (self.alice, self.bob, self.stranger):
            self.addCleanup(client.close)
        await self.daemon.ready()

    async def finish(self) -> None:
        """Stop the daemon: nothing is left, and no token in what it has written."""
        await self.daemon.stop()
        for token in self.tokens.values():
            self.assertNotIn(token, self.daemon.log)

    async def test_two_callers(self) -> None:
        """Bob neither sees nor cancels what Alice has begun, during it and after."""
        identifier = await self.alice.evaluate(
            self.repository.url, self.commit, "echo ready; exec sleep 600"
        )
        await self.alice.printed(identifier, "ready")
        for client, code in ((self.bob, 404), (self.stranger, 401)):
            for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
                answer = await client.request(method, f"/evaluation/{identifier}{path}")
                answer.problem(code)
        self.assertEqual((await self.alice.status(identifier))["state"], "running")
        await self.alice.cancel(identifier)
        await self.alice.follow(identifier)
        (await self.bob.ask(identifier, "end")).problem(404)
        self.assertEqual((await self.alice.ask(identifier, "end")).code, 200)
        await self.finish()

    async def test_refused_before_the_body(self) -> None:
        """401 reaches curl and treq in the midst of a large upload; nothing of it is stored."""
        with Connection(self.daemon.port) as connection:
            answer = connection.ask(head_of(50_000_000))
            answer.problem(401)
            self.assertEqual(answer.headers["www-authenticate"], "Bearer")
        large = self.folder / "large"
        large.write_bytes(b"x" * 40_000_000)
        for expect in ("Expect:", "Expect: 100-continue"):
            curl = subprocess.run(
                [
                    *("curl", "-sS", "-o", "-", "-w", "\n%{http_code} %{size_upload}"),
                    *("-H", expect, "-H", "Authorization: Bearer wrong"),
                    *("-F", f"submission[s]=@{large}", f"{self.daemon.url}/evaluate"),
                ],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            body, _, figures = curl.stdout.rpartition("\n")
            self.assertEqual(figures.split()[0], "401", curl)
            self.assertEqual(json.loads(body)["status"], 401)
        files = [("submission[s]", ("s", "text/plain", BytesIO(large.read_bytes())))]
        (await self.stranger.request("POST", "/evaluate", files=files)).problem(401)
        self.assertEqual(list((self.daemon.state / "uploads").iterdir()), [])
        await self.finish()
