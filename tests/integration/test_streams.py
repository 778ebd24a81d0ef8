"""Following a real evaluation over real connections: curl, treq, and WebSockets."""

from __future__ import annotations

from twisted.internet.defer import gatherResults

from tests.integration.client import failure
from tests.integration.harness import until
from tests.integration.wire import streams


class StreamTests(streams.TransportCase):
    """Evaluators on this machine."""


class ShutdownTests(streams.StreamCase):
    async def test_readers_on_each_transport_are_told_of_the_shutdown(self) -> None:
        identifier = await self.begin_and_wait("printf ready; exec sleep 600")
        reading = self.read_by_all(identifier)
        await self.followed(len(reading))
        self.daemon.interrupt()
        received, lines, messages = await gatherResults(reading)
        for events in (self.server_sent(received), lines, messages):
            failure(events, "shutdown")
        await until(lambda: not self.daemon.running, "the daemon stops")
