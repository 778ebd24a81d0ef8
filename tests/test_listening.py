"""`daemon.listening`: what listens."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet import reactor
from twisted.internet.protocol import Factory
from twisted.trial.unittest import TestCase

from tawebeval.config import Http
from tawebeval.daemon.listening import listen
from tawebeval.errors import ConfigurationError
from tawebeval.web.server.transport import PromptServer, PromptUnixServer


class ListenTests(TestCase):
    """A service for each endpoint."""

    async def transport(self, endpoint: str) -> type:
        """Return of what class the connections there are."""
        port: Any = await listen(endpoint, Factory(), reactor, Http()).endpoint.listen(Factory())
        self.addCleanup(port.stopListening)
        return port.transport

    async def test_prompt(self) -> None:
        """Connections send at once, which streams rely on: what is written has left the daemon."""
        self.assertIs(await self.transport("tcp:0:interface=127.0.0.1"), PromptServer)
        self.assertIs(await self.transport(f"unix:{self.mktemp()}"), PromptUnixServer)

    async def test_silence(self) -> None:
        """A client may be silent for two minutes, or for as long as one that is slow may take."""
        for settings, seconds in ((Http(), 120), (Http(window=10, rate=1024), 266)):
            listening = listen("tcp:0:interface=127.0.0.1", Factory(), reactor, settings)
            port: Any = await listening.endpoint.listen(Factory())
            self.addCleanup(port.stopListening)
            timeout = port.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            self.assertEqual(timeout, seconds * 1000)

    def test_name(self) -> None:
        """It is called as it was configured."""
        self.assertEqual(listen("tcp:80", Factory(), reactor, Http()).name, "tcp:80")

    def test_no_endpoint(self) -> None:
        """What is no endpoint is named."""
        error = self.assertRaises(
            ConfigurationError, listen, "carrier-pigeon:1", Factory(), reactor, Http()
        )
        self.assertIn("listen: 'carrier-pigeon:1' is no endpoint", str(error))

    def test_no_socket(self) -> None:
        """Where systemd has opened none it is said what else would do."""
        for endpoint in ("systemd:domain=INET:index=0", "systemd:domain=INET:name=none"):
            error = self.assertRaises(
                ConfigurationError, listen, endpoint, Factory(), reactor, Http()
            )
            said = str(error)
            self.assertTrue(said.startswith(f"listen: {endpoint!r}: there is no such"), said)
            self.assertIn("tcp:8080", said)
