"""git, run for a stranger: one command at a time, hardened, never in the reactor's thread.

Nothing of git's usual configuration, environment, hooks or helpers takes part
(git(1), git-config(1)), and whatever URL or name a client gave comes after
`--end-of-options`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.error import ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval.errors import EvaluationError
from tawebeval.hosts import SSH
from tawebeval.process import ChildProcess, Spawner
from tawebeval.signals import Latch, completed

_STDERR = 8 * 1024
_STDOUT = 64 * 1024

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    # What is larger is never in memory as a whole, but goes through it.
    "core.bigFileThreshold": "16m",
    "credential.helper": "",
    "fetch.fsckObjects": "true",
    "transfer.fsckObjects": "true",
    # Always a pack: it appears whole or not at all, unlike objects one by one.
    "fetch.unpackLimit": "1",
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "http.followRedirects": "false",
    "protocol.version": "2",
    "init.defaultBranch": "main",
    "core.autocrlf": "false",
    "core.symlinks": "true",
    "core.fileMode": "true",
}

_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")


@attrs.frozen
class Outcome:
    """How a git command ended; `status` is -1 after a signal.

    `stderr` is the end of what git said, with no credentials in it.
    """

    status: int
    stdout: str
    stderr: str
    timed_out: bool = False


class _Command(ProcessProtocol):
    """Gathers what a git command prints, the end of it if it is much."""

    child: ChildProcess

    def __init__(self, received: Callable[[bytes], object] | None) -> None:
        self.ended: Latch[Outcome] = Latch()
        self.refused: EvaluationError | None = None
        self._received = received
        self._printed = {1: b"", 2: b""}

    def makeConnection(self, transport: Any) -> None:
        self.child = transport
        super().makeConnection(transport)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD == 1 and self._received is not None:
            try:
                if self.refused is None:
                    self._received(data)
            except EvaluationError as error:
                self.refused = error
                self.child.signal_group(signal.SIGKILL)
            return
        limit = _STDOUT if childFD == 1 else _STDERR
        self._printed[childFD] = (self._printed[childFD] + data)[-limit:]

    def processExited(self, reason: Failure) -> None:
        self.child.signal_group(signal.SIGKILL)
        self.child.read_the_rest()

    def processEnded(self, reason: Failure) -> None:
        status = 0
        if isinstance(reason.value, ProcessTerminated):
            status = -1 if reason.value.exitCode is None else reason.value.exitCode
        stdout, stderr = (self._printed[fd].decode("utf-8", "replace") for fd in (1, 2))
        self.ended.set(Outcome(status, stdout, _USERINFO.sub("", stderr).strip()))


@attrs.frozen
class Git:
    """Runs git commands; `protocols` are those over which it may fetch."""

    _clock: Any
    _spawn: Spawner
    _protocols: Sequence[str]

    async def __call__(
        self,
        repository: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        largest: int | None = None,
        received: Callable[[bytes], object] | None = None,
    ) -> Outcome:
        """Run git in the bare repository `repository`.

        After `timeout` seconds, and when the waiting is cancelled, it is killed with all
        that it has started. No file that it writes becomes longer than `largest` bytes.
        `received` is given what it prints, in place of the outcome; when that raises
        EvaluationError git is killed, and the error raised here.
        """
        command = _Command(received)
        argv = ["git", f"--git-dir={repository}"]
        if largest is not None:
            argv = ["prlimit", f"--fsize={largest}", "--core=0", "--", *argv]
        for setting, value in _SETTINGS.items():
            argv += ["-c", f"{setting}={value}"]
        self._spawn(
            command, [*argv, *arguments], {**self._environment(), **(environment or {})}, "/"
        )

        def kill() -> None:
            command.child.signal_group(signal.SIGKILL)

        timer = self._clock.callLater(timeout, kill) if timeout is not None else None
        try:
            outcome = await completed(command.ended, kill)
        finally:
            if timer is not None and timer.active():
                timer.cancel()
                timer = None
        if command.refused is not None:
            raise command.refused
        return attrs.evolve(outcome, timed_out=timer is not None)

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LC_ALL": "C",
            "HOME": "/nonexistent",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/true",
            "GIT_SSH_COMMAND": SSH,
            "GIT_ALLOW_PROTOCOL": ":".join(self._protocols),
            "GIT_PROTOCOL_FROM_USER": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }
