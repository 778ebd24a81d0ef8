"""Three daemons behind HAProxy, by the configuration of `etc/proxies`."""

from __future__ import annotations

from tests.integration.client import Answer, Client, text
from tests.integration.harness import Daemon, RepositoryTestCase, until
from tests.integration.proxies import (
    NAMES,
    CheckingHAProxy,
    HAProxyBeforeSeveral,
    lacking,
    make_peers,
)


class SeveralCase(RepositoryTestCase):
    """Each test has three daemons, and a client of the proxy before them."""

    skip = lacking(HAProxyBeforeSeveral)
    proxy_type = HAProxyBeforeSeveral
    drain = 0.0

    async def setUp(self) -> None:
        await super().setUp()
        self.daemons = {name: Daemon(drain=self.drain, name=name) for name in NAMES}
        proxy = self.proxy_type(make_peers(self.daemons), below=False)
        self.addCleanup(proxy.remove)
        for daemon in self.daemons.values():
            self.addCleanup(daemon.remove)
            daemon.start()
        for daemon in self.daemons.values():
            await daemon.ready()
        proxy.start()
        await proxy.ready()
        self.client = self.make_client(proxy.url)

    def make_client(self, url: str) -> Client:
        client = Client(url)
        self.addCleanup(client.close)
        return client

    async def post(self, command: str = "echo hello", **headers: str) -> Answer:
        return await self.client.post(self.repository.url, self.commit, command, headers=headers)

    async def evaluate(self, command: str = "echo hello", **headers: str) -> str:
        answer = await self.post(command, **headers)
        self.assertEqual(answer.code, 200, answer.body)
        return str(answer.json["evaluation_id"])


class SeveralTests(SeveralCase):
    async def test_evaluations_are_spread_and_found_again(self) -> None:
        found = [await self.evaluate() for _ in range(6)]
        self.assertEqual({identifier.partition("-")[0] for identifier in found}, set(NAMES))
        for identifier in found:
            self.assertEqual((await self.client.status(identifier))["evaluation_id"], identifier)
            for _ in range(3):  # or it could be the right one's turn
                older = await self.client.get(f"/evaluation_events?evaluation={identifier}")
                self.assertEqual(older.code, 200, older.body)
            doubled = await self.client.get(f"//evaluation//{identifier}/events")
            self.assertEqual(doubled.code, 200, doubled.body)
            events = await self.client.follow(identifier)
            self.assertEqual(text(events), "hello\n")
            self.assertEqual((await self.client.get(f"/evaluation/{identifier}")).code, 410)
        for identifier in [await self.evaluate("exec sleep 600") for _ in NAMES]:
            await self.client.cancel(identifier)
        for daemon in self.daemons.values():
            await daemon.nothing_left()
        own = found[0].partition("-")[2]
        for identifier in (own, f"any-{own}", f"d-{own}", "a", "x" * 40):
            (await self.client.get(f"/evaluation/{identifier}")).problem(404)
        self.assertEqual((await self.client.get("/health")).code, 200)

    async def test_repeated_form_gets_the_first_answer_while_other_daemons_are_down(self) -> None:
        key = {"Idempotency-Key": "key"}
        first = await self.evaluate(**key)
        name = first.partition("-")[0]
        for other in NAMES:
            if other != name:
                await self.daemons[other].kill()
        self.assertEqual(await self.evaluate(**key), first)
        await self.daemons[name].kill()
        # The proxy may close a connection that was idle for long.
        self.client = self.make_client(self.client.url)
        answer = await self.post(**key)
        answer.problem(503)
        self.assertEqual(answer.header("Retry-After"), "5")


class DrainTests(SeveralCase):
    proxy_type = CheckingHAProxy
    drain = 600.0

    async def test_draining_daemon_gets_no_forms_and_keeps_its_readers(self) -> None:
        self.daemon, proxied = self.daemons["a"], self.client
        self.client = self.make_client(self.daemon.url)
        identifier, gate = await self.begin_and_hold("echo late")
        self.client = proxied
        self.daemon.interrupt()
        await until(self.have_forms_passed_by, "no form goes to the daemon that drains")
        self.assertTrue(self.daemon.running)
        page = await self.client.page(identifier)
        self.assertEqual(text(page["data"]), "ready")
        self.assertEqual((await self.client.get("/evaluations")).json["away"], [])
        gate.write_text("\n")
        self.assertEqual(text(await self.client.follow(identifier)), "readylate\n")
        await until(lambda: not self.daemon.running, "the daemon stops")

    async def have_forms_passed_by(self) -> bool:
        """Tell whether the next forms are accepted by the other daemons."""
        answers = [await self.post() for _ in range(2 * len(NAMES))]
        return all(
            answer.code == 200 and not answer.json["evaluation_id"].startswith("a-")
            for answer in answers
        )
