"""Names of git's servers: a fault of name servers is none of the repository's, nor in its way."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.client import Client, failure, text
from tests.integration.harness import CONFIGURATION, RepositoryTestCase, until
from tests.integration.nameserver import AskingDaemon, NameServer
from tests.integration.repositories import HttpServer
from tests.integration.unprivileged import USER

ONE_PLACE = CONFIGURATION.replace("running = 4", "running = 1")
PATIENT = "timeout:30 attempts:5"
"""Options of a resolver that waits for an answer for longer than any of these tests."""


class LookupTestCase(RepositoryTestCase):
    """A daemon whose name server is the test's; `options` are those of its resolver."""

    configuration = CONFIGURATION
    options = "timeout:1 attempts:1"

    async def setUp(self) -> None:
        if USER is None:
            raise SkipTest("only root can give a daemon a name server of its own")
        await super().setUp()
        self.names = NameServer()
        self.addCleanup(self.names.stop)
        self.server = HttpServer(self.folder)
        self.addCleanup(self.server.stop)
        port = self.server.url.rpartition(":")[2]
        self.url = f"http://git.example.org:{port}/repository/.git"
        self.daemon = AskingDaemon(self.configuration, self.names.address, self.options)
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        await self.daemon.ready()
        self.client = Client(self.daemon.url)
        self.addCleanup(self.client.close)

    async def evaluate(self, url: str = "") -> str:
        """Begin an evaluation; return its identifier."""
        return await self.client.evaluate(url or self.url, self.commit, "cat README")

    async def events(self, url: str = "") -> list[dict[str, Any]]:
        """Return the events of an evaluation."""
        return await self.client.follow(await self.evaluate(url))


class AnswerTests(LookupTestCase):
    """What name servers say, and what becomes of it."""

    async def test_answers(self) -> None:
        """A name that does not exist is the repository's fault; that nobody knows is not."""
        for answer in ("NXDOMAIN", "NOERROR"):
            self.names.answer = answer
            error = failure(await self.events(), "repository")
            self.assertIn("git.example.org does not exist or has no address", error["message"])
        for answer in ("SERVFAIL", "REFUSED", ""):
            self.names.answer = answer
            error = failure(await self.events(), "lost")
            self.assertIn("look-up of the host git.example.org", error["message"])
            self.assertEqual((await self.client.get("/health/ready")).code, 200)
        self.names.answer = "127.0.0.1"
        self.assertEqual(text(await self.events()), "an evaluator\n")
        self.names.answer = ""
        self.assertEqual(text(await self.events()), "an evaluator\n", "it is known by now")


class SilenceTests(LookupTestCase):
    """A name server that says nothing, and one place to run."""

    configuration = ONE_PLACE
    options = PATIENT

    async def setUp(self) -> None:
        await super().setUp()
        self.names.answer = ""

    async def test_others_run(self) -> None:
        """Whose name is not found yet holds no place that others could run in."""
        slow = await self.evaluate()
        await until(lambda: self.names.asked, "the name is asked for")
        self.assertEqual((await self.client.status(slow))["state"], "fetching")
        for _ in range(2):  # it is fetched first, and then known
            self.assertEqual(text(await self.events(self.repository.url)), "an evaluator\n")
        self.assertEqual((await self.client.status(slow))["state"], "fetching")
        await self.client.cancel(slow)
        failure(await self.client.follow(slow), "cancelled")

    async def test_stop(self) -> None:
        """The daemon stops without waiting for the answer."""
        slow = await self.evaluate()
        await until(lambda: self.names.asked, "the name is asked for")
        self.assertEqual((await self.client.status(slow))["state"], "fetching")
        await self.daemon.stop()
