"""Jobs of Slurm: the options of srun(1), the queue by squeue(1), and why a job was lost."""

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

SQUEUE_OPTIONS = ("--noheader", "--me", "--format=%i|%j|%T|%r")
"""The options of squeue for `parse_squeue`."""

ENDING_STATE = "COMPLETING"
"""The state of a job until its nodes have ended it; another one follows, with the reason."""

_MIB = 2**20
_QUEUED = re.compile(r"job (\d+) (?:queued|has been allocated)|allocation (\d+)")
_STDERR_SHOWN = 300  # characters of srun's stderr in a message
_NODE_MESSAGE = re.compile(r"^tawebeval on .*", re.MULTILINE)  # of the program on the node
_TRACEBACK = re.compile(r"^(?:Traceback \(most recent call last\):|[ \t].*)$\n?", re.MULTILINE)


@attrs.frozen
class QueuedJob:
    """A job as squeue shows it."""

    identifier: str
    state: str
    reason: str


def parse_squeue(printed: str) -> Mapping[str, QueuedJob]:
    """Return the jobs that squeue has printed, by their names."""
    found = {}
    for line in printed.splitlines():
        identifier, name, state, reason = [*line.split("|"), *[""] * 4][:4]
        if name:
            found[name] = QueuedJob(identifier, state, reason)
    return found


def parse_scontrol_job(printed: str) -> Mapping[str, str]:
    """Return the fields of `scontrol show job --oneliner`."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)", printed))


def find_job_identifier(srun_stderr: str) -> str | None:
    """Return the number of the job that srun names on stderr."""
    told = _QUEUED.search(srun_stderr)
    return None if told is None else told[1] or told[2]


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


def explain_job_loss(job: Mapping[str, str], srun_stderr: str) -> EvaluationFailure:
    """Return why a job has ended without an outcome.

    `job` has the fields of `parse_scontrol_job`, empty if Slurm does not answer; `srun_stderr` is
    the end of what srun has printed.
    """
    state = job.get("JobState", "")
    node = job.get("NodeList", "")
    where = f" on the node {node}" if node and node != "(null)" else ""
    number = job.get("JobId")
    named = f"the job {number} of Slurm{where}" if number else "the job of Slurm"
    if state in _REASONS:
        reason = _REASONS[state]
        return EvaluationFailure(reason, f"{named} {_ENDS[reason]}", {"slurm": state})
    words = _NODE_MESSAGE.sub("", srun_stderr)  # no path or error of the node
    for sign, reason in _SIGNS:
        if re.search(sign, words):
            return EvaluationFailure(reason, f"{named} {_ENDS[reason]}")
    if state == ENDING_STATE:
        return EvaluationFailure("node", f"{named} is not ended by its node", {"slurm": state})
    said = re.sub(r"\s+", " ", _TRACEBACK.sub("", srun_stderr)).strip()[-_STDERR_SHOWN:]
    said = f"; srun said: {said}" if said else ""
    if not number:
        return EvaluationFailure("lost", f"the evaluator was not run by Slurm{said}")
    what = f"{named} ended without an outcome (state {state or 'unknown'}){said}"
    return EvaluationFailure("lost", what)  # such as a program that the node does not have


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
