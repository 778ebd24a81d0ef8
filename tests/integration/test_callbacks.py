"""Callbacks of the real daemon to real receivers."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.ssl import PrivateCertificate
from twisted.internet.task import deferLater

from tests.cases.certificates import make_certificate
from tests.cases.documented import find_block
from tests.integration.client import text
from tests.integration.harness import CALLBACK_SECRET, CONFIGURATION, RepositoryTestCase
from tests.integration.receivers import Receiver
from tests.run import ROOT


def documented_verify() -> Any:
    """Return the function with which docs/api.md verifies callbacks."""
    namespace: dict[str, Any] = {}
    exec(find_block(ROOT / "docs" / "api.md", "python", "def verify("), namespace)
    return namespace["verify"]


class CallbacksTestCase(RepositoryTestCase):
    """A daemon for each test, with settings of its own."""

    async def start(self, **environment: str) -> None:
        await self.start_own(f"{CONFIGURATION}\n{self.configure_callbacks()}", **environment)

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
        for word in (CALLBACK_SECRET, "s3cret", "/hook"):
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
            document = verify(CALLBACK_SECRET, post.headers, post.body)
            self.assertEqual(document["evaluation_id"], identifier)
            self.assertEqual((document["state"], document["exit"]["status"]), ("failed", 3))
            for headers, body in (
                ({**post.headers, "webhook-id": "evt_x"}, post.body),
                ({**post.headers, "webhook-timestamp": "1"}, post.body),
                ({**post.headers, "webhook-signature": "v1,AAAA"}, post.body),
                (post.headers, post.body.replace(b"failed", b"passed")),
            ):
                with self.assertRaises(ValueError):
                    verify(CALLBACK_SECRET, headers, body)
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
