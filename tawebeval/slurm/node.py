"""The program on a node: starts one evaluator, and reports on it in files of a shared directory.

    python3 -I -S PROGRAM DIRECTORY CPU_SECONDS DISK_BYTES

It imports the standard library, and of tawebeval only what does so, too: `SlurmSandbox.create`
copies these modules into PROGRAM, in the shared directory. DIRECTORY is that of one job:

| file | writer | content |
| --- | --- | --- |
| output/start | daemon | the evaluator to start (`linux.starter`) |
| signal | daemon | the numbers of signals to send, a line for each |
| output/stdout, output/stderr | node | what the evaluator has printed; the daemon takes both away |
| output/status | node | what bwrap says of the sandbox |
| state | node | how the evaluator was started, goes on and has ended: see `NodeStarter` |

The program needs neither the daemon nor srun: whatever happens to these, the evaluator goes on, and
`state` tells its end. If the program is killed, or the directory removed, the evaluator is killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tawebeval.linux import starter
from tawebeval.linux.kernel_files import (
    CgroupDirectory,
    list_descendant_pids,
    measure_cpu_seconds,
    send_signal,
    signal_sandbox,
)

_MIB = 2**20
_GONE = (errno.ENOENT, errno.ESTALE)  # the daemon has removed the directory


class NodeStarter(starter.Starter):
    """The starter of one evaluator, which has no clients: `state` has what these would be told.

    `state` has `node` and `job`, and `error` if the evaluator cannot be started. Otherwise it has
    the members of `starter.Program.describe_state`, and `exceeded_limit`, for which the
    evaluator was killed: "cpu", "disk" or "memory"; None without. `unlinked_bytes` is about what
    removed files take that processes have open: the daemon cannot see them.
    """

    def __init__(
        self, directory: str, cpu_seconds: float, disk_bytes: int, max_descriptors: int
    ) -> None:
        listening, self._peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(listening, max_descriptors, None)
        self._directory = directory
        self._name = f"{directory}/output"
        self._cpu_seconds = cpu_seconds
        self._disk_bytes = disk_bytes
        self._device = os.stat(directory).st_dev
        self._signalled = 0  # bytes of `signal` that were followed
        self._oom_kills = count_oom_kills()
        self._is_saved = True
        self._state: dict[str, Any] = {
            "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
            "job": os.environ.get("SLURM_JOB_ID"),
            "exceeded_limit": None,
            "unlinked_bytes": 0,
        }

    def start_evaluator(self) -> None:
        """Start the evaluator; `serve` leads it to its end."""
        path = f"{self._name}/start"
        client = starter.Client(self._peer)
        self._clients.add(client)
        try:
            with open(path, "rb") as file:
                specification = json.loads(file.read())
            # The broker ends with its parent, which the daemon does not know.
            text = specification["broker_specification"]["descriptors"][1]
            text["text"] = json.dumps({**json.loads(text["text"]), "parent_pid": os.getpid()})
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(specification, file)
            os.rename(f"{path}.new", path)
            self._start(client, self._name, 0)
        except OSError as error:
            self._send_answer(client, {"error": str(error)})
        self._repeat_later(self._look)

    def _send_answer(
        self,
        client: starter.Client,
        answer: Mapping[str, Any],
        descriptors: Sequence[int] = (),
    ) -> None:
        """Take the answer to the start."""
        if "error" in answer:
            where = f"{answer['path']}: " if answer.get("path") else ""
            self._state["error"] = f"{where}{answer['error']}"
        self._save_state()

    def _notify_all(self, program: starter.Program) -> None:
        """Take what is new of the evaluator."""
        if program.exit is None or program.is_output_complete:
            self._save_state()
            return
        for pid in list_descendant_pids(os.getpid()):  # what has outlived bwrap
            send_signal(pid, signal.SIGKILL)
        self._close_output(program)

    def _look(self) -> None:
        """Do what is to be done now and then."""
        program = self._programs.get(self._name)
        if not self._is_saved:
            self._save_state()
        self._follow_signals()
        if program is not None and program.exit is None:
            self._check_limits(program)
            for output in program.outputs:
                # No disk, as NFS, whose clients keep what is written.
                if output.is_open and not os.major(self._device):
                    with contextlib.suppress(OSError):
                        os.fdatasync(output.file)
        self._repeat_later(self._look)

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
            self._signal_evaluator(int(line))

    def _signal_evaluator(self, number: int) -> None:
        """Send a signal to the processes in the sandbox."""
        program = self._programs.get(self._name)
        if program is None or program.exit is not None:
            return
        signal_sandbox(program.pid, number, program.send_signal)

    def _check_limits(self, program: starter.Program) -> None:
        """Kill an evaluator that has used too much; the kernel and the daemon check the rest."""
        state, broker = self._state, program.broker
        if state["exceeded_limit"]:
            return
        mains = [program.pid, broker.pid] if broker is not None and broker.pid else [program.pid]
        held = measure_unlinked_bytes(mains, self._device)
        if sum(map(measure_cpu_seconds, mains)) > self._cpu_seconds:
            state["exceeded_limit"] = "cpu"
        elif held > self._disk_bytes:
            state["exceeded_limit"] = "disk"
        elif count_oom_kills() > self._oom_kills:  # what is left may wait for the killed process
            state["exceeded_limit"] = "memory"
        if state["exceeded_limit"]:
            self._signal_evaluator(signal.SIGKILL)
        if state["exceeded_limit"] or held // _MIB != state["unlinked_bytes"] // _MIB:
            state["unlinked_bytes"] = held
            self._save_state()

    def _save_state(self) -> None:
        """Write `state`, and end after the evaluator. Raises: SystemExit.

        If the disk is full `_look` tries again.
        """
        program, path = self._programs.get(self._name), f"{self._directory}/state"
        is_over = "error" in self._state or (program is not None and program.is_output_complete)
        if is_over and not self._state["exceeded_limit"] and count_oom_kills() > self._oom_kills:
            self._state["exceeded_limit"] = "memory"
        try:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump({**(program.describe_state() if program else {}), **self._state}, file)
            os.rename(f"{path}.new", path)
        except OSError as error:
            self._is_saved = False
            self._end_if_removed(error)
        else:
            self._is_saved = True
            self._is_terminated = self._is_terminated or is_over

    def _end_if_removed(self, error: OSError) -> None:
        """End if the daemon has removed the directory, not if the whole file system is away."""
        evaluations = os.path.dirname(os.path.dirname(self._directory))
        if error.errno in _GONE and os.path.isdir(evaluations):
            sys.exit("the daemon has removed the evaluation")


def measure_unlinked_bytes(mains: Iterable[int], device: int) -> int:
    """Return the bytes of removed files on `device` that processes have open.

    The daemon counts the others, which it sees in the shared directory. Each thread may have a
    table of descriptors of its own.
    """
    files: dict[int, int] = {}
    for pid in (pid for main in mains for pid in (main, *list_descendant_pids(main))):
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
    with contextlib.suppress(OSError, ValueError), open("/proc/self/cgroup", "rb") as file:
        for line in file:
            _, controllers, path = os.fsdecode(line.rstrip(b"\n")).split(":", 2)
            if "memory" in controllers.split(","):
                group = CgroupDirectory(f"/sys/fs/cgroup/memory{path}")
                count += group.read_numbers("memory.oom_control").get("oom_kill", 0)
            elif not controllers:
                group = CgroupDirectory(f"/sys/fs/cgroup{path}")
                count += group.read_numbers("memory.events").get("oom_kill", 0)
    return count


def main() -> None:
    """Run the job. Raises: SystemExit, with a message if that is no end of the evaluator."""
    os.umask(0o077)
    os.environ.pop("SLURM_JWT", None)  # srun's authority, which no child may have
    _, directory, cpu_seconds, disk_bytes = sys.argv
    try:
        max_descriptors = starter.prepare_parent_process()
        node = NodeStarter(directory, float(cpu_seconds), int(disk_bytes), max_descriptors)
        node.start_evaluator()
        node.serve()
    except OSError as error:
        sys.exit(f"tawebeval on {os.uname().nodename}: {error}")
