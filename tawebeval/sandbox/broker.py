"""Runs the programs of submissions for one evaluator: a program that knows nothing of tawebeval.

The evaluator asks by a socket (`tools/bin/tawebeval-run`). For each request the broker starts a
sandbox of bubblewrap beside the evaluator's own, with the files that the request names, in a cgroup
below the evaluation's. A request is a stranger's. So a process of its own, in the evaluation's
cgroup, serves each one, and the broker itself only accepts connections.

A request is one message of JSON. The answer is "streams", with the caller's ends of stdin, stdout
and stderr, and after the program's end a report; or `{"error": ...}` in place of either. While the
program runs the message "output" says that it has printed too much; the end of the connection kills
it.

Callers send no descriptors: a message that waits for its turn would have them in transit, where the
kernel counts those of all evaluations together, and lets each process have as many as it may open
(unix(7)). The broker may open more than all evaluators.

Arguments: none. Descriptors: 3 this program, 4 the configuration (`BrokerConfiguration`), 5 the
listening socket, 6 and 7 the filters of system calls, in the order in which they are loaded.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import re
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from tawebeval.linux.kernel_files import (
    SUBMISSION_CGROUP_PREFIX,
    CgroupDirectory,
    kill_and_remove_cgroups,
    list_child_pids,
    measure_cpu_seconds,
    measure_largest_process_memory,
    prctl,
)

SOURCE, CONFIGURATION, LISTENING = 3, 4, 5
FILTER_DESCRIPTORS = (6, 7)
"""The descriptors of the broker."""
MAX_REQUEST_BYTES = 128 * 1024
"""Bytes of a request, at most."""
PROTOCOL_VERSION = 4
"""The version of requests, and of the configuration."""

_MOST_RUNS = 64  # at once; more wait for a place
_BACKLOG_WAIT = 1.0  # seconds
_MOST_PATHS = 256  # of a request: each becomes a mount
_LEAST_MEMORY = 2**20  # bytes of a run
_SCRATCH = 64 * 2**20  # bytes of /tmp and of /dev/shm, each
_TEMPORARY = "/tmp"  # noqa: S108  (a path in the sandbox)
_READY = "/.ready"  # a link in the sandbox, made after all mounts
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/dev")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": _TEMPORARY}
_SIGNALLED = 128  # what bwrap adds to a signal to make an exit status of it
_SIGNALS = frozenset(map(int, signal.valid_signals()))
_LOOK = 0.05  # seconds between two looks at the processor time or the memory, at most
_MOUNTS_LOOK = 0.0005  # seconds between two looks whether a sandbox has its mounts
_PATIENCE = 10.0  # seconds for the sandbox to be made, and for killed processes to end
_LEAST = 3  # the lowest descriptor that bwrap gets besides stdin, stdout and stderr
_OWN_PROCESSES = 2  # of bwrap, in the cgroup of each run
_MOST_PARTS, _MOST_BYTES = 32, 16 * 1024  # of one target, and of all: bwrap makes directories
_NOT_MADE = "the sandbox could not be made; the reason is on stderr"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class RequestRefused(Exception):
    """A request that is not executed; `str()` is the reason, for the author of the evaluator."""


class BrokerConfiguration(NamedTuple):
    """What the daemon tells the broker.

    - `bwrap_argv`: the path of bwrap, and options for the namespaces and the system's files.
    - `additional_system_paths`: paths of the system besides `_SYSTEM`, and `environment`: variables
      of programs.
    - `readable_paths`: paths of the machine that all programs see.
    - `mounts`: directories that the evaluator sees: its path, the daemon's, and whether it may
      write there.
    - `rlimits`: soft and hard limits of each process, by the names of prlimit(1).
    - `memory_bytes`: bytes, and `max_processes`: the limits of the whole evaluation.
    - `parent_pid`: that of the broker's parent, with which it ends.
    - `cgroup_directory`: that of the evaluation's cgroup, "" if it does not limit both memory and
      processes.
    """

    bwrap_argv: Sequence[str]
    mounts: Sequence[tuple[str, str, bool]]
    rlimits: dict[str, tuple[int, int]]
    memory_bytes: int
    max_processes: int
    parent_pid: int
    cgroup_directory: str
    additional_system_paths: Sequence[str] = ()
    readable_paths: Sequence[str] = ()
    environment: dict[str, str] = {}  # noqa: RUF012  (never changed)


class RunRequest(NamedTuple):
    """A request for one run; None is the default.

    `mounts` are triples: the evaluator's path, the path in the sandbox, and whether the program may
    write there. Times are in seconds, sizes in bytes.
    """

    command: Sequence[str]
    mounts: Sequence[tuple[str, str, bool]]
    directory: str
    environment: dict[str, str]
    time: float | None
    wall: float | None
    memory: int | None
    processes: int | None
    file_size: int | None


def parse_request(
    message: bytes, system: Sequence[str] = (), shown: Sequence[str] = ()
) -> RunRequest:
    """Return the request in a message, without paths to read that are `shown` anyway.

    `system` are paths besides `_SYSTEM`. Raises: RequestRefused.
    """
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        raise RequestRefused("the request is not JSON") from None
    if not isinstance(found, dict) or found.pop("version", None) != PROTOCOL_VERSION:
        raise RequestRefused(
            f"the request is not of version {PROTOCOL_VERSION}: use the tools of this sandbox"
        )
    unknown = found.keys() - {"read", "write", *RunRequest._fields} | found.keys() & {"mounts"}
    if unknown:
        raise RequestRefused(f"unknown member {sorted(unknown)[0]!r} in the request")
    command = _words("command", found.get("command", []))
    if not command or not command[0]:
        raise RequestRefused("no command to run")
    paths = [
        *(
            pair
            for pair in _pairs("read", found.get("read", []), writable=False)
            if pair[0] != pair[1] or not any(_is_below(pair[0], place) for place in shown)
        ),
        *_pairs("write", found.get("write", []), writable=True),
    ]
    if len(paths) > _MOST_PATHS:
        raise RequestRefused(f"{len(paths)} paths; at most {_MOST_PATHS} are allowed")
    _check_targets([target for _, target, _ in paths], (*_SYSTEM, *system, *shown))
    memory = _number("memory", found, int)
    if memory is not None and memory < _LEAST_MEMORY:
        raise RequestRefused(f"memory: {memory} bytes; at least {_LEAST_MEMORY} (1 MiB) are needed")
    environment = found.get("environment", {})
    if not isinstance(environment, dict) or not all(map(_NAME.fullmatch, environment)):
        raise RequestRefused("environment: a variable's name has letters, digits and _ only")
    _words("environment", list(environment.values()))
    return RunRequest(
        command,
        paths,
        _absolute("directory", found.get("directory", _TEMPORARY)),
        environment,
        _number("time", found, float),
        _number("wall", found, float),
        memory,
        _number("processes", found, int),
        _number("file_size", found, int),
    )


def _words(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise RequestRefused(f"{name}: not a list")
    for word in value:
        if not isinstance(word, str) or "\0" in word:
            raise RequestRefused(f"{name}: {word!r} is not a string without NUL")
        with suppress(UnicodeEncodeError):
            os.fsencode(word)
            continue
        raise RequestRefused(f"{name}: {word!r} cannot be encoded")
    return value


def _pairs(name: str, value: Any, *, writable: bool) -> Iterator[tuple[str, str, bool]]:
    if not isinstance(value, list):
        raise RequestRefused(f"{name}: not a list")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise RequestRefused(f"{name}: {pair!r} is not a pair of paths")
        source, target = (_absolute(name, path) for path in pair)
        yield source, target, writable


def _absolute(name: str, value: Any) -> str:
    (path,) = _words(name, [value])
    if not path.startswith("/") or os.path.normpath(path) != path or path.startswith("//"):
        raise RequestRefused(f"{name}: {path!r} is not an absolute path without . and ..")
    return path


def _check_targets(targets: Sequence[str], system: Sequence[str]) -> None:
    """Refuse a target below another one: bwrap would follow links in what was mounted there."""
    for target in targets:
        if target == "/" or any(_is_below(target, place) for place in system):
            raise RequestRefused(
                f"{target!r} is a path of the system; name another one behind a colon"
            )
    deepest = max((len(_parts(target)) for target in targets), default=0)
    if deepest > _MOST_PARTS or sum(map(len, targets)) > _MOST_BYTES:
        raise RequestRefused(
            f"paths in the sandbox: at most {_MOST_PARTS} parts each, {_MOST_BYTES} bytes in all"
        )
    for one, other in pairwise(sorted(targets, key=_parts)):
        if _is_below(other, one):
            raise RequestRefused(f"{other!r} lies in {one!r}, which is given, too")


def _parts(path: str) -> list[str]:
    return path.split("/")


def _is_below(path: str, top: str) -> bool:
    return f"{path}/".startswith(f"{top.rstrip('/')}/")


def _number(name: str, found: dict[str, Any], kind: type) -> Any:
    value = found.get(name)
    if value is None:
        return None
    wanted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, wanted) or not 0 < value < 2**53:
        raise RequestRefused(f"{name}: {value!r} is not a number above 0")
    return kind(value)


class MountSource(NamedTuple):
    """A file or directory to mount, which the daemon has found at `path`."""

    path: str
    target: str
    writable: bool
    device_and_inode: tuple[int, int]


def find_mount_source(
    places: Sequence[tuple[str, str, bool]], path: str, target: str, writable: bool
) -> tuple[MountSource, int]:
    """Return what the evaluator sees at `path`, and a descriptor that keeps it.

    Raises: RequestRefused. No symbolic link is followed, so nothing leads out of the places.
    """
    found = [place for place in places if _is_below(path, place[0])]
    if not found:
        raise RequestRefused(f"{path!r} is outside of the evaluator's own directories")
    inside, outside, may_write = max(found, key=lambda place: len(place[0]))
    if writable and not may_write:
        raise RequestRefused(f"{path!r} is read-only for the evaluator")
    below = [part for part in path[len(inside) :].split("/") if part]
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(outside, flags)
        for part in below:
            parent, descriptor = descriptor, os.open(part, flags, dir_fd=descriptor)
            os.close(parent)
    except OSError as error:
        raise RequestRefused(f"{path!r}: {error.strerror}") from None
    status = os.fstat(descriptor)
    if stat.S_ISLNK(status.st_mode):
        raise RequestRefused(f"{path!r} is a symbolic link; give the path that it leads to")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise RequestRefused(f"{path!r} is neither a file nor a directory")
    device_and_inode = (status.st_dev, status.st_ino)
    return MountSource("/".join([outside, *below]), target, writable, device_and_inode), descriptor


class SubmissionCgroup(CgroupDirectory):
    """The cgroup of one run, below that of the evaluation.

    Without one (`is_used`) its directory does not exist, and nothing is known of it.
    """

    def __init__(self, parent: str, name: str) -> None:
        super().__init__(f"{parent or '/proc/none'}/{name}")
        self.is_used = bool(parent)

    def make(self, memory: int, processes: int) -> None:
        """Make the cgroup with its limits, if it is used. Raises: OSError."""
        if self.is_used:
            self.make_cgroup()
            self.limit_memory(memory)
            self.write_file("pids.max", processes + _OWN_PROCESSES)

    def read_peak_memory(self) -> int | None:
        """Return the peak of memory in bytes, less the page cache that is left; None if unknown."""
        peak = self.read_number("memory.peak")
        if peak is None:  # before Linux 5.19
            return None
        held = self.read_numbers("memory.stat")
        return max(peak - max(held.get("file", 0) - held.get("shmem", 0), 0), 0)


def restore_signal_defaults() -> None:
    """Restore the default disposition of signals: Python ignores two, and the starter none."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _choose(asked: int | None, most: int) -> int:
    """Return a limit; without one, a quarter is left to the evaluator."""
    return min(most - most // 4 if asked is None else asked, most)


class ProgramRun:
    """One run of a program."""

    def __init__(
        self,
        configuration: BrokerConfiguration,
        request: RunRequest,
        number: int,
        streams: Sequence[int],
    ) -> None:
        self._configuration = configuration
        self._request = request
        self._streams = streams
        self._memory = _choose(request.memory, configuration.memory_bytes)
        self._processes = _choose(request.processes, configuration.max_processes)
        self._cgroup = SubmissionCgroup(
            configuration.cgroup_directory, f"{SUBMISSION_CGROUP_PREFIX}{number}"
        )
        self._sources: list[MountSource] = []
        self._status = os.memfd_create("status", os.MFD_CLOEXEC)
        self._cpu = 0.0  # seconds that wait4(2) has told
        self._measured = 0.0  # seconds of `measure_cpu_seconds`: wait4(2) omits what was killed
        self._largest = 0  # bytes: the largest process that it has told
        self._held = 0  # bytes: the most memory that a look has found
        self._before = 0.0  # seconds of processor time to make the sandbox
        self._given: list[int] = []  # the descriptors of bwrap
        self._reason: str | None = None
        self._exited = False  # whether bwrap has ended by itself

    def execute(self, connection: socket.socket) -> dict[str, Any]:
        """Run the program; return the report. Raises: RequestRefused, OSError."""
        kept = []  # so that no inode is used again before it was compared
        for path, target, writable in self._request.mounts:
            source, descriptor = find_mount_source(
                self._configuration.mounts, path, target, writable
            )
            self._sources.append(source)
            kept.append(descriptor)
        nonce = os.urandom(16).hex()
        blocking, release = os.pipe2(os.O_CLOEXEC)
        try:
            self._cgroup.make(self._memory, self._processes)
            child = self._start(blocking, nonce)
            began = time.monotonic()
            try:
                self._check_mounts(child, nonce, os.readlink(f"/proc/self/fd/{blocking}"))
                self._before = self._measure_before(child)
                began = time.monotonic()
                os.write(release, b"x")
                self._wait(child, connection, began)
            finally:
                self._kill(child)
            wall = time.monotonic() - began
            return self._report(wall)
        finally:
            kill_and_remove_cgroups([self._cgroup])  # the evaluation's end removes what stays

    def _start(self, blocking: int, nonce: str) -> int:
        # The filters with file offsets of their own; and a pipe's both ends, so that it has no end
        # of file. The copies have free numbers, and bwrap inherits nothing else.
        filters = [os.open(f"/proc/self/fd/{each}", os.O_RDONLY) for each in FILTER_DESCRIPTORS]
        waiting = os.open(f"/proc/self/fd/{blocking}", os.O_RDWR)
        own = (*filters, self._status, waiting)
        self._given = [fcntl.fcntl(each, fcntl.F_DUPFD, _LEAST) for each in own]
        argv = self._argv(nonce)
        child = os.fork()
        if child:
            return child
        try:
            restore_signal_defaults()
            if self._cgroup.is_used:
                self._cgroup.enter_cgroup()
            for number, stream in enumerate(self._streams):
                os.dup2(stream, number)
            os.execve(argv[0], argv, {})  # noqa: S606  (no shell is wanted)
        finally:
            os._exit(127)

    def _argv(self, nonce: str) -> list[str]:
        request, size = self._request, str(min(_SCRATCH, self._memory))
        argv = [*self._configuration.bwrap_argv, "--clearenv"]
        given = {**_ENVIRONMENT, **self._configuration.environment, **request.environment}
        for name, value in given.items():
            argv += ["--setenv", name, value]
        loads = ["--add-seccomp-fd"] * len(FILTER_DESCRIPTORS)
        options = (*loads, "--json-status-fd", "--block-fd")
        for option, number in zip(options, self._given, strict=True):
            argv += [option, str(number)]
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"]  # noqa: S108
        argv += ["--size", size, "--tmpfs", _TEMPORARY]
        for path in self._configuration.readable_paths:
            argv += ["--ro-bind", path, path]
        for source in self._sources:
            argv += ["--bind" if source.writable else "--ro-bind", source.path, source.target]
        argv += ["--symlink", nonce, _READY]
        for place in ("/proc", "/dev", "/"):
            argv += ["--remount-ro", place]
        argv += ["--chdir", request.directory, "--", "/usr/bin/prlimit"]
        for name, (soft, hard) in self._rlimits().items():
            argv.append(f"--{name}={soft}:{hard}".replace(str(resource.RLIM_INFINITY), "unlimited"))
        return [*argv, "--", *request.command]

    def _rlimits(self) -> dict[str, tuple[int, int]]:
        request = self._request
        limits = dict(self._configuration.rlimits)
        if request.time is not None and not self._cgroup.is_used:
            soft, hard = limits["cpu"]
            # Twice as much: the kernel compares it with ticks, and looks of the broker come first.
            limits["cpu"] = (min(math.ceil(2 * request.time) + 1, soft), hard)
        if request.file_size is not None:
            limits["fsize"] = (request.file_size,) * 2
        if not self._cgroup.is_used:
            limits["nproc"] = (self._processes,) * 2
            limits["data"] = (self._memory,) * 2
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        stack = self._memory if hard == resource.RLIM_INFINITY else min(self._memory, hard)
        # The stack of each thread has this size, and is data. Without a limit it has 2 MiB, and
        # the broker looks at the memory of the first stack.
        limits["stack"] = (stack if self._cgroup.is_used else hard, hard)
        return limits

    def _check_mounts(self, child: int, nonce: str, pipe: str) -> None:
        """Hold that each path leads to what was found before; bwrap has followed links.

        The sandbox waits for a word by `pipe`, a link of proc(5), before it starts the program.
        Raises: RequestRefused.
        """
        deadline = time.monotonic() + _PATIENCE
        while (inner := self._inner_pid()) is None:
            self._hold_alive(child, deadline)
        root = f"/proc/{inner}/root"
        while True:
            with suppress(OSError):
                if os.readlink(root + _READY) == nonce:
                    break
            self._hold_alive(child, deadline)
        waits = False
        with suppress(OSError):
            waits = os.readlink(f"/proc/{inner}/fd/{self._given[-1]}") == pipe
        if not waits:
            raise RequestRefused("the sandbox did not wait for its check")
        for source in self._sources:
            try:
                status = os.stat(root + source.target, follow_symlinks=False)
            except OSError:
                status = None
            if status is None or (status.st_dev, status.st_ino) != source.device_and_inode:
                raise RequestRefused(f"{source.target!r} was changed while the sandbox was made")

    def _hold_alive(self, child: int, deadline: float) -> None:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            raise RequestRefused(_NOT_MADE)
        if time.monotonic() > deadline:
            raise RequestRefused(f"the sandbox was not made within {_PATIENCE:g} s")
        time.sleep(_MOUNTS_LOOK)

    def _told(self) -> bytes:
        return os.pread(self._status, 4096, 0)

    def _inner_pid(self) -> int | None:
        """Return the first process of the sandbox; None if bwrap has not told it yet."""
        found = re.search(rb'"child-pid": (\d+)', self._told())
        return int(found[1]) if found else None

    def _wait(self, child: int, connection: socket.socket, began: float) -> None:
        """Wait for the end of the program, and of its limits."""
        ended = os.pidfd_open(child)
        poll = select.poll()
        for descriptor in (ended, connection.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            # The page cache that is left in the end can be larger than it was at the peak.
            self._held = max(self._held, self._cgroup.read_current_memory())
            wait, reason = self._check_limits(child, time.monotonic() - began)
            ready = [
                descriptor for descriptor, _ in poll.poll(None if wait is None else wait * 1000)
            ]
            # A program that has ended was in time, however late this process looks at it.
            if ended in ready:
                return
            if reason is not None:
                self._reason = reason
                return
            if connection.fileno() in ready:
                if connection.recv(64) != b"output":
                    raise ConnectionResetError(None, "the caller has gone")
                self._reason = "output"
                return

    def _check_limits(self, child: int, wall: float) -> tuple[float | None, str | None]:
        """Return the seconds until the next check, and the limit that is exceeded."""
        request, waits = self._request, []
        # Most programs end before the first look, which takes 1 ms of a processor.
        busy = _LOOK if request.time is None else request.time / (os.cpu_count() or 1)
        first = min(_LOOK, busy, request.wall or _LOOK)
        if wall < first:
            return first - wall, None
        if not self._cgroup.is_used:
            self._held = max(self._held, measure_largest_process_memory(child))
            if self._held > self._memory:
                self._held = self._memory
                return 0, "memory"
            waits.append(_LOOK)
        if request.time is not None:
            left = request.time - (self._measure_cpu(child) - self._before)
            if left <= 0:
                return 0, "time"
            waits.append(max(min(left / (os.cpu_count() or 1), _LOOK), 0.001))
        if request.wall is not None:
            if wall >= request.wall:
                return 0, "wall"
            waits.append(request.wall - wall)
        return min(waits, default=None), None

    def _measure_cpu(self, child: int) -> float:
        used = self._cgroup.read_cpu_seconds()
        if used is None:
            used = self._measured = max(self._measured, measure_cpu_seconds(child))
        return used

    def _measure_before(self, child: int) -> float:
        """Return the seconds of processor time that the sandbox has taken before its program."""
        used = self._cgroup.read_cpu_seconds()
        if used is None:  # to the nanosecond (clock_getcpuclockid(3)), as wait4(2) tells later
            # There is only the first process yet, which waits.
            pids = filter(None, (child, self._inner_pid()))
            return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)
        return used

    def _kill(self, child: int) -> None:
        """Kill what is left, and reap all: this process is their subreaper."""
        killing = self._reason is not None or b'"exit-code"' not in self._told()
        if killing and not self._cgroup.is_used:
            self._measured = max(self._measured, measure_cpu_seconds(child))
        if killing and (inner := self._inner_pid()) is not None:
            # First what waits for a word, so that it never goes on without.
            with suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                if killing:
                    for one in list_child_pids("self"):
                        with suppress(ProcessLookupError):
                            os.kill(one, signal.SIGKILL)
                pid, status, usage = os.wait4(-1, os.WNOHANG if killing else 0)
                if not pid:
                    time.sleep(0.001)
                    continue
                if pid == child:
                    self._exited = os.WIFEXITED(status)
                self._cpu += usage.ru_utime + usage.ru_stime
                self._largest = max(self._largest, usage.ru_maxrss * 1024)

    def _report(self, wall: float) -> dict[str, Any]:
        cpu, peak = self._cgroup.read_cpu_seconds(), self._cgroup.read_peak_memory()
        # The largest process counts files that it has mapped, too.
        largest = max(peak or 0, self._held, min(self._largest, self._memory))
        if self._cgroup.has_met_memory_limit():
            self._reason = self._reason or "memory"
            largest = self._memory
        found = re.search(rb'"exit-code": (\d+)', self._told())
        if found is None and self._exited and self._reason is None:
            raise RequestRefused(_NOT_MADE)
        status = int(found[1]) if found else _SIGNALLED + signal.SIGKILL
        number = status - _SIGNALLED if status - _SIGNALLED in _SIGNALS else None
        request = self._request
        used = (max(self._cpu, self._measured) if cpu is None else cpu) - self._before
        if request.time is not None and used >= request.time:
            self._reason = self._reason or "time"
        elif number == signal.SIGXFSZ:
            self._reason = self._reason or "output"
        elif status and self._cgroup.has_refused_fork():
            self._reason = self._reason or "processes"
        return {
            "exit_status": None if number is not None else status,
            "signal": number,
            "reason": self._reason,
            "cpu_seconds": round(used, 6),
            "wall_seconds": round(wall, 6),
            "peak_memory_bytes": largest,
            "measured": {
                "cpu_seconds": "rusage" if cpu is None else "cgroup",
                "peak_memory_bytes": "rusage" if peak is None else "cgroup",
            },
        }


def receive_request(connection: socket.socket) -> bytes:
    """Receive a request. Raises: RequestRefused."""
    message, _, flags, _ = connection.recvmsg(MAX_REQUEST_BYTES)
    if flags & socket.MSG_TRUNC:
        raise RequestRefused(f"a request has at most {MAX_REQUEST_BYTES // 1024} KiB")
    return message


def send_pipe_ends(connection: socket.socket) -> list[int]:
    """Send the caller its ends of stdin, stdout and stderr; return the program's."""
    own, sent = [], []
    for number in range(3):
        reading, writing = os.pipe2(os.O_CLOEXEC)
        own.append(reading if number == 0 else writing)
        sent.append(writing if number == 0 else reading)
    socket.send_fds(connection, [b"streams"], sent)
    for descriptor in sent:
        os.close(descriptor)
    return own


def exit_with_parent(parent_pid: int) -> None:
    """End this process with its parent, also if that has ended already."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def serve_connection(
    connection: socket.socket, configuration: BrokerConfiguration, number: int, broker: int
) -> None:
    """Serve one connection, in a process of its own, the child of the process `broker`."""
    exit_with_parent(broker)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        paths = configuration.additional_system_paths, configuration.readable_paths
        request = parse_request(receive_request(connection), *paths)
        streams = send_pipe_ends(connection)
        answer = ProgramRun(configuration, request, number, streams).execute(connection)
    except RequestRefused as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"the program could not be run: {error.strerror}"}
    with suppress(OSError):
        connection.send(json.dumps(answer).encode())


def accept_connections(listening: socket.socket, configuration: BrokerConfiguration) -> None:
    """Accept connections, and start a process for each."""
    running: set[int] = set()
    number, broker = 0, os.getpid()
    while True:
        while running:
            with suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, 0 if len(running) >= _MOST_RUNS else os.WNOHANG)
                if pid:
                    running.discard(pid)
                    continue
            break
        ready, _, _ = select.select([listening], [], [], _BACKLOG_WAIT if running else None)
        if not ready:
            continue
        try:
            connection, _ = listening.accept()
        except OSError:  # the caller has gone, or the machine has no descriptor left
            time.sleep(_LOOK)
            continue
        number += 1
        with connection:
            try:
                pid = os.fork()
            except OSError:  # the evaluation has as many processes as it may
                with suppress(OSError):
                    message = "no process could be made for it: see limits.processes"
                    connection.send(json.dumps({"error": message}).encode())
                continue
            if not pid:
                try:
                    listening.close()
                    serve_connection(connection, configuration, number, broker)
                finally:
                    os._exit(0)
            running.add(pid)


def main() -> None:
    """Read the configuration, and serve the listening socket."""
    for descriptor in (SOURCE, CONFIGURATION, LISTENING, *FILTER_DESCRIPTORS):
        os.set_inheritable(descriptor, False)
    told = os.pread(CONFIGURATION, os.fstat(CONFIGURATION).st_size, 0)
    configuration = BrokerConfiguration(**json.loads(told))
    exit_with_parent(configuration.parent_pid)
    gc.freeze()  # so that children copy fewer pages
    with socket.socket(fileno=LISTENING) as listening:
        accept_connections(listening, configuration)
