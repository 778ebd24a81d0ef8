"""A daemon whose evaluations outlive it, the starter that holds them, and a test case with both."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import Any

from tawebeval.daemon.startup import STARTER_SOCKET_VARIABLE
from tests.cases.patience import PATIENCE
from tests.integration.client import Client
from tests.integration.harness import (
    COMMAND,
    CONFIGURATION,
    Daemon,
    DaemonTestCase,
    RepositoryTestCase,
    until,
)
from tests.integration.unprivileged import temporary_folder


class KeptDaemon(Daemon):
    """A daemon with a starter of its own, which `remove` ends."""

    def __init__(self, configuration: str = CONFIGURATION, **more: Any) -> None:
        self._starter_folder = temporary_folder("tawebeval-starter-")
        self._starter_folder.chmod(0o700)
        self.socket = self._starter_folder / "socket"
        self._starter: subprocess.Popen[bytes] | None = None
        super().__init__(configuration, **{STARTER_SOCKET_VARIABLE: str(self.socket)}, **more)

    async def start_starter(self) -> None:
        command = [str(COMMAND), "starter", "--socket", str(self.socket)]
        self._starter = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        await until(self.socket.exists, "the starter listens")

    async def end(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        await until(lambda: not self.running, "the daemon has ended")

    async def restart(self, number: int = signal.SIGKILL) -> None:
        await self.end(number)
        self.start()
        await self.ready()

    @property
    def exit_status(self) -> int | None:
        """The status of the daemon that was started last, None while it runs."""
        return None if self._process is None else self._process.poll()

    def kill_starter(self) -> None:
        assert self._starter is not None, "it was started"
        self._starter.kill()
        self._starter.wait(PATIENCE)
        self.socket.unlink()

    async def stop(self) -> None:
        """Stop it, and then the starter; fail where something of an evaluation is left."""
        self.interrupt()
        await until(lambda: not self.running, "the daemon stops")
        assert self.exit_status == -signal.SIGTERM, self.log
        assert self.remains() == []
        self._end_starter()
        self.check_log()

    def remove(self) -> None:
        """See to it that nothing at all is left."""
        self._end_starter()
        shutil.rmtree(self._starter_folder, ignore_errors=True)
        super().remove()

    def _end_starter(self) -> None:
        if self._starter is not None and self._starter.poll() is None:
            self._starter.terminate()
            self._starter.wait(PATIENCE)


async def start_kept(case: RepositoryTestCase, daemon: KeptDaemon) -> None:
    """Start a daemon and its starter for one test, and a client of the daemon."""
    case.daemon = daemon
    case.addCleanup(daemon.remove)
    await daemon.start_starter()
    daemon.start()
    await daemon.ready()
    case.client = Client(daemon.url)
    case.addCleanup(case.client.close)


class KeptDaemonTestCase(DaemonTestCase):
    """Tests that share a daemon and a starter: each may end the daemon and start it again."""

    daemon: KeptDaemon

    def make_daemon(self) -> KeptDaemon:
        return KeptDaemon(self.configuration)

    async def start_daemon(self) -> None:
        if not self.daemon.socket.exists():  # not yet, or because a test has killed it
            await self.daemon.start_starter()
        self.daemon.start()
