"""git, run for a stranger: hardened, never in the reactor's thread.

Nothing of git's usual configuration, environment, hooks or helpers takes part
(git(1), git-config(1)), and whatever URL or name a client gave comes after
`--end-of-options`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.error import ProcessTerminated
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from tawebeval import utf8
from tawebeval.credentials import Login
from tawebeval.errors import EvaluationError
from tawebeval.gitbox import COMPLAINT, JUST_READ, Box, NoBox, Reach
from tawebeval.gitwords import hindrance, is_starved
from tawebeval.hosts import SSH
from tawebeval.process import ChildProcess, Spawner
from tawebeval.signals import Latch, completed

PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where git and what it starts are looked for."""

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
    "core.autocrlf": "false",
    "core.symlinks": "true",
    "core.fileMode": "true",
}

_MEMORY = 2**30
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

    def __init__(
        self,
        kill: Callable[[ChildProcess], object],
        received: Callable[[bytes], object] | None,
        login: Login | None,
    ) -> None:
        self._kill = kill
        self.ended: Latch[Outcome] = Latch()
        self.refused: EvaluationError | None = None
        self._received = received
        self._login = login
        self._margin = login.longest if login is not None else 0
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
                self.kill()
            return
        limit = _STDOUT if childFD == 1 else _STDERR + self._margin
        self._printed[childFD] = utf8.tail(self._printed[childFD] + data, limit)

    def kill(self) -> None:
        """End it, with all that it has started."""
        self._kill(self.child)

    def processExited(self, reason: Failure) -> None:
        self.child.signal_group(signal.SIGKILL)
        self.child.read_the_rest()

    def processEnded(self, reason: Failure) -> None:
        status = 0
        if isinstance(reason.value, ProcessTerminated):
            status = -1 if reason.value.exitCode is None else reason.value.exitCode
        stdout = self._printed[1].decode("utf-8", "replace")
        self.ended.set(Outcome(status, stdout, self._complaint()))

    def _complaint(self) -> str:
        """Return what is on stderr, without secrets."""
        text = self._printed[2].decode("utf-8", "replace")
        if self._login is not None:
            text = self._login.scrub(text)
            if len(self._printed[2]) > _STDERR:
                # It may begin in the midst of a password.
                text = text[self._margin :]
        clean = _USERINFO.sub("", text).strip()
        return utf8.tail(clean.encode(), _STDERR).decode()


@contextmanager
def _told(login: Login | None) -> Iterator[int | None]:
    """Give the descriptor from which a login can be read, once; None without one."""
    if login is None:
        yield None
        return
    descriptor, writing = os.pipe()
    try:
        try:
            os.write(writing, login.answer)
        finally:
            os.close(writing)
        yield descriptor
    finally:
        os.close(descriptor)


def _followed_by(commands: Iterable[Sequence[str]]) -> Sequence[str]:
    """Return what to put in front of a command that others follow.

    It is a shell for which the first is a list of words: nothing of a client's is in its script.
    """
    script = "".join(f" && printf '\\0' && {shlex.join(command)}" for command in commands)
    return ("sh", "-c", f'"$@"{script}', "sh") if script else ()


@attrs.frozen
class Git:
    """Runs git commands; `protocols` are those over which it may fetch.

    Each process of a command may take `memory` bytes.
    """

    _clock: Any
    _spawn: Spawner
    _protocols: Sequence[str]
    _memory: int = _MEMORY
    _box: Box = attrs.field(factory=NoBox)

    async def __call__(
        self,
        repository: Path,
        *arguments: str,
        then: Sequence[Sequence[str]] = (),
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        largest: int | None = None,
        received: Callable[[bytes], object] | None = None,
        login: Login | None = None,
        source: str | None = None,
        reach: Reach = JUST_READ,
    ) -> Outcome:
        """Run git in the bare repository `repository`.

        `then` are commands that follow in the same sandbox, each if the one before it has ended
        well, of which a NUL in stdout tells. The outcome is that of the last that was run.

        After `timeout` seconds, and when the waiting is cancelled, it is killed with all
        that it has started. No file that it writes becomes longer than `largest` bytes.
        `received` is given what it prints, in place of the outcome; when that raises
        EvaluationError git is killed, and the error raised here. `login` is what it tells the
        one server that it is for, `source` the path of the repository that it serves to itself.
        `reach` is what it sees and does beyond reading `repository`. Raises EvaluationError
        when git's memory does not suffice.
        """
        command = _Command(self._box.kill, received, login)
        argv = ["prlimit", f"--data={self._memory}", "--core=0"]
        if largest is not None:
            argv.append(f"--fsize={largest}")
        git = ["git", f"--git-dir={repository}"]
        for setting, value in _SETTINGS.items():
            git += ["-c", f"{setting}={value}"]
        argv += ["--", *_followed_by([*git, *one] for one in then), *git]
        with _told(login) as descriptor, self._box.enter(repository, reach) as (prefix, opened):
            if login is not None:
                # A shell that git starts reads it from a pipe: it stands nowhere else.
                helper = f'!f() {{ test "$1" = get && cat /proc/self/fd/{descriptor}; }}; f'
                argv += ["-c", f"credential.{login.origin}.helper={helper}"]
            self._spawn(
                command,
                [*prefix, *argv, *arguments],
                {**self._environment(), "GIT_DIR": str(repository), **(environment or {})},
                "/",
                descriptors=[one for one in (descriptor, opened) if one is not None],
            )
        timer = self._clock.callLater(timeout, command.kill) if timeout is not None else None
        try:
            outcome = await completed(command.ended, command.kill)
        finally:
            if timer is not None and timer.active():
                timer.cancel()
                timer = None
        if command.refused is not None:
            raise command.refused
        self._check(outcome, serving=source is not None)
        return attrs.evolve(outcome, timed_out=timer is not None)

    def _check(self, outcome: Outcome, *, serving: bool) -> None:
        """Raise EvaluationError where git was not what failed."""
        said = {"stderr": outcome.stderr}
        if outcome.status and outcome.stderr.startswith(COMPLAINT):
            raise EvaluationError("lost", "the sandbox of git could not be started", said)
        if outcome.status and (hindered := hindrance(outcome.stderr)):
            raise EvaluationError("lost", f"the cache cannot be written to: {hindered}", said)
        if outcome.status and is_starved(outcome.stderr, serving=serving):
            raise EvaluationError(
                "repository",
                f"git needs more than {self._memory} bytes of memory for this repository",
                {"limit": "repositories.memory", "value": self._memory, **said},
            )

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": PATH,
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
