"""Lines in the log about one evaluation.

The log has a line for each state. The line begins with the evaluation's name in the log; its fields
are the caller, the commit, the state, and the seconds that the state before has lasted.
"""

from __future__ import annotations

from typing import Any

from tawebeval.core.states import EvaluationState
from tawebeval.errors import format_size
from tawebeval.evaluations.details import EvaluationDetails

_STEP = "{evaluation}: {state} after {after:.3f} s"
_LIMITS = "; limits: {wall_clock:g} s, {cpu} s of processor time, "
_PRINTED = "; {events} events"
_PROCESSOR = ", {cpu_seconds:.3f} s of processor time"


def make_log_fields(details: EvaluationDetails) -> dict[str, Any]:
    """Return the fields of each line."""
    request = details.request
    return {
        "evaluation": details.log_name,
        "caller": details.caller,
        "commit": request.commit_oid or f"refs/heads/{request.repository.branch}",
        "state": details.state.value,
    }


def format_state_line(
    details: EvaluationDetails, after: float, event_count: int
) -> tuple[str, dict[str, Any]]:
    """Return the format and the fields of the line about the present state.

    The state before has lasted `after` seconds. `event_count` is the number of events so far.
    """
    fields: dict[str, Any] = {**make_log_fields(details), "after": after}
    words = _STEP
    if details.state is EvaluationState.RUNNING and details.limits is not None:
        limits = details.limits
        words += _LIMITS + f"{format_size(limits.memory)} of memory"
        fields.update(wall_clock=limits.wall_clock, cpu=limits.cpu, memory=limits.memory)
    elif details.state in (
        EvaluationState.FINISHED,
        EvaluationState.FAILED,
        EvaluationState.CANCELLED,
    ):
        if details.failure is not None:
            words += ": {reason}: {failure}"
            fields.update(reason=details.failure.reason, failure=details.failure.message)
        if details.run_result is not None:
            usage = details.run_result.usage
            words += _PRINTED
            fields["events"] = event_count
            if usage.cpu_seconds is not None:
                words += _PROCESSOR
                fields["cpu_seconds"] = usage.cpu_seconds
            if usage.peak_memory_bytes is not None:
                words += f", {format_size(usage.peak_memory_bytes)} of memory"
                fields["peak_memory_bytes"] = usage.peak_memory_bytes
            if details.run_result.stray_marker_advice:
                words += f"; {details.run_result.stray_marker_advice}"
            elif not event_count:
                words += "; the evaluator printed nothing"
            if details.result_summary is not None and details.result_summary.uncounted_value:
                words += "; {uncounted}"
                fields["uncounted"] = details.result_summary.uncounted_value
    return words, fields
