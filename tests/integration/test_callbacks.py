"""Callbacks of the real daemon to real receivers over TLS."""

from __future__ import annotations

from typing import Any

from twisted.internet.ssl import PrivateCertificate

from tests.cases.certificates import make_certificate
from tests.cases.documented import find_block
from tests.integration.harness import CALLBACK_SECRET, CONFIGURATION, RepositoryTestCase, until
from tests.integration.receivers import Receiver
from tests.run import ROOT


def documented_verify() -> Any:
    """Return the function with which docs/api.md verifies callbacks."""
    namespace: dict[str, Any] = {}
    exec(find_block(ROOT / "docs" / "api.md", "python", "def verify("), namespace)
    return namespace["verify"]


class CallbackTests(RepositoryTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        names = ("localhost", "elsewhere.example")
        files = [make_certificate(self.folder, name).read_bytes() for name in names]
        self.good, self.bad = map(PrivateCertificate.loadPEM, files)
        both = self.folder / "both.pem"
        both.write_bytes(b"".join(files))
        both.chmod(0o644)
        self.folder.chmod(0o755)
        configuration = f"{CONFIGURATION}\n{self.configure_callbacks()}"
        await self.start_own(configuration, SSL_CERT_FILE=str(both))

    async def evaluate(self, host: str, *statuses: int, certificate: Any) -> tuple[str, Receiver]:
        """Begin an evaluation that fails, whose end is told to a receiver called `host`."""
        receiver = Receiver(*statuses, certificate=certificate)
        self.addCleanup(receiver.stop)
        url = f"https://{host}:{receiver.port}/hook?key=s3cret"
        return await self.begin("echo one; exit 3", callback_url=url), receiver

    async def wait_for_callback(self, identifier: str, member: str, words: str) -> Any:
        """Wait until a member of the callback's status has these words; return the callback."""

        async def find() -> Any:
            callback = (await self.client.status(identifier))["callback"]
            return callback if words in (callback[member] or "") else None

        return await until(find, f"{member} has {words!r}")

    async def test_callback_repeated_after_a_500_passes_the_documented_check(self) -> None:
        identifier, receiver = await self.evaluate("localhost", 500, 200, certificate=self.good)
        callback = await self.wait_for_callback(identifier, "state", "delivered")
        self.assertEqual(callback["attempts"], 2)
        verify = documented_verify()
        for post in receiver.posts:
            self.assertEqual(post.headers["host"], f"localhost:{receiver.port}")
            document = verify(CALLBACK_SECRET, post.headers, post.body)
            self.assertEqual(document["evaluation_id"], identifier)
            self.assertEqual((document["state"], document["exit"]["status"]), ("failed", 3))
            for headers, body in (
                ({**post.headers, "webhook-id": "evt_x"}, post.body),
                ({**post.headers, "webhook-timestamp": "1"}, post.body),
                ({**post.headers, "webhook-signature": "v1,AAAA"}, post.body),
                (post.headers, post.body.replace(b"failed", b"passed")),
            ):
                self.assertRaises(ValueError, verify, CALLBACK_SECRET, headers, body)
        await self.daemon.stop()
        for word in (CALLBACK_SECRET, "s3cret", "/hook"):
            self.assertNotIn(word, self.daemon.log)

    async def test_certificate_has_to_match_the_name(self) -> None:
        for host, certificate in (("localhost", self.bad), ("127.0.0.1", self.good)):
            identifier, receiver = await self.evaluate(host, 204, certificate=certificate)
            await self.wait_for_callback(identifier, "last_error", "TLS failed")
            self.assertEqual(receiver.posts, [])
