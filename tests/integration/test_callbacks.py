"""Callbacks of the real daemon to real receivers."""

from __future__ import annotations

import os
import re
import signal
from base64 import b64encode
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.ssl import PrivateCertificate
from twisted.internet.task import deferLater

from tests.cases.certificates import make_certificate
from tests.integration.client import Client, text
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase, until
from tests.integration.receivers import Receiver
from tests.integration.unprivileged import give

SECRET = "whsec_" + b64encode(b"not so secret, for it is a test").decode()
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "api.md"
OPEN = 'private_networks = ["127.0.0.0/8", "::1/128"]'


def documented_verify() -> Any:
    """Return the function with which docs/api.md verifies callbacks."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    (source,) = (block for block in blocks if "def verify(" in block)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["verify"]


class CallbacksTestCase(RepositoryTestCase):
    """A daemon for each test, with settings of its own."""

    settings = OPEN

    async def setUp(self) -> None:
        await super().setUp()
        self.secrets = self.folder / "secrets"
        self.secrets.write_text(f"* {SECRET}\n")
        self.secrets.chmod(0o600)
        give(self.secrets)

    async def start(self, settings: str | None = None, **environment: str) -> None:
        self.daemon = Daemon(
            f"{CONFIGURATION}\n[callbacks]\nsecrets = '{self.secrets}'\n"
            + (self.settings if settings is None else settings)
            + "\n",
            **environment,
        )
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        await self.daemon.ready()
        self.client = Client(self.daemon.url)
        self.addCleanup(self.client.close)

    def receive(self, *statuses: int, **more: Any) -> Receiver:
        receiver = Receiver(*statuses, **more)
        self.addCleanup(receiver.stop)
        return receiver

    async def evaluate(self, url: str, command: str = "echo one; exit 3") -> str:
        """Begin an evaluation whose end is to be told to a URL."""
        return await self.client.evaluate(
            self.repository.url, self.commit, command, callback_url=url
        )

    async def outcome(self, identifier: str) -> dict[str, Any]:
        """Return what has become of a callback at last."""
        while True:
            callback: dict[str, Any] = (await self.client.status(identifier))["callback"]
            if callback["state"] not in ("waiting", "pending"):
                return callback
            await deferLater(reactor, 0.01)

    async def last_error(self, identifier: str) -> str:
        """Return why the first attempt of a callback has failed."""
        while True:
            callback = (await self.client.status(identifier))["callback"]
            if callback["last_error"]:
                return str(callback["last_error"])
            await deferLater(reactor, 0.01)

    async def tell(self, url: str) -> dict[str, Any]:
        """Return what becomes of a callback to a URL; the events are as without it."""
        identifier = await self.evaluate(url)
        callback = await self.outcome(identifier)
        events = await self.client.follow(identifier)
        self.assertEqual(text(events), "one\n")
        self.assertEqual(events[-1]["payload"]["status"], 3)
        return callback

    async def finish(self) -> None:
        """Stop the daemon; what is nobody's business is not in its log."""
        await self.daemon.stop()
        for word in (SECRET, "s3cret", "/hook"):
            self.assertNotIn(word, self.daemon.log)


class DeliveryTests(CallbacksTestCase):
    async def test_callback_repeated_after_a_500_passes_the_documented_check(self) -> None:
        await self.start()
        receiver = self.receive(500, 200)
        verify = documented_verify()
        identifier = await self.evaluate(receiver.url)
        callback = await self.outcome(identifier)
        self.assertEqual(
            callback,
            {
                "url": receiver.url.partition("?")[0],
                "state": "delivered",
                "attempts": 2,
                "last_error": "the receiver answered with status 500",
            },
        )
        first, second = receiver.posts
        self.assertEqual(first.path, "/hook?key=s3cret")
        self.assertEqual(first.headers["content-type"], "application/json")
        self.assertEqual(first.headers["webhook-id"], second.headers["webhook-id"])
        self.assertEqual(first.body, second.body)
        for post in receiver.posts:
            document = verify(SECRET, post.headers, post.body)
            self.assertEqual(document["evaluation_id"], identifier)
            self.assertEqual((document["state"], document["exit"]["status"]), ("failed", 3))
            for headers, body in (
                ({**post.headers, "webhook-id": "evt_x"}, post.body),
                ({**post.headers, "webhook-timestamp": "1"}, post.body),
                ({**post.headers, "webhook-signature": "v1,AAAA"}, post.body),
                (post.headers, post.body.replace(b"failed", b"passed")),
            ):
                with self.assertRaises(ValueError):
                    verify(SECRET, headers, body)
        events = await self.client.follow(identifier)
        self.assertEqual(text(events), "one\n")
        await self.finish()


class TlsTests(CallbacksTestCase):
    async def test_certificate_has_to_match_the_name(self) -> None:
        names = ("localhost", "elsewhere.example")
        files = [make_certificate(self.folder, name).read_bytes() for name in names]
        good, bad = map(PrivateCertificate.loadPEM, files)
        both = self.folder / "both.pem"
        both.write_bytes(b"".join(files))
        both.chmod(0o644)
        self.folder.chmod(0o755)
        await self.start(SSL_CERT_FILE=str(both))
        receiver = self.receive(204, certificate=good)
        callback = await self.tell(f"https://localhost:{receiver.port}/hook")
        self.assertEqual((callback["state"], callback["last_error"]), ("delivered", None))
        self.assertEqual(receiver.posts[0].headers["host"], f"localhost:{receiver.port}")
        for certificate, host in ((bad, "localhost"), (good, "127.0.0.1")):
            receiver = self.receive(204, certificate=certificate)
            identifier = await self.evaluate(f"https://{host}:{receiver.port}/hook")
            self.assertIn("TLS failed", await self.last_error(identifier))
            self.assertEqual(receiver.posts, [])
        await self.finish()


class RefusalTests(CallbacksTestCase):
    async def post(self, url: str) -> Any:
        return await self.client.post(self.repository.url, self.commit, "true", callback_url=url)

    async def test_private_addresses_are_refused_at_once_or_after_lookup(self) -> None:
        await self.start("")
        receiver = self.receive(200)
        for url in (receiver.url, "http://[::1]/", "http://10.0.0.1/", "http://169.254.169.254/"):
            problem = (await self.post(url)).problem(400)
            self.assertEqual(problem["field"], "callback_url")
            self.assertIn("callbacks.private_networks", problem["detail"])
        callback = await self.tell(f"http://localhost:{receiver.port}/hook")
        self.assertEqual((callback["state"], callback["attempts"]), ("refused", 1))
        self.assertIn("callbacks.private_networks", callback["last_error"])
        self.assertNotIn("127.", callback["last_error"])
        self.assertEqual(receiver.posts, [])
        await self.finish()


class ReloadTests(CallbacksTestCase):
    async def reload(self, path: Path, before: str, after: str, said: str) -> None:
        """Write `after` into a file where `before` stands, and have all read again."""
        self.assertEqual(path.read_text().count(before), 1)
        path.write_text(path.read_text().replace(before, after))
        count = self.daemon.log.count(said)
        os.kill(self.daemon.pid, signal.SIGHUP)
        await self.daemon.logged(said, count + 1)

    async def test_reloaded_secrets_count_also_for_waiting_callbacks(self) -> None:
        await self.start()
        secret = "whsec_" + b64encode(b"another one, for callbacks that are new").decode()
        await self.reload(
            self.secrets, SECRET, "s3cret", "reload refused, nothing is changed: callbacks.secrets"
        )
        await self.reload(self.secrets, "s3cret", secret, "callbacks.secrets: reloaded")
        settings = self.daemon.folder / "tawebeval.toml"
        restart = "callbacks.private_networks: changed; takes effect after a restart"
        await self.reload(settings, OPEN, "private_networks = []", restart)
        receiver = self.receive(204)
        self.assertEqual((await self.tell(receiver.url))["state"], "delivered")
        (post,) = receiver.posts
        documented_verify()(secret, post.headers, post.body)
        with self.assertRaises(ValueError):
            documented_verify()(SECRET, post.headers, post.body)
        down = self.receive(503)
        waiting = await self.evaluate(down.url, "exit 3")
        await until(lambda: down.posts, "an attempt")
        await self.reload(self.secrets, "* ", "alice ", "callbacks.secrets: reloaded")
        outcome = await self.outcome(waiting)
        self.assertEqual(outcome["state"], "refused")
        self.assertIn("secret was removed", outcome["last_error"])
        answer = await self.client.post(
            self.repository.url, self.commit, "true", callback_url=down.url
        )
        self.assertIn("ask the operator for a secret", str(answer.problem(400)["detail"]))
        await self.client.follow(waiting)
        self.assertNotIn(secret, self.daemon.log)
        await self.finish()
