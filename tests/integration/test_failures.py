"""Each reason for which an evaluation comes to no good end, as its last event tells it."""

from __future__ import annotations

from tests.integration.client import failure
from tests.integration.repositories import GitDaemon, HttpServer
from tests.integration.wire import reasons


class FailureTests(reasons.ReasonCase):
    environment = {"CANARY": "the-daemons-own-secret"}  # noqa: RUF012

    async def run_from(self, url: str, commit: str | None = None) -> dict[str, object]:
        """Return the status and all events of a command that never comes to run."""
        identifier = await self.client.evaluate(url, commit or self.commit, "echo never")
        await self.client.ended(identifier)
        self.assertEqual((await self.client.status(identifier))["state"], "failed")
        events = await self.client.follow(identifier)
        self.assertEqual(len(events), 1, events)
        return events[0]["payload"]

    async def test_unreachable_repository_is_reported_without_secrets(self) -> None:
        git_daemon, server = GitDaemon(self.folder), HttpServer(self.folder)
        self.addCleanup(git_daemon.stop)
        self.addCleanup(server.stop)
        for url in (
            "http://127.0.0.1:1/repository",
            "git://127.0.0.1:1/repository",
            f"{server.url}/missing",
            f"{git_daemon.url}/missing",
            f"file://{self.folder}/missing",
            f"file://{self.repository.folder}/README",
        ):
            error = await self.run_from(url)
            self.assertEqual(error["reason"], "repository", error)
            self.assertIn("fatal", str(error["stderr"]))
            self.assertNotIn("secret", str(error))

    async def test_files_of_the_commit_explain_what_the_shell_does_not_find(self) -> None:
        self.repository.write("judge.sh", "#!/bin/sh\r\necho ok\r\n", 0o755)
        commit = self.repository.commit()
        identifier = await self.client.evaluate(self.repository.url, commit, "./judge.sh")
        events = await self.client.follow(identifier)
        message = failure(events, "exit")["message"]
        self.assertIn("./judge.sh has the line ends of Windows (CRLF)", message)


class TimeoutTests(reasons.TimeoutCase):
    """Evaluators on this machine."""
