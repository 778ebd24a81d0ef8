"""The sandbox of git: bubblewrap again, for programs that are trusted more than what they read.

Git parses what strangers' servers and repositories send it. Should that ever make it do
something else, it is without privileges, behind a filter of system calls as evaluators are, and
sees the system's programs, read-only, and of the daemon nothing but the one repository that the
command is about. It may write there only if the command is to. Only a fetch has the network, and
one from this machine has the repository that it serves to itself instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import attrs

from tawebeval.linux.child import ChildProcess
from tawebeval.sandbox.bwrap import reopened, signal_inside, unprivileged

COMPLAINT = "bwrap: "
"""How the sandbox itself begins what it has to say, where it cannot be made."""

_TEMPORARY = 16 * 2**20  # bytes: git itself needs none
_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


@attrs.frozen
class Reach:
    """What a command can reach in a sandbox, besides reading its repository and the system.

    `readable` need not be there.
    """

    writable: Sequence[Path] = ()
    readable: Sequence[str] = ()
    network: bool = False


JUST_READ = Reach()


class Box(Protocol):
    """Runs commands in a sandbox, or in none."""

    def enter(
        self, repository: Path, reach: Reach
    ) -> AbstractContextManager[tuple[Sequence[str], int | None]]:
        """Give what to put in front of a command, and a descriptor that it needs to start."""

    def kill(self, child: ChildProcess) -> None:
        """Kill a command that was started so, with all that it has started."""


class NoBox:
    """Runs them as they are, with the rights of the daemon."""

    @contextmanager
    def enter(self, repository: Path, reach: Reach) -> Iterator[tuple[Sequence[str], int | None]]:
        """Give nothing."""
        yield (), None

    def kill(self, child: ChildProcess) -> None:
        """Kill the process group."""
        child.signal_group(signal.SIGKILL)


@attrs.frozen
class GitBox:
    """Runs commands of git in a sandbox.

    `program` is the path of bwrap, `filter` a descriptor of the filter of system calls,
    `shown` the arguments that show what programs need, `online` those for what they need besides
    to use a network. Each file that is shown makes the start longer.
    """

    program: str
    filter: int
    shown: Sequence[str]
    online: Sequence[str] = ()

    @contextmanager
    def enter(self, repository: Path, reach: Reach) -> Iterator[tuple[Sequence[str], int]]:
        """Give what to put in front of a command, and the descriptor that it needs to start."""
        filter_ = reopened(self.filter)
        try:
            yield self.argv(repository, reach, filter_), filter_
        finally:
            os.close(filter_)

    def argv(self, repository: Path, reach: Reach, filter_: int) -> Sequence[str]:
        """Return what to put in front of a command; `filter_` is a descriptor of the filter."""
        argv = [self.program, *unprivileged("git"), *(("--share-net",) if reach.network else ())]
        argv += ["--seccomp", str(filter_), *self.shown, "--proc", "/proc", "--dev", "/dev"]
        argv += ["--size", str(_TEMPORARY), "--tmpfs", "/tmp"]  # noqa: S108  (a path inside)
        if reach.network:
            argv += self.online
            argv += ["--ro-bind-try", _KNOWN_HOSTS, _KNOWN_HOSTS]
        for path in reach.readable:
            argv += ["--ro-bind-try", path, path]
        argv += ["--ro-bind", str(repository), str(repository)]
        for writable in reach.writable:
            argv += ["--bind", str(writable), str(writable)]
        for place in ("/proc", "/dev", "/"):
            argv += ["--remount-ro", place]
        return [*argv, "--chdir", "/", "--"]

    def kill(self, child: ChildProcess) -> None:
        """Kill what runs in the sandbox: when bwrap has ended nothing writes any more."""
        signal_inside(child, signal.SIGKILL)
