"""The sandbox of git and of imports: bubblewrap, for trusted programs that read strangers' data.

Git parses what strangers' servers and repositories send. In case that subverts it, git has no
privileges, the same system call filter as evaluators, and sees only the system's programs,
read-only, and the one repository of the command, writable only for commands that write. Only a
fetch has the network; a fetch from this machine sees the source repository instead.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import attrs

from tawebeval.linux.child import ChildProcess
from tawebeval.sandbox.bubblewrap import (
    build_filter_options,
    build_isolation_options,
    reopen_seccomp_filters,
    signal_sandbox,
)

BWRAP_ERROR_PREFIX = "bwrap: "
"""The beginning of bwrap's own error messages."""

_TEMPORARY = 16 * 2**20  # bytes: git itself needs none
_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


@attrs.frozen
class SandboxAccess:
    """The access of a command, besides reading its repository, if it has one, and the system.

    `writable_paths` are paths in the repository, `readable_paths` other paths, which need not
    exist.
    """

    writable_paths: Sequence[Path] = ()
    readable_paths: Sequence[str] = ()
    has_network: bool = False


READ_ONLY_ACCESS = SandboxAccess()


class HelperSandbox(Protocol):
    """A way to run commands, in a sandbox or without one."""

    def prepare_command(
        self, repository: Path | None, access: SandboxAccess
    ) -> AbstractContextManager[tuple[Sequence[str], Sequence[int]]]:
        """Yield the arguments before a command, and the descriptors that its start needs."""

    def kill_command(self, child: ChildProcess) -> None:
        """Kill a command and its descendants."""


class NoHelperSandbox:
    """Commands with the rights of the daemon."""

    @contextmanager
    def prepare_command(
        self, repository: Path | None, access: SandboxAccess
    ) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
        """Yield nothing."""
        yield (), ()

    def kill_command(self, child: ChildProcess) -> None:
        """Kill the process group."""
        child.signal_group(signal.SIGKILL)


@attrs.frozen
class BubblewrapHelperSandbox:
    """Commands in a sandbox of bubblewrap.

    `bwrap_path` is the path of bwrap, `filter_descriptors` are those of the system call filters.
    `system_options` are the bwrap options that show what programs need, `network_options` those for
    what a network needs besides. Each shown file makes the start longer.
    """

    bwrap_path: str
    filter_descriptors: tuple[int, ...]
    system_options: Sequence[str]
    network_options: Sequence[str] = ()

    @contextmanager
    def prepare_command(
        self, repository: Path | None, access: SandboxAccess
    ) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
        """Yield the arguments before a command, and the descriptors that its start needs."""
        with ExitStack() as opened:
            filters = reopen_seccomp_filters(self.filter_descriptors, opened)
            yield self.build_argv_prefix(repository, access, filters), filters

    def build_argv_prefix(
        self, repository: Path | None, access: SandboxAccess, filters: Sequence[int]
    ) -> Sequence[str]:
        """Return the arguments before a command; `filters` are the descriptors of the filters."""
        argv = [
            self.bwrap_path,
            *build_isolation_options("git"),
            *(("--share-net",) if access.has_network else ()),
        ]
        argv += [
            *build_filter_options(filters),
            *self.system_options,
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        argv += ["--size", str(_TEMPORARY), "--tmpfs", "/tmp"]  # noqa: S108  (a path inside)
        if access.has_network:
            argv += self.network_options
            argv += ["--ro-bind-try", _KNOWN_HOSTS, _KNOWN_HOSTS]
        for path in access.readable_paths:
            argv += ["--ro-bind-try", path, path]
        if repository is not None:
            argv += ["--ro-bind", str(repository), str(repository)]
        for writable in access.writable_paths:
            argv += ["--bind", str(writable), str(writable)]
        for place in ("/proc", "/dev", "/"):
            argv += ["--remount-ro", place]
        return [*argv, "--chdir", "/", "--"]

    def kill_command(self, child: ChildProcess) -> None:
        """Kill the processes in the sandbox; bwrap ends after the last of them."""
        signal_sandbox(child, signal.SIGKILL)
