"""From stdout to stored events by the daemon's own parts, with a reader who keeps up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tawebeval.evaluations.stdout_pump import StdoutPump
from twisted.internet import reactor as installed

from benchmarks.programs.stopwatch import Stopwatch, arguments
from tawebeval.config import LimitSettings
from tawebeval.core.budget import RingBudget
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.fileblock import FileReference
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import Markers, SegiParser
from tawebeval.daemon.process_setup import keep_freed_memory
from tawebeval.deferreds import WorkerThreads
from tawebeval.evaluations.run import EvaluatorRun
from tawebeval.linux.cgroups.manager import CgroupManager
from tawebeval.linux.child import Spawner
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.sandbox.base import NoSandbox, UnsandboxedRun
from tawebeval.sandbox.workspace import Workspace

_CAPACITY = 4 * 1024 * 1024

reactor: Any = installed


class MeasuredRun(EvaluatorRun):
    """A run that counts what it prints."""

    def __init__(self, stopwatch: Stopwatch, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stopwatch = stopwatch

    def outReceived(self, data: bytes) -> None:
        """Count, and do what is done otherwise."""
        self._stopwatch.count(len(data))
        super().outReceived(data)


class Store:
    """Stores events, and has them acknowledged whenever half of what there may be is stored."""

    run: EvaluatorRun

    def __init__(self) -> None:
        self.ring = EventRing(read_wall_clock=time.time)
        budget = RingBudget(2**40, _CAPACITY, 1, lambda call: reactor.callLater(0, call))
        parser = SegiParser(Markers.generate(os.urandom))
        self.share = budget.allocate_ring(on_room=lambda: self.pump.on_ring_has_room())
        self.pump = StdoutPump(reactor, parser, self.ring, self.share, self)

    def on_new_events(self) -> None:
        """Acknowledge, if that is due."""
        if self.ring.line_bytes >= _CAPACITY / 2:
            self.ring.acknowledge(self.ring.end_cursor)
            self.pump.on_acknowledge()

    def on_pause_change(self, paused: bool) -> None:
        """Stop the clock, or let it go on."""
        self.run.set_clock_paused(paused)

    def on_lost_events(self) -> None:
        """Refuse: no figure would be true."""
        raise AssertionError("output was lost")

    async def read_referenced_file(self, wanted: FileReference) -> bytes:
        """Refuse: there are no file blocks."""
        raise AssertionError("the writer prints no file blocks")


def main(prepare: Callable[[Store], object] = lambda store: None) -> None:
    """Run the writer, store its events, and report; `prepare` gets the store before."""
    keep_freed_memory()  # as the daemon does at its start
    argv, total = arguments()
    stopwatch = Stopwatch()
    store = Store()
    prepare(store)
    spawner = Spawner(reactor)
    limits = LimitSettings(output=2**40)
    cell = UnsandboxedRun(
        Workspace(Path("/nonexistent")),
        Checkout(Commit("", ""), Path("/nonexistent"), lambda: None),
        NoSandbox(
            limits, CgroupManager([], {}, {}), OrphanReaper(reactor, spawner), Path("/nonexistent")
        ),
        limits,
    )
    threads = WorkerThreads(reactor, reactor.getThreadPool())
    run = store.run = MeasuredRun(stopwatch, reactor, store.pump, 2, cell, threads)
    spawner(run, argv, {}, "/")
    run.run_ended.add_callback(lambda _: reactor.stop())
    reactor.run()
    assert run.failure is None
    stopwatch.report(total)


if __name__ == "__main__":
    main()
