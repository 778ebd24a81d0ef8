"""Jobs of Slurm: the options of srun(1), the lines of squeue(1), and why a job was lost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

from tawebeval.config import LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.errors import EvaluationFailure, FailureReason

NODE_PROGRAM_MEMORY_BYTES = 96 * 2**20
"""Bytes that the program on the node and the sandbox need beside the evaluator."""

JOB_TIME_MARGIN_SECONDS = 120
"""Seconds that a job may last beyond the evaluation's own limits."""

SQUEUE_OPTIONS = ("--noheader", "--me", "--format=%i|%j|%T|%r|%N")
"""The options of squeue for `parse_squeue`."""

ENDING_STATE = "COMPLETING"
"""The state of a job until its nodes have ended it; another one follows, with the reason."""

_MIB = 2**20
_BARS = 4  # in a line of squeue
_STDERR_SHOWN = 300  # characters of srun's stderr in a message
_NODE_MESSAGE = re.compile(r"^tawebeval on .*", re.MULTILINE)  # of the program on the node
_TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\):|[ \t].*)$\n?", re.MULTILINE)


@attrs.frozen
class QueuedJob:
    """A job as squeue shows it, also for some minutes after its end."""

    identifier: str
    name: str
    state: str
    reason: str = ""
    node: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether neither node nor controller does anything for it any more."""
        return self.state in ("COMPLETED", "FAILED", *_REASONS)

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs, and may be cancelled."""
        return not self.has_ended and self.state != ENDING_STATE


def parse_squeue(printed: str) -> Mapping[str, QueuedJob]:
    """Return the jobs that squeue has printed, by their names."""
    jobs = (
        QueuedJob(*line.split("|")) for line in printed.splitlines() if line.count("|") == _BARS
    )
    return {job.name: job for job in jobs}


def build_srun_options(
    limits: LimitSettings, name: str, *settings: RunnerSettings | SlurmJobSettings
) -> Iterator[str]:
    """Yield the options of srun for one evaluator; of a repeated option the last one counts."""
    seconds = limits.wall_clock + JOB_TIME_MARGIN_SECONDS
    yield from (
        f"--job-name={name}",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        f"--mem={math.ceil((limits.memory + NODE_PROGRAM_MEMORY_BYTES) / _MIB)}M",
        f"--time={min(math.ceil(seconds / 60), 525_600)}",
        "--chdir=/",
        "--export=NONE",
        "--propagate=NONE",
        "--mpi=none",
        "--kill-on-bad-exit=1",
    )
    for one in settings:
        yield from one.arguments


def exclude_node(options: Sequence[str], node: str) -> list[str]:
    """Return options of srun that exclude a node besides those that they exclude already."""
    name = "--exclude="
    excluded = [option.removeprefix(name) for option in options if option.startswith(name)]
    return [*options, name + ",".join((*excluded[-1:], node))]


def explain_job_loss(job: QueuedJob | None, srun_stderr: str) -> EvaluationFailure:
    """Return why a job has ended without an outcome.

    `job` is what squeue said last; None if it does not know the job, or does not answer.
    `srun_stderr` is the end of what srun has printed.
    """
    if job is not None:
        where = f" on the node {job.node}" if job.node else ""
        named = f"the job {job.identifier} of Slurm{where}"
        if reason := _REASONS.get(job.state):
            return EvaluationFailure(reason, f"{named} {_ENDS[reason]}", {"slurm": job.state})
    words = _NODE_MESSAGE.sub("", srun_stderr)  # no path or error of the node
    for sign, reason in _SIGNS:
        if re.search(sign, words):
            return EvaluationFailure(reason, f"the job of Slurm {_ENDS[reason]}")
    said = re.sub(r"\s+", " ", _TRACEBACK.sub("", srun_stderr)).strip()[-_STDERR_SHOWN:]
    said = f"; srun said: {said}" if said else ""
    if job is None:
        return EvaluationFailure("lost", f"the evaluator was not run by Slurm{said}")
    if job.state == ENDING_STATE:
        return EvaluationFailure("node", f"{named} is not ended by its node", {"slurm": job.state})
    # Such as a program that the node does not have.
    return EvaluationFailure("lost", f"{named} ended without an outcome ({job.state}){said}")


_REASONS: Mapping[str, FailureReason] = {
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), "node"),
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "memory",
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timeout"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), "revoked"),
}
_SIGNS: Sequence[tuple[str, FailureReason]] = (
    (r"(?i)node failure|NODE FAIL", "node"),
    (r"(?i)preemption", "preempted"),
    (r"(?i)oom[-_ ]kill|out of memory", "memory"),
    (r"DUE TO TIME LIMIT", "timeout"),
    (r"has been revoked|CANCELLED AT|job has been cancelled|allocation cancelled", "revoked"),
)
_ENDS: Mapping[str, str] = {
    "node": "was lost: the node failed",
    "preempted": "was preempted by another job",
    "memory": "used over its memory (limits.memory)",
    "timeout": "was ended by Slurm's time limit",
    "revoked": "was cancelled in Slurm",
}
