"""The programs that benchmarks start: each is ended by its own process identifier."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parent.parent
_RUN = 60.0  # seconds for a program that measures
_START = 20.0  # ... and until a server is ready
_END = 30.0  # ... and until it has ended whom it has started


def argv(program: str, *arguments: object) -> list[str]:
    """Return the command line of one of `benchmarks.programs`."""
    return [sys.executable, "-m", f"benchmarks.programs.{program}", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return an environment in which this package is found from anywhere."""
    return {**os.environ, "PYTHONPATH": str(_ROOT)}


def figures(program: str, *arguments: object) -> dict[str, float]:
    """Run a program to its end and return the JSON object that it prints."""
    done = subprocess.run(
        argv(program, *arguments),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_RUN,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for as long as the context lasts, and end it gently, or else by force."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def server(program: str, *arguments: object) -> Iterator[Server]:
    """Run one of `benchmarks.programs` that prints the port on which it listens."""
    with serving(argv(program, *arguments)) as started:
        yield started


@contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    """Run a program that prints the port on which it listens."""
    with running(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Server(process.pid, int(_first_line(process.stdout)))


def _first_line(stream: IO[bytes]) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(_START):
            raise TimeoutError("a server does not say where it listens")
    return stream.readline()


class Server:
    """A server that runs, on the loopback interface."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    def processor_time(self) -> float:
        """Return the seconds of processor time that it has used, all threads together."""
        return sum(int(text.split()[0]) / 1e9 for text in self._read_threads("schedstat"))

    def descendants_time(self) -> float:
        """Return the seconds of processor time of all processes that it has waited for.

        With those that these have waited for, in turn.
        """
        # Behind the name, which may have anything in it: cutime and cstime are fields 16 and 17.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def memory(self, name: str) -> int:
        """Return bytes: RssAnon is its own memory now, VmHWM the peak of all of it."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024

    def children(self) -> list[int]:
        """Return the processes that it has started and has not waited for."""
        return [int(pid) for text in self._read_threads("children") for pid in text.split()]

    def _read_threads(self, name: str) -> Iterator[str]:
        """Yield a file of each thread, but of those that end meanwhile."""
        for path in glob(f"/proc/{self.pid}/task/*/{name}"):
            with suppress(FileNotFoundError, ProcessLookupError):
                yield Path(path).read_text()


def wait_for(process: subprocess.Popen[bytes], port: int, name: str, *logs: Path) -> None:
    """Return when a server listens. Raises SystemExit, with what it says, if it does not."""
    deadline = time.monotonic() + _START
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            said = "".join(log.read_text() for log in logs if log.exists())
            raise SystemExit(f"{name} does not start:\n{said}")
        time.sleep(0.05)


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody uses just now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
