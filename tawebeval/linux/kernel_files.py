"""Processes and cgroups by the files in which the kernel shows them: /proc and /sys/fs/cgroup.

Besides, calls of the C library that Python does not have (`call_libc`).

For processes see proc(5), for cgroups (`CgroupDirectory`) cgroups(7) and the kernel's
admin-guide/cgroup-v2. Everything here blocks, mostly not for long.

This module imports the standard library only: `starter_client.build_program_archive` packs it into
the starter, the broker and the program on the nodes of Slurm, which know nothing of tawebeval.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds, the unit of times in /proc/PID/stat
_PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes

_libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises: OSError with errno, if the result is below 0."""
    longs = (ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments)
    if getattr(_libc, name)(*longs) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prctl(option: int, argument: int) -> None:
    """Set a property of this process (prctl(2)). Raises: OSError."""
    call_libc("prctl", option, argument, 0, 0, 0)


@contextmanager
def shorten_socket_path(path: str) -> Iterator[str]:
    """Yield a short path for the same place: that of a socket has at most 107 bytes (unix(7))."""
    directory, name = os.path.split(path)
    place = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{place}/{name}"
    finally:
        os.close(place)


def make_sealed_memfd(name: str, content: bytes) -> int:
    """Return the descriptor of a file in memory that nobody can change. Raises: OSError.

    Without seals a descriptor that was opened for reading can be opened for writing by proc(5).
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    try:
        os.pwrite(descriptor, content, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:  # such as ENOMEM
        os.close(descriptor)
        raise
    return descriptor


def is_pid_in_use(pid: int) -> bool:
    """Tell whether a process has this number, also if /proc hides it (`hidepid` in proc(5))."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_process_stat(process: int | str) -> list[bytes]:
    """Return the fields of a stat file from the third one on, which is the state.

    `process` is a number, or names a process or thread below /proc. Raises: OSError.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def list_child_pids(pid: int | str) -> Iterator[int]:
    """Yield the children of a process; none if it has ended."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
    # Hidden, as the starter by `ProtectProc=invisible`: /proc may show its children.
    if isinstance(pid, int) and not os.path.exists(f"/proc/{pid}") and is_pid_in_use(pid):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if int(read_process_stat(name)[1]) == pid:
                    yield int(name)


def list_descendant_pids(pid: int | str) -> list[int]:
    """Return all descendants of a process, each behind its parent."""
    found = list(list_child_pids(pid))
    for one in found:
        found.extend(list_child_pids(one))
    return found


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_sandbox(bwrap: int, number: int, signal_group: Callable[[int], object]) -> None:
    """Send a signal to the processes in a sandbox; `bwrap` is the process that has made it.

    bwrap itself gets none: it ends after the processes inside. If nothing is inside but the first
    process, which ignores signals, the program has not begun or has ended: then kill everything,
    by `signal_group` if nothing is inside.
    """
    inside = list_descendant_pids(bwrap)
    for pid in inside:
        send_signal(pid, number if len(inside) > 1 else signal.SIGKILL)
    if not inside:
        signal_group(signal.SIGKILL)


def measure_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, never too much.

    Missing are ended children of processes that ignore SIGCHLD. Parents come first: the time of a
    child that ends meanwhile is not counted twice.
    """
    ticks = 0
    for one in (pid, *list_descendant_pids(pid)):
        with suppress(OSError):
            ticks += sum(map(int, read_process_stat(one)[11:15]))
    return ticks * _TICK


def measure_largest_process_memory(pid: int) -> int:
    """Return the memory, without files, of the largest of a process and its descendants: bytes."""
    largest = 0
    for one in (pid, *list_descendant_pids(pid)):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/statm", "rb") as file:
                    _, resident, shared = map(int, file.read().split()[:3])
                largest = max(largest, resident - shared)
                if resident:  # as of all threads but a main thread that has ended
                    break
    return largest * _PAGE


OWN_CGROUP_NAME = "daemon"
"""The name of the cgroup of the process that has made a parent cgroup, below that."""
EVALUATOR_CGROUP_NAME = "evaluator"
"""The name of the cgroup of the evaluator, below that of the evaluation with its limits."""
SUBMISSION_CGROUP_PREFIX = "run-"
"""The beginning of the names of the others, of the submission's programs."""

_READ = 4096  # bytes: the kernel returns a page at a time
# Seconds between attempts to remove a cgroup; about one second in all.
_WAITS = tuple(0.001 * 2**n for n in range(10))
_WAIT_FOR = frozenset({errno.EBUSY, errno.ENOTEMPTY})


class CgroupDirectory:
    """One cgroup, at the absolute `path`; tests override what changes cgroups."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __truediv__(self, name: str) -> CgroupDirectory:
        return CgroupDirectory(f"{self.path}/{name}")

    def write_file(self, name: str, value: object) -> None:
        """Write to a file of the cgroup; the file has to exist."""
        path = f"{self.path}/{name}"
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, str(value).encode())
        except OSError as error:
            error.filename = path  # which only os.open knows by itself
            raise
        finally:
            os.close(descriptor)

    def make_cgroup(self) -> None:
        """Make the cgroup; the kernel adds its files."""
        os.mkdir(self.path, 0o755)

    def remove_cgroup(self) -> None:
        """Remove the cgroup, which has to be empty, with its files."""
        os.rmdir(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def procs_file(self) -> str:
        """The file into which a process writes "0" to enter."""
        return f"{self.path}/cgroup.procs"

    def read_file(self, name: str) -> str:
        """Return the content of a file of the cgroup.

        A Python file object would take twice as many system calls, and all running cgroups are
        read again and again.
        """
        descriptor = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(lambda: os.read(descriptor, _READ), b"")).decode("ascii")
        finally:
            os.close(descriptor)

    def read_number(self, name: str) -> int | None:
        """Return the number that is the whole content of a file; None without one."""
        with suppress(OSError, ValueError):
            return int(self.read_file(name))
        return None

    def read_numbers(self, name: str) -> Mapping[str, int]:
        """Return the numbers of a flat keyed file, by name."""
        found = {}
        with suppress(OSError):
            for line in self.read_file(name).splitlines():
                key, _, value = line.partition(" ")
                if value.isdecimal():
                    found[key] = int(value)
        return found

    def read_cpu_seconds(self) -> float | None:
        """Return the processor time; None if it is not measured."""
        used = self.read_numbers("cpu.stat").get("usage_usec")
        return None if used is None else used / 1e6

    def read_current_memory(self) -> int:
        """Return the bytes of memory without the page cache now; 0 if unknown."""
        held = self.read_numbers("memory.stat")
        return held.get("anon", 0) + held.get("shmem", 0)

    def limit_memory(self, size: int) -> None:
        """Limit memory to `size` bytes, without swap; the kernel kills all processes together."""
        self.write_file("memory.max", size)
        for name, value in (("memory.swap.max", 0), ("memory.oom.group", 1)):
            with suppress(FileNotFoundError):  # not every kernel has them
                self.write_file(name, value)

    def has_met_memory_limit(self) -> bool:
        """Tell whether the kernel was out of memory for this cgroup's own limit.

        Limits of cgroups below do not count (since Linux 5.2).
        """
        events = self.read_numbers("memory.events.local") or self.read_numbers("memory.events")
        return events.get("oom", 0) > 0

    def has_refused_fork(self) -> bool:
        """Tell whether a fork has failed in this cgroup."""
        return self.read_numbers("pids.events").get("max", 0) > 0

    def enter_cgroup(self) -> None:
        """Move this process, with all of its threads, into the cgroup."""
        self.write_file("cgroup.procs", 0)

    def list_children(self) -> list[CgroupDirectory]:
        """Return the children of this cgroup."""
        with os.scandir(self.path) as entries:
            return [self / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def list_tree(self) -> list[CgroupDirectory]:
        """Return this cgroup and all below, each behind its children."""
        with suppress(FileNotFoundError):
            below = [each for child in self.list_children() for each in child.list_tree()]
            return [*below, self]
        return []


UnremovedCgroups = Sequence[tuple[CgroupDirectory, OSError]]
"""Cgroups that cannot be removed, with the reasons."""


def kill_and_remove_cgroups(groups: Iterable[CgroupDirectory]) -> UnremovedCgroups:
    """Kill all processes in cgroups and their descendants, and remove all of these cgroups.

    Blocks, about a second at most: a killed process holds its cgroup until the kernel has released
    it.
    """
    left = [each for group in groups for each in group.list_tree()]
    kept: list[tuple[CgroupDirectory, OSError]] = []
    for wait in _WAITS:
        kept = []
        for each in left:
            try:
                each.remove_cgroup()
            except FileNotFoundError:
                pass
            except OSError as error:
                kept.append((each, error))
                with suppress(OSError):
                    each.write_file("cgroup.kill", 1)
        left = [each for each, _ in kept]
        if not any(error.errno in _WAIT_FOR for _, error in kept):
            break
        time.sleep(wait)
    return kept


def remove_parent_cgroup(
    parent: CgroupDirectory, own: CgroupDirectory, enabled: Sequence[str]
) -> UnremovedCgroups:
    """Move this process, and those beside it, from below `parent` to `own`; remove `parent`.

    All other cgroups below `parent` are killed and removed first: the kernel keeps a controller
    that a child still gives to its own. `enabled` are the controllers that `own` enables for the
    sake of `parent`. Return what stays, besides `parent`.
    """
    kept: UnremovedCgroups = ()
    with suppress(OSError):
        home, children = parent / OWN_CGROUP_NAME, parent.list_children()
        kept = kill_and_remove_cgroups(each for each in children if each.path != home.path)
        given = parent.read_file("cgroup.subtree_control").split()
        for group, controllers in ((parent, given), (own, enabled)):
            for controller in controllers:
                group.write_file("cgroup.subtree_control", f"-{controller}")
        own.enter_cgroup()
        for pid in home.read_file("cgroup.procs").split():  # such as the init of a container
            with suppress(ProcessLookupError):
                own.write_file("cgroup.procs", pid)
        home.remove_cgroup()
        parent.remove_cgroup()
    return kept
