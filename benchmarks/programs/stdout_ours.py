"""From stdout to stored events by the daemon's own parts, with a reader who keeps up."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed

from benchmarks.programs.stopwatch import Stopwatch, arguments
from tawebeval.config import Configuration, LimitSettings
from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.core.events import (
    EventLog,
    EventMemory,
)
from tawebeval.core.form import EvaluationRequest, Repository, pack_request
from tawebeval.core.segi import Markers
from tawebeval.daemon.process import keep_freed_memory
from tawebeval.deferreds import WorkerThreads
from tawebeval.evaluations.context import EvaluationContext, make_unread_events_budget
from tawebeval.evaluations.eventlog import (
    EvaluationEvents,
    EventFiles,
    RecordedStdout,
)
from tawebeval.evaluations.run import Run
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.starter import LaunchSpec
from tawebeval.sandbox.base import LimitMonitor, NoSandbox
from tawebeval.sandbox.workspace import Workspace, WorkspaceLauncher

_CAPACITY = 4 * 1024 * 1024  # bytes of events in memory

reactor: Any = installed


class ReadEvents(EvaluationEvents):
    """Events that a client reads and acknowledges who keeps up."""

    def notify_readers(self) -> None:
        """Count new events, and read them."""
        super().notify_readers()
        while self.event_log.begin_cursor < self.event_log.end_cursor:
            batch = self.read_now(self.event_log.begin_cursor, 256 * 1024)
            self.acknowledge(self.event_log.begin_cursor + batch.count)


class MeasuredRun(Run):
    """A run that counts what it prints."""

    stopwatch: Stopwatch

    def outReceived(self, data: bytes) -> None:
        """Count, and do what is done otherwise."""
        self.stopwatch.count(len(data))
        super().outReceived(data)


def main() -> None:
    """Run the writer, store its events and read them, and report."""
    keep_freed_memory()  # as the daemon does at its start
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder))


def _measure(folder: Path) -> None:
    argv, total = arguments()
    threads = WorkerThreads.create(reactor, 4, "work")
    threads.start()
    launcher = WorkspaceLauncher(folder / "starter" / "socket")
    launcher.connect_starter()
    launcher.overlay_problem = "no tree is needed"
    launcher.attach_reactor(reactor, threads.run_in_thread, lambda: None)
    configuration = Configuration(limits=LimitSettings(output=2**40))
    cgroups = CgroupManager({})
    sandbox = NoSandbox(configuration.limits, cgroups, launcher, folder)
    workspace = Workspace(folder / "evaluation")
    workspace.root.mkdir()
    checkout = Checkout(Commit("", ""), folder, lambda: None)
    context = EvaluationContext(
        configuration=configuration,
        clock=reactor,
        generate_random_bytes=os.urandom,
        worker_threads=threads,
        checkout_source=None,  # type: ignore[arg-type]  # nothing is fetched
        sandbox=sandbox,
        limit_monitor=LimitMonitor(reactor, threads, threads),
        event_memory=EventMemory(_CAPACITY),
        unread_events_budget=make_unread_events_budget(2**40),
    )
    stdout = RecordedStdout(
        EventLog(context.event_memory),
        EventFiles(workspace.output_directory),
        Markers.generate(os.urandom),
        time.time,
    )
    slots, budget = context.segment_load_slots, context.unread_events_budget
    events = ReadEvents(stdout.event_log, "", "some", threads, slots, budget, stdout)
    request = EvaluationRequest(Repository("file:///"), "", "", "", 0, ())
    run = MeasuredRun(
        context,
        EvaluationDetails("some", pack_request(request), 0),
        checkout,
        sandbox.make_run(workspace, checkout, configuration.limits),
        events,
        lambda: None,
    )
    run.stopwatch = Stopwatch()
    program = launcher.starter.start_program(workspace.output_directory, LaunchSpec(argv, {}, "/"))
    launcher.connect_program(run, program)
    run.run_ended.add_callback(lambda _: reactor.stop())
    reactor.run()
    assert run.failure is None, run.failure
    run.stopwatch.report(total)
    launcher.close()
    threads.stop()


if __name__ == "__main__":
    main()
