"""The status document of an evaluation (contract, section 7)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import attrs

from tawebeval.evaluation import Evaluation
from tawebeval.life import State


def status(evaluation: Evaluation, place: int | None) -> dict[str, Any]:
    """Return what can be told about an evaluation, as JSON takes it.

    `place` is how many wait before it, None when it does not wait. What is not known yet
    is null.
    """
    request, commit, run, ring = (
        evaluation.request,
        evaluation.commit,
        evaluation.run,
        evaluation.ring,
    )
    document: dict[str, Any] = {
        "evaluation_id": evaluation.identifier,
        "log_name": evaluation.name,
        "state": evaluation.state.value,
        "queue_place": place,
        "repository": request.repository.url,
        "commit_oid": request.commit_oid,
        "tree_oid": commit and commit.tree,
        "directory": request.directory,
        "evaluator_cmd": request.evaluator_cmd,
        "seed": evaluation.seed,
        "created": _time(evaluation, "created"),
        "fetching": _time(evaluation, State.FETCHING.value),
        "running": _time(evaluation, State.RUNNING.value),
        "ended": _time(evaluation, "ended"),
        "exit": None,
        "usage": None,
        "error": None,
        "callback": None,
        "stderr": run.stderr if run else "",
        "events": {"buffered": ring.newest - ring.oldest, "discarded": ring.oldest},
        "buffered_bytes": ring.size,
    }
    if run is not None and run.ended.is_set:
        document["exit"] = run.exit and attrs.asdict(run.exit)
        document["usage"] = {
            "cpu_seconds": run.usage.cpu_seconds and round(run.usage.cpu_seconds, 3),
            "peak_memory_bytes": run.usage.peak_memory,
            "wall_seconds": round(
                evaluation.times["ended"] - evaluation.times[State.RUNNING.value], 3
            )
            if "ended" in evaluation.times
            else None,
        }
    if evaluation.failure is not None:
        document["error"] = {
            "reason": evaluation.failure.reason,
            "message": evaluation.failure.message,
        }
    callback = evaluation.callback
    if callback is not None:
        document["callback"] = {
            "url": callback.shown_url,
            "state": callback.stage.value,
            "attempts": callback.attempts,
            "last_error": callback.last_error,
        }
    return document


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the members of the status document that a list shows of each evaluation."""
    return {
        "evaluation_id": evaluation.identifier,
        "state": evaluation.state.value,
        "created": _time(evaluation, "created"),
        "ended": _time(evaluation, "ended"),
    }


def _time(evaluation: Evaluation, name: str) -> str | None:
    moment = evaluation.times.get(name)
    return None if moment is None else shown_time(moment)


def shown_time(moment: float) -> str:
    """Return a time, in seconds since the epoch, as documents have it (RFC 3339)."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
