"""Slurm's commands: the options of srun(1), the queue, cancellations, and the check of a cluster.

`SlurmCommands` runs squeue(1) and scancel(1) in a thread of its own: while the controller is away
each waits for it, up to a deadline. `build_job_loss_failure` tells why a job was lost, by what
squeue has said. `check_cluster` is for `tawebeval doctor`.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.task import deferLater
from twisted.logger import Logger

from tawebeval.config import Configuration, LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.deferreds import WorkerThreads, run_in_background
from tawebeval.errors import ConfigurationError, EvaluationFailure, FailureReason, SetupProblem
from tawebeval.sandbox.bubblewrap import build_isolation_options

NODE_PYTHON = "/usr/bin/python3"
"""The Python of the program on the nodes, which is also that of evaluators."""
NODE_PROGRAM_MEMORY_BYTES = 96 * 2**20
"""Bytes that the program on the node and the sandbox need beside the evaluator."""
JOB_TIME_MARGIN_SECONDS = 120
"""Seconds that a job may last beyond the evaluation's own limits."""
ENDING_STATE = "COMPLETING"
"""The state of a job that its nodes are to end; another one follows, with the reason."""
COMMAND_TIMEOUT = 15.0
"""Seconds for one command."""
SQUEUE_PERIOD = 2.0
"""Seconds before each squeue, which tells of all jobs together."""

_SQUEUE = ("squeue", "--noheader", "--me", "--states=all", "--format=%i|%j|%T|%r|%N")
_MIB = 2**20
_BARS = 4  # in a line of squeue
_STDERR_SHOWN = 300  # characters of a command's stderr in a message
_SAID = re.compile(r"^(?:srun|slurmstepd|tawebeval)\b.*", re.MULTILINE)  # in srun's stderr
_PASSED = ("SLURM_CONF", "PATH", "SLURM_JWT")
_NAME_LENGTH = 16  # of an evaluation's name in the log
_LAST_LOOKS = 10  # at the queue, after the last job
_CHECK_SECONDS = 90.0  # for the job of the check, with its wait for a node

log = Logger()


def build_srun_options(
    limits: LimitSettings,
    name: str,
    *settings: RunnerSettings | SlurmJobSettings,
    excluded_node: str | None = None,
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
    if excluded_node is not None:
        yield f"--exclude={excluded_node}"
    for one in settings:
        yield from one.arguments


_REASONS: Mapping[str, FailureReason] = {
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL", ENDING_STATE), "node"),
    "PREEMPTED": "preempted",
    "OUT_OF_MEMORY": "memory",
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), "timeout"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), "revoked"),
}

JOB_LOSS_REASONS: tuple[FailureReason, ...] = (*dict.fromkeys(_REASONS.values()), "lost")
"""Reasons for which a job ends without an outcome."""


@attrs.frozen
class QueuedJob:
    """A job as squeue shows it, also for some minutes after its end."""

    identifier: str
    name: str
    state: str
    reason: str = ""
    node: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs, and may be cancelled."""
        return self.state not in ("COMPLETED", "FAILED", *_REASONS)


def parse_squeue(printed: str) -> Mapping[str, QueuedJob]:
    """Return the jobs that squeue has printed, by their names."""
    jobs = (
        QueuedJob(*line.split("|")) for line in printed.splitlines() if line.count("|") == _BARS
    )
    return {job.name: job for job in jobs}


def build_job_loss_failure(job: QueuedJob | None, srun_stderr: str) -> EvaluationFailure:
    """Return why a job has ended without an outcome.

    `job` is what squeue said last; None if it does not know the job. `srun_stderr` is the end of
    what srun has printed.
    """
    said = "; ".join(_SAID.findall(srun_stderr))[-_STDERR_SHOWN:]
    said = f"; srun said: {said}" if said else ""
    if job is None:
        return EvaluationFailure("lost", f"the evaluator was not run by Slurm{said}")
    where = f" on the node {job.node}" if job.node else ""
    what = f"the job {job.identifier} of Slurm{where} ended without an outcome ({job.state})"
    if reason := _REASONS.get(job.state):
        return EvaluationFailure(reason, what, {"slurm": job.state})
    return EvaluationFailure("lost", f"{what}{said}")  # as by a program that the node lacks


@attrs.define(eq=False)
class JobCounters:
    """Counts of jobs. `is_controller_unreachable`: whether the last squeue has failed."""

    lost_jobs_by_reason: Counter[str] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(JOB_LOSS_REASONS, 0))
    )
    restarted_jobs: int = 0
    is_controller_unreachable: bool = False


def build_command_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of Slurm's commands, from that of the daemon."""
    passed = {name: environment[name] for name in _PASSED if name in environment}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", **passed}


class SlurmCommandFailed(Exception):
    """A command that has failed; `str()` is the end of its stderr."""


def run_command(
    environment: Mapping[str, str], *argv: str, timeout: float = COMMAND_TIMEOUT
) -> str:
    """Return the stdout of a command. Blocks. Raises: SlurmCommandFailed."""
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
    try:
        done = subprocess.run(argv, env=environment, cwd="/", timeout=timeout, check=True, **how)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").strip()[-_STDERR_SHOWN:]
        words = f"no answer within {timeout:g} seconds"
        raise SlurmCommandFailed(f"{words}; {said}" if said else words) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()[-_STDERR_SHOWN:]
        raise SlurmCommandFailed(said or f"exit status {error.returncode}") from None
    except OSError as error:
        raise SlurmCommandFailed(f"{argv[0]}: {error.strerror}") from None
    return str(done.stdout)


QueuedJobCallback = Callable[[QueuedJob | None], object]


@attrs.define(eq=False)
class SlurmCommands:
    """Slurm's commands: one watch of the queue for all jobs of the daemon.

    Jobs with `label` in their names that nobody watches are cancelled: those of earlier processes
    of the daemon, and those that were given up, or whose srun was killed.
    """

    _clock: Any
    _threads: WorkerThreads
    _label: str
    _environment: Mapping[str, str] = attrs.field(factory=build_command_environment)
    counters: JobCounters = attrs.field(factory=JobCounters)
    _watches: dict[str, QueuedJobCallback] = attrs.field(factory=dict)  # by name
    _unwatched: frozenset[str] = frozenset()  # names of jobs that the last look has found
    _looks_left: int = 0
    _is_polling: bool = False

    def make_job_name(self, evaluation: str) -> str:
        """Return a new name; `evaluation` begins with the name of the evaluation in the log."""
        return f"tawebeval-{self._label}-{evaluation[:_NAME_LENGTH]}-{secrets.token_hex(4)}"

    def add_job_watcher(self, name: str, on_look: QueuedJobCallback = lambda job: None) -> None:
        """Call `on_look` with what each squeue says of a job; None if it does not know the job."""
        self._watches[name] = on_look
        self.poll_queue()

    def abandon_job(self, name: str) -> None:
        """End `add_job_watcher`, and soon the job, if it has not ended by itself."""
        self._watches.pop(name, None)
        self.poll_queue()

    def poll_queue(self) -> None:
        """Look for jobs that nobody watches for some time, as one may be submitted just now."""
        self._looks_left = _LAST_LOOKS
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._poll_queue(), log, "defect: Slurm's queue is not watched")

    async def _poll_queue(self) -> None:
        try:
            while self._watches or self._unwatched or self._looks_left:
                await deferLater(self._clock, SQUEUE_PERIOD)
                try:
                    await self._look()
                except SlurmCommandFailed as error:
                    if not self.counters.is_controller_unreachable:  # else it was logged
                        log.warn("the queue of Slurm is unknown: {error}", error=error)
                    self.counters.is_controller_unreachable = True
        finally:
            self._is_polling = self.counters.is_controller_unreachable = False

    async def _look(self) -> None:
        """Tell what squeue says, and cancel jobs. Raises: SlurmCommandFailed, if it fails."""
        jobs = parse_squeue(await self._run(*_SQUEUE))
        self.counters.is_controller_unreachable = False
        self._looks_left = max(0, self._looks_left - 1)
        for name, on_look in list(self._watches.items()):
            on_look(jobs.get(name))
        prefix, before = f"tawebeval-{self._label}-", self._unwatched
        own = {name for name, job in jobs.items() if job.is_alive and name.startswith(prefix)}
        self._unwatched = frozenset(own - self._watches.keys())
        # At the second look, as a job ends a moment after its evaluator.
        if found := [jobs[name].identifier for name in self._unwatched & before]:
            try:
                await self._run("scancel", *found)
            except SlurmCommandFailed as error:
                words = "{count} jobs of Slurm are not cancelled: {error}"
                log.warn(words, count=len(found), error=error)

    async def _run(self, *argv: str) -> str:
        return await self._threads.run_in_thread(run_command, self._environment, *argv)


def check_shared_directory(configuration: Configuration, state: Path) -> None:
    """Check that the state directory lies in `runner.shared`. Raises: ConfigurationError."""
    shared = Path(configuration.runner.shared)
    if not state.resolve().is_relative_to(shared.resolve()):
        raise ConfigurationError(
            f"runner.shared: {state} is not in {shared}, so the nodes would not see it",
            "name a directory in it by STATE_DIRECTORY",
        )


def check_cluster(
    configuration: Configuration, state: Path, environment: Mapping[str, str]
) -> Iterator[str | SetupProblem]:
    """Yield what a job finds that tries on a node what evaluators need. Blocks.

    Raises: ConfigurationError, if evaluators cannot run there.
    """
    check_shared_directory(configuration, state)
    isolated = ("bwrap", *build_isolation_options("check"), "--ro-bind", "/", "/", "/bin/true")
    roots = (one.root for one in configuration.environments.values())
    paths: Sequence[str] = (*roots, *configuration.sandbox.readable)
    script = (
        f"cd {shlex.quote(str(state))}",
        shlex.join(isolated),
        f"{NODE_PYTHON} -I -S -c pass",
        'echo "${SLURMD_NODENAME:-$(uname -n)}"',
        *(f"test -e {path} || echo {path}" for path in map(shlex.quote, paths)),
    )
    name = f"tawebeval-doctor-{secrets.token_hex(8)}"
    commands = build_command_environment(environment)
    options = build_srun_options(configuration.limits, name, configuration.runner)
    shell = ("/bin/sh", "-ec", "\n".join(script))
    try:
        printed = run_command(commands, "srun", *options, "--", *shell, timeout=_CHECK_SECONDS)
    except SlurmCommandFailed as error:
        raise ConfigurationError(
            f"runner.kind: a job does not run on a node: {error}",
            "run `srun hostname` and `sinfo` here, and correct slurm.conf and munge; mount"
            " runner.shared on this machine and all nodes under the same path, run `apt-get"
            " install bubblewrap python3` on all nodes and allow user namespaces there, and check"
            " the options in [runner]",
        ) from None
    finally:
        with suppress(SlurmCommandFailed):
            run_command(commands, "scancel", f"--name={name}")
    node, *missing = printed.splitlines()
    yield f"on the node {node} bubblewrap works, and the shared directory is seen"
    for path in missing:
        yield SetupProblem(f"on the node {node} {path} is missing", "make it on all nodes")
