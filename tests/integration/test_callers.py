"""Callers with tokens, against the real daemon, by treq, curl and byte by byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from io import BytesIO
from typing import ClassVar

from tests.cases.patience import PATIENCE
from tests.integration.client import Client
from tests.integration.harness import (
    CONFIGURATION,
    Daemon,
    RepositoryTestCase,
    new_token,
)
from tests.integration.raw import Connection, head_of


class CallersTestCase(RepositoryTestCase):
    """One daemon for each test, with a place to run and two callers, of such `shares`."""

    shares: ClassVar[str] = ""

    async def setUp(self) -> None:
        await super().setUp()
        self.tokens, lines = {}, []
        for name in ("alice", "bob"):
            self.tokens[name], line = new_token(name)
            lines.append(line)
        self.file = self.folder / "tokens"
        self.file.write_text("# callers\n" + "\n".join(lines))
        configuration = CONFIGURATION.replace("running = 4", "running = 1")
        self.daemon = Daemon(f"{configuration}\n[callers]\ntokens = '{self.file}'\n{self.shares}")
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

    async def begin(self, client: Client, command: str) -> str:
        """Begin an evaluation."""
        return await client.evaluate(self.repository.url, self.commit, command)


class CallersTests(CallersTestCase):
    """Whose evaluations are whose."""

    async def hang_up(self, words: str) -> None:
        """Send SIGHUP, and wait until that is logged."""
        count = self.daemon.log.count(words)
        os.kill(self.daemon.pid, signal.SIGHUP)
        await self.daemon.logged(words, count + 1)

    async def test_two_callers(self) -> None:
        """Bob neither sees nor cancels what Alice has begun, during it and after."""
        identifier = await self.begin(self.alice, "echo ready; exec sleep 600")
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

    async def test_reload(self) -> None:
        """SIGHUP: new tokens count, old ones do not; a broken file changes nothing."""
        carol, line = new_token("carol")
        self.tokens["carol"] = carol
        client = Client(self.daemon.url, carol)
        self.addCleanup(client.close)
        (await client.get("/evaluation/x")).problem(401)
        before = self.file.read_text()
        self.file.write_text(f"{before}\n{carol}\n")
        await self.hang_up(f"{self.file}: line 4")
        (await client.get("/evaluation/x")).problem(401)
        (await self.alice.get("/evaluation/x")).problem(404)
        self.file.write_text(line)
        await self.hang_up("callers.tokens: reloaded")
        (await client.get("/evaluation/x")).problem(404)
        (await self.alice.get("/evaluation/x")).problem(401)
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

    async def test_fair(self) -> None:
        """Bob's one is next, whatever Alice has waiting before it."""
        first = await self.begin(self.alice, "echo ready; exec sleep 600")
        await self.alice.printed(first, "ready")
        many = [await self.begin(self.alice, "exec sleep 600") for _ in range(20)]
        bobs = await self.begin(self.bob, "echo bob")
        self.assertEqual((await self.bob.status(bobs))["queue_place"], 1)
        self.assertEqual((await self.alice.status(many[0]))["queue_place"], 0)
        self.assertEqual((await self.alice.status(many[-1]))["queue_place"], 20)
        await self.alice.cancel(first)
        await self.alice.cancel(many[0])
        events = await self.bob.follow(bobs)
        self.assertEqual(events[0]["payload"], "bob")
        states = [(await self.alice.status(identifier))["state"] for identifier in many[2:]]
        self.assertEqual(set(states), {"queued"})
        await self.finish()


class KeptShareTests(CallersTestCase):
    """Each may leave one unread."""

    shares = "kept = 1"

    async def test_unread(self) -> None:
        """Alice, who does not read, is told what to do, and Bob is served meanwhile."""
        identifier = await self.begin(self.alice, "echo unread")
        await self.alice.ended(identifier)
        await self.alice.cancel(identifier)  # which changes nothing, when all is done for it
        answer = await self.alice.post(self.repository.url, self.commit, "true")
        self.assertIn("after=end", answer.problem(429)["detail"])
        self.assertGreater(int(answer.header("Retry-After") or 0), 0)
        await self.bob.follow(await self.begin(self.bob, "true"))
        self.assertIsNone((await self.alice.page(identifier, "end"))["end"])
        await self.alice.follow(await self.begin(self.alice, "true"))
        await self.finish()
