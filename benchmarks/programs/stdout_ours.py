"""From stdout to stored events by the daemon's own parts, with a reader who keeps up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed

from benchmarks.programs.stopwatch import Stopwatch, arguments
from tawebeval.allocator import keep_freed_memory
from tawebeval.budget import Budget
from tawebeval.cgroups import Cgroups
from tawebeval.checkouts import Checkout
from tawebeval.commits import Commit
from tawebeval.config import Limits
from tawebeval.fileblock import WantedFile
from tawebeval.intake import Intake
from tawebeval.markers import Markers
from tawebeval.orphans import Orphans
from tawebeval.process import Spawner
from tawebeval.ring import Ring
from tawebeval.run import Run
from tawebeval.sandbox import NoCell
from tawebeval.segi import Parser
from tawebeval.signals import Threads
from tawebeval.workspace import Workspace
from tawebeval.writable import Copies

_CAPACITY = 4 * 1024 * 1024

reactor: Any = installed


class MeasuredRun(Run):
    """A run that counts what it prints."""

    def __init__(self, stopwatch: Stopwatch, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stopwatch = stopwatch

    def outReceived(self, data: bytes) -> None:
        """Count, and do what is done otherwise."""
        self._stopwatch.count(len(data))
        super().outReceived(data)


def main() -> None:
    """Run the writer, store its events, and report."""
    keep_freed_memory()  # as the daemon does at its start
    argv, total = arguments()
    stopwatch = Stopwatch()
    ring = Ring()

    def acknowledge() -> None:
        if ring.size >= _CAPACITY / 2:
            ring.acknowledge(ring.newest)
            intake.acknowledged()

    async def no_file(wanted: WantedFile) -> bytes:
        raise AssertionError("the writer prints no file blocks")

    intake = Intake(
        reactor,
        Parser(Markers.fresh(os.urandom)),
        ring,
        Budget(2**40, _CAPACITY, 1, lambda call: reactor.callLater(0, call)).enter(),
        changed=acknowledge,
        held=lambda held: run.hold(held),
        read_file=no_file,
    )
    spawner = Spawner(reactor)
    cell = NoCell(
        Workspace(Path("/nonexistent")),
        Checkout(Commit("", ""), Path("/nonexistent"), lambda: None),
        Limits(output=2**40),
        Cgroups([], {}, {}),
        Orphans(reactor, spawner),
        Copies(),
    )
    threads = Threads(reactor, reactor.getThreadPool())
    run = MeasuredRun(stopwatch, reactor, intake, 2, cell, threads)
    spawner(run, argv, {}, "/")
    run.ended.wait().addCallback(lambda _: reactor.stop())
    reactor.run()
    assert run.failure is None
    stopwatch.report(total)


if __name__ == "__main__":
    main()
