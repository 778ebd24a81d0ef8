"""A machine for tests and benchmarks: this one once more, under a systemd of its own.

It has its own processes, network, mounts and cgroups, and nothing that is done there is left
here. It starts in a second, needs root, and nothing that Debian does not bring anyway.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PORT = 8080
"""Where the installed service listens there."""

_PATIENCE = 120.0  # seconds for an answer, a program's start or its end
_LONG_PATIENCE = 1800.0  # seconds for an installation
_SYSTEM_PYTHON = "/usr/bin/python3"
_CLONE_NEWNET = 0x40000000
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Return what this machine lacks for another one, "" if there is nothing."""
    if os.geteuid() != 0:
        return "booting systemd needs root"
    if not Path("/lib/systemd/systemd").exists():
        return "there is no systemd here (Debian package systemd)"
    return "" if _cgroup2() else "there are no cgroups of version 2 here"


def _cgroup2() -> Path | None:
    """Return where the hierarchy of version 2 is."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


def wait_until(condition: Callable[[], Any], what: str, seconds: float = _PATIENCE) -> Any:
    """Wait for `condition()` to be true and return its value; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)
    return value


class Connection(http.client.HTTPConnection):
    """A connection to a port of a machine."""

    def __init__(self, machine: Machine, port: int) -> None:
        super().__init__("127.0.0.1", port, timeout=_PATIENCE)
        self._machine = machine

    def connect(self) -> None:
        """Connect from within."""
        with self._machine.network():
            super().connect()

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Connection:
        """Send a request, and wait for nothing."""
        self.request(method, path, body, headers)
        return self

    def answer(self) -> tuple[int, Any]:
        """Return the status and what the answer says in JSON; None if it says nothing."""
        response = self.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content else None


class Machine:
    """Runs from when it is made until `stop`; what is in the directory `layer` is there, too."""

    def __init__(self, layer: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tawebeval-machine-"))
        top = _cgroup2()
        assert top is not None
        self._group = top / self._folder.name
        self._group.mkdir()
        atexit.register(self.stop)
        boot = Path(__file__).with_name("boot")
        with (self._folder / "console").open("wb") as console:
            self._outside = subprocess.Popen(
                [
                    *("sh", "-c", 'echo $$ >"$0" && exec "$@"', self._group / "cgroup.procs"),
                    # Whatever ends these tests ends the machine.
                    *("setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork"),
                    *("--kill-child", "--propagation", "private", boot, self._folder, layer),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._first = wait_until(self._booted, "the machine has booted")
        except AssertionError:
            print((self._folder / "console").read_text(errors="replace"))
            raise

    def _booted(self) -> int:
        """Return the number here of the first process there, 0 if it is not ready."""
        assert self._outside.poll() is None, "the machine has ended"
        number = self._outside.pid
        with suppress(OSError, ValueError):
            first = int(Path(f"/proc/{number}/task/{number}/children").read_text())
            if Path(f"/proc/{first}/comm").read_text() == "systemd\n":
                self._first = first
                state = self.attempt("systemctl", "is-active", "multi-user.target")
                return first if state.returncode == 0 else 0
        return 0

    def stop(self) -> None:
        """End it, and leave nothing of it here."""
        atexit.unregister(self.stop)
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._outside.wait()
        groups = [path for path, _, _ in os.walk(self._group)]
        for group in reversed(groups):
            wait_until(lambda group=group: _removed(Path(group)), f"{group} is empty")
        shutil.rmtree(self._folder)

    def _processes(self) -> Iterator[int]:
        """Yield the first process there, with which all others end."""
        number = self._outside.pid
        with suppress(OSError):
            yield from map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split())

    @contextmanager
    def network(self) -> Iterator[None]:
        """Within it sockets are made in the machine's network; for this thread alone."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self._first}/ns/net") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())

    def path(self, path: str) -> Path:
        """Return where a path of the machine is to be found here; links in it lead astray."""
        return Path(f"/proc/{self._first}/root{path}")

    def attempt(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command there, as root, and return how it has ended."""
        return subprocess.run(
            self._inside(*command),
            input=text,
            capture_output=True,
            text=True,
            timeout=_LONG_PATIENCE,
        )

    def run(self, *command: str, text: str = "") -> str:
        """Run a command there, which has to succeed; return what it has printed."""
        done = self.attempt(*command, text=text)
        if done.returncode:
            raise AssertionError(f"{command} failed:\n{done.stdout}{done.stderr}\n{self.journal()}")
        return done.stdout.strip()

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command there, and do not wait for it."""
        return subprocess.Popen(
            self._inside(*command), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _inside(self, *command: str) -> list[str]:
        entering = ("nsenter", "--target", str(self._first), "--all", "--")
        return [*entering, "env", "-i", _PATH, "LANG=C.UTF-8", *command]

    def journal(self, *options: str) -> str:
        """Return what the machine has logged."""
        self.attempt("journalctl", "--sync")
        return self.attempt("journalctl", "--no-pager", "--output=cat", *options).stdout

    def write(self, path: str, text: str) -> None:
        """Write a file there, in a directory that is made if it is missing."""
        self.run("sh", "-c", 'mkdir -p "${0%/*}" && cat >"$0"', path, text=text)

    def copy(self, folder: Path, path: str) -> None:
        """Copy a directory of this machine to a place there."""
        shutil.copytree(folder, self.path(path))

    def connection(self, port: int = PORT) -> Connection:
        """Return a connection, which is made with the first request."""
        return Connection(self, port)


@functools.cache
def installed() -> Machine:
    """Return a machine on which `scripts/install` has installed this checkout."""
    with tempfile.TemporaryDirectory(prefix="tawebeval-layer-") as layer:
        install = [_SYSTEM_PYTHON, ROOT / "scripts" / "install", "--pip", sys.executable]
        done = subprocess.run(
            [*install, "--destdir", layer], capture_output=True, text=True, timeout=_LONG_PATIENCE
        )
        if done.returncode:
            raise AssertionError(done.stdout + done.stderr)
        Path(layer).chmod(0o755)  # it becomes that of /
        machine = Machine(Path(layer))
        machine.run("systemd-sysusers", "tawebeval.conf")
        return machine


def _enter(network: int) -> None:
    if _libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()
