"""From stdout to a protocol: `stdout_spliced WAY LENGTH TOTAL`.

WAY is `pipe`, for `PipeReader`, or `memfd`, for `SplicedPipeReader` with everything that was
delivered discarded at once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tawebeval.linux.keeper_owned_process import KeeperOwnedDescriptors, KeeperOwnedProcess
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from benchmarks.programs.stopwatch import Stopwatch, arguments
from tawebeval.linux.child import ChildProcess, start_child

reactor: Any = installed


class Counter(ProcessProtocol):
    """Counts stdout, discards it, and stops the reactor at its end."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self.process: KeeperOwnedProcess | None = None

    def outReceived(self, data: bytes) -> None:
        """Count."""
        self._stopwatch.count(len(data))
        if self.process is not None:
            self.process.release_output_memory(self.process.delivered_bytes)

    def processEnded(self, reason: Failure) -> None:
        """Stop."""
        reactor.stop()


def main() -> None:
    """Run the writer, count, and report."""
    way = sys.argv.pop(1)
    argv, total = arguments()
    stopwatch = Stopwatch()
    counter = Counter(stopwatch)
    started = start_child(argv, {}, "/")
    if way == "memfd":
        run = KeeperOwnedDescriptors(
            started.pid,
            started.pidfd,
            started.stdout,
            started.stderr,
            os.memfd_create("output"),
            os.memfd_create("errors"),
        )

        def wait() -> Deferred[Any]:
            return succeed(os.wait4(started.pid, 0)[1:])

        counter.process = KeeperOwnedProcess(reactor, counter, run, wait)
    else:
        ChildProcess(reactor, counter, started)
    reactor.run()
    stopwatch.report(total)


if __name__ == "__main__":
    main()
