"""What the daemon itself may have of processes, and of all that a process is limited in.

No evaluator can have more than that, and all of them share the processes. Where those run out the
next fork fails, in whose evaluator so ever it is, so that one is blamed for what others use.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from twisted.logger import Logger

from tawebeval.admission import count_places
from tawebeval.config import Configuration, Limits
from tawebeval.errors import ConfigurationError
from tawebeval.linux.cgroups.filesystem import Directory, Kernel
from tawebeval.linux.cgroups.hierarchies import parse_hierarchies

_OF_FETCH = 16  # git's own programs, with their threads, and the sandbox
_BESIDES = 64  # the daemon's own threads, the launcher, and what they start for a moment
MORE = "TasksMax= in the unit, or what limits the container's processes"
"""What helps where there are too few."""

log = Logger()


def check_limits(limits: Limits) -> None:
    """Raise ConfigurationError where the kernel would not let an evaluator have these limits."""
    for name, value, number, directive in (
        ("open_files", limits.open_files, resource.RLIMIT_NOFILE, "LimitNOFILE"),
        ("processes", limits.processes, resource.RLIMIT_NPROC, "LimitNPROC"),
        ("cpu", limits.cpu + 1, resource.RLIMIT_CPU, "LimitCPU"),
        ("file_size", limits.file_size, resource.RLIMIT_FSIZE, "LimitFSIZE"),
        ("memory", limits.memory, resource.RLIMIT_DATA, "LimitDATA"),
    ):
        hard = _hard(number)
        if hard is not None and hard < value:
            raise ConfigurationError(
                f"limits.{name}: the daemon itself may have no more than {hard} here, and {value}"
                f" are needed; {directive}={value} in the unit (or ulimit -H), or a lower"
                f" limits.{name}"
            )


def find_lowered() -> Iterator[tuple[str, int]]:
    """Yield the daemon's hard limits, by name, that evaluators may want to be unlimited."""
    for name in ("CORE", "CPU"):
        hard = _hard(getattr(resource, f"RLIMIT_{name}"))
        if hard is not None:
            yield name, hard


def processes_needed(configuration: Configuration) -> int:
    """Return how many processes and threads there may be at once, if all evaluators have all."""
    running = count_places(configuration.evaluations.running)
    fetches = configuration.repositories.fetches * _OF_FETCH
    return running * configuration.limits.processes + fetches + _BESIDES


def processes_allowed(proc: Path = Path("/proc/self")) -> int | None:
    """Return how many the daemon, and all that it starts, may have; None without a limit. Blocks.

    Raises OSError.
    """
    return min(_bounds(proc), default=None)


def _bounds(proc: Path) -> Iterator[int]:
    hard = _hard(resource.RLIMIT_NPROC)
    if hard is not None:
        yield hard
    texts = (
        (proc / name).read_text("utf-8", "surrogateescape") for name in ("mountinfo", "cgroup")
    )
    found = parse_hierarchies(*texts)
    own = found.controllers.get("pids", found.unified)
    if own is not None:
        for path in (Path(own), *Path(own).parents):  # of those around the mount there is nothing
            most = Directory(str(path), Kernel()).number("pids.max")
            if most is not None:
                yield most


def few_processes(configuration: Configuration) -> Sequence[str]:
    """Return what is to be said where there may be too few processes, or nothing.

    Blocks, hardly. Raises OSError.
    """
    there, wanted = processes_allowed(), processes_needed(configuration)
    if there is None or there >= wanted:
        return ()
    few = f"processes: {there} are allowed here, and {wanted} may be needed; {remedy(wanted)}"
    return (few,)


def tell_of_processes(configuration: Configuration) -> None:
    """Tell the log where there may be too few processes. Blocks, hardly. Raises OSError."""
    for few in few_processes(configuration):
        log.warn("{few}", few=few)


def remedy(wanted: int) -> str:
    """Return what helps where so many may be needed, and are not allowed."""
    return f"{wanted} by {MORE}; or fewer evaluations.running or limits.processes"


def _hard(number: int) -> int | None:
    hard = resource.getrlimit(number)[1]
    return None if hard == resource.RLIM_INFINITY else hard
