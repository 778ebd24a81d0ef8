"""Limits of the daemon itself: file descriptors, processes, epoll watches, and its hard limits.

No evaluator can have more than the daemon, and all evaluators share its processes. Where those run
out the next fork(2) fails, so that one evaluator is blamed for the processes of the others. Where
connections take all descriptors no evaluation can begin, and Twisted closes new connections without
a word: `cap_configured_connections` leaves enough descriptors for the rest.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import msgspec
from twisted.logger import Logger

from tawebeval.config import MAX_CONCURRENT_CALLBACKS, Configuration, LimitSettings
from tawebeval.deferreds import resolve_run_slot_count
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux import starter
from tawebeval.linux.cgroups import find_own_cgroup
from tawebeval.linux.kernel_files import CgroupDirectory

# Of a running evaluation: two tails, three files of its events and its tree; and the connection to
# the starter, or directories, while it is started or measured.
_EVALUATION_DESCRIPTORS = 10
_FETCH_DESCRIPTORS = 6  # pipes, pidfd, a filter of the sandbox, a password
_SPARE_DESCRIPTORS = 128  # the daemon's own, and connections that are just being refused
MIN_HTTP_CONNECTIONS = 16  # with fewer there is no use in a start
_FETCH_PROCESSES = 16  # git's own programs, with their threads, and the sandbox
_DAEMON_PROCESSES = 96  # the daemon's own threads, the starter, and their children for a moment
_WATCH = 180  # bytes of memory that the kernel takes for one epoll watch, at least
_STARTER_UNIT = "tawebeval-starter.service"
EPOLL_WATCH_LIMIT_FILE = Path("/proc/sys/fs/epoll/max_user_watches")
PROCESS_LIMIT_REMEDY = "raise TasksMax= in the unit, or the container's limit of processes"
"""The remedy for too few processes."""

log = Logger()


@attrs.frozen
class LimitAssessment:
    """Comparison of a limit of the kernel with the number that may be needed at once.

    `allowed_count` None is any number.
    """

    allowed_count: int | None
    needed_count: int
    remedy: str

    def __str__(self) -> str:
        """Return both numbers in a sentence."""
        many = "any number" if self.allowed_count is None else self.allowed_count
        return f"{many} allowed, and up to {self.needed_count} may be needed"

    @property
    def problems(self) -> Sequence[SetupProblem]:
        """The one problem, that there may be too few, or none."""
        if self.allowed_count is None or self.allowed_count >= self.needed_count:
            return ()
        return (SetupProblem(str(self), self.remedy),)


def check_hard_limits(limits: LimitSettings, starter_pid: int = 0) -> None:
    """Check that the hard limits of the daemon, or of the starter, allow evaluators'.

    Raises: ConfigurationError; PermissionError, if the limits of the starter cannot be read.
    """
    whose, unit = "the daemon's own", "the unit"
    if starter_pid:
        whose, unit = "the starter's", _STARTER_UNIT
    largest = limits.largest_requestable_limits
    for name, value, number, directive in (
        ("open_files", largest.open_files, resource.RLIMIT_NOFILE, "LimitNOFILE"),
        ("processes", largest.processes + 1, resource.RLIMIT_NPROC, "LimitNPROC"),
        ("cpu", largest.cpu + 1, resource.RLIMIT_CPU, "LimitCPU"),
        ("file_size", largest.file_size, resource.RLIMIT_FSIZE, "LimitFSIZE"),
        ("memory", largest.memory, resource.RLIMIT_DATA, "LimitDATA"),
    ):
        hard = get_hard_limit(number, starter_pid)
        if hard is not None and hard < value:
            chosen = getattr(largest, name) > getattr(limits, name)
            setting = f"limits.maximum.{name}" if chosen else f"limits.{name}"
            raise ConfigurationError(
                f"{setting}: {value} is over {whose} hard limit, {hard}",
                f"set {directive}={value} in {unit} (or ulimit -H), or lower {setting}",
            )


def assess_descriptor_limit(configuration: Configuration) -> LimitAssessment:
    """Compare the limit of file descriptors with their need.

    Raises ConfigurationError where only a few connections are left beside the evaluations.
    """
    there, wanted = count_allowed_descriptors(), count_needed_descriptors(configuration)
    fewest = _descriptors_besides(configuration) + MIN_HTTP_CONNECTIONS
    remedy = f"set LimitNOFILE={wanted} in the unit (or ulimit -n), or lower"
    if there < fewest:
        what = f"file descriptors: {there} allowed, and at least {fewest} are needed"
        raise ConfigurationError(what, f"{remedy} evaluations.running")
    return LimitAssessment(there, wanted, f"{remedy} http.connections")


def count_needed_descriptors(configuration: Configuration) -> int:
    """Return the number of descriptors that the daemon may need at the same time."""
    return configuration.http.connections + _descriptors_besides(configuration)


def count_allowed_descriptors() -> int:
    """Return the descriptors that this process may have after `raise_descriptor_limit`."""
    hard = get_hard_limit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if hard is None else hard


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process: it is for programs that use select(2)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cap_configured_connections(configuration: Configuration) -> Configuration:
    """Return the configuration with no more connections than descriptors allow; log if fewer.

    Raises ConfigurationError as `assess_descriptor_limit` does.
    """
    found = assess_descriptor_limit(configuration)
    if not found.problems:
        return configuration
    most = count_allowed_descriptors() - _descriptors_besides(configuration)
    log.warn(
        "file descriptors: {found}; connections are limited to {most} in place of {connections}"
        " (http.connections); {remedy}",
        found=str(found),
        most=most,
        connections=configuration.http.connections,
        remedy=found.remedy,
    )
    http = msgspec.structs.replace(configuration.http, connections=most)
    return msgspec.structs.replace(configuration, http=http)


def assess_process_limit(configuration: Configuration) -> LimitAssessment:
    """Compare the limit of processes with their need. Blocks, hardly. Raises OSError."""
    wanted = count_needed_processes(configuration)
    lower = "lower evaluations.running or limits.processes"
    remedy = f"{PROCESS_LIMIT_REMEDY}, to {wanted}; or {lower}"
    return LimitAssessment(count_allowed_processes(), wanted, remedy)


def count_needed_processes(configuration: Configuration) -> int:
    """Return the processes and threads in use if every evaluator uses its whole limit."""
    fetches = configuration.repositories.fetches * _FETCH_PROCESSES
    return _count_evaluators_processes(configuration) + fetches + _DAEMON_PROCESSES


def assess_starter_limits(
    configuration: Configuration, starter_pid: int, evaluations_cgroup: str | None
) -> Iterator[tuple[str, LimitAssessment]]:
    """Yield descriptors and processes of a starter with a unit of its own, and their need.

    `evaluations_cgroup` is the parent of its evaluations, with the pids controller: the kernel
    hides the starter's own from other processes of its user. Blocks, hardly. Raises:
    PermissionError.
    """
    running = resolve_run_slot_count(configuration.evaluations.running)
    wanted = running * starter.STARTER_FDS_PER_PROGRAM + starter.RESERVED_FD_COUNT
    remedy = (
        f"set LimitNOFILE={wanted} in {_STARTER_UNIT} (or ulimit -n), or lower evaluations.running"
    )
    there = get_hard_limit(resource.RLIMIT_NOFILE, starter_pid)
    yield "descriptors", LimitAssessment(there, wanted, remedy)
    wanted = _count_evaluators_processes(configuration) + _DAEMON_PROCESSES
    remedy = (
        f"set TasksMax={wanted} in {_STARTER_UNIT} (or the container's limit of processes), or"
        " lower evaluations.running or limits.processes"
    )
    there = min(_bounds(starter_pid, evaluations_cgroup), default=None)
    yield "processes", LimitAssessment(there, wanted, remedy)


def count_allowed_processes() -> int | None:
    """Return the processes that the daemon and its descendants may have; None is unlimited.

    Blocks. Raises: OSError.
    """
    return min(_bounds(0, find_own_cgroup()), default=None)


def assess_epoll_watch_limit(configuration: Configuration) -> LimitAssessment:
    """Compare the limit of epoll watches with their need if evaluators stay within `limits.memory`.

    The daemon itself needs one for each connection. Blocks, hardly. Raises OSError.
    """
    running = resolve_run_slot_count(configuration.evaluations.running)
    wanted = (
        running * configuration.limits.largest_requestable_limits.memory // _WATCH
        + configuration.http.connections
    )
    there = int(EPOLL_WATCH_LIMIT_FILE.read_text("ascii"))
    return LimitAssessment(there, wanted, f"run `sysctl fs.epoll.max_user_watches={wanted}`")


def _descriptors_besides(configuration: Configuration) -> int:
    """Return how many descriptors are for other things than connections."""
    running = resolve_run_slot_count(configuration.evaluations.running)
    fetches = configuration.repositories.fetches * _FETCH_DESCRIPTORS
    return (
        running * _EVALUATION_DESCRIPTORS + fetches + MAX_CONCURRENT_CALLBACKS + _SPARE_DESCRIPTORS
    )


def _count_evaluators_processes(configuration: Configuration) -> int:
    running = resolve_run_slot_count(configuration.evaluations.running)
    return running * configuration.limits.largest_requestable_limits.processes


def _bounds(pid: int, cgroup: str | None) -> Iterator[int]:
    hard = get_hard_limit(resource.RLIMIT_NPROC, pid)
    if hard is not None:
        yield hard
    if cgroup is not None:
        own = Path(cgroup)
        for path in (own, *own.parents):  # paths above the mount have no such file
            most = CgroupDirectory(str(path)).read_number("pids.max")
            if most is not None:
                yield most


def get_hard_limit(number: int, pid: int = 0) -> int | None:
    """Return the hard limit of a resource (getrlimit(2)); None if it is unlimited.

    It is that of the process `pid`, or of this one. Raises: PermissionError.
    """
    hard = (resource.prlimit(pid, number) if pid else resource.getrlimit(number))[1]
    return None if hard == resource.RLIM_INFINITY else hard
