"""Problems, tokens restricted to them, and reruns: the daemon, the client and a real git."""

from __future__ import annotations

from tawebeval.client import Text
from tawebeval.client.twisted_client import TwistedClient
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase, new_token

JUDGE = 'cat "$SUBMISSION_FILE_SOURCE" README; echo $TURINGARENA_SEED'


class ProblemTests(RepositoryTestCase):
    """A daemon with a file of problems, and a token for one of them."""

    client: TwistedClient

    async def setUp(self) -> None:
        await super().setUp()
        self.problems, tokens = self.folder / "problems.toml", self.folder / "tokens"
        secret, line = new_token("students")
        tokens.write_text(f"{line} problems=latest\n")
        self.repository.branch("judge")
        self.write_problem("latest", "branch = 'judge'")
        configuration = CONFIGURATION.replace(
            "[evaluations]", f"[evaluations]\nproblems = '{self.problems}'"
        )
        assert "problems.toml" in configuration
        self.daemon = Daemon(f"{configuration}\n[callers]\ntokens = '{tokens}'\n")
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        await self.daemon.ready()
        self.client = TwistedClient(self.daemon.url, secret)
        self.addCleanup(self.client.close)

    def write_problem(self, name: str, commit: str) -> None:
        self.problems.write_text(
            f"[{name}]\nrepository = '{self.repository.url}'\n{commit}\n"
            f"command = '''{JUDGE}'''\nfields = ['source']\n"
        )

    async def follow(self, identifier: str) -> str:
        """Return the text of an evaluation, all of whose events stay on the server."""
        while (await self.client.status(identifier))["ended"] is None:
            await self.client.status(identifier)
        async for page in self.client.pages(identifier):
            return "".join(each.text for each in page.events if isinstance(each, Text))
        return ""

    async def test_branch_is_resolved_for_each_submission_but_not_for_reruns(self) -> None:
        first = await self.client.evaluate_problem("latest", {"source": "1\n"})
        status = await self.client.status(first)
        self.assertEqual(await self.follow(first), f"1\nan evaluator\n{status['seed']}\n")
        status = await self.client.status(first)
        self.assertEqual((status["problem"], status["commit_oid"]), ("latest", self.commit))
        self.repository.write("README", "another\n")
        commit = self.repository.commit()
        second = await self.client.evaluate_problem("latest", {"source": "2\n"})
        self.assertIn("2\nanother\n", await self.follow(second))
        self.assertEqual((await self.client.status(second))["commit_oid"], commit)
        again = await self.client.rerun(first)
        self.assertEqual(await self.follow(again), await self.follow(first))
        await self.daemon.stop()
