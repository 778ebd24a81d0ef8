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

from tawebeval.core import text
from tawebeval.core.hosts import SSH
from tawebeval.deferreds import Latch, completed
from tawebeval.errors import EvaluationError
from tawebeval.git.credentials import Login
from tawebeval.git.gitwords import hindrance, is_starved, was_killed
from tawebeval.linux.child import ChildProcess, Spawner
from tawebeval.linux.launcher import OOM_SCORE_ADJ
from tawebeval.sandbox.commands import COMPLAINT, JUST_READ, Box, NoBox, Reach

PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where git and what it starts are looked for."""

_STDERR = 8 * 1024
_STDOUT = 64 * 1024
# Servers may send messages without end, and each costs the reactor's time.
_MOST_STDERR = 4 * 2**20  # bytes

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
_KIB, _BLOCK = 1024, 512  # bytes: what ulimit of sh(1) counts memory and files in
_SHELL = "tawebeval-git"  # as which the shell that begins a command complains
# As `launcher` does for evaluators.
_EXPOSE = (
    "read -r score </proc/self/oom_score_adj;"
    f' [ "$score" -ge {OOM_SCORE_ADJ} ] || echo {OOM_SCORE_ADJ} >/proc/self/oom_score_adj'
)
_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")


@attrs.frozen
class Outcome:
    """How a git command ended; `status` is -N after the signal N.

    `stderr` is the end of what git said, without credentials and the path of the cache;
    `is_whole` is whether nothing was before it.
    """

    status: int
    stdout: str
    stderr: str
    timed_out: bool = False
    is_whole: bool = True


class _Command(ProcessProtocol):
    """Gathers what a git command prints, the end of it if it is much.

    `cache` is the directory whose path is left out.
    """

    child: ChildProcess

    def __init__(
        self,
        kill: Callable[[ChildProcess], object],
        received: Callable[[bytes], object] | None,
        login: Login | None,
        cache: Path,
    ) -> None:
        self._kill = kill
        self.ended: Latch[Outcome] = Latch()
        self.refused: EvaluationError | None = None
        self._received = received
        self._login = login
        self._cache = f"{cache}/"
        self._margin = login.longest if login is not None else 0
        self._printed = {1: b"", 2: b""}
        self._size = {1: 0, 2: 0}  # bytes that were printed

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
        self._size[childFD] += len(data)
        if self._size[2] > _MOST_STDERR and self.refused is None:
            self.refused = EvaluationError(
                "repository",
                f"git and the server printed more than {_MOST_STDERR >> 20} MiB of messages",
            )
            self.kill()
        self._printed[childFD] = text.tail(self._printed[childFD] + data, limit)

    def kill(self) -> None:
        """End it, with all that it has started."""
        self._kill(self.child)

    def processExited(self, reason: Failure) -> None:
        self.child.signal_group(signal.SIGKILL)
        self.child.read_the_rest()

    def processEnded(self, reason: Failure) -> None:
        status = 0
        if isinstance(reason.value, ProcessTerminated):
            status = reason.value.exitCode or -(reason.value.signal or 0)
        stdout = self._printed[1].decode("utf-8", "replace")
        is_whole = self._size[2] == len(self._printed[2]) <= _STDERR
        self.ended.set(Outcome(status, stdout, self._complaint(), is_whole=is_whole))

    def _complaint(self) -> str:
        """Return what is on stderr, without secrets and the path of the cache."""
        stderr = self._printed[2].decode("utf-8", "replace").replace(self._cache, "")
        if self._login is not None:
            stderr = self._login.scrub(stderr)
            if len(self._printed[2]) > _STDERR:
                # It may begin in the midst of a password.
                stderr = stderr[self._margin :]
        clean = _USERINFO.sub("", stderr).strip()
        return text.tail(clean.encode(), _STDERR).decode()


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

    Each process of a command may take `memory` bytes. It enters groups by writing "0" to the files
    `entry`, and its nice value is higher than the daemon's by `niceness`.
    """

    _clock: Any
    _spawn: Spawner
    _protocols: Sequence[str]
    _memory: int = _MEMORY
    _box: Box = attrs.field(factory=NoBox)
    _entry: Sequence[str] = ()
    _niceness: int = 0

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
        command = _Command(self._box.kill, received, login, repository.parent)
        git = ["git", f"--git-dir={repository}"]
        for setting, value in _SETTINGS.items():
            git += ["-c", f"{setting}={value}"]
        argv = [*_followed_by([*git, *one] for one in then), *git]
        with _told(login) as descriptor, self._box.enter(repository, reach) as (prefix, opened):
            if login is not None:
                # A shell that git starts reads it from a pipe: it stands nowhere else.
                helper = f'!f() {{ test "$1" = get && cat /proc/self/fd/{descriptor}; }}; f'
                argv += ["-c", f"credential.{login.origin}.helper={helper}"]
            self._spawn(
                command,
                [*self._bounded(largest), *prefix, *argv, *arguments],
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
        outcome = attrs.evolve(outcome, timed_out=timer is not None)
        self._check(outcome, serving=source is not None)
        return outcome

    def _bounded(self, largest: int | None) -> Sequence[str]:
        """Return what to put in front of a command and its sandbox: a shell that sets limits.

        What the shell does holds for the command, which the shell becomes.
        """
        limits = [("c", 0), ("d", self._memory // _KIB)]
        if largest is not None:
            limits.append(("f", -(-largest // _BLOCK)))
        entering = "".join(f"echo 0 >{shlex.quote(entry)}; " for entry in self._entry)
        bounds = "".join(f"ulimit -{letter} {value} && " for letter, value in limits)
        nice = f"nice -n {self._niceness} " if self._niceness else ""
        script = f'{{ {entering}{_EXPOSE}; }} 2>/dev/null; {bounds}exec {nice}"$@"'
        return "sh", "-c", script, _SHELL

    def _check(self, outcome: Outcome, *, serving: bool) -> None:
        """Raise EvaluationError where git was not what failed.

        A server can have git say whatever it likes, and so can a path. That is not alarming, and
        disks are tried anyway. Only what begins a command speaks first.
        """
        said = {"stderr": outcome.stderr}
        began = outcome.stderr if outcome.status and outcome.is_whole else ""
        if began.startswith(f"{_SHELL}: "):
            raise EvaluationError("lost", "git could not be started", said)
        if began.startswith(COMPLAINT):
            message = "the sandbox of git could not be started"
            raise EvaluationError("lost", message, said, is_alarming=not serving)
        if outcome.status and (hindered := hindrance(outcome.stderr)):
            message = f"git cannot use the disk: {hindered}"
            raise EvaluationError("lost", message, said, is_alarming=False)
        if was_killed(outcome.status, outcome.stderr) and not outcome.timed_out:
            message = "git was killed: the machine is short of memory, or its disk fails"
            raise EvaluationError("lost", message, said, is_alarming=False)
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
