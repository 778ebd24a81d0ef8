"""`web.server.transport`: all data arrives, at once or in the reactor's turns."""

from __future__ import annotations

import ctypes
import socket
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet import reactor, ssl, tcp
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import (
    AdoptedStreamServerEndpoint,
    SSL4ServerEndpoint,
    TCP4ClientEndpoint,
    UNIXClientEndpoint,
    connectProtocol,
    serverFromString,
    wrapClientTLS,
)
from twisted.internet.interfaces import IStreamServerEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactor
from twisted.python.failure import Failure
from twisted.trial.unittest import SkipTest, SynchronousTestCase, TestCase

from tawebeval.web.server.transport import (
    WriteThroughEndpoint,
    WriteThroughServer,
    WriteThroughUnixServer,
)
from tests.cases.certificates import make_certificate
from tests.cases.patience import PATIENCE

TCP = "tcp:0:interface=127.0.0.1"
KERNEL = 4096  # bytes that the kernel is asked to keep; it keeps about twice as many
LITTLE = 32 * 1024  # more than it takes
BUFFER = 64 * 1024  # bytes in memory from which on Twisted pauses a producer


class FakeReactor(Clock):
    """A Clock with the transports that want to write; `turn` lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[Any] = []
        self.addReader = self.removeReader = lambda reader: None

    def addWriter(self, writer: object) -> None:
        """Add a writer."""
        if writer not in self.writers:
            self.writers.append(writer)

    def removeWriter(self, writer: object) -> None:
        """Remove a writer, if it is one."""
        if writer in self.writers:
            self.writers.remove(writer)

    def turn(self) -> None:
        """Make the calls that are due; let all write that wanted to when the turn began."""
        self.advance(0)
        for writer in list(self.writers):
            why = writer.doWrite()
            if why is not None:
                self.removeWriter(writer)
                writer.connectionLost(Failure(why))


class Pushing:
    """A push producer that records its calls."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.pauseProducing = partial(self.said.append, "pause")
        self.resumeProducing = partial(self.said.append, "resume")
        self.stopProducing = partial(self.said.append, "stop")


class Pulled:
    """A pull producer: writes a piece for each call, then ends."""

    def __init__(self, connection: tcp.Server, pieces: list[bytes]) -> None:
        self.connection = connection
        self.pieces = pieces

    def resumeProducing(self) -> None:
        """Write the next piece."""
        if self.pieces:
            self.connection.write(self.pieces.pop(0))
        else:
            self.connection.unregisterProducer()

    def stopProducing(self) -> None:
        """Do nothing."""


class Pair:
    """A connection of a kind, with a reactor of its own, and its client."""

    def __init__(self, kind: type[tcp.Server] = WriteThroughServer) -> None:
        self.reactor = FakeReactor()
        server, self.client = socket.socketpair()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL)
        self.client.setblocking(False)
        self.lost: list[Failure] = []
        self.received = b""
        protocol = Protocol()
        protocol.connectionLost = self.lost.append  # type: ignore[method-assign,assignment]
        address: Any = "" if kind is WriteThroughUnixServer else ("", 0)
        port: Any = None
        self.connection = kind(server, protocol, address, port, 0, self.reactor)  # type: ignore[arg-type]
        protocol.makeConnection(self.connection)

    def read(self, size: int = 2**24) -> bool:
        """Read up to so many bytes; tell whether there was anything, or has ever been an end."""
        try:
            chunk = self.client.recv(size)
        except BlockingIOError:
            return False
        self.received += chunk
        return bool(chunk)

    @property
    def ended(self) -> bool:
        """Whether the client finds the end of what is sent, all before it being read."""
        try:
            return self.client.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def finish(self) -> None:
        """Let turns pass and the client read until nothing happens any more."""
        while True:
            writers = list(self.reactor.writers)
            self.reactor.turn()
            if not self.read() and (self.lost or writers == self.reactor.writers == []):
                return

    def close(self) -> None:
        """End all that is left."""
        self.client.close()
        if not self.lost:
            self.connection.connectionLost(Failure(ConnectionAbortedError()))


STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 300_000)),
    st.tuples(st.just("write"), st.integers(0, 2_000)),
    st.tuples(st.just("sequence"), st.integers(0, 20_000)),
    st.tuples(st.just("read"), st.integers(1, 100_000)),
    st.tuples(st.just("turn"), st.just(0)),
)


PLAYS = st.tuples(
    st.lists(STEPS, max_size=12),
    st.sampled_from(["stay", "lose", "half"]),
    st.lists(STEPS, max_size=3),
    st.booleans(),
)


class PropertyTests(SynchronousTestCase):
    """Any order of writes, reads and turns."""

    @given(st.sampled_from([WriteThroughServer, WriteThroughUnixServer]), PLAYS)
    def test_arrives(self, kind: type[tcp.Server], steps: Any) -> None:
        """All bytes arrive in order, and then the end, as with Twisted's transport."""
        self.assertEqual(self.play(kind, *steps), self.play(tcp.Server, *steps))

    def play(
        self, kind: type[tcp.Server], before: list[Any], end: str, behind: list[Any], watched: bool
    ) -> tuple[bytes, bool, int]:
        """Return the bytes that arrive, whether they end, and how often the loss is reported.

        Bytes written `behind` the end may arrive or not: earlier ones may have been sent by then.
        """
        pair = Pair(kind)
        try:
            producer = Pushing()
            if watched:
                pair.connection.registerProducer(producer, True)
            written = self.take(pair, before, b"")
            if watched and end != "stay":
                pair.connection.unregisterProducer()  # a producer would delay the end
            if end == "lose":
                pair.connection.loseConnection()
            elif end == "half":
                pair.connection.loseWriteConnection()
            promised = len(written)
            written = self.take(pair, behind, written)
            pair.finish()
            self.assertTrue(written.startswith(pair.received))
            if end == "stay":
                self.assertNotEqual(producer.said[-1:], ["pause"])
            received = pair.received if end == "stay" else pair.received[:promised]
            return received, pair.ended, len(pair.lost)
        finally:
            pair.close()

    def take(self, pair: Pair, steps: list[tuple[str, int]], written: bytes) -> bytes:
        """Take steps; return all that was written until then."""
        for what, size in steps:
            piece = bytes(((len(written) + i) >> 3) % 251 for i in range(min(size, 64)))
            piece = (piece * (size // 64 + 1))[:size]
            if what == "write":
                pair.connection.write(piece)
                written += piece
            elif what == "sequence":
                pair.connection.writeSequence([piece, b"-", piece])
                written += piece + b"-" + piece
            elif what == "read":
                pair.read(size)
            elif not pair.lost:
                pair.reactor.turn()
        return written


class WriteThroughTests(SynchronousTestCase):
    """Writes that are sent without a turn of the reactor, and those that are not."""

    def pair(self, kind: type[tcp.Server] = WriteThroughServer) -> Pair:
        """Return a connection of which the test is the reactor."""
        pair = Pair(kind)
        self.addCleanup(pair.close)
        return pair

    def check_sent(self, pair: Pair, data: bytes) -> None:
        """Hold that the client has just this, without a turn of the reactor."""
        pair.read()
        self.assertEqual(pair.received, data)
        pair.received = b""

    def test_at_once(self) -> None:
        """What the kernel takes is sent without a turn, again and again."""
        for kind in (WriteThroughServer, WriteThroughUnixServer):
            pair = self.pair(kind)
            for data in (b"one", b"", b"two"):
                pair.connection.write(data)
                self.check_sent(pair, data)
            self.assertEqual(pair.reactor.writers, [])

    def test_slow_client(self) -> None:
        """A producer is paused when anything is left, and resumed when that is sent."""
        for size in (LITTLE, BUFFER, 3 * BUFFER):
            pair = self.pair()
            producer = Pushing()
            pair.connection.registerProducer(producer, True)
            pair.connection.write(b"x")
            self.assertEqual(producer.said, [])
            pair.connection.write(b"y" * size)
            self.assertEqual(set(producer.said), {"pause"})
            producer.said.clear()
            pair.finish()
            self.assertEqual(producer.said, ["resume"])
            self.assertEqual(pair.received, b"x" + b"y" * size)
            pair.connection.write(b"z")
            self.assertEqual(producer.said, ["resume"])

    def test_pulled(self) -> None:
        """A producer that is asked for each piece is asked until it has no more."""
        pair = self.pair()
        pieces = [b"one", b"two", b"three"]
        pulled = Pulled(pair.connection, list(pieces))
        pair.connection.registerProducer(pulled, False)
        pair.finish()
        self.assertEqual(pair.received, b"".join(pieces))
        self.assertIsNone(pair.connection.producer)

    def test_client_gone(self) -> None:
        """Where the client has gone the connection ends in the reactor's next turn."""
        pair = self.pair()
        pair.client.close()
        pair.connection.write(b"one")
        self.assertEqual(pair.lost, [])
        pair.reactor.turn()
        self.assertEqual(len(pair.lost), 1)
        pair.connection.write(b"two")  # which nobody gets
        self.assertEqual(pair.reactor.writers, [])

    def test_aborted(self) -> None:
        """Behind an abort nothing is sent any more."""
        pair = self.pair()
        pair.connection.abortConnection()
        pair.connection.write(b"one")
        self.check_sent(pair, b"")
        pair.reactor.turn()
        self.assertEqual(len(pair.lost), 1)


PIECES = tuple(bytes([number]) * size for number, size in enumerate((1, 400, 70_000, 2, 500_000)))


class Sink(Protocol):
    """A client that pauses for a turn after each read, and closes once it has all `PIECES`."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended: Deferred[bytes] = Deferred()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Report what was received."""
        self.ended.callback(bytes(self.received))

    def dataReceived(self, data: bytes) -> None:
        """Take data and pause."""
        self.received += data
        transport: Any = self.transport
        if len(self.received) >= sum(map(len, PIECES)):
            transport.loseConnection()
        else:
            transport.pauseProducing()
            reactor.callLater(0, transport.resumeProducing)  # type: ignore[attr-defined]


class EndpointTests(TestCase):
    """Endpoints of all kinds, with real sockets and the real reactor."""

    async def check(
        self,
        endpoint: IStreamServerEndpoint,
        client: Callable[[Any], Any],
        kind: type = WriteThroughServer,
        begin: Callable[[Any], object] = id,
    ) -> None:
        """Check that connections are of this kind and deliver all data.

        `begin` is first called with the transports of both ends.
        """
        made: list[Any] = []

        class Source(Protocol):
            def connectionMade(self) -> None:
                made.append(self.transport)
                begin(self.transport)
                for piece in PIECES:
                    made[0].write(piece)

        port = await WriteThroughEndpoint(endpoint, 120).listen(Factory.forProtocol(Source))
        self.addCleanup(port.stopListening)
        sink = Sink()
        begin((await connectProtocol(client(port.getHost()), sink)).transport)
        self.assertTrue(await sink.ended == b"".join(PIECES))
        self.assertIsInstance(getattr(made[0], "transport", made[0]), kind)

    async def test_plain(self) -> None:
        """TCP, a UNIX socket, and a listening socket that systemd hands over."""
        folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-"))
        self.addCleanup(folder.rmdir)
        await self.check(serverFromString(reactor, TCP), _client_of)
        await self.check(
            serverFromString(reactor, f"unix:{folder}/socket"),
            lambda host: UNIXClientEndpoint(reactor, host.name),
            WriteThroughUnixServer,
        )
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        adopted = AdoptedStreamServerEndpoint(reactor, listening.detach(), socket.AF_INET)
        await self.check(adopted, _client_of)

    async def test_tls(self) -> None:
        """TLS from the beginning, and TLS begun on a connection, which then sends no clear text."""
        folder = Path(self.mktemp())
        folder.mkdir()
        file = make_certificate(folder, "localhost")
        certificate = ssl.PrivateCertificate.loadPEM(file.read_bytes())
        options = ssl.optionsForClientTLS("localhost", certificate)
        await self.check(
            SSL4ServerEndpoint(reactor, 0, certificate.options(), interface="127.0.0.1"),
            lambda host: wrapClientTLS(options, _client_of(host)),
        )

        def begin(transport: Any) -> None:
            server = isinstance(transport, WriteThroughServer)
            transport.startTLS(certificate.options() if server else options)

        await self.check(serverFromString(reactor, TCP), _client_of, begin=begin)

    def test_others(self) -> None:
        """A port that is none of Twisted's stays as it is."""
        endpoint = WriteThroughEndpoint(serverFromString(MemoryReactor(), "tcp:1"), 120)
        port = self.successResultOf(endpoint.listen(Factory.forProtocol(Protocol)))
        self.assertFalse(hasattr(port, "transport"))


class SilenceTests(TestCase):
    """Clients that have vanished without a word."""

    timeout = PATIENCE

    async def vanish(self, begin: Callable[[Any], object]) -> None:
        """Have a client vanish, and wait until its connection is lost; `begin` gets that before."""
        made: Deferred[Protocol] = Deferred()
        lost: Deferred[None] = Deferred()

        class Waiting(Protocol):
            def connectionMade(self) -> None:
                made.callback(self)

            def connectionLost(self, reason: Failure = connectionDone) -> None:
                lost.callback(None)

        endpoint = WriteThroughEndpoint(serverFromString(reactor, TCP), 1)
        port: Any = await endpoint.listen(Factory.forProtocol(Waiting))
        self.addCleanup(port.stopListening)
        with socket.create_connection(("127.0.0.1", port.getHost().port)) as client:
            server = await made
            # No packet gets to it any more, so none is answered.
            nothing = struct.pack("=HBBI", 6, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes
            program = ctypes.create_string_buffer(nothing)
            filter_ = struct.pack("@HP", 1, ctypes.addressof(program))
            try:
                client.setsockopt(socket.SOL_SOCKET, 26, filter_)  # SO_ATTACH_FILTER
            except PermissionError:
                raise SkipTest("here only root may attach a filter to a socket") from None
            begin(server.transport)
            await lost

    async def test_vanished(self) -> None:
        """The connection is lost: idle, or with little or much unsent data."""
        await self.vanish(lambda transport: None)
        await self.vanish(lambda transport: transport.write(b"a heartbeat"))
        await self.vanish(lambda transport: transport.write(bytes(2**23)))


def _client_of(host: Any) -> Any:
    return TCP4ClientEndpoint(reactor, "127.0.0.1", host.port)
