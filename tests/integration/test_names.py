"""Two daemons with names behind HAProxy, by the configuration of `etc/proxies`."""

from __future__ import annotations

from tests.integration.client import Client, text
from tests.integration.harness import Daemon, RepositoryTestCase
from tests.integration.proxies import HAProxyBeforeSeveral
from tests.integration.proxy_case import lacking


class NamedTests(RepositoryTestCase):
    """Clients have one address, and each evaluation is asked of the daemon that has it."""

    skip = lacking(HAProxyBeforeSeveral)

    async def setUp(self) -> None:
        await super().setUp()
        self.daemons = [self.start(name) for name in ("a", "b")]
        for daemon in self.daemons:
            await daemon.ready()
        places = " ".join(f"127.0.0.1:{daemon.port}" for daemon in self.daemons)
        proxy = HAProxyBeforeSeveral(places, below=False)
        self.addCleanup(proxy.remove)
        proxy.start()
        await proxy.ready()
        self.client = Client(proxy.url)
        self.addCleanup(self.client.close)

    def start(self, name: str) -> Daemon:
        """Start a daemon of that name."""
        daemon = Daemon(name=name)
        self.addCleanup(daemon.remove)
        daemon.start()
        return daemon

    async def evaluate(self, command: str = "echo hello", **headers: str) -> str:
        """Begin an evaluation; return its identifier."""
        return await self.client.evaluate(
            self.repository.url, self.commit, command, headers=headers
        )

    async def test_each_finds_its_own(self) -> None:
        """Both get some of the evaluations; all of what is asked of one reaches the right one."""
        found = [await self.evaluate() for _ in range(4)]
        self.assertEqual({identifier.partition("-")[0] for identifier in found}, {"a", "b"})
        for identifier in found:
            self.assertEqual((await self.client.status(identifier))["evaluation_id"], identifier)
            for _ in range(2):  # or it could be the right one's turn
                older = await self.client.get(f"/evaluation_events?evaluation={identifier}")
                self.assertEqual(older.code, 200, older.body)
            doubled = await self.client.get(f"//evaluation//{identifier}/events")
            self.assertEqual(doubled.code, 200, doubled.body)
            events = await self.client.follow(identifier)
            self.assertEqual(text(events), "hello\n")
            self.assertEqual((await self.client.get(f"/evaluation/{identifier}")).code, 410)

    async def test_cancel(self) -> None:
        """Cancelling goes to the right one, too."""
        for identifier in [await self.evaluate("exec sleep 600") for _ in range(2)]:
            await self.client.cancel(identifier)
        for daemon in self.daemons:
            await daemon.nothing_left()

    async def test_keys(self) -> None:
        """A form that is sent again with its key has the answer of the first time."""
        for number in range(4):
            headers = {"Idempotency-Key": f"key-{number}"}
            first, again = [await self.evaluate(**headers) for _ in range(2)]
            self.assertEqual(first, again)

    async def test_away(self) -> None:
        """What a daemon has that is away is told by a problem, and the other one goes on."""
        identifiers = [await self.evaluate() for _ in range(2)]
        await self.daemons[0].kill()
        for identifier in identifiers:
            answer = await self.client.get(f"/evaluation/{identifier}")
            if identifier.startswith("a-"):
                answer.problem(503)
            else:
                self.assertEqual(answer.code, 200)

    async def test_unknown(self) -> None:
        """What nobody has is answered all the same: 404, as a problem."""
        own = (await self.evaluate()).partition("-")[2]
        for identifier in (own, f"any-{own}", f"c-{own}", "a", "x" * 40):
            (await self.client.get(f"/evaluation/{identifier}")).problem(404)
        self.assertEqual((await self.client.get("/health")).code, 200)
