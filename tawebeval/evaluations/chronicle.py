"""The story of an evaluation, as the log tells it: a line for each step.

Each line begins with the evaluation's name in the log, and has, as fields, whose it is, its
commit, its state, and how long the state before has lasted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.logger import Logger

from tawebeval.config import Limits
from tawebeval.core.states import State

if TYPE_CHECKING:
    from tawebeval.evaluations.evaluation import Evaluation

_AFTER = "{evaluation}: {state} after {after:.3f} s"
_LIMITS = "; it may take {wall_clock:g} s, {cpu} s of processor, {memory} bytes of memory"
_PRINTED = "; {events} events"
_PROCESSOR = ", {cpu_seconds:.3f} s of processor"
_MEMORY = ", {peak_memory_bytes} bytes of memory"

log = Logger()


def tell_beginning(evaluation: Evaluation) -> None:
    """Tell that an evaluation was accepted."""
    log.info("{evaluation}: {state}; caller {caller!r}, commit {commit}", **_who(evaluation))


def tell_step(evaluation: Evaluation, after: float, limits: Limits) -> None:
    """Tell which state it has reached, `after` so many seconds in the one before."""
    fields: dict[str, Any] = {**_who(evaluation), "after": after}
    words = _AFTER
    state = evaluation.state
    if state is State.RUNNING:
        words += _LIMITS
        fields.update(wall_clock=limits.wall_clock, cpu=limits.cpu, memory=limits.memory)
    elif state in (State.FINISHED, State.FAILED, State.CANCELLED):
        if evaluation.failure is not None:
            words += ": {reason}: {failure}"
            fields.update(reason=evaluation.failure.reason, failure=evaluation.failure.message)
        if evaluation.result is not None:
            usage = evaluation.result.usage
            words += _PRINTED
            fields["events"] = evaluation.ring.newest
            if usage.cpu_seconds is not None:
                words += _PROCESSOR
                fields["cpu_seconds"] = usage.cpu_seconds
            if usage.peak_memory is not None:
                words += _MEMORY
                fields["peak_memory_bytes"] = usage.peak_memory
    log.info(words, **fields)


def tell_stderr(evaluation: Evaluation, stderr: str) -> None:
    """Tell the last of what the evaluator has printed to stderr."""
    log.info("{evaluation}: stderr ends in {stderr!r}", **_who(evaluation), stderr=stderr)


def tell_abandonment(evaluation: Evaluation) -> None:
    """Tell why it is about to be stopped."""
    log.info("{evaluation}: nobody asks for it any more", **_who(evaluation))


def _who(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "evaluation": evaluation.name,
        "caller": evaluation.caller,
        "commit": evaluation.request.commit_oid,
        "state": evaluation.state.value,
    }
