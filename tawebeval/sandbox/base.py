"""A sandbox and its runs with their limits: what all kinds share, and the kind without a sandbox.

A `Sandbox` belongs to the daemon. It makes a `SandboxedRun` for each evaluation, which starts the
evaluator by the starter and ends its processes, and whose `RunLimits` measure its usage.
`LimitMonitor` checks the limits that the kernel does not enforce.

These are the seam for other kinds of sandbox, such as containers or a cluster.
`probe.open_sandbox` chooses the kind by the setting `sandbox.kind`.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.config import Configuration, LimitSettings, SlurmJobSettings
from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.core.segi import add_tools_to_path
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size, make_limit_failure
from tawebeval.linux.cgroups import CgroupManager, EvaluationCgroup, ResourceUsage
from tawebeval.linux.child import kill_directory_processes
from tawebeval.linux.kernel_files import list_descendant_pids, measure_cpu_seconds, send_signal
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import StartedProgram
from tawebeval.linux.tail import TailedProcess
from tawebeval.sandbox.disk import BLOCK_BYTES, DiskMeter
from tawebeval.sandbox.workspace import (
    READ_ONLY_WORKSPACE_NAMES,
    Workspace,
    WorkspaceLauncher,
    WorkspaceView,
)

LARGE_INSPECTED_ENTRY_COUNT = 5_000
"""Inspected entries of a count from which on other runs do not wait for the run: some 50 ms."""

FULL_DISK_MIN_RUN_BYTES = 2**20
"""Bytes on the disk from which on a run may be stopped for a nearly full disk."""

_STACK = 8 * 2**20  # bytes: the soft limit of most systems
_SIGNALS = 1024  # pending signals, which the kernel counts for all processes of a user
# Seconds for which a limit that the kernel enforces may go unnoticed: the run gains nothing by it.
_UNNOTICED = 1.0
_PAUSE = 0.25  # seconds between two looks at all runs
_PATIENCE = 4  # looks until the files of a stopped run are removed, as a rule
_BLIND = 8  # failed looks in a row; a run that is being removed fails once or twice
_DIGEST = re.compile(r"sha256-[0-9a-f]{64}")


def find_stored_root_digest(root: Path) -> str | None:
    """Return the digest of a root of the store by its name; None for another directory."""
    return root.name if _DIGEST.fullmatch(root.name) else None


@attrs.frozen
class Environment:
    """A configured root: its name, directory and variables; `digest` is None outside the store."""

    name: str
    root: Path
    variables: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def digest(self) -> str | None:
        """The digest of the content, by the name of the directory."""
        return find_stored_root_digest(self.root)


def find_environment(configuration: Configuration, name: str | None) -> Environment | None:
    """Return the environment of a request; None for the default. Raises: KeyError."""
    if name is None:
        return None
    settings = configuration.environments[name]
    return Environment(name, Path(settings.root), settings.variables)


@attrs.frozen
class EvaluatorExit:
    """The exit status of an evaluator, or the number of the signal that ended it."""

    status: int | None
    signal: int | None = None


@attrs.define
class ClusterJob:
    """The job of a run that is not on this machine: a part of the status of its evaluation.

    The names are those on the wire. `queue_reason` is why the cluster has not started the job yet,
    in the cluster's own words; `retries` is how many jobs were lost before the evaluator printed
    anything, and replaced.
    """

    kind: str
    job: str | None = None
    node: str | None = None
    queue_reason: str | None = None
    retries: int = 0


@attrs.frozen
class ResumableProcess:
    """The first process of a run that another process of the daemon has started.

    `resume_data` is that of `SandboxedRun.make_resume_data`; stdout goes on at `stdout_offset`.
    """

    resume_data: Mapping[str, Any]
    pid: int
    start_time_ticks: int
    stdout_offset: int


log = Logger()


def build_cpu_limit_failure(limits: LimitSettings) -> EvaluationFailure:
    """Return the error of a run over its processor time."""
    what = f"used over {limits.cpu} seconds of processor time"
    return make_limit_failure("cpu", "cpu", what, limits.cpu)


def build_disk_limit_failure(limits: LimitSettings) -> EvaluationFailure:
    """Return the error of a run over its disk space."""
    what = f"wrote over {format_size(limits.disk)} to the disk"
    return make_limit_failure("disk", "disk", what, limits.disk)


class RunLimits:
    """The limits of one run, for `LimitMonitor` and for the run's end.

    While the run goes on, `find_limit_failure` is called in a thread. When all processes have
    ended, `read_usage` is, and then `find_limit_failure(final=True)` after a failure, or else
    `find_node_limit_failure`.

    - `settings`: the limits.
    - `cgroup`: None until `make_cgroup`, or if closed.
    - `first_process`: None until the run has one.
    - `disk_bytes`: the bytes of the run on the disk, as last counted.
    - `free_disk_bytes`: the free bytes of the disk at the last look.
    - `inspected_entry_count`: what the last count has looked at (`DiskUsage`).
    """

    def __init__(
        self,
        settings: LimitSettings,
        cgroups: CgroupManager,
        workspace: Workspace,
        commit: Commit,
    ) -> None:
        self.settings = settings
        self.cgroup: EvaluationCgroup | None = None
        self.first_process: TailedProcess | None = None
        self.disk_bytes = self.inspected_entry_count = 0
        self.free_disk_bytes = inf
        self._cgroups = cgroups
        # The limit is for what the evaluator adds. The checkout is there from the start, or an
        # overlay copies a file of it when the evaluator changes the file.
        self._most_disk = settings.disk + commit.size + BLOCK_BYTES * commit.file_count
        self._most_files = settings.disk_files + commit.file_count
        self.disk = DiskMeter(
            workspace.root,
            self._most_disk,
            self._most_files,
            self._list_pids,
            excluded_names=READ_ONLY_WORKSPACE_NAMES,
            run_start_time=time.time(),
            floor=settings.free_disk,
        )

    @property
    def is_disk_nearly_full(self) -> bool:
        """Whether less than `limits.free_disk` was free at the last look."""
        return self.free_disk_bytes < self.settings.free_disk

    def build_full_disk_failure(self) -> EvaluationFailure:
        """Return the error of a run that is stopped because the disk is nearly full."""
        floor = self.settings.free_disk
        return EvaluationFailure(
            "disk",
            f"the evaluator was stopped: under {format_size(floor)} (limits.free_disk) of the"
            " server's disk is free, and the evaluator's files take"
            f" {format_size(self.disk_bytes)}",
            {"limit": "limits.free_disk", "value": floor},
        )

    def _list_pids(self) -> Sequence[int]:
        return [pid for main in self._list_main_pids() for pid in list_descendant_pids(main)]

    def _list_main_pids(self) -> Sequence[int]:
        """Return the first process, and the broker of submissions: others descend from them."""
        first = self.first_process
        if first is None or not first.is_running:
            return ()  # another process may have its number
        broker = getattr(first, "broker_pid", None)
        return (first.pid,) if broker is None else (first.pid, broker)

    def make_cgroup(self, name: str) -> EvaluationCgroup:
        """Make the cgroup, whose name other users can read. Blocks. Raises: OSError."""
        self.cgroup = self._cgroups.make_evaluation_cgroup(name, self.settings)
        return self.cgroup

    def close(self) -> None:
        """Kill the processes that are left in the cgroup, and remove it. Blocks.

        Raises: OSError, if killed processes do not end soon; call again later.
        """
        if self.cgroup is not None:
            self.cgroup.remove_cgroup()
            self.cgroup = None

    def make_resume_data(self) -> dict[str, Any]:
        """Return what `apply_resume_data` needs, as JSON."""
        return {
            "group": None if self.cgroup is None else self.cgroup.name,
            "since": self.disk.run_start_time,
        }

    def apply_resume_data(self, described: Mapping[str, Any]) -> None:
        """Go on with the limits of a run that an earlier process of the daemon has started."""
        if described["group"] is not None:
            self.cgroup = self._cgroups.find_evaluation_cgroup(described["group"])
        self.disk.run_start_time = described["since"]

    def find_limit_failure(
        self, final: bool = False, counts: bool = True
    ) -> EvaluationFailure | None:
        """Return the error of the first exceeded limit; None if all are kept. Blocks.

        `final`, for a run that has failed, looks more closely. Without `counts` no files are
        counted.
        """
        limits = self.settings
        # An exited run may be read for long, and uses nothing but the disk.
        if self.cgroup is not None and (final or self._list_main_pids()):
            over = self.cgroup.find_exceeded_limits(0 if final else _UNNOTICED)
            if "memory" in over:
                return self._build_memory_failure()
            if "processes" in over:
                what = f"started over {limits.processes} processes and threads"
                return make_limit_failure("processes", "processes", what, limits.processes)
            if self.cgroup.is_over_cpu_limit(limits.cpu, self._measure_cpu_seconds):
                return build_cpu_limit_failure(limits)
        try:
            disk = self.disk.measure_usage(again=final, counts=counts)
        finally:
            self.disk_bytes = self.disk.last_usage.disk_bytes
            self.inspected_entry_count = self.disk.last_usage.inspected_entry_count
            self.free_disk_bytes = self.disk.free_bytes
        if disk.disk_bytes > self._most_disk:
            return build_disk_limit_failure(limits)
        if disk.file_count > self._most_files or disk.has_uncounted_deep_directories:
            what = f"made over {limits.disk_files} files and directories, or nested them too deeply"
            return make_limit_failure("disk", "disk_files", what, limits.disk_files)
        if final and disk.largest_file_bytes >= limits.file_size:
            what = f"wrote a file of {format_size(limits.file_size)}"
            return make_limit_failure("file_size", "file_size", what, limits.file_size)
        if (
            final
            and self.is_disk_nearly_full
            and (
                self.disk_bytes >= FULL_DISK_MIN_RUN_BYTES
                or self.free_disk_bytes < FULL_DISK_MIN_RUN_BYTES
            )
        ):
            return self.build_full_disk_failure()
        return None

    def find_node_limit_failure(self) -> EvaluationFailure | None:
        """Return the error of the limit that the run's node has found exceeded, whatever the exit.

        None on this machine, where the kernel ends a whole run that is over its memory.
        """
        return None

    def _build_memory_failure(self) -> EvaluationFailure:
        limit = self.settings.memory
        what = f"used over {format_size(limit)} of memory"
        if self.cgroup is not None and (programs := self.cgroup.submission_peak_memory_bytes):
            what = f"and the submission's programs ({format_size(min(programs, limit))}) {what}"
        return make_limit_failure("memory", "memory", what, limit)

    def _measure_cpu_seconds(self) -> float:
        """Return the processor time of all processes without cgroups, as far as /proc tells."""
        return sum(map(measure_cpu_seconds, self._list_main_pids()))

    def read_usage(self, rusage: resource.struct_rusage | None) -> ResourceUsage:
        """Return the usage, when all processes have ended. Blocks.

        `rusage` is the usage that wait4(2) has returned; None if it was not called.
        """
        if self.cgroup is None:
            return ResourceUsage(None, None)
        return self.cgroup.read_usage(rusage)

    def list_rlimits(self, *, apart: bool) -> Mapping[str, tuple[int, int]]:
        """Return the resource limits of each process, soft and hard, by the names of prlimit(1).

        Resources that the cgroup limits are left out. `apart`: the kernel counts the user's
        processes for this run alone, as in a user namespace. The hard limits of core dumps and of
        processor time are the daemon's: some programs raise the soft limits of their children.
        """
        limits, core = self.settings, resource.getrlimit(resource.RLIMIT_CORE)[1]
        own_cpu = resource.getrlimit(resource.RLIMIT_CPU)[1]
        own_as = resource.getrlimit(resource.RLIMIT_AS)[1]
        own_stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
        bounds = {
            # Twice as much: the kernel compares it with ticks, and `LimitMonitor` looks first.
            "cpu": (2 * limits.cpu + 1, own_cpu),
            "fsize": (limits.file_size, limits.file_size),
            "nofile": (limits.open_files, limits.open_files),
            # With 1 byte the kernel writes no file and starts no crash handler. With 0 it starts
            # the machine's handler, as root (core(5)).
            "core": (1 if core else 0, core),
            # Whatever the shell of the daemon had.
            "as": (own_as, own_as),
            "stack": (_STACK if own_stack < 0 else min(_STACK, own_stack), own_stack),
            "msgqueue": (0, 0),
            "sigpending": (_SIGNALS, _SIGNALS),
            "nice": (0, 0),
            "rtprio": (0, 0),
        }
        if apart and "processes" not in self._cgroups.enforced_resources:
            bounds["nproc"] = (limits.processes, limits.processes)
        if "memory" not in self._cgroups.enforced_resources:
            bounds["data"] = (limits.memory, limits.memory)
        return bounds


class SandboxedRun(ABC):
    """One run of one evaluator, in a cgroup, with a writable tree over the checkout.

    `start_evaluator` and `connect_process`, or `resume_process`, are called once, and `close` in
    the end, also without a start. A kind of sandbox says by a subclass which program runs the
    command, how it is signalled and ended, and what its exit means.

    - `workspace_mount_point`: the path of `workspace` in the sandbox; None if the evaluator sees
      the daemon's paths.
    - `run_limits`: its limits.
    - `is_build`: whether the run, which is not started yet, builds a tree that others will see.
    - `has_external_queue`: whether the started program waits until something else lets it run.
    - `cluster_job`: the job that runs it; None on this machine.
    - `job_settings`: those of the environment and of the problem, for runs that are jobs.
    """

    workspace_mount_point: Path | None = None
    is_build = False
    has_external_queue = False
    cluster_job: ClusterJob | None = None
    job_settings: Sequence[SlurmJobSettings] = ()
    _overlay: int | None = None  # a descriptor of its top

    def __init__(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        sandbox: Sandbox,
        environment: Environment | None = None,
    ) -> None:
        self.workspace = workspace
        self.run_limits = RunLimits(limits, sandbox.cgroup_manager, workspace, checkout.commit)
        self._checkout = checkout
        self._sandbox = sandbox
        self._environment = environment
        self._launcher = sandbox.workspace_launcher

    @property
    def limits(self) -> LimitSettings:
        """The limits of the run."""
        return self.run_limits.settings

    @property
    def workspace_view(self) -> WorkspaceView:
        """The paths under which the evaluator sees `workspace`, with the tree of the overlay."""
        if self.workspace_mount_point is None:
            view = self.workspace.make_unsandboxed_view()
        else:
            view = self.workspace.make_sandboxed_view(self.workspace_mount_point)
        return attrs.evolve(view, tree_descriptor=self._overlay)

    @property
    def has_network(self) -> bool:
        """Whether the evaluator reaches the network."""
        return True

    @abstractmethod
    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return the program by which the shell runs `command` in `directory`.

        The program is a child of the starter, and its stdout and stderr are the evaluator's. For a
        container it is a client that stays in the foreground, such as `podman run`. `directory` is
        a path of the daemon's. `start_evaluator` adds cgroups, the nice value and limits of output.
        Raises: OSError.
        """

    def start_evaluator(self, command: str, environment: Mapping[str, str], directory: Path) -> Any:
        """Start the shell that runs `command` in `directory`, a path of the daemon's. Blocks.

        The result is for `connect_process`. Raises: OSError.
        """
        # Other users can read the names of cgroups: the identifier must not be among them.
        group = self.run_limits.make_cgroup(self.workspace.root.name)
        launch = self.make_launch_spec(command, environment, directory)._replace(
            procs_files=group.procs_files,
            niceness=self._sandbox.cgroup_manager.evaluator_niceness,
            stdout_limit=self.limits.output,
            stderr_limit=self.limits.stderr,
        )
        started = self._launcher.start_program(
            self._checkout.path, self.workspace, launch, copies_tree=self.is_build
        )
        self._use_overlay(started.overlay_descriptor)
        return started

    def _use_overlay(self, descriptor: int | None) -> None:
        """See the tree by the descriptor of its overlay, if there is one, in place of another."""
        before, self._overlay = self._overlay, descriptor
        if before is not None:  # last: its number may become that of any other directory
            os.close(before)

    async def wait_for_evaluator_start(self, started: Any) -> None:  # noqa: B027
        """Wait until the evaluator runs, with `has_external_queue`. Raises: EvaluationFailure.

        A cancellation ends the started program.
        """

    def connect_process(self, run: ProcessProtocol, started: Any) -> TailedProcess:
        """Let the started process drive `run`. Raises: OSError."""
        return self._launcher.connect_program(run, started)

    def make_resume_data(self) -> dict[str, Any]:
        """Return what `resume_process` needs, as JSON."""
        return self.run_limits.make_resume_data()

    def resume_process(self, run: ProcessProtocol, left: ResumableProcess) -> TailedProcess:
        """Go on with a run that was started by another process of the daemon. Blocks.

        The first process may have ended, or be lost. Raises: OSError.
        """
        self._use_overlay(self._launcher.starter.reopen_overlay(self.workspace.output_directory))
        self.run_limits.apply_resume_data(left.resume_data)
        program = StartedProgram(self.workspace.output_directory, left.pid, left.start_time_ticks)
        return self._launcher.connect_program(run, program, left.stdout_offset)

    @abstractmethod
    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to all processes of the run; `child` is the first, and still runs."""

    @abstractmethod
    async def kill_remaining_processes(self) -> None:
        """Kill the processes that the first one has left.

        Return when nothing is left that could write to the workspace. Raises: OSError, if they
        cannot be looked for.
        """

    @abstractmethod
    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the evaluator's exit, by the exit status or signal of the first process.

        Raises: EvaluationFailure, if the evaluator was not even started; OSError.
        """

    def close(self) -> None:
        """Kill the program, close the tree, and remove the cgroup with all processes. Blocks.

        Raises: OSError, if killed processes do not end soon; call again later.
        """
        try:
            self._launcher.kill_program(self.workspace)
        finally:
            self._use_overlay(None)  # last: it unmounts, for which the starter would hold up others
            self.run_limits.close()


@attrs.define
class Sandbox:
    """One kind of sandbox, as the daemon has set it up: it makes runs, and has what they share.

    `run_class` is the class of its runs, `default_limits` are the limits of the operator.
    """

    run_class: ClassVar[type[SandboxedRun]]
    default_limits: LimitSettings
    cgroup_manager: CgroupManager
    workspace_launcher: WorkspaceLauncher = attrs.field(eq=False)

    def make_run(
        self,
        workspace: Workspace,
        checkout: Checkout,
        limits: LimitSettings,
        environment: Environment | None = None,
    ) -> SandboxedRun:
        """Return the run of an evaluation with these limits, not started yet.

        `environment` None is the machine's system.
        """
        return self.run_class(workspace, checkout, limits, self, environment)

    def close(self) -> None:
        """Close `workspace_launcher`, and what the sandbox itself has open. Blocks."""
        self.workspace_launcher.close()


class UnsandboxedRun(SandboxedRun):
    """The run of an evaluator with the rights of the daemon."""

    _sandbox: NoSandbox

    def make_launch_spec(
        self, command: str, environment: Mapping[str, str], directory: Path
    ) -> LaunchSpec:
        """Return the shell with the command."""
        assert self._environment is None, "`parse_configuration` refuses environments"
        return LaunchSpec(
            ["/bin/sh", "-c", command],
            add_tools_to_path(environment, str(self._sandbox.evaluator_tools_directory)),
            str(directory),
            rlimits=self.run_limits.list_rlimits(apart=False),
        )

    def send_signal(self, child: TailedProcess, number: int) -> None:
        """Send a signal to the process group, and to descendants that have left it."""
        strays = list_descendant_pids(child.pid)
        child.signal_group(number)
        for pid in strays:
            send_signal(pid, number)

    async def kill_remaining_processes(self) -> None:
        """Kill the process group, and what has left it."""
        first = self.run_limits.first_process
        if first is not None:
            first.signal_group(signal.SIGKILL)
        root, starter = self.workspace.root, self._launcher.starter.pid
        await self._launcher.run_in_thread(partial(kill_directory_processes, root, parent=starter))

    def interpret_exit(self, status: int | None, number: int | None) -> EvaluatorExit:
        """Return the exit of the shell."""
        return EvaluatorExit(status, number)


@attrs.define
class NoSandbox(Sandbox):
    """The sandbox of `sandbox.kind = "none"`: runs have the rights of the daemon.

    `evaluator_tools_directory` has the tools for evaluators (`bubblewrap.write_sandbox_files`).
    """

    run_class = UnsandboxedRun
    evaluator_tools_directory: Path


StopRunCallback = Callable[[EvaluationFailure], object]


@attrs.define
class FullDiskPolicy:
    """The choice of a run to stop while the disk is nearly full: the one with most bytes on it.

    The next run is chosen after the time to remove the files of the first, or at once if the disk
    goes on filling up. If the disk fills up and no run has many bytes there, a run hides its files:
    then all runs are chosen, one after the other, the youngest first.
    """

    _mark: float = 0  # free bytes; one MiB less means that the disk goes on filling up
    _patience: int = 0  # looks for which no run is chosen

    def choose_run_to_stop(self, runs: Iterable[RunLimits]) -> RunLimits | None:
        """Return the run to stop now, if any; `runs` are in the order of their start."""
        short = [run for run in runs if run.is_disk_nearly_full]
        if not short:
            self._mark, self._patience = 0, 0
            return None
        free = min(run.free_disk_bytes for run in short)
        filling = free < self._mark - FULL_DISK_MIN_RUN_BYTES
        if filling or free > self._mark:
            self._mark = free
        if self._patience and not filling:
            self._patience -= 1
            return None
        chosen = max(short, key=lambda run: run.disk_bytes)
        if chosen.disk_bytes < FULL_DISK_MIN_RUN_BYTES:
            if not filling:
                return None
            chosen = short[-1]  # the disk was not nearly full before its start
        self._patience = _PATIENCE
        return chosen


class LimitMonitor:
    """The monitor of all runs: it looks at each in turn, in one of `threads`.

    The files of a run whose count has been large once are counted by `others` from then on, so
    that it does not delay small runs.
    """

    def __init__(self, clock: Any, threads: WorkerThreads, others: WorkerThreads) -> None:
        self._clock = clock
        self._threads = threads
        self._others = others
        self._watched: dict[RunLimits, StopRunCallback] = {}
        # Failed looks in a row.
        self._failures: Counter[RunLimits] = Counter()
        self._large: set[RunLimits] = set()
        self._apart: set[RunLimits] = set()  # counted by `others` just now
        self._relief = FullDiskPolicy()
        self._relieved: set[RunLimits] = set()  # chosen by `_relief` already
        self._next: IDelayedCall | None = None
        self._looking = False

    def add_run(self, run: RunLimits, stop: StopRunCallback) -> None:
        """Look at the limits of a run from now on; call `stop(error)` when it exceeds a limit.

        The error's reason is `lost` if several looks in a row fail.
        """
        self._watched[run] = stop
        self._plan()

    def remove_run(self, run: RunLimits) -> None:
        """Stop looking at the limits of a run."""
        del self._watched[run]
        self._failures.pop(run, None)
        self._large.discard(run)
        self._relieved.discard(run)
        if not self._watched and self._next is not None:
            self._next.cancel()
            self._next = None

    def _plan(self) -> None:
        if self._watched and self._next is None and not self._looking:
            self._next = self._clock.callLater(_PAUSE, self._start)

    def _start(self) -> None:
        self._next = None
        self._looking = True
        Deferred.fromCoroutine(self._look())

    async def _look(self) -> None:
        try:
            for run in self._large - self._apart:
                Deferred.fromCoroutine(self._look_apart(run))
            runs = {run: run not in self._large for run in self._watched}
            for run, found in await self._threads.run_in_thread(check_run_limits, runs):
                self._take(run, found, has_counted=runs[run])
            self._relieve()
        finally:
            self._looking = False
            self._plan()

    def _relieve(self) -> None:
        chosen = self._relief.choose_run_to_stop(
            run for run in self._watched if run not in self._relieved
        )
        if chosen is not None:
            self._relieved.add(chosen)
            log.warn(
                f"under {format_size(chosen.settings.free_disk)} (limits.free_disk) of the disk is"
                " free: the run with the most bytes on it"
                f" ({format_size(chosen.disk_bytes)}) is stopped",
                free=chosen.free_disk_bytes,
                least=chosen.settings.free_disk,
                written=chosen.disk_bytes,
            )
            self._watched[chosen](chosen.build_full_disk_failure())

    async def _look_apart(self, run: RunLimits) -> None:
        self._apart.add(run)
        try:
            ((_, found),) = await self._others.run_in_thread(check_run_limits, {run: True})
        finally:
            self._apart.remove(run)
        self._take(run, found, has_counted=True)

    def _take(self, run: RunLimits, found: Exception | None, *, has_counted: bool) -> None:
        """Act on the result of a look."""
        if run not in self._watched:  # it has ended meanwhile
            return
        if run.inspected_entry_count > LARGE_INSPECTED_ENTRY_COUNT:
            self._large.add(run)
        if found is None or isinstance(found, EvaluationFailure):
            if has_counted:
                self._failures.pop(run, None)
            if found is not None:
                self._watched[run](found)
            return
        self._failures[run] += 1
        if self._failures[run] == _BLIND:
            message = "the run's limits could not be checked"
            if isinstance(found, OSError):
                log.error("a run is stopped: {problem}", problem=f"{message}: {found}")
                message = f"{message}: {found.strerror}"
            else:
                log.failure(
                    "defect: a run is stopped, as its limits cannot be checked", Failure(found)
                )
                message = f"defect of the daemon: {message}"
            self._watched[run](EvaluationFailure("lost", message))


def check_run_limits(
    runs: Mapping[RunLimits, bool],
) -> Sequence[tuple[RunLimits, Exception | None]]:
    """Return the result of a look at each run, which counts its files if the value says so. Blocks.

    None: all limits are kept; EvaluationFailure: the exceeded limit; another exception: the look
    has failed.
    """
    found: list[tuple[RunLimits, Exception | None]] = []
    for run, counts in runs.items():
        try:
            found.append((run, run.find_limit_failure(counts=counts)))
        except Exception as error:  # noqa: BLE001  (the other runs need their look)
            found.append((run, error))
    return found
