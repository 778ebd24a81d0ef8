"""`tawebeval.listening`: what listens."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.protocol import Factory
from twisted.trial.unittest import TestCase

from tawebeval.errors import ConfigurationError
from tawebeval.listening import listen
from tawebeval.web.sending import PromptServer, PromptUnixServer


class ListenTests(TestCase):
    """A service for each endpoint."""

    async def transport(self, endpoint: str) -> type:
        """Return of what class the connections there are."""
        port: Any = await listen(endpoint, Factory(), reactor).endpoint.listen(Factory())
        self.addCleanup(port.stopListening)
        return port.transport

    async def test_prompt(self) -> None:
        """Connections send at once, which streams rely on: what is written has left the daemon."""
        self.assertIs(await self.transport("tcp:0:interface=127.0.0.1"), PromptServer)
        self.assertIs(await self.transport(f"unix:{self.mktemp()}"), PromptUnixServer)

    def test_name(self) -> None:
        """It is called as it was configured."""
        self.assertEqual(listen("tcp:80", Factory(), reactor).name, "tcp:80")

    def test_no_endpoint(self) -> None:
        """What is no endpoint is named."""
        error = self.assertRaises(
            ConfigurationError, listen, "carrier-pigeon:1", Factory(), reactor
        )
        self.assertIn("listen: 'carrier-pigeon:1' is no endpoint", str(error))

    def test_no_socket(self) -> None:
        """Where systemd has opened none it is said what else would do."""
        for endpoint in ("systemd:domain=INET:index=0", "systemd:domain=INET:name=none"):
            error = self.assertRaises(ConfigurationError, listen, endpoint, Factory(), reactor)
            said = str(error)
            self.assertTrue(said.startswith(f"listen: {endpoint!r}: there is no such"), said)
            self.assertIn("tcp:8080", said)
