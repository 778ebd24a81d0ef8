"""The command at servers that are no tawebeval: it says so, and asks none of them twice."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from tests.cases.patience import LONG_PATIENCE
from tests.integration.terminal import piped

reactor: Any = installed

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>"


class Other(Protocol):
    """A server that says the same to everybody."""

    factory: Others

    def dataReceived(self, data: bytes) -> None:
        """Answer, whatever it was."""
        assert self.transport is not None
        self.transport.write(self.factory.says)
        if not self.factory.says.startswith(b"HTTP"):
            self.transport.loseConnection()


class Others(Factory):
    """Such a server; `asked` counts connections."""

    protocol = Other

    def __init__(self, says: bytes) -> None:
        self.says = says
        self.asked = 0

    def buildProtocol(self, addr: IAddress) -> Protocol | None:
        """Count."""
        self.asked += 1
        return super().buildProtocol(addr)


class OtherServersTests(TestCase):
    """One attempt each."""

    timeout = LONG_PATIENCE

    async def check(self, says: bytes, scheme: str, words: str) -> None:
        """Hold that a server which says that is asked once, and what is told of it."""
        others = Others(says)
        port = reactor.listenTCP(0, others, interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        url = f"{scheme}://localhost:{port.getHost().port}"
        for command in (("status", "a" * 40), ("follow", "a" * 40), ("cancel", "a" * 40)):
            others.asked = 0
            done = await piped(url, *command)
            self.assertEqual((done.returncode, others.asked), (3, 1), done.stderr)
            self.assertIn(words, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)

    async def test_page(self) -> None:
        """A web server that answers everything by a page."""
        await self.check(PAGE, "http", "is not a tawebeval server: it sends text/html")

    async def test_no_tls(self) -> None:
        """TLS with a port that speaks none."""
        words = (
            "does not speak TLS as expected (wrong version number); check the URL, or try"
            " http://localhost:"
        )
        for says in (JSON, b"SSH-2.0-OpenSSH_9.2\r\n"):
            await self.check(says, "https", words)
