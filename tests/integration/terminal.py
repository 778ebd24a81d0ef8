"""The command `tawebeval` as people run it: in a terminal, or with pipes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from tests.cases.patience import PATIENCE
from tests.integration.unprivileged import PYTHON_AS_USER

COMMAND = (*PYTHON_AS_USER, str(Path(sys.executable).with_name("tawebeval")))


def environment(server: str, **more: str) -> dict[str, str]:
    """Return the environment for a command that asks `server`."""
    kept = ("PATH", "PYTHONPATH", "HOME", "LANG")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    return {**found, "TAWEBEVAL_SERVER": server, "TERM": "xterm", **more}


async def piped(
    server: str,
    *arguments: str,
    cwd: Path | None = None,
    begun: Callable[[int], object] = lambda pid: None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Return what a command prints to pipes, and how it ends; `begun` is told its process."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(server, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun(process.pid)
    try:
        out, err = await deferToThread(process.communicate, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Terminal:
    """A command that runs in a terminal of its own; `shown` is all that stands there."""

    def __init__(self, server: str, *arguments: str, cwd: Path | None = None, **more: str) -> None:
        self.shown = ""
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=cwd,
            env=environment(server, **more),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._ended: Deferred[int] = deferToThread(self._read)

    def _read(self) -> int:
        while True:
            try:
                some = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                break
            self.shown += some.decode(errors="replace")
        os.close(self._master)
        return self._process.wait()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Press Ctrl-C, or send another signal."""
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self) -> int:
        """Return the exit status, negative for a signal."""
        status: int = await self._ended
        return status

    def close(self) -> None:
        """End it, if it has not."""
        if self._process.poll() is None:
            self._process.kill()
