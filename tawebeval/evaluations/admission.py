"""Admission of new evaluations: shares of callers, bounds of the daemon, and times of retries."""

from __future__ import annotations

from functools import partial

from tawebeval.core.shares import RetrySchedule, Share
from tawebeval.core.tokens import ANONYMOUS_CALLER
from tawebeval.deferreds import FairQueue
from tawebeval.errors import CallerQuotaExceeded, ServerBusy
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.records import RecordIndex

_RETRY_LATER = 30  # seconds, if too many events are unread


class AdmissionControl:
    """Admission of new evaluations, and the queue for run slots.

    `bounds` are the arguments of the queue (`FairQueue`).
    """

    def __init__(
        self,
        context: EvaluationContext,
        records: RecordIndex,
        bounds: tuple[int, int, int, int],
    ) -> None:
        self._context = context
        self._records = records
        self.run_queue = FairQueue(*bounds)
        self._retries = RetrySchedule(self.run_queue.slot_count)
        for share in self._list_shares():
            share.make_room = partial(self._forget_sent, share)
        # In another turn: a log is being changed.
        wake = context.event_room_condition.notify
        context.event_memory.on_room = partial(context.clock.callLater, 0, wake)

    def check_admission(self, caller: str) -> None:
        """Raise the error with which a new evaluation would be refused.

        This is CallerQuotaExceeded, which the caller can remedy, or ServerBusy, in this order.
        Before a refusal evaluations are forgotten that a stream has sent to the end: they are kept
        only for clients that have lost some of the events. A refusal for the length of the queue
        has the time at which the client is to come back, which no other client gets.
        """
        for share in self._list_shares():
            share.check(1, caller)
        self._check_queue(caller, should_schedule_retry=True)

    def check_readiness(self) -> None:
        """Raise ServerBusy if a new evaluation without a token would be refused; change nothing.

        What could be forgotten before a refusal counts as room, though it may be too little.
        """
        for share in self._list_shares():
            if share.is_used_up and not any(
                self._records.find_sent_evaluation(caller) for caller in share.used_by_caller
            ):
                raise ServerBusy(share.refusal_of_all, share.retry_after)
        self._check_queue(ANONYMOUS_CALLER, should_schedule_retry=False)

    def _check_queue(self, caller: str, *, should_schedule_retry: bool) -> None:
        if self.run_queue.is_caller_quota_exhausted(caller):
            raise CallerQuotaExceeded(
                "too many of your evaluations are queued (callers.queued); try again later",
                self._plan_retry(caller, self.run_queue.waiting_caller_count)
                if should_schedule_retry
                else _RETRY_LATER,
            )
        if self.run_queue.is_full(caller):
            raise ServerBusy(
                "the queue is full (evaluations.queued); try again later",
                self._plan_retry() if should_schedule_retry else _RETRY_LATER,
            )

    def record_evaluation_start(self) -> None:
        """Record that an evaluation was accepted and has entered the queue."""
        if not self.run_queue.has_free_slot:
            self._retries.record_all_slots_used(self._context.clock.seconds())

    def record_evaluation_end(self) -> None:
        """Record the end of an evaluation."""
        self._retries.record_evaluation_end(
            self._context.clock.seconds(), are_all_slots_used=not self.run_queue.has_free_slot
        )

    def _plan_retry(self, caller: str | None = None, caller_count: int = 1) -> int:
        return self._retries.schedule_retry(self._context.clock.seconds(), caller, caller_count)

    def _list_shares(self) -> tuple[Share, ...]:
        """Return the shares of what evaluations leave until they are read."""
        configuration, ended = self._context.configuration, self._records.ended_share
        ended.total = configuration.evaluations.kept
        ended.part = configuration.callers.kept or None
        return ended, self._context.unread_events, self._context.event_memory.fixed_share

    def _forget_sent(self, share: Share, _: int, caller: str | None) -> bool:
        """Forget evaluations that a stream has sent to the end until another one has room."""
        if caller is not None:
            while share.is_part_used_up(caller) and self._records.forget_sent_evaluation(caller):
                pass
            return not share.is_part_used_up(caller)
        for name in share.list_callers():
            while self._records.forget_sent_evaluation(name):
                if not share.is_used_up:
                    return True
        return False
