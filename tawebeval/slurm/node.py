"""The program on a node: starts one evaluator, and reports on it in files of a shared directory.

    python3 -I -S PROGRAM DIRECTORY CPU_SECONDS DISK_BYTES

It imports the standard library, and of tawebeval only what does so, too: `write_node_program` of
`job` copies these modules into PROGRAM, in the shared directory. DIRECTORY is that of one job:

| file | writer | content |
| --- | --- | --- |
| output/start | daemon | the evaluator to start (`linux.starter`) |
| signal | daemon | the numbers of signals to send, a line for each |
| output/stdout, output/stderr | node | what the evaluator has printed; the daemon takes both away |
| output/status | node | what bwrap says of the sandbox |
| state | node | how the evaluator was started, goes on and has ended: see `NodeJob` |

The program forks a starter, which ends with it. It needs neither the daemon nor srun: whatever
happens to these, the evaluator goes on, and `state` tells its end. If the program is killed, or the
directory removed, the evaluator is killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

from tawebeval.linux import starter
from tawebeval.linux.kernel_files import list_descendants, measure_cpu_seconds

_PAUSE = 0.1  # seconds between two looks at `signal`
_LIMITS_PAUSE = 0.3  # seconds between two looks at limits, and two flushes
_MIB = 2**20
_STARTER_SECONDS = 10.0  # for the starter to listen
_WAIT = 0.002  # seconds between two attempts to connect
_GONE = (errno.ENOENT, errno.ESTALE)  # the daemon has removed the directory


class NodeJob:
    """One evaluator on this node.

    `state` has `node` and `job`, and `error` if the evaluator cannot be started. Otherwise it has
    the members of `starter.Program.describe`, and `exceeded`: the limit for which the evaluator was
    killed, "cpu", "disk" or "memory"; None without. `unlinked_bytes` is about what removed files
    take that processes have open: the daemon cannot see them.
    """

    def __init__(self, directory: str, cpu_seconds: float, disk_bytes: int) -> None:
        self._directory = directory
        self._name = f"{directory}/output"
        self._cpu_seconds = cpu_seconds
        self._disk_bytes = disk_bytes
        self._device = os.stat(directory).st_dev
        self._flushed: list[int] = []  # descriptors of output on a network file system
        self._signalled = 0  # bytes of `signal` that were followed
        self._oom_kills = count_oom_kills()
        self._is_saved = False
        self._has_ended = False
        self._starter_pid, self._connection = start_starter()
        self._state: dict[str, Any] = {
            "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
            "job": os.environ.get("SLURM_JOB_ID"),
            "exceeded": None,
            "unlinked_bytes": 0,
        }

    def run(self) -> None:
        """Run the evaluator to its end. Raises: OSError, SystemExit."""
        try:
            self._start()
        except OSError as error:
            self._state["error"] = str(error)
            self._has_ended = True
        limits_time = 0.0
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._has_ended:
            if not self._is_saved:
                self._save()
            if poll.poll(_PAUSE * 1000):
                self._take_notice(starter.receive_message(self._connection)[0])
            self._follow_signals()
            if time.monotonic() >= limits_time:
                limits_time = time.monotonic() + _LIMITS_PAUSE
                self._check_limits()
                self._flush_output()
        self._save()
        while not self._is_saved:  # the disk is full
            time.sleep(_LIMITS_PAUSE)
            self._save()
        os.kill(self._starter_pid, signal.SIGTERM)
        os.waitpid(self._starter_pid, 0)

    def _start(self) -> None:
        """Start the evaluator. Raises: OSError."""
        path = f"{self._name}/start"
        with open(path, "rb") as file:
            specification = json.loads(file.read())
        # The broker ends with its parent, which the daemon does not know.
        text = specification["broker"]["descriptors"][1]
        text["text"] = json.dumps({**json.loads(text["text"]), "parent_pid": self._starter_pid})
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(specification, file)
        os.rename(f"{path}.new", path)
        self._send(request="attach")
        self._send(request="start", name=self._name, id=1)
        while True:
            answer = json.loads(starter.receive_message(self._connection)[0] or b'{"id": 1}')
            if "id" in answer:
                break
        if "pid" not in answer:
            where = f"{answer['path']}: " if answer.get("path") else ""
            raise OSError(f"{where}{answer.get('error', 'the starter has ended')}")
        if not os.major(self._device):  # no disk, as NFS, whose clients keep what is written
            for name in ("stdout", "stderr"):
                self._flushed.append(os.open(f"{self._name}/{name}", os.O_RDONLY))
        self._state.update(pid=answer["pid"], start_time=answer["start_time"])
        self._send(request="look", name=self._name)  # the end may have come before the answer

    def _send(self, **request: Any) -> None:
        self._connection.send(json.dumps(request).encode())

    def _take_notice(self, message: bytes) -> None:
        """Take what the starter tells of the evaluator. Raises: SystemExit, if it has ended."""
        if not message:
            sys.exit("the starter has ended")
        notice = json.loads(message)
        if notice.pop("notice", None) != self._name:
            return
        if "status" in notice and not notice["is_output_complete"]:
            for pid in list_descendants(self._starter_pid):  # what has outlived bwrap
                send_signal(pid, signal.SIGKILL)
            self._send(request="close", name=self._name)
        self._state.update(notice)
        self._is_saved = False
        if notice["is_output_complete"]:
            self._has_ended = True
            if self._state["exceeded"] is None and count_oom_kills() > self._oom_kills:
                self._state["exceeded"] = "memory"
            self._flush_output()

    def _follow_signals(self) -> None:
        """Send the signals that the daemon wants. Opening makes NFS ask its server."""
        try:
            with open(f"{self._directory}/signal", "rb") as file:
                file.seek(self._signalled)
                *lines, _ = file.read().split(b"\n")
        except OSError as error:
            self._end_if_removed(error)
            return
        for line in lines:
            self._signalled += len(line) + 1
            self._signal(int(line))

    def _signal(self, number: int) -> None:
        """Send a signal to the processes in the sandbox, as `bubblewrap.signal_sandbox` does."""
        if "status" in self._state:
            return
        inside = list_descendants(self._state["pid"])
        for pid in inside:
            send_signal(pid, number if len(inside) > 1 else signal.SIGKILL)
        if not inside:
            self._send(request="signal", name=self._name, number=signal.SIGKILL)

    def _check_limits(self) -> None:
        """Kill an evaluator that has used too much; the kernel and the daemon check the rest."""
        if "status" in self._state or self._state["exceeded"]:
            return
        mains = [pid for pid in (self._state["pid"], self._state.get("broker_pid")) if pid]
        held = measure_unlinked_bytes(mains, self._device)
        if held // _MIB != self._state["unlinked_bytes"] // _MIB:
            self._state["unlinked_bytes"] = held
            self._is_saved = False
        if sum(map(measure_cpu_seconds, mains)) > self._cpu_seconds:
            exceeded = "cpu"
        elif held > self._disk_bytes:
            exceeded = "disk"
        elif count_oom_kills() > self._oom_kills:  # what is left may wait for the killed process
            exceeded = "memory"
        else:
            return
        self._state["exceeded"] = exceeded
        self._is_saved = False
        self._signal(signal.SIGKILL)

    def _flush_output(self) -> None:
        """Write output to the server of a network file system, which other machines read."""
        for descriptor in self._flushed:
            with contextlib.suppress(OSError):
                os.fdatasync(descriptor)

    def _save(self) -> None:
        """Write `state`; `_is_saved` tells whether that has worked. Raises: SystemExit."""
        path = f"{self._directory}/state"
        try:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(self._state, file)
            os.rename(f"{path}.new", path)
            self._is_saved = True
        except OSError as error:
            self._end_if_removed(error)

    def _end_if_removed(self, error: OSError) -> None:
        """End if the daemon has removed the directory, not if the whole file system is away."""
        evaluations = os.path.dirname(os.path.dirname(self._directory))
        if error.errno in _GONE and os.path.isdir(evaluations):
            sys.exit("the daemon has removed the evaluation")


def start_starter() -> tuple[int, socket.socket]:
    """Fork a starter, which ends with this process; return its number and a connection.

    Raises: OSError.
    """
    directory = f"/tmp/tawebeval-node-{os.urandom(8).hex()}"  # noqa: S108  (nobody else's name)
    os.mkdir(directory, 0o700)
    path, parent = f"{directory}/socket", os.getpid()
    pid = os.fork()
    if not pid:
        try:
            sys.argv[1:] = [starter.PROCESS_NAME, path, str(parent)]
            starter.main()
        except SystemExit as error:
            if error.code:
                print(error.code, file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + _STARTER_SECONDS
    try:
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect(path)
                return pid, connection
            if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > deadline:
                raise OSError("the starter of evaluators cannot be started")
            time.sleep(_WAIT)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.rmdir(directory)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, if there is one that takes it."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def measure_unlinked_bytes(mains: Iterable[int], device: int) -> int:
    """Return the bytes of removed files on `device` that processes have open.

    The daemon counts the others, which it sees in the shared directory. Each thread may have a
    table of descriptors of its own.
    """
    files: dict[int, int] = {}
    for pid in (pid for main in mains for pid in (main, *list_descendants(main))):
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                for number in os.listdir(f"/proc/{pid}/task/{thread}/fd"):
                    with contextlib.suppress(OSError):
                        status = os.stat(f"/proc/{pid}/task/{thread}/fd/{number}")
                        if status.st_nlink == 0 and status.st_dev == device:
                            files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def count_oom_kills() -> int:
    """Return how many processes of the job's cgroup the kernel has killed for its memory."""
    count = 0
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, path in groups:
            if "memory" in controllers.split(","):
                name = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
            elif not controllers:
                name = f"/sys/fs/cgroup{path}/memory.events"
            else:
                continue
            with contextlib.suppress(OSError), open(name, encoding="utf-8") as file:
                words = [line.split() for line in file]
                count += sum(int(number) for what, number in words if what == "oom_kill")
    return count


def main() -> None:
    """Run the job. Raises: SystemExit, with a message."""
    os.umask(0o077)
    os.environ.pop("SLURM_JWT", None)  # srun's authority, which no child may have
    _, directory, cpu_seconds, disk_bytes = sys.argv
    try:
        NodeJob(directory, float(cpu_seconds), int(disk_bytes)).run()
    except OSError as error:
        sys.exit(f"tawebeval on {os.uname().nodename}: {error}")
