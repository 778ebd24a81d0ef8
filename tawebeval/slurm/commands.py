"""Slurm's commands: the options of srun(1), the queue, cancellations, and checks of a cluster.

`SlurmCommands` runs squeue(1) and scancel(1) in a thread of its own: while the controller is away
each waits for it, up to a deadline. `explain_job_loss` tells why a job was lost, by what squeue has
said.

`check_cluster` is for `tawebeval doctor`: it tries the commands from here, and the sandbox by a
job.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
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
"""The state of a job until its nodes have ended it; another one follows, with the reason."""

_SQUEUE = ("squeue", "--noheader", "--me", "--states=all", "--format=%i|%j|%T|%r|%N")
_MIB = 2**20
_BARS = 4  # in a line of squeue
_STDERR_SHOWN = 300  # characters of srun's stderr in a message
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
_ENDS: Mapping[str, str] = {
    "node": "was lost: the node failed",
    "preempted": "was preempted by another job",
    "memory": "used over its memory (limits.memory)",
    "timeout": "was ended by Slurm's time limit",
    "revoked": "was cancelled in Slurm",
}


COMMAND_TIMEOUT = 15.0
"""Seconds for one command."""

SQUEUE_PERIOD = 2.0
"""Seconds before each squeue, which tells of all jobs together."""

_PASSED = ("SLURM_CONF", "PATH", "SLURM_JWT")
_CANCEL_LOOKS = 10  # for jobs to cancel
_MISSES = 15  # looks without a job that was in the queue before, until it counts as gone

log = Logger()


LOSS_REASONS: tuple[FailureReason, ...] = (*dict.fromkeys(_REASONS.values()), "lost")
"""Reasons for which a job ends without an outcome."""


@attrs.define(eq=False)
class JobCounters:
    """Counts of jobs. `is_controller_unreachable`: whether the last squeue has failed."""

    lost_jobs_by_reason: Counter[str] = attrs.field(
        factory=lambda: Counter(dict.fromkeys(LOSS_REASONS, 0))
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
    """Return the stdout of a command. Blocks. Raises: SlurmCommandFailed, OSError."""
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmCommandFailed(f"no answer within {timeout:g} seconds") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-_STDERR_SHOWN:]
        raise SlurmCommandFailed(said or f"exit status {done.returncode}")
    return done.stdout.decode(errors="replace")


WatchJob = Callable[[QueuedJob | None], object]
IsMeant = Callable[[str], bool]


@attrs.define(eq=False)
class _Watch:
    on_state: WatchJob
    misses_left: int


@attrs.define(eq=False)
class SlurmCommands:
    """Slurm's commands: one watch of the queue for all jobs, and cancellations."""

    _clock: Any
    _threads: WorkerThreads
    _environment: Mapping[str, str] = attrs.field(factory=build_command_environment)
    counters: JobCounters = attrs.field(factory=JobCounters)
    _watches: dict[str, _Watch] = attrs.field(factory=dict)  # by name
    _cancels: dict[IsMeant, int] = attrs.field(factory=dict)  # looks that are left
    _is_polling: bool = False

    def watch_job(self, name: str, on_state: WatchJob, *, misses: int | None = None) -> None:
        """Call `on_state` with what squeue says of a job now and then, None if it is gone.

        A controller that has lost its state may forget a job without a word to srun. `misses`, for
        a job without srun, or of an earlier process of the daemon: the looks without the job until
        it counts as gone. Without it a job is gone only after it was in the queue.
        """
        self._watches[name] = _Watch(on_state, misses or 0)
        self._poll()

    def unwatch_job(self, name: str) -> None:
        """End `watch_job`."""
        self._watches.pop(name, None)

    def cancel_job(self, name: str) -> None:
        """Cancel the jobs of a name.

        A job of an srun that was killed would otherwise keep its node until its time is over.
        """
        self.cancel_jobs(name.__eq__)

    def cancel_jobs(self, is_meant: IsMeant) -> None:
        """Cancel jobs by their names, also those that are in the queue only a few looks later."""
        self._cancels[is_meant] = _CANCEL_LOOKS
        self._poll()

    def _poll(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            run_in_background(self._watch_queue(), log, "defect: Slurm's queue is not watched")

    async def _watch_queue(self) -> None:
        try:
            while True:
                await deferLater(self._clock, SQUEUE_PERIOD)
                if not (self._watches or self._cancels):
                    return
                await self._look()
        finally:
            self._is_polling = self.counters.is_controller_unreachable = False

    async def _look(self) -> None:
        try:
            jobs = parse_squeue(await self._run(*_SQUEUE))
        except (SlurmCommandFailed, OSError) as error:
            if not self.counters.is_controller_unreachable:  # once while the controller is away
                log.warn("the queue of Slurm is unknown: {error}", error=error)
            self.counters.is_controller_unreachable = True
            return
        self.counters.is_controller_unreachable = False
        for name, watch in list(self._watches.items()):
            job = jobs.get(name)
            if job is not None:
                watch.misses_left = max(watch.misses_left, _MISSES)
                watch.on_state(job)
            elif watch.misses_left:
                watch.misses_left -= 1
                if not watch.misses_left:
                    watch.on_state(None)
        await self._cancel([job for job in jobs.values() if job.is_alive])

    async def _cancel(self, jobs: Sequence[QueuedJob]) -> None:
        """Cancel jobs by one command: there may be hundreds."""
        found = [job.identifier for job in jobs if any(meant(job.name) for meant in self._cancels)]
        self._cancels = {meant: left - 1 for meant, left in self._cancels.items() if left > 1}
        if found:
            try:
                await self._run("scancel", *found)
            except (SlurmCommandFailed, OSError) as error:
                words = "{count} jobs of Slurm are not cancelled: {error}"
                log.warn(words, count=len(found), error=error)

    async def _run(self, *argv: str) -> str:
        """Return the stdout of a command. Raises: SlurmCommandFailed, OSError."""
        return await self._threads.run_in_thread(run_command, self._environment, *argv)


_COMMANDS = ("srun", "squeue", "scontrol", "scancel")
_JOB_SECONDS = 90.0  # for the job of the check, with its wait for a node
_TRIED: Mapping[str, Sequence[str]] = {
    "bubblewrap": ("bwrap", *build_isolation_options("check"), "--ro-bind", "/", "/", "/bin/true"),
    NODE_PYTHON: (NODE_PYTHON, "-I", "-S", "-c", "pass"),
}


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
    """Yield what works of a cluster, from this machine and by a job on a node. Blocks.

    Raises: ConfigurationError, OSError.
    """
    if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
        raise ConfigurationError(
            f"runner.kind: {', '.join(missing)} of Slurm is not installed",
            "run `apt-get install slurm-client`, and set up this machine as a client of the"
            " cluster",
        )
    check_shared_directory(configuration, state)
    run = partial(run_command, build_command_environment(environment))
    try:
        pinged = run("scontrol", "ping").strip()
    except SlurmCommandFailed as error:
        pinged = str(error)
    if " UP" not in pinged:
        raise ConfigurationError(
            f"runner.kind: the controller of Slurm does not answer: {pinged[:200]}",
            "start slurmctld, or correct SLURM_CONF and munge of this machine",
        )
    yield "the controller of Slurm answers"
    printed = _run_job(configuration, run)
    node = re.search("^node (.*)", printed, re.MULTILINE)
    where = f"on the node {node[1]}" if node else "on a node"
    yield f"{where} bubblewrap works, and the shared directory is seen"
    for path in re.findall("^missing (.*)", printed, re.MULTILINE):
        yield SetupProblem(f"{where} {path} is missing", "make it on all nodes")


def _run_job(configuration: Configuration, run: Callable[..., str]) -> str:
    """Return what a script in the shared directory prints on a node.

    Raises: ConfigurationError, if evaluators cannot run there.
    """
    runner, name = configuration.runner, f"tawebeval-doctor-{secrets.token_hex(8)}"
    script = Path(runner.shared) / name
    try:
        script.write_text("\n".join(_list_commands(configuration)))
    except OSError as error:
        raise ConfigurationError(
            f"runner.shared: {runner.shared}: {error.strerror}", "let the daemon's user write there"
        ) from None
    options = build_srun_options(configuration.limits, name, runner)
    try:
        return run("srun", *options, "--", "/bin/sh", str(script), timeout=_JOB_SECONDS)
    except SlurmCommandFailed as error:
        raise ConfigurationError(
            f"runner.kind: a job does not run on a node: {error}",
            "mount runner.shared on this machine and all nodes under the same path, run `apt-get"
            " install bubblewrap python3` on all nodes and allow user namespaces there, check the"
            " options in [runner], and look at `sinfo` and `squeue` for a free node",
        ) from None
    finally:
        with suppress(SlurmCommandFailed):
            run("scancel", f"--name={name}")
        script.unlink()


def _list_commands(configuration: Configuration) -> Iterator[str]:
    """Yield commands of a shell, which fail with the error, or print the node and what it lacks."""
    for what, argv in _TRIED.items():
        failed = f'{{ echo "{what} does not work: $said" >&2; exit 1; }}'
        yield f"said=$({shlex.join(argv)} 2>&1) || {failed}"
    yield 'echo "node ${SLURMD_NODENAME:-$(uname -n)}"'
    roots = (one.root for one in configuration.environments.values())
    for path in map(shlex.quote, (*roots, *configuration.sandbox.readable)):
        yield f"test -e {path} || echo missing {path}"
