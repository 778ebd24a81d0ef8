"""Names of git's servers: a fault of name servers is none of the repository's, nor in its way."""

from __future__ import annotations

import random
import socket
import threading
from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.client import Client, failure, text
from tests.integration.harness import CONFIGURATION, TWISTD, Daemon, RepositoryTestCase, until
from tests.integration.repositories import HttpServer
from tests.integration.unprivileged import USER, temporary_folder

_MOUNT = 'mount --bind "$TEST_RESOLV_CONF" /etc/resolv.conf || exit 1; exec "$@"'
_TYPE_A = 1
CODES = {"NOERROR": 0, "FORMERR": 1, "SERVFAIL": 2, "NXDOMAIN": 3, "REFUSED": 5}


class NameServer:
    """Answers each question as `answer` says: a code, an address of IPv4, or "" for silence.

    It listens on a loopback address that no other test has. `asked` counts questions.
    """

    def __init__(self) -> None:
        self.answer = "NXDOMAIN"
        self.asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        while True:
            self.address = f"127.{random.randint(2, 254)}.{random.randint(2, 254)}.53"
            try:
                self._socket.bind((self.address, 53))
                break
            except OSError:
                continue
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (self.address, 53))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(4096)
            if not question:
                return
            self.asked += 1
            if self.answer:
                self._socket.sendto(self._reply(question), peer)

    def _reply(self, question: bytes) -> bytes:
        """Return the reply to a question (RFC 1035, section 4)."""
        end = question.index(b"\0", 12) + 5
        code, records = CODES.get(self.answer, 0), b""
        if self.answer not in CODES and question[end - 3] == _TYPE_A:
            records = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.answer)
        counts = b"\0\1" + (b"\0\1" if records else b"\0\0") + b"\0\0\0\0"
        flags = (0x8180 | code).to_bytes(2, "big")
        return question[:2] + flags + counts + question[12:end] + records


class AskingDaemon(Daemon):
    """A daemon whose /etc/resolv.conf is a file of the tests', in a mount namespace of its own."""

    program = (
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh"),
        str(TWISTD),
    )

    def __init__(self, configuration: str, address: str, options: str) -> None:
        """Let it ask the name server at an address, with `options` of resolv.conf(5)."""
        folder = temporary_folder()
        self._resolv_conf = folder / "resolv.conf"
        self._resolv_conf.write_text(f"nameserver {address}\noptions {options}\n")
        super().__init__(configuration, TEST_RESOLV_CONF=str(self._resolv_conf))

    def remove(self) -> None:
        super().remove()
        self._resolv_conf.unlink(missing_ok=True)
        if self._resolv_conf.parent.exists():
            self._resolv_conf.parent.rmdir()


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
        return await self.client.evaluate(url or self.url, self.commit, "cat README")

    async def events(self, url: str = "") -> list[dict[str, Any]]:
        return await self.client.follow(await self.evaluate(url))


class AnswerTests(LookupTestCase):
    async def test_missing_name_is_blamed_on_the_repository_alone(self) -> None:
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
    configuration = ONE_PLACE
    options = PATIENT

    async def setUp(self) -> None:
        await super().setUp()
        self.names.answer = ""

    async def test_unanswered_lookup_holds_no_slot(self) -> None:
        slow = await self.evaluate()
        await until(lambda: self.names.asked, "the name is asked for")
        self.assertEqual((await self.client.status(slow))["state"], "fetching")
        for _ in range(2):  # it is fetched first, and then known
            self.assertEqual(text(await self.events(self.repository.url)), "an evaluator\n")
        self.assertEqual((await self.client.status(slow))["state"], "fetching")
        await self.client.cancel(slow)
        failure(await self.client.follow(slow), "cancelled")
