"""Baseline: a forwarder in Twisted, from the stdout of a process to a socket, as it comes.

`forwarder COMMAND` runs the shell command once for each connection. It is not read faster than
the socket takes it.
"""

from __future__ import annotations

import sys
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, ProcessProtocol, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from benchmarks.programs.serving import serve

reactor: Any = installed


@implementer(IPushProducer)
class Forward(ProcessProtocol):
    """Writes stdout to the socket, which is closed at its end."""

    transport: Any

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def connectionMade(self) -> None:
        """Let the socket tell when it has enough."""
        self._socket.registerProducer(self, True)

    def pauseProducing(self) -> None:
        """Read no more for now."""
        self.transport.pauseProducing()

    def resumeProducing(self) -> None:
        """Read on."""
        self.transport.resumeProducing()

    def stopProducing(self) -> None:
        """Nobody wants more of it."""
        self.transport.loseConnection()

    def outReceived(self, data: bytes) -> None:
        """Forward."""
        self._socket.write(data)

    def processEnded(self, reason: Failure) -> None:
        """End the connection."""
        self._socket.unregisterProducer()
        self._socket.loseConnection()


class Connection(Protocol):
    """A client, for whom the command is run."""

    transport: Any

    def connectionMade(self) -> None:
        """Run the command."""
        self.transport.setTcpNoDelay(True)
        argv = ["/bin/sh", "-c", sys.argv[1]]
        reactor.spawnProcess(Forward(self.transport), argv[0], argv, {})


def main() -> None:
    """Serve each connection."""
    serve(Factory.forProtocol(Connection))


if __name__ == "__main__":
    main()
