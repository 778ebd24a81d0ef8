"""The daemon as a process of its own: start it, wait for it, stop it."""

from __future__ import annotations

import os
import shlex
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
from demonstration.unprivileged import SERVICE, give, is_root

START_SECONDS = 20.0
STOP_SECONDS = 15.0

CONFIGURATION = """\
# The repository of the demonstration is a folder of this machine.
[repositories]
protocols = ["file"]
"""


class DemonstrationError(Exception):
    """Something that ends the demonstration, in words for people."""


def free_port() -> int:
    """Find a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Daemon:
    """A ``twistd tawebeval`` that lives no longer than a ``with`` statement."""

    def __init__(self, folder: Path) -> None:
        """Prepare to run in a folder, where everything that it writes is kept."""
        self.folder = folder
        self.log = folder / "daemon.log"
        self.base_url = ""
        self.command: list[str] = []
        self.without_sandbox: str | None = None
        """Why evaluators run without a sandbox."""

    def __enter__(self) -> Daemon:
        """Start the process, without waiting until it answers."""
        twistd = Path(sys.executable).with_name("twistd")
        if not twistd.exists():
            raise DemonstrationError(
                f"There is no twistd beside {sys.executable}: is tawebeval installed there?"
            )
        environment = {**os.environ, **self._places()}
        configuration = self.folder / "tawebeval.toml"
        text = CONFIGURATION + (SERVICE if is_root() else "")
        configuration.write_text(text + settings_for_python(True), encoding="utf-8")
        doctor = twistd.with_name("tawebeval")
        self.without_sandbox = why_none(doctor, configuration, environment)
        if self.without_sandbox is not None:
            configuration.write_text(text + NONE + settings_for_python(False), encoding="utf-8")
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        self.command = [
            str(twistd),
            "-n",
            "--pidfile=",
            "tawebeval",
            "--config",
            str(configuration),
            "--listen",
            f"tcp:{port}:interface=127.0.0.1",
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def _places(self) -> dict[str, str]:
        """Make the daemon's directories; tell the variables that name them."""
        places = {}
        for name in ("STATE_DIRECTORY", "CACHE_DIRECTORY"):
            place = self.folder / name.partition("_")[0].lower()
            place.mkdir()
            give(place)
            places[name] = str(place)
        return places

    def __exit__(self, *_: object) -> None:
        """Ask the process to stop, and see to it that it does."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise DemonstrationError(
                f"The daemon did not stop within {STOP_SECONDS:.0f} s.\n{self.log_tail()}"
            ) from None

    @property
    def command_line(self) -> str:
        """The command as one would type it."""
        return shlex.join(["twistd", *self.command[1:]])

    def log_tail(self) -> str:
        """Give the last lines of the daemon's log."""
        lines = self.log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join(["The end of its log:", *(f"    {line}" for line in lines)])

    async def answering(self) -> None:
        """Wait until ``GET /health`` answers 200."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DemonstrationError(f"The daemon did not start.\n{self.log_tail()}")
            try:
                response = await treq.get(f"{self.base_url}/health", timeout=5)
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
