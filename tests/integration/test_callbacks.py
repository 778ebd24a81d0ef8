"""Callbacks of the real daemon to a real receiver over TLS."""

from __future__ import annotations

from twisted.internet.ssl import PrivateCertificate

from tests.cases.certificates import make_certificate
from tests.integration.harness import CALLBACK_SECRET, CONFIGURATION, RepositoryTestCase, until
from tests.integration.receivers import Receiver


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

    async def test_certificate_has_to_match_the_name(self) -> None:
        for host, certificate, state in (
            ("localhost", self.good, "delivered"),
            ("localhost", self.bad, "TLS failed"),
            ("127.0.0.1", self.good, "TLS failed"),
        ):
            receiver = Receiver(204, certificate=certificate)
            self.addCleanup(receiver.stop)
            url = f"https://{host}:{receiver.port}/hook?key=s3cret"
            identifier = await self.begin("echo one; exit 3", callback_url=url)

            async def find(identifier: str = identifier, state: str = state) -> bool:
                callback = (await self.client.status(identifier))["callback"]
                return state in (callback["state"], (callback["last_error"] or "")[: len(state)])

            await until(find, state)
            self.assertEqual(len(receiver.posts), state == "delivered")
        await self.daemon.stop()
        for word in (CALLBACK_SECRET, "s3cret", "/hook"):
            self.assertNotIn(word, self.daemon.log)
