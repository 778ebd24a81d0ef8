"""Slurm's commands: the options of srun(1), the queue, cancellations, and checks of a cluster.

`SlurmCommands` runs squeue(1) and scancel(1) as children with a deadline. They take no thread:
while the controller is away each waits for it, up to its deadline. `explain_job_loss` tells why a
job was lost, by what squeue and srun have said.

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
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.config import Configuration, LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.deferreds import run_in_background
from tawebeval.errors import ConfigurationError, EvaluationFailure, FailureReason, SetupProblem
from tawebeval.linux.child import ChildProcess
from tawebeval.sandbox.bubblewrap import build_isolation_options

NODE_PYTHON = "/usr/bin/python3"
"""The Python of the program on the nodes, which is also that of evaluators."""

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


COMMAND_TIMEOUT = 15.0
"""Seconds for one command."""

SQUEUE_PERIOD = 2.0
"""Seconds before each squeue, which tells of all jobs together."""

_PASSED = ("SLURM_CONF", "PATH", "SLURM_JWT")
_CANCEL_LOOKS = 10  # for jobs to cancel
_MISSES = 15  # looks without a job that was in the queue before, until it counts as gone

log = Logger()


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


def build_command_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of Slurm's commands, from that of the daemon."""
    passed = {name: environment[name] for name in _PASSED if name in environment}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", **passed}


class SlurmCommandFailed(Exception):
    """A command that has failed; `str()` is the end of its stderr."""


class _Command(ProcessProtocol):
    """One command: its stdout, and its end."""

    def __init__(self, clock: Any) -> None:
        self.ended = Deferred[str]()
        self._printed = {1: bytearray(), 2: bytearray()}
        self._deadline = clock.callLater(COMMAND_TIMEOUT, self._on_deadline)
        self._process: ChildProcess

    def makeConnection(self, transport: Any) -> None:
        self._process = transport
        super().makeConnection(transport)

    def _on_deadline(self) -> None:
        self._printed[2] += b"no answer within %d seconds" % COMMAND_TIMEOUT
        self._process.signal_group(9)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self._printed[childFD] += data

    def processEnded(self, reason: Failure) -> None:
        is_late = not self._deadline.active()
        if not is_late:
            self._deadline.cancel()
        if is_late or isinstance(reason.value, ProcessTerminated):
            said = self._printed[2][-400:].decode(errors="replace").strip()
            self.ended.errback(SlurmCommandFailed(said or str(reason.value)))
        else:
            self.ended.callback(self._printed[1].decode(errors="replace"))


SpawnCommand = Callable[[ProcessProtocol, Sequence[str], Mapping[str, str], str], object]
WatchJob = Callable[[QueuedJob | None], object]
IsMeant = Callable[[str], bool]


@attrs.define(eq=False)
class _Watch:
    on_state: WatchJob
    is_to_end: bool
    misses_left: int


@attrs.define(eq=False)
class SlurmCommands:
    """Slurm's commands: one watch of the queue for all jobs, and cancellations."""

    _clock: Any
    _spawn: SpawnCommand
    _environment: Mapping[str, str] = attrs.field(factory=build_command_environment)
    counters: JobCounters = attrs.field(factory=JobCounters)
    _watches: dict[str, _Watch] = attrs.field(factory=dict)  # by name
    _cancels: dict[IsMeant, int] = attrs.field(factory=dict)  # looks that are left
    _is_polling: bool = False

    def watch_job(self, name: str, on_state: WatchJob, *, misses: int | None = None) -> None:
        """Call `on_state` with what squeue says of a job now and then, None if it is gone.

        A controller that has lost its state may forget a job without a word to srun. `misses`, for
        a job without srun, or of an earlier process of the daemon: the looks without the job until
        it counts as gone; its end is told, too. Without it a job is gone only after it was in the
        queue.
        """
        self._watches[name] = _Watch(on_state, misses is not None, misses or 0)
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
        ended = ["--states=all"] if any(one.is_to_end for one in self._watches.values()) else []
        try:
            jobs = parse_squeue(await self._run("squeue", *SQUEUE_OPTIONS, *ended))
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
        command = _Command(self._clock)
        self._spawn(command, argv, self._environment, "/")
        return await command.ended


_COMMANDS = ("srun", "squeue", "scontrol", "scancel")
_JOB_SECONDS = 90.0  # for the job of the check, with its wait for a node
_TRIED: Mapping[str, Sequence[str]] = {
    "bubblewrap": ("bwrap", *build_isolation_options("check"), "--ro-bind", "/", "/", "/bin/true"),
    NODE_PYTHON: (NODE_PYTHON, "-I", "-S", "-c", "pass"),
}
_LATE = "no answer within {:g} seconds"


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
    run = partial(_run, build_command_environment(environment))
    pinged = run("scontrol", "ping")
    if " UP" not in pinged:
        raise ConfigurationError(
            f"runner.kind: the controller of Slurm does not answer: {pinged.strip()[:200]}",
            "start slurmctld, or correct SLURM_CONF and munge of this machine",
        )
    yield "the controller of Slurm answers"
    yield from _judge_report(_run_job(configuration, run))


def _run(environment: Mapping[str, str], *argv: str, timeout: float = COMMAND_TIMEOUT) -> str:
    """Return what a command of Slurm prints. Blocks."""
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _LATE.format(timeout)
    return done.stdout.decode(errors="replace")


def _run_job(configuration: Configuration, run: Callable[..., str]) -> str:
    """Return what a script in the shared directory prints on a node."""
    runner, name = configuration.runner, f"tawebeval-doctor-{secrets.token_hex(8)}"
    script = Path(runner.shared) / name
    try:
        script.write_text("\n".join(_list_commands(configuration)))
    except OSError as error:
        raise ConfigurationError(
            f"runner.shared: {runner.shared}: {error.strerror}", "let the daemon's user write there"
        ) from None
    try:
        options = build_srun_options(configuration.limits, name, runner)
        command = ("srun", "--quiet", *options, "--", "/bin/sh", str(script))
        return run(*command, timeout=_JOB_SECONDS)
    finally:
        run("scancel", f"--name={name}")
        script.unlink()


def _list_commands(configuration: Configuration) -> Iterator[str]:
    """Yield commands of a shell, which print a line for each problem, and then the node."""
    for what, argv in _TRIED.items():
        yield f'said=$({shlex.join(argv)} 2>&1) || echo "fails {what}:" $said'
    roots = (one.root for one in configuration.environments.values())
    for path in map(shlex.quote, (*roots, *configuration.sandbox.readable)):
        yield f"test -e {path} || echo missing {path}"
    yield 'echo "node ${SLURMD_NODENAME:-$(uname -n)}"'


def _judge_report(printed: str) -> Iterator[str | SetupProblem]:
    """Yield what a job has found. Raises: ConfigurationError, if evaluators cannot run there."""
    if printed == _LATE.format(_JOB_SECONDS):
        raise ConfigurationError(
            f"runner.kind: no node was free within {_JOB_SECONDS:g} seconds",
            "look at `sinfo` and `squeue`, and check again when a node is free",
        )
    told = [line.partition(" ") for line in printed.splitlines()]
    nodes = [text for word, _, text in told if word == "node"]
    if not nodes:
        said = " ".join(printed.split())[-300:] or "it printed nothing"
        raise ConfigurationError(
            f"runner.kind: a job does not run on a node: {said}",
            "mount runner.shared on this machine and all nodes under the same path, and check the"
            " options in [runner]",
        )
    where = f"on the node {nodes[0]}"
    for word, _, text in told:
        if word == "fails":
            raise ConfigurationError(
                f"runner.kind: {where} this does not work: {text[:300]}",
                "run `apt-get install bubblewrap python3` on all nodes, and allow user namespaces"
                " there",
            )
    yield f"{where} bubblewrap works, and the shared directory is seen"
    for word, _, text in told:
        if word == "missing":
            yield SetupProblem(f"{where} {text} is missing", "make it on all nodes")
