"""One evaluation: its state, from the queue to its end, the reason to stop it, and the end.

`starting` leads an evaluation to its run, `conclude` from there to the end. The removal of its
processes and directories is idempotent: it is repeated until it succeeds, also by a later process
of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import attrs
from twisted.logger import Logger

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import Checkout, EvaluationState, check_transition
from tawebeval.core.events import encode_error_event
from tawebeval.deferreds import OneShotEvent, run_in_background
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.context import EvaluationContext, RunSlots
from tawebeval.evaluations.details import EvaluationDetails, format_state_line, make_log_fields
from tawebeval.evaluations.reading import EvaluationEvents
from tawebeval.evaluations.run import Run
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.environments import Environment, find_environment
from tawebeval.sandbox.workspace import Workspace

STARTER_LOST = EvaluationFailure("lost", "the starter of evaluators has ended; submit again")
"""The failure of an evaluation that cannot go on without the starter."""

log = Logger()


@attrs.define(eq=False)
class Evaluation:
    """One run of an evaluator on one submission.

    - `save(evaluation)` stores the present state.
    - `run`, `sandboxed`, `checkout`: set from the start of the evaluator to its end.
    - `cancel_start()` ends what leads to the run; None if that cannot be ended.
    - `stop_reason`: what becomes the final event; None before a stop.
    - `final_failure`: what becomes the final event, stop or not, once that is stored.
    - `is_resuming`: whether an earlier process has started the run, and this one has yet to go on
      with it: the row of the earlier process holds.
    - `left_at`: when this process of the daemon has left the evaluation to the next one, in seconds
      of the clock.
    - `cleanup_event`: set, to the evaluation, when its processes and directories are gone.
    """

    details: EvaluationDetails
    workspace: Workspace
    context: EvaluationContext
    events: EvaluationEvents
    _save: Callable[[Evaluation], object] = lambda evaluation: None
    run: Run | None = None
    sandboxed: SandboxedRun | None = None
    checkout: Checkout | None = None
    slots: RunSlots | None = None
    cancel_start: Callable[[], object] | None = None
    stop_reason: EvaluationFailure | None = None
    final_failure: EvaluationFailure | None = None
    is_resuming: bool = False
    left_at: float | None = None
    cleanup_event: OneShotEvent[Evaluation] = attrs.field(factory=OneShotEvent)
    _since: float = 0.0  # when its state began, in seconds of the clock

    def __attrs_post_init__(self) -> None:
        context, details = self.context, self.details
        if details.clock_offset is None:
            details.clock_offset = context.read_wall_clock() - context.read_boot_clock()
        times, now = details.state_times, self.read_clock()
        begun = times.get(details.state.value, times.get("created", now))
        self._since = context.clock.seconds() - max(0.0, now - begun)

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

    def save(self) -> None:
        """Have the present state stored."""
        self._save(self)

    def on_new_events(self) -> None:
        """Count new events, and wake the clients that wait for them."""
        self.count_event_bytes()
        self.events.change_condition.notify()

    async def on_discard(self) -> None:
        """Count and store that the files of acknowledged events are about to be given back."""
        self.count_event_bytes()
        self.save()
        await self.context.wait_for_commit()

    def count_event_bytes(self) -> None:
        """Count the bytes on the disk of events that were not discarded."""
        stdout, size = self.events.stdout, 0
        if stdout is not None:
            size = stdout.stdout_bytes + stdout.file_bytes - self.events.log.discarded_stdout_bytes
        self._set_event_bytes(size)

    def release_event_bytes(self) -> None:
        """Count the events no more: they are gone."""
        self._set_event_bytes(0)

    def _set_event_bytes(self, size: int) -> None:
        share, caller = self.context.unread_events, self.details.caller
        was_used_up = share.is_part_used_up(caller)
        share.take(size - self.details.event_bytes, caller)
        self.details.event_bytes = size
        if was_used_up and not share.is_part_used_up(caller):
            self.context.event_room_condition.notify()

    def stop(self, failure: EvaluationFailure) -> None:
        """End the evaluation; `failure` becomes the final event. No effect after the end.

        After `leave` the next process of the daemon ends it, if the reason can still be stored.
        """
        if self.stop_reason is None and not self.details.state.has_ended:
            self.stop_reason = failure
            if self.run is not None:
                self.run.stop(failure)
            elif self.cancel_start is not None:
                self.cancel_start()
            self.save()

    def leave(self) -> None:
        """Leave it to the next process of the daemon; answer the clients that wait."""
        self.left_at = self.context.clock.seconds()
        if self.run is not None:
            self.run.leave()
            self.save()
        self.events.change_condition.notify()

    def stop_as_abandoned(self) -> None:
        """Stop the evaluation, whose events no client asks for, and log that."""
        seconds = self.context.configuration.evaluations.retain
        words = f"no client has asked for the events in {seconds:g} seconds"
        log.info("{evaluation}: stopped: {why}", why=words, **make_log_fields(self.details))
        self.stop(EvaluationFailure("lost", f"{words} (evaluations.retain)"))

    def enter(self, state: EvaluationState) -> None:
        """Enter a state, count it and log it."""
        before, self.details.state = self.details.state, check_transition(self.details.state, state)
        self.details.state_times.setdefault(state.value, self.read_clock())
        now = self.context.clock.seconds()
        after, self._since = now - self._since, now
        reason = self.details.failure.reason if self.details.failure else ""
        self.context.counters.record_transition(before, state, after, reason)
        words, fields = format_state_line(self.details, after, self.events.log.end_cursor)
        log.info(words, **fields)

    async def store_failure(self, failure: EvaluationFailure) -> None:
        """Store the failure before it is told: a later process might find another one, or none."""
        is_resumable = self.run is not None or self.details.state is not EvaluationState.RUNNING
        if self.context.store is not None and is_resumable:
            self.final_failure = failure
            self.save()
            await self.context.wait_for_commit()

    def end(self, failure: EvaluationFailure | None) -> None:
        """Close the log of events; on failure the last event is the error."""
        details, context, now = self.details, self.context, self.read_clock()
        # A copy without the traceback, and without the members that only the event shows.
        details.failure = failure and EvaluationFailure(failure.reason, failure.message)
        lost = failure if failure is not None and failure.reason == "lost" else None
        if self.stop_reason is None and (lost is None or lost.is_daemon_fault):
            fault = None if lost is None else lost.message
            context.counters.set_latest_fault(fault, context.clock.seconds())
        if failure is None:
            self.enter(EvaluationState.FINISHED)
        else:
            error = encode_error_event(failure.reason, failure.message, failure.extra_members)
            details.failure_event = error.lines
            self.events.log.append_batch(error, int(now * 1000))
            cancelled = failure.reason == "cancelled"
            self.enter(EvaluationState.CANCELLED if cancelled else EvaluationState.FAILED)
        details.state_times["ended"] = now  # also the time of the error, after a restart
        details.limits = self.limits
        details.drop_start_fields()
        self.events.log.mark_end()
        self.stop_reason = self.final_failure = None
        self.save()
        self.events.change_condition.notify()


def conclude_in_background(evaluation: Evaluation, failure: EvaluationFailure | None) -> None:
    """End an evaluation as `conclude` does, without waiting for it."""
    run_in_background(
        conclude(evaluation, failure),
        log,
        "{evaluation}: defect of the daemon",
        evaluation=evaluation.details.log_name,
    )


async def conclude(evaluation: Evaluation, failure: EvaluationFailure | None) -> None:
    """End an evaluation, give back its slots and remove its processes and directories.

    One that is left ends in the next process of the daemon: this one may store nothing any more.
    """
    details = evaluation.details
    if evaluation.left_at is not None:
        return
    evaluation.cancel_start = None
    if failure is not None:
        await evaluation.store_failure(failure)
    evaluation.run = None
    if evaluation.events.stdout is not None:
        evaluation.events.stdout.drop_parser()
    # Of an evaluation that has not started; otherwise it is in the workspace.
    request = (
        details.pack_for_rerun()
        if details.upload_directory and details.should_keep_submission
        else b""
    )
    try:
        evaluation.end(failure)
    finally:
        if evaluation.slots is not None:
            evaluation.slots.release_slot(details.identifier)
        evaluation.context.fetch_slots.release_slot(details.identifier)
        await clean_up(evaluation, request)


async def clean_up(evaluation: Evaluation, request: bytes = b"") -> None:
    """Remove the processes and directories of an evaluation that has ended.

    The files of its events stay, and those of its submission, if they are kept. `request` is kept
    with a submission that is still where it was uploaded.
    """
    details, context, workspace = evaluation.details, evaluation.context, evaluation.workspace
    upload, sandboxed, checkout = (
        details.upload_directory,
        evaluation.sandboxed,
        evaluation.checkout,
    )
    evaluation.sandboxed = evaluation.checkout = None
    keeps = details.should_keep_submission

    def remove_all() -> None:
        nonlocal keeps
        keep, keeps = keeps, False  # the registry does not see what a second attempt would keep
        try:
            if sandboxed is not None:
                sandboxed.close()
        finally:  # a killed process that is not gone yet is only in the way of its cgroup
            if keep and request and upload is not None and upload.exists():
                workspace.take_over_upload(upload)
                workspace.request_file.write_bytes(request)
            keep = keep and workspace.request_file.exists()
            workspace.remove_evaluator_content(keep_submission=keep)
            if upload is not None:
                remove_tree(upload)
        details.has_kept_submission = keep

    try:
        await context.cleanup_queue.attempt_call(
            f"{details.log_name}: removal of its processes and directories",
            remove_all,
        )
    except Exception:  # noqa: BLE001  (the evaluation ends all the same)
        log.failure(
            "{evaluation}: its processes and directories could not be removed",
            evaluation=details.log_name,
        )
    if checkout is not None:
        checkout.release()
    evaluation.cleanup_event.set_value(evaluation)
