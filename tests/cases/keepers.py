"""A real keeper of evaluators in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tawebeval.linux import keeper
from tests.cases.patience import PATIENCE


class KeeperProcess:
    """A running keeper with a socket in a new directory; `grace` in seconds."""

    def __init__(self, grace: float = keeper.REAP_DELAY_SECONDS, open_files: int = 0) -> None:
        # Not below trial's: the path of a socket has 107 bytes at most.
        self._directory = tempfile.mkdtemp(prefix="tawebeval-starter-")
        self.path = os.path.join(self._directory, "socket")
        argv = [
            sys.executable,
            "-I",
            "-S",
            keeper.__file__,
            keeper.PROCESS_NAME,
            self.path,
            str(grace),
        ]
        if open_files:
            argv = ["/usr/bin/prlimit", f"--nofile={open_files}", *argv]
        self.process = subprocess.Popen(argv, env={})
        deadline = time.monotonic() + PATIENCE
        while not os.path.exists(self.path):
            assert self.process.poll() is None, "the keeper does not start"
            assert time.monotonic() < deadline, "the keeper does not listen"
            time.sleep(0.002)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self.process.pid

    def kill(self) -> None:
        """Kill the keeper alone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the keeper, if it runs, with the processes of its bundles; remove its socket."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)
        shutil.rmtree(self._directory, ignore_errors=True)
