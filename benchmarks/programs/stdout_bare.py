"""Baseline: a bare `ProcessProtocol` that counts bytes."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from benchmarks.programs.stopwatch import Stopwatch, arguments

reactor: Any = installed


class Counter(ProcessProtocol):
    """Counts stdout and stops the reactor at its end."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def outReceived(self, data: bytes) -> None:
        """Count."""
        self._stopwatch.count(len(data))

    def processEnded(self, reason: Failure) -> None:
        """Stop."""
        reactor.stop()


def main() -> None:
    """Run the writer, count, and report."""
    argv, total = arguments()
    stopwatch = Stopwatch()
    reactor.spawnProcess(Counter(stopwatch), argv[0], argv, {})
    reactor.run()
    stopwatch.report(total)


if __name__ == "__main__":
    main()
