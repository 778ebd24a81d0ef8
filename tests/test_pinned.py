"""`webhooks.pinned`: one address, whatever the URL says, and a bounded answer."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import BrowserLikePolicyForHTTPS, ResponseFailed
from twisted.web.http_headers import Headers
from twisted.web.iweb import IPolicyForHTTPS, IResponse
from zope.interface import implementer

from tawebeval.webhooks.callback import web_target
from tawebeval.webhooks.pinned import MOST_BYTES, RememberedTrust, pinned_agent

HEAD = b"HTTP/1.1 200 OK\r\n"


class Transport(StringTransport):
    """Notes that it was aborted, and loses the connection by that."""

    aborted = False

    def abortConnection(self) -> None:
        self.aborted = True


@implementer(IPolicyForHTTPS)
class Policy:
    """Notes for which names certificates are wanted."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, int]] = []

    def creatorForNetloc(self, hostname: bytes, port: int) -> Any:
        """Return what Twisted's own returns."""
        self.asked.append((hostname, port))
        return BrowserLikePolicyForHTTPS().creatorForNetloc(hostname, port)


class PinnedTests(SynchronousTestCase):
    """A reactor in memory."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.policy = Policy()
        self.transport = Transport()

    def ask(
        self, url: str = "http://name.example/x?y=z", address: str = "8.8.8.8", **headers: str
    ) -> Deferred[IResponse]:
        """Ask for a URL by an agent that is bound to an address."""
        target = web_target(url)
        agent = pinned_agent(self.reactor, self.policy, 15, target, ip_address(address))
        sent = Headers({name: [value] for name, value in headers.items()})
        return agent.request(b"POST", url.encode(), sent, None)

    def connect(self) -> Any:
        """Let the connection be made; return its protocol."""
        protocol = self.reactor.tcpClients[0][2].buildProtocol(None)
        protocol.makeConnection(self.transport)
        return protocol

    def test_address(self) -> None:
        """The connection goes to the address, and the request still names the host."""
        for url, address, port in (
            ("http://name.example/x", "8.8.8.8", 80),
            ("http://name.example:8080/x", "2001:4860::8888", 8080),
            ("https://name.example/x", "8.8.4.4", 443),
        ):
            self.ask(url, address)
            self.assertEqual(self.reactor.tcpClients[-1][:2], (address, port))
        self.assertEqual(self.policy.asked, [(b"name.example", 443)])
        self.connect()
        lines = self.transport.value().split(b"\r\n")
        self.assertEqual(lines[0], b"POST /x HTTP/1.1")
        self.assertIn(b"Host: name.example", lines)
        self.assertIn(b"Connection: close", lines)

    def test_trust(self) -> None:
        """What is trusted for a host is found out once, and for each host by itself."""
        trust = RememberedTrust(self.policy)
        one = trust.creatorForNetloc(b"a.example", 443)
        self.assertIs(trust.creatorForNetloc(b"a.example", 443), one)
        self.assertIsNot(trust.creatorForNetloc(b"b.example", 443), one)
        self.assertEqual(self.policy.asked, [(b"a.example", 443), (b"b.example", 443)])

    def test_unpacked_by_nobody(self) -> None:
        """Nothing packed is asked for, and of an answer's headers only one is shown."""
        asked = self.ask(**{"Accept-Encoding": "gzip", "X-Own": "1"})
        protocol = self.connect()
        self.assertNotIn(b"accept-encoding", self.transport.value().lower())
        self.assertIn(b"X-Own: 1", self.transport.value())
        protocol.dataReceived(
            HEAD + b"Content-Encoding: gzip\r\nSet-Cookie: a=b\r\nRetry-After: 7\r\n"
            b"Content-Length: 0\r\n\r\n"
        )
        headers = self.successResultOf(asked).headers
        self.assertEqual(list(headers.getAllRawHeaders()), [(b"Retry-After", [b"7"])])

    def test_bytes(self) -> None:
        """An answer that goes on and on is cut off, be it in its headers or its body."""
        for end in (b"", b"\r\n"):
            self.setUp()
            asked = self.ask()
            protocol = self.connect()
            protocol.dataReceived(HEAD + end)
            left = MOST_BYTES - len(HEAD + end)
            line = b"X-Y: " + b"z" * 994 + b"\r\n"
            while left >= len(line):
                protocol.dataReceived(line)
                left -= len(line)
            protocol.dataReceived(line[:left])
            self.assertFalse(self.transport.aborted)
            protocol.dataReceived(b"z")
            self.assertTrue(self.transport.aborted)
            protocol.connectionLost(Failure(ConnectionLost()))
            if end:
                self.assertEqual(self.successResultOf(asked).code, 200)
            else:
                self.failureResultOf(asked, ResponseFailed)

    def test_seconds(self) -> None:
        """A connection that is kept open is aborted in time; one that has ended leaves no timer."""
        self.ask()
        protocol = self.connect()
        protocol.dataReceived(HEAD + b"\r\n")
        self.reactor.advance(14.9)
        self.assertFalse(self.transport.aborted)
        self.reactor.advance(0.2)
        self.assertTrue(self.transport.aborted)
        protocol.connectionLost(Failure(ConnectionLost()))
        self.setUp()
        asked = self.ask()
        self.connect().connectionLost(Failure(ConnectionLost()))
        self.failureResultOf(asked, ResponseFailed)
        self.assertEqual(self.reactor.getDelayedCalls(), [])
