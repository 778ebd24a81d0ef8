"""The status document of an evaluation (docs/api.md)."""

from __future__ import annotations

from typing import Any

import attrs

from tawebeval.config import LimitSettings
from tawebeval.core.evaluations import EvaluationState
from tawebeval.core.form import LIMIT_UNITS
from tawebeval.evaluations.details import EvaluationDetails, format_rfc3339_time
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.sandbox.base import Environment


def build_status(evaluation: Evaluation, queue_position: int | None) -> dict[str, Any]:
    """Return the status document of an evaluation as a JSON object; null is for unknown values.

    `queue_position` is the number of evaluations before this one in the queue, None outside of it.
    """
    details, event_log = evaluation.details, evaluation.events.log
    document = _build(details, evaluation.limits, evaluation.environment)
    if details.state is EvaluationState.QUEUED:
        document["queue_place"] = queue_position
    if evaluation.run is not None:
        document["stderr"] = evaluation.run.stderr_text
    document["events"] = {
        "buffered": event_log.end_cursor - event_log.begin_cursor,
        "discarded": event_log.begin_cursor,
    }
    return document


def build_archived_status(details: EvaluationDetails) -> dict[str, Any]:
    """Return the status document of an archived evaluation; all events can be read."""
    assert details.limits is not None, "it has ended"
    assert details.archived is not None, "it is archived"
    document = _build(details, details.limits, details.environment)
    events = {"buffered": details.archived.event_count, "discarded": 0}
    return {**document, "events": events, "buffered_bytes": 0, "archived": True}


def _build(
    details: EvaluationDetails, limits: LimitSettings, environment: Environment | None
) -> dict[str, Any]:
    request, commit, result = details.request, details.commit, details.run_result
    document: dict[str, Any] = {
        "evaluation_id": details.identifier,
        "log_name": details.log_name,
        "state": details.state.value,
        "queue_place": None,
        "problem": request.problem,
        "repository": request.repository.url,
        "commit_oid": request.commit_oid or None,  # None until the branch is resolved
        "tree_oid": commit and commit.tree_oid,
        "directory": request.directory,
        "evaluator_cmd": request.truncated_command,
        "seed": details.seed,
        "environment": _build_environment(environment, request.environment),
        "limits": {name: getattr(limits, name) for name in LIMIT_UNITS},
        "metadata": dict(request.metadata),
        "created": _time(details, "created"),
        "fetching": _time(details, EvaluationState.FETCHING.value),
        "running": _time(details, EvaluationState.RUNNING.value),
        "ended": _time(details, "ended"),
        "exit": None,
        "usage": None,
        "error": None,
        "results": _build_results(details),
        "runner": details.runner_status and details.runner_status.build_json_object(),
        "callback": None,
        "stderr": "" if result is None else result.stderr_text,
        "events": {"buffered": 0, "discarded": 0},
        "buffered_bytes": details.event_bytes,
    }
    if result is not None:
        document["exit"] = result.exit_status and attrs.asdict(result.exit_status)
        document["usage"] = {
            "cpu_seconds": result.usage.cpu_seconds and round(result.usage.cpu_seconds, 3),
            "peak_memory_bytes": result.usage.peak_memory_bytes,
            "wall_seconds": round(
                details.state_times["ended"] - details.state_times[EvaluationState.RUNNING.value],
                3,
            )
            if "ended" in details.state_times
            else None,
        }
    if details.failure is not None:
        document["error"] = {
            "reason": details.failure.reason,
            "message": details.failure.message,
        }
    callback = details.callback
    if callback is not None:
        document["callback"] = {
            "url": callback.url_without_query,
            "state": callback.state.value,
            "attempts": callback.attempt_count,
            "last_error": callback.last_error,
        }
    return document


def build_listing_entry(details: EvaluationDetails) -> dict[str, Any]:
    """Return the members of the status document that a list shows."""
    labels = details.problem_and_labels
    return {
        "evaluation_id": details.identifier,
        "state": details.state.value,
        "problem": labels.problem,
        "metadata": labels.metadata,
        "created": _time(details, "created"),
        "ended": _time(details, "ended"),
        "results": _build_results(details),
    }


def _build_environment(environment: Environment | None, name: str | None) -> dict[str, Any] | None:
    """Return the environment of a run, or before the start the `name` that the request has."""
    if environment is None:
        return None if name is None else {"name": name, "digest": None}
    return {"name": environment.name, "digest": environment.digest}


def _build_results(details: EvaluationDetails) -> dict[str, Any] | None:
    return None if details.result_summary is None else details.result_summary.build_json_object()


def _time(details: EvaluationDetails, name: str) -> str | None:
    moment = details.state_times.get(name)
    return None if moment is None else format_rfc3339_time(moment)
