"""Real children of the tests' process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from twisted.internet import reactor
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from tawebeval.deferreds import OneShotEvent
from tawebeval.linux.child import ChildProcess, spawn_child

PATH = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class Recorder(ProcessProtocol):
    """Notes what happens to a child; `printed` is called with each chunk of stdout."""

    child: ChildProcess

    def __init__(self) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.calls: list[str] = []
        self.first: OneShotEvent[None] = OneShotEvent()
        self.exited: OneShotEvent[ProcessDone | ProcessTerminated] = OneShotEvent()
        self.ended: OneShotEvent[ProcessDone | ProcessTerminated] = OneShotEvent()

    def makeConnection(self, transport: Any) -> None:
        self.child = transport
        super().makeConnection(transport)

    def outReceived(self, data: bytes) -> None:
        self.stdout += data
        self.first.set_value(None)

    def errReceived(self, data: bytes) -> None:
        self.stderr += data

    def outConnectionLost(self) -> None:
        self.calls.append("stdout lost")

    def errConnectionLost(self) -> None:
        self.calls.append("stderr lost")

    def processExited(self, reason: Failure) -> None:
        self.calls.append("exited")
        self.exited.set_value(reason.value)

    def processEnded(self, reason: Failure) -> None:
        self.calls.append("ended")
        self.ended.set_value(reason.value)


def descriptors() -> dict[str, str]:
    """Return the descriptors that are open in this process, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one by which they are listed
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


async def turn() -> None:
    """Let the reactor do what is due."""
    done: OneShotEvent[None] = OneShotEvent()
    reactor.callLater(0, done.set_value, None)
    await done.wait()


class ProcessTestCase(TestCase):
    """Starts children that do not outlive their test."""

    def spawn(
        self,
        *argv: str,
        environment: dict[str, str] | None = None,
        directory: str = "/",
        descriptors: Sequence[int] = (),
    ) -> Recorder:
        """Start a child and return what takes notes of it."""
        recorder = Recorder()
        child = spawn_child(
            reactor,
            recorder,
            argv,
            PATH if environment is None else environment,
            directory,
            descriptors=descriptors,
        )

        async def end() -> None:
            child.signal_group(signal.SIGKILL)
            if child.is_running:
                await recorder.exited.wait()
            child.read_remaining_output()
            await recorder.ended.wait()

        self.addCleanup(end)
        return recorder

    def shell(self, command: str, **settings: Any) -> Recorder:
        return self.spawn("/bin/sh", "-c", command, **settings)

    def python(self, script: str, **settings: Any) -> Recorder:
        return self.spawn(sys.executable, "-IS", "-c", script, **settings)


LOOK = """
import json, os, signal
umask = os.umask(0)
json.dump({
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "argv": __import__("sys").argv[1:],
    "descriptors": [
        int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    ],
    "pid": os.getpid(), "session": os.getsid(0), "group": os.getpgrp(),
    "stdin": os.read(0, 10).decode(),
    "umask": umask,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "pipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL,
}, open(1, "w"))
"""
