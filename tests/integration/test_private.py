"""Private repositories: a secret of the operator's, for some callers, and seen by nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.client import Client, failure, text
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase, new_token
from tests.integration.processes import new_word
from tests.integration.repositories import HttpServer
from tests.integration.unprivileged import give

_WORD = new_word()
SECRET = f"a {_WORD}/with:odd%signs"


class PrivateTests(RepositoryTestCase):
    """A server that asks for a password, which the daemon has for Alice, not for Bob."""

    async def setUp(self) -> None:
        await super().setUp()
        self.server = HttpServer(self.folder, login=f"judge:{SECRET}")
        self.addCleanup(self.server.stop)
        self.url = f"{self.server.url}/repository/.git"
        self.password = self.folder / "password"
        self.write_password(SECRET)
        tokens, self.tokens = [], {}
        for name in ("alice", "bob"):
            self.tokens[name], line = new_token(name)
            tokens.append(line)
        (self.folder / "tokens").write_text("\n".join(tokens))
        self.daemon = self.make()

    def write_password(self, password: str) -> None:
        self.password.write_text(password + "\n")
        self.password.chmod(0o600)
        give(self.password)

    def make(self, *, configured: bool = True) -> Daemon:
        """Return a daemon that has not been started."""
        configuration = f"{CONFIGURATION}\n[callers]\ntokens = '{self.folder}/tokens'\n"
        if configured:
            port = self.server.url.rpartition(":")[2]
            configuration += (
                "[[repositories.credentials]]\n"
                f"host = '127.0.0.1'\nport = {port}\nusername = 'judge'\n"
                f"password_file = '{self.password}'\ncallers = ['alice']\n"
            )
        daemon = Daemon(configuration)
        self.addCleanup(daemon.remove)
        return daemon

    async def start(self) -> tuple[Client, Client]:
        """Start the daemon; return what Alice and Bob talk to it with."""
        self.daemon.start()
        await self.daemon.ready()
        found = []
        for name in ("alice", "bob"):
            client = Client(self.daemon.url, self.tokens[name])
            self.addCleanup(client.close)
            found.append(client)
        return found[0], found[1]

    async def finish(self) -> None:
        """Stop the daemon; the secret is not in the log, nor in anything that it has stored."""
        await self.daemon.stop()
        self.assertNotIn(_WORD, self.daemon.log)
        for top in (self.daemon.state, self.daemon.cache):
            for file in filter(Path.is_file, top.rglob("*")):
                if not file.is_symlink():  # to a file of the machine
                    file.chmod(0o400)  # some can only be executed
                    self.assertNotIn(_WORD.encode(), file.read_bytes(), file)

    async def evaluate(self, client: Client, url: str | None = None) -> list[Any]:
        """Return the events of an evaluation, which do not have the secret."""
        identifier = await client.evaluate(url or self.url, self.commit, "cat README; env")
        await client.ended(identifier)
        status = await client.status(identifier)
        events = await client.follow(identifier)
        self.assertNotIn(_WORD, json.dumps([status, events]))
        return events

    async def refuse(self, client: Client, url: str | None = None) -> Any:
        """Check that an evaluation fails because of its repository; return the error."""
        return failure(await self.evaluate(client, url), "repository")

    async def test_callers_of_the_credential_alone_have_the_repository(self) -> None:
        alice, bob = await self.start()
        await self.refuse(bob)
        self.assertEqual(self.server.authorizations, [])
        self.assertIn("an evaluator\n", text(await self.evaluate(alice)))
        shown = len(self.server.authorizations)
        self.assertGreater(shown, 0)
        await self.refuse(bob)
        await self.daemon.stop()
        alice, bob = await self.start()
        await self.refuse(bob)
        asked = self.server.fetches
        self.assertIn("an evaluator\n", text(await self.evaluate(alice)))
        self.assertEqual(self.server.fetches, asked, "it was in the cache")
        self.assertEqual(len(self.server.authorizations), shown)
        await self.finish()
