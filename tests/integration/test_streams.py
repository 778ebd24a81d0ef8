"""Following a real evaluation over real connections: curl, treq, and WebSockets."""

from __future__ import annotations

from twisted.internet.defer import gatherResults

from tests.integration.client import failure, python, text
from tests.integration.harness import until
from tests.integration.raw import Connection
from tests.integration.wire import streams


class StreamTests(streams.TransportCase):
    """Evaluators on this machine."""


class DeafTests(streams.StreamCase):
    configuration = streams.StreamCase.configuration + "[http]\nwindow = 2\nrate = 65_536\n"

    async def test_reader_that_takes_nothing_is_cut_off(self) -> None:
        identifier = await self.begin(python(streams.LINES))
        with Connection(self.daemon.port, receives=4096) as deaf:
            deaf.send(
                f"GET /evaluation/{identifier}/events HTTP/1.1\r\nHost: localhost\r\n"
                "Accept: application/jsonl\r\n\r\n".encode()
            )
            await until(lambda: deaf.reset, "the connection is cut off")
        everything = text(await self.client.follow(identifier))
        self.assertTrue(everything == streams.PRINTED, "not what was printed")


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
