"""One evaluation, from the queue to its end.

The log has a line for each state. The line begins with the evaluation's name in the log; its fields
are the caller, the commit, the state, and the seconds that the state before has lasted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.config import LimitSettings
from tawebeval.core.budget import RingShare
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.environment import build_environment
from tawebeval.core.events import base64_size, encode_error
from tawebeval.core.fileblock import FileReference
from tawebeval.core.form import (
    EvaluationRequest,
    Repository,
    pack_request,
    unpack_labels,
    unpack_request,
)
from tawebeval.core.results import ResultSummary
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import Markers, SegiParser
from tawebeval.core.states import EvaluationState, check_transition
from tawebeval.core.tokens import ANONYMOUS
from tawebeval.deferreds import Condition, OneShotEvent, run_in_background
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.evaluations.context import EvaluationContext, RunSlots
from tawebeval.evaluations.run import EvaluatorRun, RunResult, StdoutPump
from tawebeval.linux.child import StartedProcess
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.workspace import FileRefused, Workspace, derive_log_name
from tawebeval.webhooks.callback import Callback

_UNCOUNTED = 1024  # bytes of form and stderr that count as the fixed cost of an evaluation

# Parts of log lines.
_STEP = "{evaluation}: {state} after {after:.3f} s"
_LIMITS = "; limits: {wall_clock:g} s, {cpu} s of processor time, "
_PRINTED = "; {events} events"
_PROCESSOR = ", {cpu_seconds:.3f} s of processor time"

log = Logger()


@attrs.define(eq=False)
class Evaluation:
    """One run of an evaluator on one submission, and the owner of its `StdoutPump`.

    - `upload_directory`: the directory of the form's files, None once the workspace has them.
    - `ring`: the events; `ring_share`: its part of the memory for all events.
    - `run`: set while the evaluator runs; `run_result`: set after that.
    - `results`: what the evaluator has reported, None before the start.
    - `state_times`: when each state began, in seconds since the epoch.
    - `change_condition`: notified of new events and of the end.
    - `cleanup_event`: set, to the evaluation, when its processes and directories are gone.
    - `on_full(evaluation)`: called when the ring becomes full; may make room.

    The registry keeps many evaluations in memory. Text of callers and evaluators is kept as bytes,
    since a `str` may take four times as much, and the fields of the form that only a start needs
    are dropped after the start. A thousand evaluations may run at once: one coroutine leads to the
    start of the evaluator, another one from its exit to the end, and none waits in between.
    """

    identifier: str
    _request: bytes = attrs.field(
        converter=pack_request, on_setattr=attrs.setters.NO_OP, repr=False
    )
    seed: int
    upload_directory: Path | None
    workspace: Workspace
    context: EvaluationContext
    caller: str = ANONYMOUS
    _on_full: Callable[[Evaluation], object] = lambda evaluation: None
    ring: EventRing = attrs.field(factory=EventRing)
    ring_share: RingShare = attrs.field(init=False)
    state: EvaluationState = EvaluationState.QUEUED
    failure: EvaluationFailure | None = None
    callback: Callback | None = None
    commit: Commit | None = None
    run: EvaluatorRun | None = None
    run_result: RunResult | None = None
    results: ResultSummary | None = None
    markers: Markers | None = None
    state_times: dict[str, float] = attrs.field(factory=dict)
    _since: float = 0.0  # when its state began, in seconds of the clock
    change_condition: Condition[None] = attrs.field(factory=Condition)
    cleanup_event: OneShotEvent[Evaluation] = attrs.field(factory=OneShotEvent)
    _pump: StdoutPump | None = None
    _limits: LimitSettings | None = None
    _checkout: Checkout | None = None
    _sandboxed: SandboxedRun | None = None
    _stop_reason: EvaluationFailure | None = None
    _slots: RunSlots | None = None
    _startup: Deferred[None] | None = None
    _is_launching: bool = False
    _stray_marker: str | None = None

    def __attrs_post_init__(self) -> None:
        self.ring.read_time = self.context.read_wall_clock
        self.ring_share = self.context.ring_budget.add_share(
            self.caller, partial(self._on_full, self), self._on_room
        )

    @property
    def log_name(self) -> str:
        """Name in the log, from which the identifier cannot be guessed."""
        return derive_log_name(self.identifier)

    @property
    def request(self) -> EvaluationRequest:
        """The form; after the start without the fields that only a start needs."""
        return unpack_request(self._request)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The client's labels."""
        return unpack_labels(self._request)

    @property
    def limits(self) -> LimitSettings:
        """The limits of the run; before the start those that a start would have now."""
        if self._limits is not None:
            return self._limits
        return self.context.configuration.limits.choose_limits(self.request.limits)

    def _fix_limits(self) -> LimitSettings:
        """Keep the present limits, whatever a reload changes."""
        self._limits = self.limits
        return self._limits

    def enter_queue(self, slots: RunSlots) -> None:
        """Enter the queue, and run as soon as there is a slot."""
        self.state_times["created"] = self.context.read_wall_clock()
        self._since = self.context.clock.seconds()
        self.context.counters.record_accepted()
        log.info("{evaluation}: {state}; caller {caller!r}, commit {commit}", **self._log_fields())
        self._startup = self._in_background(self._fetch_and_start(slots))

    def _in_background(self, coroutine: Coroutine[Deferred[Any], Any, None]) -> Deferred[None]:
        return run_in_background(
            coroutine, log, "{evaluation}: defect of the daemon", evaluation=self.log_name
        )

    def stop(self, reason: EvaluationFailure) -> None:
        """End the evaluation; `reason` becomes the final event. No effect after the end."""
        if self._stop_reason is None and not self.state.has_ended:
            self._stop_reason = reason
            if self.run is not None:
                self.run.stop(reason)
            elif self._startup is not None and not self._is_launching:
                self._startup.cancel()

    def abandon(self) -> None:
        """Stop the evaluation, whose events no client asks for, and log that."""
        seconds = self.context.configuration.evaluations.abandon_after
        words = f"no client has asked for the events in {seconds:g} seconds"
        log.info("{evaluation}: stopped: {why}", why=words, **self._log_fields())
        self.stop(EvaluationFailure("lost", f"{words} (evaluations.abandon_after)"))

    def on_acknowledge(self) -> None:
        """Handle a discard of events from the ring: more of stdout may be read."""
        if self._pump is not None:
            self._pump.on_acknowledge()
        else:
            self.ring_share.resize(self.ring.stored_bytes)

    def check_reader_timeout(self, cursor: int, *, wanted: bool) -> None:
        """Stop the evaluation if it has waited too long for its readers.

        `cursor` is the last cursor up to which a client has read. `wanted` is whether another
        evaluation waits for the slot.
        """
        if self.run is not None:
            limit = self.context.configuration.evaluations.paused
            self.run.check_reader_timeout(
                limit, self.ring.measure_bytes_before(cursor), wanted=wanted
            )

    def discard_events(self, final_state: EvaluationState) -> None:
        """Discard all events of a cleaned-up evaluation; its state becomes DRAINED or EXPIRED."""
        self._enter(final_state)
        self.ring.acknowledge(self.ring.newest)
        self.ring_share.release()

    async def _fetch_and_start(self, slots: RunSlots) -> None:
        """Fetch the commit, wait for a run slot and start the evaluator. On failure, end."""
        repositories = self.context.checkout_source
        try:
            if fetched := repositories.checkout_needs_network(*self._checkout_arguments()):
                self._slots = slots
                slots.reserve_turn(self.identifier, self.caller)
                await self._fetch()
            await self._wait_for_slot(slots)
            checkout = self._checkout = await repositories.check_out_commit(
                *self._checkout_arguments(), again=fetched
            )
            self.commit = checkout.commit
            if self.context.quota_directories is not None:
                directory = await self.context.quota_directories.get()
                self.workspace = attrs.evolve(self.workspace, quota_directory=directory)
            sandboxed = self._sandboxed = self.context.sandbox.make_run(
                self.workspace, checkout, self._fix_limits()
            )
            run = self._make_run(sandboxed)
            self._is_launching = True  # no cancelling from here on: the child would be lost
            started = await self.context.threads.run_in_thread(self.launch, sandboxed, checkout)
            self._adopt(run, started)
        except EvaluationFailure as error:
            await self._conclude(error)
        except CancelledError:
            await self._conclude(self._stop_reason)
        except OSError as error:
            # A path of the machine stays in the log. The error is no defect: no traceback.
            words = "{evaluation}: the evaluator could not be run: {error}"
            log.error(words, evaluation=self.log_name, error=error)  # noqa: TRY400
            await self._conclude(_not_run(error.strerror))
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            log.failure(
                "{evaluation}: defect: the evaluator could not be run", evaluation=self.log_name
            )
            await self._conclude(_not_run(type(error).__name__))

    def _checkout_arguments(self) -> tuple[Repository, str, str]:
        """Return the arguments of `check_out_commit`, unpacked each time: a small queue."""
        request = self.request
        return request.repository, request.commit_oid, self.caller

    async def _fetch(self) -> None:
        """Fetch the commit into the cache before there is a run slot.

        Until then the evaluation counts against the caller's share of fetches.
        """
        fetches = self.context.fetch_slots
        await fetches.acquire_slot(self.identifier, self.caller)
        self._enter(EvaluationState.FETCHING)
        try:
            checkout = await self.context.checkout_source.check_out_commit(
                *self._checkout_arguments()
            )
            self.commit = checkout.commit
            checkout.release()  # a queued evaluation pins nothing in the cache
        finally:
            fetches.suspend_slot(self.identifier)

    async def _wait_for_slot(self, slots: RunSlots) -> None:
        slot = slots.acquire_slot(self.identifier, self.caller)
        if self.state is EvaluationState.FETCHING and not slot.called:
            self._enter(EvaluationState.QUEUED)
        await slot
        self._slots = slots
        self.context.fetch_slots.release_slot(self.identifier)
        if self.state is EvaluationState.QUEUED:
            self._enter(EvaluationState.FETCHING)

    def _make_run(self, sandboxed: SandboxedRun) -> EvaluatorRun:
        """Return the run that the started evaluator will drive."""
        context, clock = self.context, self.context.clock
        limits, grace = self.limits, context.configuration.evaluations.grace
        markers = self.markers = Markers.generate(context.random_bytes)
        parser = SegiParser(markers, max_value=limits.data_value, max_file=limits.file)
        self.results = parser.results
        pump = self._pump = StdoutPump(clock, parser, self.ring, self.ring_share, self)
        return EvaluatorRun(clock, pump, grace, sandboxed, context.threads)

    def launch(self, sandboxed: SandboxedRun, checkout: Checkout) -> StartedProcess:
        """Create the workspace and start the evaluator. Blocks. Raises: EvaluationFailure, OSError.

        All blocking work is in this one call: each change of threads costs time.
        """
        assert self.upload_directory is not None, "only this method takes it"
        self.workspace.create_directories(self.upload_directory, sandboxed.workspace_view)
        self.upload_directory = None
        directory = self.workspace.locate_working_directory(self.request.directory, checkout.path)
        return self.launch_in_directory(directory, sandboxed)

    def launch_in_directory(self, directory: Path, sandboxed: SandboxedRun) -> StartedProcess:
        """Start the evaluator in `directory`. Blocks. Raises: EvaluationFailure, OSError."""
        if self._stop_reason is not None:
            raise self._stop_reason
        assert self.markers is not None, "made with the run"
        request, workspace, view = self.request, self.workspace, sandboxed.workspace_view
        environment = build_environment(
            self.context.configuration.evaluations.environment,
            home=str(view.translate_path(workspace.home_directory)),
            temporary=str(view.translate_path(workspace.temporary_directory)),
            seed=self.seed,
            submission={
                file.field: str(view.translate_path(workspace.locate_submitted_file(file)))
                for file in request.submission
            },
            markers=self.markers,
        )
        return sandboxed.start_evaluator(request.evaluator_cmd, environment, directory)

    def _adopt(self, run: EvaluatorRun, started: StartedProcess) -> None:
        """Connect the started evaluator to its run; kill it if `stop` was called meanwhile."""
        self.context.spawner.adopt_child(run, started)
        self._drop_start_fields()
        self.run = run
        self._startup = None
        self._enter(EvaluationState.RUNNING)
        assert self._sandboxed is not None, "made before the start"
        self.context.limit_monitor.add_run(self._sandboxed, run.stop)
        context = self.context
        self._sandboxed.serve_submissions(context.clock, context.threads, context.spawner)
        run.run_ended.add_callback(self._on_run_ended)
        if self._stop_reason is not None:
            run.stop(self._stop_reason)
            run.kill()  # no grace time: no client has seen it run

    def _on_run_ended(self, run: EvaluatorRun) -> None:
        assert self._sandboxed is not None, "made before the start"
        self.context.limit_monitor.remove_run(self._sandboxed)
        if run.stderr:
            words = "{evaluation}: end of stderr: {stderr!r}"
            log.info(words, **self._log_fields(), stderr=run.stderr)
        if self._pump is not None and run.failure is None:
            self._stray_marker = self._pump.stray_marker
        # A run holds its parser, and the parser up to a whole data block or file: drop both.
        self.run_result, self.run, self._pump = run.result, None, None
        self._in_background(self._conclude(run.failure))

    def _drop_start_fields(self) -> None:
        self._fix_limits()
        self._request = pack_request(self.request.drop_start_fields())

    def _on_room(self) -> None:
        """Go on: the ring is not full any more."""
        if self._pump is not None:
            self._pump.on_ring_room()

    # PumpOwner

    def on_new_events(self) -> None:
        """Wake the clients that wait for events."""
        self.change_condition.notify(None)

    def on_pause_change(self, paused: bool) -> None:
        """Stop the clock of the run while the ring is full."""
        assert self.run is not None, "the pump has a run"
        self.run.set_paused(paused)

    def on_lost_events(self) -> None:
        """Kill the run: its events are not complete any more."""
        assert self.run is not None, "the pump has a run"
        self.run.on_lost_events()

    async def read_referenced_file(self, wanted: FileReference) -> bytes:
        """Return the content of a file that the evaluator names. Raises: FileRefused."""
        assert self.run is not None, "the pump has a run"
        content = await self.context.threads.run_in_thread(self._read_file, wanted.path)
        size = base64_size(len(content))
        if self.run.count_output(size) < size:
            raise FileRefused(f"{wanted.path!r} exceeds the rest of limits.output")
        return content

    def _read_file(self, path: str) -> bytes:
        assert self._sandboxed is not None, "made before the start"
        assert self._checkout is not None, "made before the start"
        return self.workspace.read_file(
            path,
            self.workspace.locate_working_directory(self.request.directory, self._checkout.path),
            self.limits.file,
            self._sandboxed.workspace_view,
        )

    def _enter(self, state: EvaluationState) -> None:
        before, self.state = self.state, check_transition(self.state, state)
        self.state_times.setdefault(state.value, self.context.read_wall_clock())
        now = self.context.clock.seconds()
        after, self._since = now - self._since, now
        reason = self.failure.reason if self.failure else ""
        self.context.counters.record_transition(before, state, after, reason)
        self._log_step(after)

    def _log_step(self, after: float) -> None:
        """Log the present state; the state before has lasted `after` seconds."""
        fields: dict[str, Any] = {**self._log_fields(), "after": after}
        words = _STEP
        if self.state is EvaluationState.RUNNING:
            limits = self.limits
            words += _LIMITS + f"{format_size(limits.memory)} of memory"
            fields.update(wall_clock=limits.wall_clock, cpu=limits.cpu, memory=limits.memory)
        elif self.state in (
            EvaluationState.FINISHED,
            EvaluationState.FAILED,
            EvaluationState.CANCELLED,
        ):
            if self.failure is not None:
                words += ": {reason}: {failure}"
                fields.update(reason=self.failure.reason, failure=self.failure.message)
            if self.run_result is not None:
                usage = self.run_result.usage
                words += _PRINTED
                fields["events"] = self.ring.newest
                if usage.cpu_seconds is not None:
                    words += _PROCESSOR
                    fields["cpu_seconds"] = usage.cpu_seconds
                if usage.peak_memory_bytes is not None:
                    words += f", {format_size(usage.peak_memory_bytes)} of memory"
                if self._stray_marker:
                    words += f"; {self._stray_marker}"
                elif not self.ring.newest:
                    words += "; the evaluator printed nothing"
                    fields["peak_memory_bytes"] = usage.peak_memory_bytes
        log.info(words, **fields)

    def _log_fields(self) -> dict[str, Any]:
        """Return the fields of each log line."""
        return {
            "evaluation": self.log_name,
            "caller": self.caller,
            "commit": self.request.commit_oid,
            "state": self.state.value,
        }

    def _end(self, failure: EvaluationFailure | None) -> None:
        """Close the ring; on failure the last event is the error."""
        # A copy without the traceback, and without the members that only the event shows.
        self.failure = failure and EvaluationFailure(failure.reason, failure.message)
        lost = failure if failure is not None and failure.reason == "lost" else None
        if self._stop_reason is None and (lost is None or lost.is_daemon_fault):
            fault = None if lost is None else lost.message
            self.context.counters.set_latest_fault(fault, self.context.clock.seconds())
        if failure is None:
            self._enter(EvaluationState.FINISHED)
        else:
            self.ring.append_batch(
                encode_error(failure.reason, failure.message, failure.extra_members)
            )
            cancelled = failure.reason == "cancelled"
            self._enter(EvaluationState.CANCELLED if cancelled else EvaluationState.FAILED)
        self.state_times["ended"] = self.context.read_wall_clock()
        self.ring.close()
        self._drop_start_fields()
        self.ring_share.remove_limit()
        self.ring_share.resize_beside_ring(max(0, self._kept_bytes - _UNCOUNTED))
        self.ring_share.resize(self.ring.stored_bytes)
        self._stop_reason = None
        self.change_condition.notify(None)

    @property
    def _kept_bytes(self) -> int:
        """Bytes of the caller and the evaluator, besides events, that are kept after the end."""
        stderr = self.run_result.stderr_tail if self.run_result is not None else b""
        url = self.callback.url if self.callback is not None else ""
        results = self.results.size if self.results is not None else 0
        return len(self._request) + len(stderr) + len(url) + results

    async def _conclude(self, failure: EvaluationFailure | None) -> None:
        """End the evaluation, give back its slots and remove its processes and directories."""
        try:
            self._end(failure)
        finally:
            if self._slots is not None:
                self._slots.release_slot(self.identifier)
            self.context.fetch_slots.release_slot(self.identifier)
            await self._clean_up()
            self.cleanup_event.set_value(self)

    async def _clean_up(self) -> None:
        sandboxed, workspace, upload, checkout = (
            self._sandboxed,
            self.workspace,
            self.upload_directory,
            self._checkout,
        )
        self._sandboxed = self._checkout = None

        def remove_all() -> None:
            try:
                if sandboxed is not None:
                    sandboxed.close()
            finally:  # a killed process that is not gone yet is only in the way of its cgroup
                workspace.remove_content()
                if upload is not None:
                    remove_tree(upload)

        try:
            await self.context.cleanup_queue.attempt_call(
                f"{self.log_name}: removal of its processes and directories",
                remove_all,
                on_success=self._return_quota_directory,
            )
        except Exception:  # noqa: BLE001  (the evaluation ends all the same)
            log.failure(
                "{evaluation}: its processes and directories could not be removed",
                evaluation=self.log_name,
            )
        if checkout is not None:
            checkout.release()

    def _return_quota_directory(self) -> None:
        free, directory = self.context.quota_directories, self.workspace.quota_directory
        if free is not None and directory is not None:
            free.put(directory)


def _not_run(why: str | None) -> EvaluationFailure:
    return EvaluationFailure("lost", f"the daemon could not run the evaluator: {why}")
