"""Streams of evaluations on this machine, to their end and to that of the daemon."""

from __future__ import annotations

from tests.integration.client import failure
from tests.integration.harness import until
from tests.integration.wire import streams


class StreamTests(streams.TransportCase):
    async def test_readers_on_each_transport_are_told_of_the_shutdown(self) -> None:
        identifier = await self.begin_and_wait("printf ready; exec sleep 600")
        reading = await self.follow_by_all(identifier)
        self.daemon.interrupt()
        for events in await reading:
            failure(events, "shutdown")
        await until(lambda: not self.daemon.running, "the daemon stops")
