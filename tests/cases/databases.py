"""Databases of evaluations that a test opens, and closes as the end of a process would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.evaluations.store import EvaluationStore


def close_databases_at_end(case: SynchronousTestCase) -> Callable[[], None]:
    """Close all databases at the end of the test; return a function that closes them now."""
    opened: list[EvaluationStore] = []
    open_database, close_database = EvaluationStore.open, EvaluationStore._disconnect

    def note_open(path: Path, *others: Any) -> EvaluationStore:
        opened.append(open_database(path, *others))
        return opened[-1]

    def close_once(database: EvaluationStore) -> None:
        if database in opened:
            opened.remove(database)
            close_database(database)

    def close_all() -> None:
        while opened:
            close_once(opened[-1])

    case.patch(EvaluationStore, "open", note_open)
    case.patch(EvaluationStore, "_disconnect", close_once)
    case.addCleanup(close_all)
    return close_all
