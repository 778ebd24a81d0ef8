"""Run an untrusted program with limits, in a process group that is killed.

This stops careless programs, not malicious ones. The daemon's sandbox confines
those; it also kills processes that have left the process group.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """The limits of one run."""

    cpu_seconds: int
    """Processor time: other programs on the machine do not change it."""
    wall_seconds: float
    """Real time, for a program that sleeps or waits."""
    file_bytes: int = MEBIBYTE
    """The size of its output, and of each file that it writes."""
    memory_bytes: int | None = 1024 * MEBIBYTE
    """Address space; ``None`` for no limit."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    status: int
    """The exit status, or minus the number of the signal."""
    cpu_seconds: float
    out_of_time: bool
    stdout: bytes
    stderr: bytes

    @property
    def ending(self) -> str:
        """The result in words."""
        if self.out_of_time:
            return "out of time"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


def clean_environment(scratch: Path) -> dict[str, str]:
    """Return an environment without the evaluator's markers."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
    }


def run(argv: list[str], stdin: Path | None, scratch: Path, limits: Limits) -> Outcome:
    """Run ``argv`` in the folder ``scratch`` and wait for its end.

    Input and output are files, so neither side can block the other.
    """

    def limit_child() -> None:
        cpu = limits.cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limits.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))

    out_path, err_path = scratch.with_suffix(".out"), scratch.with_suffix(".err")
    with (
        open(stdin or os.devnull, "rb") as source,
        open(out_path, "wb") as out,
        open(err_path, "wb") as err,
    ):
        child = subprocess.Popen(
            argv,
            stdin=source,
            stdout=out,
            stderr=err,
            cwd=scratch,
            env=clean_environment(scratch),
            start_new_session=True,
            preexec_fn=limit_child,
        )
    ended, cpu_seconds = wait_and_kill_group(child, limits.wall_seconds)
    return Outcome(
        status=child.returncode,
        cpu_seconds=cpu_seconds,
        out_of_time=not ended or child.returncode == -signal.SIGXCPU,
        stdout=read_start(out_path, limits.file_bytes),
        stderr=read_start(err_path, limits.file_bytes),
    )


def wait_and_kill_group(child: subprocess.Popen[bytes], wall_seconds: float) -> tuple[bool, float]:
    """Wait for a child, then kill all of its process group.

    Gives whether the child ended by itself, and the processor time that it and
    the children it waited for have used, in seconds.
    """
    deadline = time.monotonic() + wall_seconds
    try:
        while not (ended := has_ended(child.pid)) and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        # The child is not reaped yet, so no other process has its number.
        os.killpg(child.pid, signal.SIGKILL)
        _, wait_status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(wait_status)
    return ended, usage.ru_utime + usage.ru_stime


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def read_start(path: Path, size: int) -> bytes:
    """Read a file, but never more than ``size`` bytes."""
    with open(path, "rb") as file:
        return file.read(size)
