"""What becomes of the jobs of one daemon, for its metrics."""

from __future__ import annotations

from collections import Counter

import attrs

from tawebeval.errors import FailureReason

LOSS_REASONS: tuple[FailureReason, ...] = (
    "node",
    "preempted",
    "memory",
    "timeout",
    "revoked",
    "lost",
)
"""Reasons for which a job ends without an outcome."""


@attrs.define(eq=False)
class JobCounters:
    """Counts of jobs. `is_controller_unreachable`: whether the last squeue has failed."""

    lost_jobs_by_reason: Counter[str] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(LOSS_REASONS, 0))
    )
    restarted_jobs: int = 0
    is_controller_unreachable: bool = False
    _running: dict[str, bool] = attrs.field(factory=dict)  # by name: whether a node runs it

    def record_job_state(self, name: str, *, is_running: bool) -> None:
        """Note a job that waits or runs."""
        self._running[name] = is_running

    def record_job_end(self, name: str) -> None:
        """Note the end of a job's srun."""
        self._running.pop(name, None)

    def count_jobs(self) -> dict[str, int]:
        """Return the numbers of jobs that wait and that run."""
        running = sum(self._running.values())
        return {"waiting": len(self._running) - running, "running": running}
