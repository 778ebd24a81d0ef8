"""`web.server` over TLS, which gathers what is written until the next turn of the reactor.

And over the PROXY protocol, which does not.
"""

from __future__ import annotations

import socket
import ssl
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.endpoints import serverFromString
from twisted.internet.ssl import DefaultOpenSSLContextFactory
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase
from twisted.web.server import NOT_DONE_YET
from twisted.web.websocket import WebSocketResource

from tawebeval.config import Configuration, HttpSettings
from tawebeval.web.server.channel import ApiSite
from tawebeval.web.streams import EventWebSocket, StreamScheduler, check_websocket_handshake
from tests.cases.certificates import make_certificate
from tests.cases.patience import PATIENCE
from tests.cases.settings import with_constants

reactor: Any = installed

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
PING, CLOSE = b"\x89\x81\0\0\0\0x", b"\x88\x82\0\0\0\0\x03\xe8"  # as a client sends them
PONG, CLOSED = b"\x8a\x01x", b"\x88\x02\x03\xe8"


class EchoingApplication:
    """An application that makes each request a WebSocket."""

    def __init__(self) -> None:
        self.scheduler = StreamScheduler(reactor)

    def identify_caller(self, request: Any) -> str:
        return "a"

    def make_form_receiver(self, request: Any, length: int | None) -> None:
        """Expect no form."""

    def check_not_stopping(self) -> None:
        """Accept all."""

    def match_route(self, method: bytes, path: bytes) -> tuple[str, str, Any]:
        return "", "", None

    def render(self, request: Any) -> Any:
        check_websocket_handshake(request)
        WebSocketResource(EventWebSocket()).render_GET(request)
        request.channel.wait_for_websocket_turn = partial(self.scheduler.wait_for_turn, "a")
        return NOT_DONE_YET


def make_site(head_timeout: float = PATIENCE) -> ApiSite:
    """Return a site; `head_timeout` is in seconds."""
    settings = with_constants(HttpSettings, head_timeout=head_timeout)()
    owner: Any = SimpleNamespace(configuration=Configuration(http=settings))
    return ApiSite(EchoingApplication(), owner, reactor)


class TlsTests(TestCase):
    def listen(self, site: ApiSite) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        pem = str(make_certificate(folder, "localhost"))
        context = DefaultOpenSSLContextFactory(pem, pem)
        listening = reactor.listenSSL(0, site, context, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        self.address = "127.0.0.1", listening.getHost().port

    def send(self, *parts: bytes) -> bytes:
        """Send each part once the answer to the one before has begun; return all that is read."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(self.address, PATIENCE) as plain:
            connection = context.wrap_socket(plain)
            read = b""
            for part in parts:
                connection.sendall(part)
                read += connection.recv(2**16)
            while some := connection.recv(2**16):
                read += some
            connection.unwrap()
        return read

    async def test_refusal_at_a_deadline_arrives(self) -> None:
        self.listen(make_site(head_timeout=1))
        read = await deferToThread(self.send, b"GET / HTTP/1.1\r\n")
        self.assertEqual(read[:12], b"HTTP/1.1 408")

    async def test_close_of_a_websocket_is_answered(self) -> None:
        self.listen(make_site())
        read = await deferToThread(self.send, HANDSHAKE, PING, CLOSE)
        self.assertEqual(read.partition(b"\r\n\r\n")[2], PONG + CLOSED)


class ProxyProtocolTests(TestCase):
    async def test_refused_client_may_go_on_sending(self) -> None:
        endpoint = serverFromString(reactor, "haproxy:tcp:0:interface=127.0.0.1")
        listening = await endpoint.listen(make_site())
        self.addCleanup(listening.stopListening)

        def send() -> bytes:
            with socket.create_connection(("127.0.0.1", listening.getHost().port), PATIENCE) as to:
                to.sendall(b"PROXY TCP4 192.0.2.1 127.0.0.1 1 80\r\nmalformed\r\n\r\n")
                read = b""
                while some := to.recv(2**16):
                    read += some
                for _ in range(20):  # a connection whose both halves are closed would be reset
                    to.sendall(b"x")
                    time.sleep(0.005)
                return read

        self.assertEqual((await deferToThread(send))[:12], b"HTTP/1.1 400")
