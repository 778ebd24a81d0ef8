"""Admission of new evaluations: shares of callers, bounds of the daemon, and times of retries."""

from __future__ import annotations

from tawebeval.core.retry_schedule import RetrySchedule
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

    def check_admission(self, caller: str, *, should_schedule_retry: bool) -> None:
        """Raise the error with which a new evaluation would be refused.

        This is CallerQuotaExceeded, which the caller can remedy, or ServerBusy, in this order.
        Before a refusal evaluations are forgotten that a stream has sent to the end: they are kept
        only for clients that have lost some of the events.

        If `should_schedule_retry`, a refusal for the length of the queue has the time at which the
        client is to come back, which no other client gets.
        """
        while self._has_caller_too_much(caller) and self._records.forget_fully_sent_evaluation(
            caller
        ):
            pass
        while self._has_too_much_kept() and self._records.forget_fully_sent_evaluation():
            pass
        if self._has_kept_share(caller):
            raise CallerQuotaExceeded(
                "too many of your finished evaluations are unread (callers.kept); read them, or"
                " discard them by GET /evaluation/ID/events?after=end",
                _RETRY_LATER,
            )
        if self._context.event_disk.is_caller_quota_exhausted(caller):
            raise CallerQuotaExceeded(
                "your unread events use up your part of the disk (buffers.disk); read them, or"
                " discard those of finished evaluations by GET /evaluation/ID/events?after=end",
                _RETRY_LATER,
            )
        if self._has_too_much_kept():
            raise ServerBusy(
                "too many finished evaluations are unread (evaluations.kept, buffers.disk); try"
                " again later",
                _RETRY_LATER,
            )
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

    def _has_caller_too_much(self, caller: str) -> bool:
        return self._has_kept_share(caller) or self._context.event_disk.is_caller_quota_exhausted(
            caller
        )

    def _has_too_much_kept(self) -> bool:
        return (
            self._records.ended_count >= self._context.configuration.evaluations.kept
            or self._context.event_disk.is_exhausted
        )

    def _has_kept_share(self, caller: str) -> bool:
        """Return whether a caller has as many unread finished evaluations as `callers.kept`."""
        configuration = self._context.configuration
        share = configuration.callers.kept
        if caller == ANONYMOUS_CALLER or not 0 < share < configuration.evaluations.kept:
            return False
        return self._records.ended_counts_by_caller[caller] >= share
