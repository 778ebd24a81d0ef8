"""A real starter of evaluators, and a protocol that keeps what a program prints."""

from __future__ import annotations

import atexit
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from tawebeval.linux import starter
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import STARTER_ARCHIVE, StarterClient
from tests.cases.patience import PATIENCE

PATH = {"PATH": "/usr/bin:/bin"}


def sh(command: str, **options: object) -> LaunchSpec:
    """Return what starts a shell with a command."""
    return LaunchSpec(["/bin/sh", "-c", command], PATH, "/", **options)  # type: ignore[arg-type]


class StarterProcess:
    """A running starter with a socket in a new directory."""

    def __init__(self, open_files: int = 0) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tawebeval-starter-"))
        self.path = self.directory / "socket"
        program = self.directory / "starter.pyz"
        program.write_bytes(STARTER_ARCHIVE)
        argv = [sys.executable, "-I", "-S", str(program), starter.PROCESS_NAME, str(self.path)]
        if open_files:
            argv = ["/usr/bin/prlimit", f"--nofile={open_files}", *argv]
        with (self.directory / "said").open("wb") as said:
            self.process = subprocess.Popen(argv, env={}, stderr=said)
        deadline = time.monotonic() + PATIENCE
        while not self.path.exists():
            assert self.process.poll() is None, "the starter does not start"
            assert time.monotonic() < deadline, "the starter does not listen"
            time.sleep(0.002)

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self) -> StarterClient:
        return StarterClient.connect(self.path)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the starter, if it runs, with all programs; remove its directory."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)
        shutil.rmtree(self.directory, ignore_errors=True)


@cache
def get_shared_starter() -> StarterProcess:
    """Return the starter of all tests that neither end nor limit it."""
    started = StarterProcess()
    atexit.register(started.stop)
    return started


class StarterCase(TestCase):
    """Tests with a starter, a client, and a directory in which programs have their files."""

    needs_own_starter = False

    def setUp(self) -> None:
        if self.needs_own_starter:
            self.starter = StarterProcess()
            self.addCleanup(self.starter.stop)
        else:
            self.starter = get_shared_starter()
        self.directory = Path(tempfile.mkdtemp(dir=self.starter.directory))
        self.client = self.connect()
        self.addCleanup(self.forget_programs)

    def connect(self) -> StarterClient:
        client = self.starter.connect()
        self.addCleanup(client.close)
        return client

    def forget_programs(self) -> None:
        with suppress(OSError):  # the starter has ended
            for name in self.client.list_programs():
                self.client.forget_program_blocking(name)


class Keeping(ProcessProtocol):
    """A protocol that keeps what it is told."""

    def __init__(self) -> None:
        self.printed = {1: b"", 2: b""}
        self.told: list[str] = []
        self.exited: Deferred[Any] = Deferred()
        self.ended: Deferred[Any] = Deferred()
        self.on_data: Callable[[], object] = lambda: None

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self.printed[childFD] += data
        self.on_data()

    def childConnectionLost(self, childFD: int) -> None:
        """Note the end of output."""
        self.told.append(f"lost {childFD}")

    def processExited(self, reason: Failure) -> None:
        self.told.append("exited")
        self.exited.callback(reason.value)

    def processEnded(self, reason: Failure) -> None:
        self.told.append("ended")
        self.ended.callback(reason.value)


def eventually(condition: Callable[[], object]) -> object:
    """Block until a condition holds; return its value."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)
    return found


def turn() -> Deferred[None]:
    """Return what fires once the reactor has done what is due."""
    done: Deferred[None] = Deferred()
    reactor.callLater(0.002, done.callback, None)  # type: ignore[attr-defined]
    return done


def is_alive(pid: int) -> bool:
    """Tell whether a process can still run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
