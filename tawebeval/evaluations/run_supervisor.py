"""The supervision of one evaluator: its start, its stdout and the files that it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import attrs
import msgspec

from tawebeval.core.budget import RingAllocation
from tawebeval.core.checkout import Checkout
from tawebeval.core.evaluator_environment import build_environment
from tawebeval.core.events import compute_base64_size
from tawebeval.core.fileblock import FileReference
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import Markers, SegiParser
from tawebeval.evaluations.command_hints import find_command_hint
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.handover_journal import HandoverJournal
from tawebeval.evaluations.journal import ParserCheckpoint
from tawebeval.evaluations.run import EvaluatorRun, RunProgress
from tawebeval.evaluations.run_keeper import BROKER, RUN, KeeperSpawner, RunDescriptors, RunRecorder
from tawebeval.evaluations.snapshot import RunSnapshot
from tawebeval.evaluations.stdout_pump import StdoutPump
from tawebeval.linux.child import ProcessAdopter, ProcessTransport, ResumableProcess, StartedProcess
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.workspace import FileRefused


@attrs.define(eq=False)
class RunSupervisor:
    """Supervisor of one evaluator in its sandbox, and the owner of its `StdoutPump`.

    - `parser_state`, `progress`: those of a run that an earlier process of the daemon has begun.
    - `on_new_events()`: called when the ring has new events.
    - `on_change()`: called when a snapshot is to be saved.
    """

    _details: EvaluationDetails
    _context: EvaluationContext
    _checkout: Checkout
    _sandboxed: SandboxedRun
    output_markers: Markers
    _ring: EventRing
    _ring_allocation: RingAllocation
    _on_new_events: Callable[[], object]
    _on_change: Callable[[], object]
    _parser_state: bytes = b""
    _progress: RunProgress | None = None
    evaluator_run: EvaluatorRun = attrs.field(init=False)
    pump: StdoutPump = attrs.field(init=False)
    _parser: SegiParser = attrs.field(init=False)
    _is_pause_unsaved: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        context, limits = self._context, self._sandboxed.limits
        state, summary = self._parser_state, self._details.result_summary
        make = partial(SegiParser.resume, state) if state else SegiParser
        self._parser = make(self.output_markers, max_value=limits.data_value, max_file=limits.file)
        if state and summary is not None:
            self._parser.result_summary = summary
        self._details.result_summary = self._parser.result_summary
        self.pump = StdoutPump(context.clock, self._parser, self._ring, self._ring_allocation, self)
        self.evaluator_run = EvaluatorRun(
            context.clock,
            self.pump,
            context.configuration.evaluations.kill_grace_seconds,
            self._sandboxed,
            context.worker_threads,
            self._on_change,
            self._progress,
        )
        self.evaluator_run.find_command_hint = self._find_command_hint

    # The start

    def start_evaluator(self, directory: Path) -> StartedProcess:
        """Start the evaluator in `directory`. Blocks. Raises: OSError."""
        details, sandboxed = self._details, self._sandboxed
        request, workspace, view = details.request, sandboxed.workspace, sandboxed.workspace_view
        chosen = details.environment.variables if details.environment is not None else {}
        environment = build_environment(
            {**self._context.configuration.evaluations.environment_variables, **chosen},
            home=str(view.translate_path(workspace.home_directory)),
            temporary_directory=str(view.translate_path(workspace.temporary_directory)),
            seed=details.seed,
            submission={
                file.field: str(view.translate_path(workspace.locate_submitted_file(file)))
                for file in request.submission
            },
            markers=self.output_markers,
        )
        return sandboxed.start_evaluator(request.evaluator_cmd, environment, directory)

    async def wait_for_evaluator_start(self, started: StartedProcess) -> None:
        """Wait in the queue of a cluster. Raises: EvaluationFailure, CancelledError."""
        await self._sandboxed.wait_for_evaluator_start(started, self._make_spawner())

    def connect_process(self, started: StartedProcess, journal: HandoverJournal | None) -> None:
        """Let the started process drive the run. Raises: OSError."""
        process = self._sandboxed.connect_process(self.evaluator_run, started, self._make_spawner())
        self._record_events(process, journal)

    def reattach_process(self, kept: RunDescriptors, journal: HandoverJournal | None) -> None:
        """Let a process that the keeper holds drive the run. Raises: OSError."""
        keeper = self._context.run_keeper
        assert keeper is not None, "it holds the evaluator"
        process = self._sandboxed.reattach_process(
            self.evaluator_run,
            kept.process_descriptors,
            partial(keeper.connect_run_to_protocol, self._details.log_name + RUN),
            self._make_spawner(),
        )
        self._record_events(process, journal)

    def _make_spawner(self) -> ProcessAdopter:
        """Return the adopter of the evaluator's process: the keeper's, if there is one."""
        keeper = self._context.run_keeper
        if keeper is None:
            return self._context.spawner
        return KeeperSpawner(keeper, self._details.log_name + RUN, self._sandboxed.list_descriptors)

    def _record_events(self, process: ProcessTransport, journal: HandoverJournal | None) -> None:
        """Record the events of an evaluator that the keeper holds."""
        if self._context.run_keeper is not None:
            assert journal is not None, "made with the keeper"
            # The processes of a `KeeperSpawner` are resumable.
            stored = cast("ResumableProcess", process)
            self.pump.event_recorder = RunRecorder(
                journal.write_events, self._parser, self.evaluator_run, stored
            )

    def supervise(self) -> None:
        """Have the limits of the connected run checked, and serve its programs, until its end."""
        context, sandboxed, run = self._context, self._sandboxed, self.evaluator_run
        context.limit_monitor.add_run(sandboxed, run.stop)
        spawner: ProcessAdopter = context.spawner
        if context.run_keeper is not None:
            spawner = KeeperSpawner(context.run_keeper, self._details.log_name + BROKER)
        sandboxed.serve_submission_run_requests(
            context.clock, context.worker_threads, spawner, run.stop_unless_exited
        )
        run.run_ended.add_callback(lambda _: context.limit_monitor.remove_run(sandboxed))

    # While the evaluator runs

    def check_reader_timeout(self, read_cursor: int, *, is_slot_wanted: bool) -> None:
        """Stop the run if it has waited too long for its readers. Have a new pause saved.

        `read_cursor` is the last cursor up to which a client has read. `is_slot_wanted` is whether
        another evaluation waits for the slot. To be called about once a second, since pauses may
        come with each page.
        """
        self.evaluator_run.check_reader_timeout(
            self._context.configuration.evaluations.max_pause_seconds,
            self._ring.measure_bytes_before(read_cursor),
            is_slot_wanted=is_slot_wanted,
        )
        if self._is_pause_unsaved:
            self._is_pause_unsaved = False
            self._on_change()

    def take_snapshot(self) -> RunSnapshot:
        """Return the present state of the connected run, for the journal."""
        quota = self._sandboxed.workspace.quota_directory
        return RunSnapshot(
            pid=self.evaluator_run.main_pid,
            checkout_path=str(self._checkout.path),
            markers=attrs.astuple(self.output_markers),
            sandbox_description=self._sandboxed.describe_for_resume(),
            progress=self.evaluator_run.progress,
            progress_time=self._context.clock.seconds(),
            quota_directory=None if quota is None else str(quota),
        )

    def _find_command_hint(self, status: int, stderr: str) -> str:
        request = self._details.request
        return find_command_hint(
            request.evaluator_cmd, self._checkout.path, request.directory, status, stderr
        )

    # StdoutPumpOwner

    def on_new_events(self) -> None:
        """Wake the clients that wait for events."""
        self._on_new_events()

    def on_pause_change(self, paused: bool) -> None:
        """Stop the clock of the run while the ring is full."""
        self.evaluator_run.set_clock_paused(paused)
        self._is_pause_unsaved = True

    def on_lost_events(self) -> None:
        """Kill the run: its events are not complete any more."""
        self.evaluator_run.on_lost_events()

    async def read_referenced_file(self, reference: FileReference) -> bytes:
        """Return the content of a file that the evaluator names. Raises: FileRefused."""
        path = reference.path
        if self._sandboxed.read_remote_file is not None:
            content = await self._sandboxed.read_remote_file(path)
        else:
            content = await self._context.worker_threads.run_in_thread(self._read_file, path)
        size = compute_base64_size(len(content))
        if self.evaluator_run.count_output_within_limit(size) < size:
            raise FileRefused(f"{path!r} exceeds the rest of limits.output")
        return content

    def _read_file(self, path: str) -> bytes:
        sandboxed, directory = self._sandboxed, self._details.request.directory
        return sandboxed.workspace.read_file(
            path,
            sandboxed.workspace.locate_working_directory(directory, self._checkout.path),
            sandboxed.limits.file,
            sandboxed.workspace_view,
        )


def compute_progress(
    snapshot: RunSnapshot,
    checkpoint: ParserCheckpoint,
    last_heartbeat: float | None,
    skipped_stderr_bytes: int,
) -> RunProgress:
    """Return the progress of a run at the end of the earlier process.

    `last_heartbeat` is the last time at which that was alive, in seconds of the monotonic clock.
    """
    progress, ran = snapshot.progress, 0.0
    if last_heartbeat is not None and not (progress.is_paused or progress.is_clock_suspended):
        ran = max(0.0, last_heartbeat - snapshot.progress_time)
    return msgspec.structs.replace(
        progress,
        wall_clock_seconds_left=progress.wall_clock_seconds_left - ran,
        output_bytes=checkpoint.output_bytes,
        stderr_bytes=skipped_stderr_bytes,
    )
