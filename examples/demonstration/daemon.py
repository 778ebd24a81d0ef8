"""The daemon as a child process: start it, wait for it, stop it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import treq
from twisted.internet import reactor
from twisted.internet.error import ConnectError
from twisted.internet.task import deferLater

from demonstration.sandbox import NONE, settings_for_python, why_none
from demonstration.unprivileged import give, user_options

START_SECONDS = 120.0
STOP_SECONDS = 60.0

CONFIGURATION = """\
# The repository of the demo is a directory of this machine.
[repositories]
protocols = ["file"]

# The page shows the evaluations for a day.
[evaluations]
retain = 86_400
"""


class DemonstrationError(Exception):
    """A fault that ends the demo; the message is for people."""


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Daemon:
    """A ``tawebeval serve`` that runs during a ``with`` statement."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder`` for everything that the daemon writes."""
        self.folder = folder
        self.log = folder / "daemon.log"
        self.configuration = folder / "tawebeval.toml"
        self.base_url = ""
        self.without_sandbox: str | None = None
        """Why evaluators run without a sandbox; None if they run in one."""

    def __enter__(self) -> Daemon:
        """Start the process, without waiting until it answers."""
        tawebeval = Path(sys.executable).with_name("tawebeval")
        if not tawebeval.exists():
            raise DemonstrationError(
                f"{tawebeval} does not exist. Run `make demo`, which installs tawebeval in .venv."
            )
        environment = {**os.environ, **self._places()}
        self.configuration.write_text(CONFIGURATION + settings_for_python(True), encoding="utf-8")
        self.without_sandbox = why_none(tawebeval, self.configuration, environment)
        if self.without_sandbox is not None:
            text = CONFIGURATION + NONE + settings_for_python(False)
            self.configuration.write_text(text, encoding="utf-8")
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        command = [
            str(tawebeval),
            "serve",
            *user_options(),
            "--config",
            str(self.configuration),
            "--listen",
            f"tcp:{port}:interface=127.0.0.1",
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def _places(self) -> dict[str, str]:
        """Make the daemon's directories, and return the variables that name them."""
        places = {}
        for name in ("STATE_DIRECTORY", "CACHE_DIRECTORY"):
            place = self.folder / name.partition("_")[0].lower()
            place.mkdir()
            give(place)
            places[name] = str(place)
        return places

    def __exit__(self, *_: object) -> None:
        """Stop the process; kill it after ``STOP_SECONDS``."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise DemonstrationError(
                f"The daemon did not stop within {STOP_SECONDS:.0f} s.\n{self.log_tail()}"
            ) from None

    def wait(self) -> None:
        """Wait until the process ends. Raises: DemonstrationError; KeyboardInterrupt on Ctrl-C."""
        self._process.wait()
        raise DemonstrationError(f"The daemon has ended.\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the daemon's log."""
        lines = self.log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join(["The end of its log:", *(f"    {line}" for line in lines)])

    async def answering(self) -> None:
        """Wait until ``GET /health`` answers 200."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DemonstrationError(f"The daemon did not start.\n{self.log_tail()}")
            try:
                response = await treq.get(f"{self.base_url}/health", timeout=START_SECONDS)
                await treq.content(response)
            except ConnectError:
                pass
            else:
                if response.code == 200:
                    return
            await deferLater(reactor, 0.05)
        raise DemonstrationError(
            f"The daemon did not answer within {START_SECONDS:.0f} s.\n{self.log_tail()}"
        )
