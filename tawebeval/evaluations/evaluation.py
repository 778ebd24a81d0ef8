"""One evaluation, from the queue to its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.config import LimitSettings
from tawebeval.core.budget import RingAllocation
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.event_log import EventLog
from tawebeval.core.events import EventBatch, encode_error_event
from tawebeval.core.form import Repository
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import Markers, add_results_to_summary
from tawebeval.core.states import EvaluationState, check_transition
from tawebeval.deferreds import OneShotEvent, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.context import EvaluationContext, RunSlots
from tawebeval.evaluations.details import EvaluationDetails
from tawebeval.evaluations.handover_journal import HandoverJournal
from tawebeval.evaluations.journal import JournalContent, ParserCheckpoint
from tawebeval.evaluations.log_lines import format_state_line, make_log_fields
from tawebeval.evaluations.reading import EvaluationEvents
from tawebeval.evaluations.restart import RecoveredEvaluation
from tawebeval.evaluations.run import EvaluatorRun, RunProgress
from tawebeval.evaluations.run_keeper import BROKER, RunDescriptors
from tawebeval.evaluations.run_supervisor import RunSupervisor, compute_progress
from tawebeval.evaluations.snapshot import EvaluationSnapshot, RunSnapshot, load_failure
from tawebeval.linux.child import StartedProcess
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.environments import Environment, find_environment
from tawebeval.sandbox.workspace import Workspace

_UNCOUNTED = 1024  # bytes of form and stderr that count as the fixed cost of an evaluation

ResumeCheckout = Callable[[Commit, Path], Checkout]
"""Function that returns a checkout that an evaluation uses already, by its path."""

_LOST = EvaluationFailure(
    "lost", "the evaluator could not go on after a restart of the daemon; submit again"
)

KEEPER_ENDED = EvaluationFailure("lost", "the keeper of evaluators has ended; submit again")
"""The failure of an evaluation that cannot start, or go on, without the keeper."""

log = Logger()


@attrs.define(eq=False)
class Evaluation:
    """One run of an evaluator on one submission.

    - `ring`: the events; `ring_allocation`: its part of the memory for all events.
    - `supervisor`: that of the evaluator, set while it runs.
    - `cleanup_event`: set, to the evaluation, when its processes and directories are gone.
    - `on_full(evaluation)`: called when the ring becomes full; may make room.
    - `journal`: what a later process of the daemon reads; None without a keeper.

    A thousand evaluations may run at once: one coroutine leads to the start of the evaluator,
    another one from its exit to the end, and none waits in between.
    """

    details: EvaluationDetails
    workspace: Workspace
    context: EvaluationContext
    _on_full: Callable[[Evaluation], object] = lambda evaluation: None
    ring: EventRing = attrs.field(factory=EventRing)
    ring_allocation: RingAllocation = attrs.field(init=False)
    supervisor: RunSupervisor | None = None
    _since: float = 0.0  # when its state began, in seconds of the clock
    events: EvaluationEvents = attrs.field(init=False)
    cleanup_event: OneShotEvent[Evaluation] = attrs.field(factory=OneShotEvent)
    _checkout: Checkout | None = None
    _sandboxed: SandboxedRun | None = None
    _stop_reason: EvaluationFailure | None = None
    _slots: RunSlots | None = None
    _startup: Deferred[None] | None = None
    _is_launching: bool = False
    _journal: HandoverJournal | None = None
    _is_left: bool = False

    def __attrs_post_init__(self) -> None:
        context, details = self.context, self.details
        if details.clock_offset is None:
            details.clock_offset = context.read_wall_clock() - context.read_boot_clock()
        self.ring.read_wall_clock = self.read_clock
        self.events = EvaluationEvents(
            cast(EventLog, self.ring), details.caller, details.log_name, context.segment_loader
        )
        self.ring_allocation = self.context.ring_budget.allocate_ring(
            self.details.caller, partial(self._on_full, self), self._on_room
        )

    def read_clock(self) -> float:
        """Return the time, in seconds since the epoch, as if the clock was not set meanwhile."""
        assert self.details.clock_offset is not None, "set with the context"
        return self.context.read_boot_clock() + self.details.clock_offset

    @property
    def limits(self) -> LimitSettings:
        """The limits of the run; before the start those that a start would have now."""
        if self.details.limits is not None:
            return self.details.limits
        return self.context.configuration.limits.choose_limits(self.details.request.limits)

    @property
    def environment(self) -> Environment | None:
        """The environment of the run; before the start that which a start would have now.

        None also if a reload has removed it before the start.
        """
        if self.details.environment is not None or self.details.limits is not None:
            return self.details.environment
        with suppress(KeyError):
            return find_environment(self.context.configuration, self.details.request.environment)
        return None

    def _fix_environment(self) -> None:
        """Keep the present environment. Raises: EvaluationFailure, if a reload has removed it."""
        name = self.details.request.environment
        try:
            self.details.environment = find_environment(self.context.configuration, name)
        except KeyError:
            raise EvaluationFailure(
                "lost",
                f"the environment {name!r} was removed while the evaluation waited; submit again"
                " with another one",
                is_daemon_fault=False,
            ) from None

    def enter_queue(self, run_slots: RunSlots) -> None:
        """Enter the queue, and run as soon as there is a slot."""
        self.details.state_times["created"] = self.read_clock()
        self._since = self.context.clock.seconds()
        self.save_snapshot()
        self.context.counters.record_accepted_evaluation()
        log.info(
            "{evaluation}: {state}; caller {caller!r}, commit {commit}",
            **make_log_fields(self.details),
        )
        self._startup = self._in_background(self._fetch_and_start(run_slots))

    def _in_background(self, coroutine: Coroutine[Deferred[Any], Any, None]) -> Deferred[None]:
        return run_in_background(
            coroutine, log, "{evaluation}: defect of the daemon", evaluation=self.details.log_name
        )

    def stop(self, failure: EvaluationFailure) -> None:
        """End the evaluation; `failure` becomes the final event. No effect after the end."""
        if self._stop_reason is None and not (self.details.state.has_ended or self._is_left):
            self._stop_reason = failure
            if self.supervisor is not None:
                self.supervisor.evaluator_run.stop(failure)
            elif self._startup is not None and not self._is_launching:
                self._startup.cancel()
            self.save_snapshot()

    def stop_as_abandoned(self) -> None:
        """Stop the evaluation, whose events no client asks for, and log that."""
        seconds = self.context.configuration.evaluations.abandon_after_seconds
        words = f"no client has asked for the events in {seconds:g} seconds"
        log.info("{evaluation}: stopped: {why}", why=words, **make_log_fields(self.details))
        self.stop(EvaluationFailure("lost", f"{words} (evaluations.abandon_after)"))

    def on_acknowledge(self) -> None:
        """Handle a discard of events from the ring: more of stdout may be read."""
        if self.supervisor is not None:
            self.supervisor.pump.on_acknowledge()
        else:
            self.ring_allocation.set_used_bytes(self.ring.memory_bytes)
        self.discard_journaled_events()

    def discard_journaled_events(self) -> None:
        """Give back what neither clients nor the archive need of the journal."""
        if self._journal is not None:
            self._journal.discard_acknowledged_events(
                self.ring.begin_cursor,
                self.take_snapshot,
                self.context.archive.get_written_cursor(self.details.identifier),
            )

    def discard_events(self, final_state: EvaluationState) -> None:
        """Discard all events of a cleaned-up evaluation; its state becomes DRAINED or EXPIRED.

        The journal stays until the archive has the evaluation.
        """
        if self.context.archive.get_written_cursor(self.details.identifier) is not None:
            self.save_snapshot()
        journal, self._journal = self._journal, None
        self._enter(final_state)
        self.ring.acknowledge(self.ring.end_cursor)
        self.ring_allocation.release()
        if journal is not None:
            self.context.archive.add_archived_callback(self.details.identifier, journal.discard)

    async def _fetch_and_start(self, slots: RunSlots) -> None:
        """Fetch the commit, wait for a run slot and start the evaluator. On failure, end."""
        repositories = self.context.checkout_source
        self._slots = slots
        try:
            if fetched := repositories.checkout_needs_network(*self._checkout_arguments()):
                slots.reserve_queue_place(self.details.identifier, self.details.caller)
                await self._fetch()
            await self._wait_for_slot(slots)
            await self._resolve_branch()
            checkout = self._checkout = await repositories.check_out_commit(
                *self._checkout_arguments(), is_retry=fetched
            )
            self.details.set_commit(checkout.commit)
            if self.context.free_quota_directories is not None:
                directory = await self.context.free_quota_directories.get()
                self.workspace = attrs.evolve(self.workspace, quota_directory=directory)
            self._fix_environment()
            self.details.limits = self.limits
            sandboxed = self._make_sandboxed_run(checkout)
            markers = Markers.generate(self.context.generate_random_bytes)
            supervisor = self._make_supervisor(checkout, sandboxed, markers)
            self._is_launching = True  # no cancelling from here on: the child would be lost
            started = await self.context.worker_threads.run_in_thread(
                self.launch, supervisor, sandboxed, checkout
            )
            if sandboxed.has_external_queue:
                await self._wait_for_begin(supervisor, started)
            self._connect(supervisor, started)
        except EvaluationFailure as error:
            await self._conclude(error)
        except CancelledError:
            await self._conclude(self._stop_reason)
        except OSError as error:
            # A path of the machine stays in the log. The error is no defect: no traceback.
            words = "{evaluation}: the evaluator could not be run: {error}"
            log.error(words, evaluation=self.details.log_name, error=error)  # noqa: TRY400
            await self._conclude(_not_run(error.strerror))
        except Exception as error:  # noqa: BLE001  (a client learns of every end)
            log.failure(
                "{evaluation}: defect: the evaluator could not be run",
                evaluation=self.details.log_name,
            )
            await self._conclude(_not_run(type(error).__name__))

    def _checkout_arguments(self) -> tuple[Repository, str, str]:
        """Return the arguments of `check_out_commit`, unpacked each time: a small queue."""
        request = self.details.request
        return request.repository, request.commit_oid, self.details.caller

    async def _resolve_branch(self) -> None:
        """Put the newest commit of the branch into a request without a commit."""
        request = self.details.request
        if not request.commit_oid:
            source = self.context.checkout_source
            self.details.set_commit_oid(
                await source.resolve_branch(request.repository, self.details.caller)
            )
            log.info(
                "{evaluation}: branch {branch} is commit {commit}",
                branch=request.repository.branch,
                **make_log_fields(self.details),
            )

    async def _fetch(self) -> None:
        """Fetch the commit into the cache before there is a run slot.

        Until then the evaluation counts against the caller's share of fetches.
        """
        fetches = self.context.fetch_slots
        await fetches.acquire_slot(self.details.identifier, self.details.caller)
        self._enter(EvaluationState.FETCHING)
        try:
            await self._resolve_branch()
            checkout = await self.context.checkout_source.check_out_commit(
                *self._checkout_arguments()
            )
            self.details.set_commit(checkout.commit)
            checkout.release()  # a queued evaluation pins nothing in the cache
        finally:
            fetches.release_slot_keep_quota(self.details.identifier)

    async def _wait_for_slot(self, slots: RunSlots) -> None:
        slot = slots.acquire_slot(self.details.identifier, self.details.caller)
        if self.details.state is EvaluationState.FETCHING and not slot.called:
            self._enter(EvaluationState.QUEUED)
        await slot
        self.context.fetch_slots.release_slot(self.details.identifier)
        if self.details.state is EvaluationState.QUEUED:
            self._enter(EvaluationState.FETCHING)

    async def _wait_for_begin(self, supervisor: RunSupervisor, started: StartedProcess) -> None:
        """Wait in the queue of a cluster, from which a stop takes the evaluation."""
        self._enter(EvaluationState.QUEUED)
        waiting = Deferred.fromCoroutine(supervisor.wait_for_evaluator_start(started))
        self._is_launching = False
        if self._stop_reason is not None:  # while srun was started
            waiting.cancel()
        await waiting
        self._is_launching = True
        self._enter(EvaluationState.FETCHING)

    def _make_sandboxed_run(self, checkout: Checkout) -> SandboxedRun:
        """Return the sandbox for the run, under the limits of the details."""
        sandboxed = self._sandboxed = self.context.sandbox.make_run(
            self.workspace, checkout, self.limits, self.details.environment
        )
        sandboxed.problem_name = self.details.request.problem
        self.details.runner_status = sandboxed.runner_status
        return sandboxed

    def _make_supervisor(
        self,
        checkout: Checkout,
        sandboxed: SandboxedRun,
        markers: Markers,
        parser_state: bytes = b"",
        progress: RunProgress | None = None,
    ) -> RunSupervisor:
        return RunSupervisor(
            self.details,
            self.context,
            checkout,
            sandboxed,
            markers,
            self.ring,
            self.ring_allocation,
            self.events.change_condition.notify,
            self.save_snapshot,
            parser_state,
            progress,
        )

    def launch(
        self, supervisor: RunSupervisor, sandboxed: SandboxedRun, checkout: Checkout
    ) -> StartedProcess:
        """Create the workspace and start the evaluator. Blocks. Raises: EvaluationFailure, OSError.

        All blocking work is in this one call: each change of threads costs time.
        """
        assert self.details.upload_directory is not None, "only this method takes it"
        self.workspace.create_directories(self.details.upload_directory, sandboxed.workspace_view)
        self.details.upload_directory = None
        if self.details.should_keep_submission:
            self.workspace.request_file.write_bytes(self.details.pack_for_rerun())
        directory = self.workspace.locate_working_directory(
            self.details.request.directory, checkout.path
        )
        return self.launch_in_directory(directory, supervisor)

    def launch_in_directory(self, directory: Path, supervisor: RunSupervisor) -> StartedProcess:
        """Start the evaluator in `directory`. Blocks. Raises: EvaluationFailure, OSError."""
        if self._stop_reason is not None:
            raise self._stop_reason
        return supervisor.start_evaluator(directory)

    def _connect(self, supervisor: RunSupervisor, started: StartedProcess) -> None:
        """Connect the started evaluator to its run; kill it if `stop` was called meanwhile."""
        if self._is_left:
            return  # the next process kills it, and starts it anew
        self.supervisor = supervisor
        supervisor.connect_process(started, self._journal)
        self.details.drop_start_fields()
        self._enter(EvaluationState.RUNNING)
        self._supervise(supervisor)
        self.save_snapshot()
        if self._stop_reason is not None:
            supervisor.evaluator_run.stop(self._stop_reason)
            supervisor.evaluator_run.kill()  # no grace time: no client has seen it run

    def _supervise(self, supervisor: RunSupervisor) -> None:
        """Supervise the connected run to its end."""
        self._startup = None
        supervisor.supervise()
        supervisor.evaluator_run.run_ended.add_callback(self._on_run_ended)

    def _on_run_ended(self, run: EvaluatorRun) -> None:
        if run.stderr_text:
            words = "{evaluation}: end of stderr: {stderr!r}"
            log.info(words, **make_log_fields(self.details), stderr=run.stderr_text)
        self.details.run_result = run.result
        self._in_background(self._conclude(run.failure))

    def _on_room(self) -> None:
        """Go on: the ring is not full any more."""
        if self.supervisor is not None:
            self.supervisor.pump.on_ring_has_room()

    def _enter(self, state: EvaluationState) -> None:
        before, self.details.state = self.details.state, check_transition(self.details.state, state)
        self.details.state_times.setdefault(state.value, self.read_clock())
        now = self.context.clock.seconds()
        after, self._since = now - self._since, now
        reason = self.details.failure.reason if self.details.failure else ""
        self.context.counters.record_transition(before, state, after, reason)
        words, fields = format_state_line(self.details, after, self.ring.end_cursor)
        log.info(words, **fields)

    def _end(self, failure: EvaluationFailure | None) -> None:
        """Close the ring; on failure the last event is the error."""
        keeper = self.context.run_keeper
        has_keeper = keeper is None or keeper.client.is_alive
        if failure is not None and failure.reason == "lost" and not has_keeper:
            failure = KEEPER_ENDED  # whatever has failed for that
        # A copy without the traceback, and without the members that only the event shows.
        self.details.failure = failure and EvaluationFailure(failure.reason, failure.message)
        lost = failure if failure is not None and failure.reason == "lost" else None
        if self._stop_reason is None and (lost is None or lost.is_daemon_fault):
            fault = None if lost is None else lost.message
            self.context.counters.set_latest_fault(fault, self.context.clock.seconds())
        if failure is None:
            self._enter(EvaluationState.FINISHED)
        else:
            error = encode_error_event(failure.reason, failure.message, failure.extra_members)
            self.details.failure_event = error.lines if self._journal is not None else b""
            self.ring.append_batch(error)
            cancelled = failure.reason == "cancelled"
            self._enter(EvaluationState.CANCELLED if cancelled else EvaluationState.FAILED)
        self.details.state_times["ended"] = self.read_clock()
        self.details.limits = self.limits
        self.details.drop_start_fields()
        self._close_ring()
        self._stop_reason = None
        self.save_snapshot()
        self.events.change_condition.notify()

    def _close_ring(self) -> None:
        """Take no more events, and count what is kept until a client has read them."""
        self.ring.mark_end()
        self.ring_allocation.disable_limit()
        self.ring_allocation.set_bytes_outside_ring(
            max(0, self.details.bytes_kept_after_end - _UNCOUNTED)
        )
        self.ring_allocation.set_used_bytes(self.ring.memory_bytes)

    # Journal

    def save_snapshot(self) -> None:
        """Write a snapshot to the journal, if there is one and it differs from the last."""
        if self._journal is not None:
            self._journal.write_snapshot(self.take_snapshot())

    def save_final_snapshot(self) -> None:
        """Write the last state of a cleaned-up evaluation, and drop old ones."""
        self.save_snapshot()
        if self._journal is not None:
            self._journal.drop_old_snapshots(self.take_snapshot)

    def hand_over(self) -> None:
        """Change nothing any more, for another process goes on; an end that has begun goes on here.

        Clients read what is in the ring.
        """
        if self._journal is not None and self._journal.is_open and not self.details.state.has_ended:
            self._is_left = True
            self._journal.hand_over()
            if self.supervisor is not None:
                self.supervisor.evaluator_run.hand_over()
            if self._sandboxed is not None:
                self._sandboxed.detach()
        self.events.change_condition.notify()

    def take_snapshot(self) -> EvaluationSnapshot:
        """Return the present state, for the journal."""
        run, stop_reason = None, self._stop_reason
        if self.supervisor is not None:
            run = self.supervisor.take_snapshot()
            stop_reason = stop_reason or self.supervisor.evaluator_run.failure
        return self.details.make_snapshot(
            run, stop_reason, self.ring.end_cursor, is_cleaned_up=self.cleanup_event.is_set
        )

    # Another process of the daemon goes on

    def restore_events(self, snapshot: EvaluationSnapshot, journal_content: JournalContent) -> None:
        """Take over the events and the stop in a journal, whose snapshot the details are from.

        The ring then has all events of the journal, also those that clients have acknowledged.
        """
        if not self.details.state.has_ended:
            self._stop_reason = load_failure(snapshot.failure)
        ring, times, summary = self.ring, self.details.state_times, self.details.result_summary
        ring.begin_cursor = ring.end_cursor = journal_content.begin_cursor
        now = self.read_clock()
        begun = times.get(snapshot.state, times.get("created", now))
        self._since = self.context.clock.seconds() - max(0.0, now - begun)
        for each in journal_content.batches:
            ring.append_batch(each.batch, each.time_ms)
            if each.begin_cursor >= snapshot.end_cursor and summary is not None:
                add_results_to_summary(summary, each.batch)
        if self.details.state.has_ended and ring.end_cursor < snapshot.end_cursor:
            time_ms = int(times["ended"] * 1000)
            ring.append_batch(EventBatch(1, self.details.failure_event), time_ms)

    def restore_ended(self, snapshot: EvaluationSnapshot) -> None:
        """Take over an evaluation that has ended, after `restore_events`."""
        self._close_ring()
        if snapshot.is_cleaned_up:
            self.cleanup_event.set_value(self)
        else:
            self._in_background(self._clean_up(b""))

    def requeue(self, run_slots: RunSlots) -> None:
        """Enter the queue again, after `restore_events`. Blocks, hardly.

        An evaluator that had just been started is gone.
        """
        self.details.limits = self.details.environment = self.details.runner_status = None
        upload = self.details.upload_directory
        with suppress(OSError):  # the start finds what is missing
            if upload is not None and not upload.exists() and self.workspace.root.exists():
                self.workspace.restore_uploaded_files(upload)
        if self._stop_reason is not None:
            self._in_background(self._conclude(self._stop_reason))
        else:
            self._startup = self._in_background(self._fetch_and_start(run_slots))

    def end_as_lost(self) -> None:
        """End an evaluation whose evaluator is gone, after `restore_events`."""
        self.details.upload_directory = None
        self._in_background(self._conclude(self._stop_reason or _LOST))

    def resume_run(
        self,
        recovered: RecoveredEvaluation,
        resume_checkout: ResumeCheckout,
        last_heartbeat: float | None,
        run_slots: RunSlots,
    ) -> None:
        """Go on with an evaluator that the keeper holds, after `restore_events`. Blocks, hardly.

        `last_heartbeat` is the last time at which the earlier process was alive, in seconds of the
        monotonic clock.
        """
        self.details.upload_directory = None
        self._slots = run_slots
        try:
            self._resume_run(recovered, resume_checkout, last_heartbeat)
        except Exception:  # noqa: BLE001  (a client learns of every end)
            log.failure(
                "{evaluation}: defect: the evaluator cannot go on", evaluation=self.details.log_name
            )
            self.end_as_lost()

    def _resume_run(
        self,
        found: RecoveredEvaluation,
        resume_checkout: ResumeCheckout,
        last_heartbeat: float | None,
    ) -> None:
        snapshot, batches, kept = (
            found.snapshot.run,
            found.journal_content.batches,
            found.run_descriptors,
        )
        assert kept is not None, "the evaluator runs"
        assert snapshot is not None, "the evaluator runs"
        checkout, sandboxed = self._resume_sandbox(
            snapshot, kept, found.broker_descriptors, resume_checkout
        )
        checkpoint = batches[-1].checkpoint if batches else ParserCheckpoint()
        skipped = sandboxed.count_skipped_stderr_bytes(kept.process_descriptors)
        supervisor = self.supervisor = self._make_supervisor(
            checkout,
            sandboxed,
            Markers(*snapshot.markers),
            checkpoint.parser_state,
            compute_progress(snapshot, checkpoint, last_heartbeat, skipped),
        )
        supervisor.reattach_process(kept, self._journal)
        self.details.state = EvaluationState.RUNNING
        self._supervise(supervisor)
        self.on_acknowledge()  # the ring may be full
        self.save_snapshot()
        if self._stop_reason is not None:
            supervisor.evaluator_run.stop(self._stop_reason)

    def _resume_sandbox(
        self,
        snapshot: RunSnapshot,
        kept: RunDescriptors,
        broker: RunDescriptors | None,
        resume_checkout: ResumeCheckout,
    ) -> tuple[Checkout, SandboxedRun]:
        """Return the checkout and sandbox of a run that goes on. On failure close what is kept."""
        assert self.details.commit is not None, "checked out before the start"
        assert self.context.run_keeper is not None, "it holds the evaluator"
        connect = self.context.run_keeper.connect_run_to_protocol
        with ExitStack() as failing:
            failing.callback(kept.close_process_descriptors)
            connect_broker = None
            if broker is not None:
                failing.callback(broker.close_process_descriptors)
                connect_broker = partial(
                    connect, self.details.log_name + BROKER, process=broker.process_descriptors
                )
            quota = snapshot.quota_directory
            if quota is not None:
                self.workspace = attrs.evolve(self.workspace, quota_directory=Path(quota))
            path = Path(snapshot.checkout_path)
            checkout = self._checkout = resume_checkout(self.details.commit, path)
            sandboxed = self._make_sandboxed_run(checkout)
            sandboxed.resume(snapshot.sandbox_description, kept.sandbox_descriptors, connect_broker)
            failing.pop_all()
        return checkout, sandboxed

    # The end

    async def _conclude(self, failure: EvaluationFailure | None) -> None:
        """End the evaluation, give back its slots and remove its processes and directories."""
        # A run holds its parser, and the parser up to a whole data block or file: drop both.
        self.supervisor = None
        if self._is_left:
            return
        # Of an evaluation that has not started; otherwise it is in the workspace.
        request = (
            self.details.pack_for_rerun()
            if self.details.upload_directory and self.details.should_keep_submission
            else b""
        )
        try:
            self._end(failure)
        finally:
            if self._slots is not None:
                self._slots.release_slot(self.details.identifier)
            self.context.fetch_slots.release_slot(self.details.identifier)
            await self._clean_up(request)

    async def _clean_up(self, request: bytes) -> None:
        sandboxed, workspace, upload, checkout = (
            self._sandboxed,
            self.workspace,
            self.details.upload_directory,
            self._checkout,
        )
        self._sandboxed = self._checkout = None
        keeps = self.details.should_keep_submission
        if self.context.run_keeper is not None:
            drop = partial(self.context.run_keeper.drop_run, self.details.log_name)
            if sandboxed is None:
                drop()
            else:
                sandboxed.call_after_process_end(drop)

        def remove_all() -> None:
            nonlocal keeps
            keep, keeps = keeps, False  # the registry does not see what a second attempt would keep
            try:
                if sandboxed is not None:
                    sandboxed.close()
            finally:  # a killed process that is not gone yet is only in the way of its cgroup
                if keep and request and upload is not None and upload.exists():
                    upload.rename(workspace.root)
                    workspace.request_file.write_bytes(request)
                keep = keep and workspace.request_file.exists()
                if keep:
                    workspace.remove_evaluator_content()
                else:
                    workspace.remove_content()
                if upload is not None:
                    remove_tree(upload)
            self.details.has_kept_submission = keep

        try:
            await self.context.cleanup_queue.attempt_call(
                f"{self.details.log_name}: removal of its processes and directories",
                remove_all,
                on_success=self._return_quota_directory,
            )
        except Exception:  # noqa: BLE001  (the evaluation ends all the same)
            log.failure(
                "{evaluation}: its processes and directories could not be removed",
                evaluation=self.details.log_name,
            )
        if checkout is not None:
            checkout.release()
        self.cleanup_event.set_value(self)

    def _return_quota_directory(self) -> None:
        free, directory = self.context.free_quota_directories, self.workspace.quota_directory
        if free is not None and directory is not None:
            free.put(directory)


def _not_run(why: str | None) -> EvaluationFailure:
    return EvaluationFailure("lost", f"the daemon could not run the evaluator: {why}")
