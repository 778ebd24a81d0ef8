"""The sandbox: bubblewrap (bwrap(1)), without any privilege.

What runs in it has namespaces of its own for users, processes, mounts, the network, IPC, the
host's name and cgroups; no capability, and no way to get one; a filter of system calls; and a
file system with nothing in it but

/usr, /bin, ...         the system, read-only, and a few files of /etc that programs there need
/evaluation/tree        the commit's tree, writable; the evaluator runs in a directory of it
/evaluation/submission  what was sent, read-only
/evaluation/tmp         TEMPORARY_DIRECTORY
/evaluation/home        HOME
/tmp, /dev/shm          directories of the workspace: on the disk, so that one limit is for all
/init                   the first process

and what the operator lets in. When its first process ends, or the daemon, the kernel ends all.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path

import attrs

from tawebeval.config import Limits
from tawebeval.core.checkout import Checkout
from tawebeval.errors import EvaluationError
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.child import ChildProcess
from tawebeval.linux.diskfaults import naming
from tawebeval.linux.launcher_client import FIRST, Launch
from tawebeval.linux.reaper import Orphans
from tawebeval.sandbox.base import Cell, Exit
from tawebeval.sandbox.bwrap import reopened, signal_inside, unprivileged
from tawebeval.sandbox.overlay import Trees
from tawebeval.sandbox.workspace import View, Workspace

# The first process, whose end is that of all others, waits for the command. The evaluator is the
# same user and could change it by /proc/1/mem, or read what it has of secrets, if it were not a
# program that this user may execute and not read: its processes are closed to others (execve(2)).
# What it says itself of the command's end goes nowhere, and stdin is of the sandbox's own `/dev`.
# Before the command it notes that it could make a process for it: its status does not tell. No
# process has the descriptor for that once it has begun.
_INIT = "/init"
_NOTES = FIRST + 3  # the descriptor for that
_BEGUN = '"begun"'
_WAIT = (
    "exec 3>&2 2>/dev/null </dev/null;"
    f""" (echo '{{ {_BEGUN}: true }}' >&{_NOTES}; exec "$@" 2>&3 3>&- {_NOTES}>&-); exit $?"""
)

_ROOM = Path("/evaluation")  # where an evaluator finds its workspace
_ROOT = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

# Of /etc: how programs find their libraries and one another ...
_ETC_PROGRAMS = ("alternatives", "ld.so.*")
# ... what else some of them read, and what time it is.
_ETC = (
    *("debian_version", "fonts", "java-*", "localtime", "magic", "mime.types", "os-release"),
    *("perl", "python3*", "timezone"),
)
# With a network: how they find hosts, and whom they trust.
_ETC_NETWORK = (
    *("ca-certificates", "gai.conf", "hosts", "nsswitch.conf", "protocols", "resolv.conf"),
    *("services", "ssl/certs", "ssl/openssl.cnf"),
)
# What bwrap, as shells do, adds to a signal to make an exit status of it; and the signals.
_SIGNALLED = 128
_SIGNALS = frozenset(map(int, signal.valid_signals()))
_USERS = b"evaluator:x:1000:1000::/evaluation/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
_GROUPS = b"evaluator:x:1000:\nnogroup:x:65534:\n"


def system_view(accounts: Path, *, network: bool) -> Iterator[str]:
    """Yield the arguments that show the system, read-only. Blocks.

    `accounts` is the directory of `write_accounts`.
    """
    yield from programs_view(accounts)
    yield from _etc(_ETC)
    if network:
        yield from network_view()


def programs_view(accounts: Path) -> Iterator[str]:
    """Yield those of them without which hardly a program runs. Blocks."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _ROOT:
        path = Path("/", name)
        if path.is_symlink():  # into /usr, as usual today
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from _etc(_ETC_PROGRAMS)
    for name in ("passwd", "group"):
        yield from ("--ro-bind", str(accounts / name), f"/etc/{name}")


def network_view() -> Iterator[str]:
    """Yield those by which programs use a network. Blocks."""
    yield from _etc(_ETC_NETWORK)


def _etc(patterns: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        for found in sorted(glob(f"/etc/{pattern}")):
            yield from ("--ro-bind-try", os.path.realpath(found), found)


def write_accounts(directory: Path) -> None:
    """Write what the sandbox has of its own. Blocks. Raises OSError with the path.

    These are users and groups, none of the machine's, and the program of the first process: a
    shell that may not be read.
    """
    new = directory / "init.new"
    shell = Path("/bin/sh").read_bytes()
    with naming(new):
        new.write_bytes(shell)
        new.chmod(0o111)
        new.replace(directory / "init")
    for name, content in (("passwd", _USERS), ("group", _GROUPS)):
        with naming(directory / name):
            (directory / name).write_bytes(content)


@attrs.frozen
class Descriptors:
    """Files that are open for bwrap: two to read from, and one to write to.

    `filter` is the filter of system calls, `environment` the evaluator's, in the words of
    bwrap's arguments. In `status` it notes what becomes of the sandbox.
    """

    filter: int
    environment: int
    status: int

    def __iter__(self) -> Iterator[int]:
        # The last one once more: bwrap hands on what is not its own.
        return iter((self.filter, self.environment, self.status, self.status))


_GIVEN = Descriptors(FIRST, FIRST + 1, FIRST + 2)
"""The numbers that bwrap has for them; `_NOTES` follows."""


@attrs.define
class Bubblewrap:
    """Makes cells of bubblewrap.

    `program` is the path of bwrap, `accounts` the directory of `write_accounts`, `filter` a
    descriptor of the filter of system calls, `shown` the arguments of `system_view`, `readable`
    what else may be read, `trees` what makes the trees that evaluators may write to.
    """

    program: str
    accounts: Path
    filter: int
    shown: Sequence[str]
    readable: Sequence[str]
    network: bool
    trees: Trees
    limits: Limits
    cgroups: Cgroups
    orphans: Orphans

    def cell(self, workspace: Workspace, checkout: Checkout) -> Cell:
        """Return what the evaluator of this evaluation is to run in."""
        return BubblewrapCell(workspace, checkout, self)

    def argv(self, view: View, directory: Path, command: Sequence[str]) -> Sequence[str]:
        """Return what runs `command` in `directory`, a path inside."""
        argv = [
            self.program,
            *unprivileged("evaluation"),
            "--as-pid-1",
            *(("--share-net",) if self.network else ()),
        ]
        argv += ["--seccomp", str(_GIVEN.filter)]
        argv += ["--json-status-fd", str(_GIVEN.status)]
        argv += ["--args", str(_GIVEN.environment)]
        argv += [*self.shown, "--proc", "/proc", "--dev", "/dev"]
        # What the operator shows may lie below /tmp, and hides nothing of the evaluation's.
        own = [pair for pair in view.writable if pair[0].is_relative_to(view.root)]
        for inside, outside in view.writable:
            if (inside, outside) not in own:
                argv += ["--bind", str(outside), str(inside)]
        for path in self.readable:
            argv += ["--ro-bind", path, path]
        for inside, outside in view.readable:
            argv += ["--ro-bind", str(outside), str(inside)]
        for inside, outside in own:
            argv += ["--bind", str(outside), str(inside)]
        argv += ["--ro-bind", str(self.accounts / "init"), _INIT]
        for place in ("/proc", "/dev", "/"):
            argv += ["--remount-ro", place]
        argv += ["--chdir", str(directory)]
        return [*argv, "--", _INIT, "-c", _WAIT, _INIT, *command]


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


class BubblewrapCell(Cell):
    """One run of bubblewrap."""

    def __init__(self, workspace: Workspace, checkout: Checkout, sandbox: Bubblewrap) -> None:
        super().__init__(workspace, checkout, sandbox)
        self._sandbox = sandbox
        self._opened = contextlib.ExitStack()
        self._descriptors: Descriptors | None = None

    def _seen(self) -> View:
        return self.workspace.elsewhere(_ROOM)

    def launch(self, command: str, environment: Mapping[str, str], directory: Path) -> Launch:
        """Return what runs the command in the sandbox, by the shell. Raises OSError.

        bwrap has another environment: the evaluator could read it, and so could whatever it runs,
        also if it hides its own.
        """
        opened = self._open()
        words = ["--clearenv"]
        for name, value in environment.items():
            words += ["--setenv", name, value]
        os.pwrite(opened.environment, os.fsencode("\0".join(words)), 0)
        view = self._seen()
        inside = [*self._limiter(), "/bin/sh", "-c", command]
        argv = self._sandbox.argv(view, view.of(directory), inside)
        return Launch(argv, {}, "/", tuple(opened))

    def _open(self) -> Descriptors:
        """Open, once, what there is for bwrap."""
        if self._descriptors is None:
            filter_ = reopened(self._sandbox.filter)
            self._opened.callback(os.close, filter_)
            files = []
            for name in ("environment", "status"):
                files.append(os.memfd_create(name, os.MFD_CLOEXEC))
                self._opened.callback(os.close, files[-1])
            self._descriptors = Descriptors(filter_, *files)
        return self._descriptors

    def _limiter(self) -> Sequence[str]:
        """Return what sets limits within, where the user's processes are those of this run."""
        bounds = self._bounds(apart=True).items()
        options = (f"--{name}={soft}:{_shown(hard)}" for name, (soft, hard) in bounds)
        return ["/usr/bin/prlimit", *options, "--"]

    def signal(self, child: ChildProcess, number: int) -> None:
        """Send a signal to those in the sandbox."""
        signal_inside(child, number)

    async def end(self) -> None:
        """End the first process in the sandbox, should it outlive bwrap; with it all others end."""
        told = re.search(rb'"child-pid": (\d+)', self._told())
        if told:
            await self._orphans.gone(int(told[1]))

    def exit(self, status: int | None, number: int | None) -> Exit:
        """Return how the evaluator ended, of which bwrap tells as shells do."""
        told = self._told()
        if number is not None:  # bwrap itself was killed
            if b'"child-pid"' in told:
                return Exit(None, number)
            raise EvaluationError("lost", f"the sandbox was ended by signal {number} at its start")
        if b'"exit-code"' not in told:
            raise EvaluationError(
                "lost", "the sandbox could not be started", {"status": status or 0}
            )
        if _BEGUN.encode() not in told:
            what = "no process could be made for the evaluator in its sandbox"
            raise EvaluationError("lost", what, {"status": status or 0})
        if status is not None and status - _SIGNALLED in _SIGNALS:
            return Exit(None, status - _SIGNALLED)
        return Exit(status or 0)

    def _told(self) -> bytes:
        """Return what bwrap has noted: objects of JSON."""
        return os.pread(self._descriptors.status, 4096, 0) if self._descriptors else b""

    def close(self) -> None:
        """Remove what the start has made. Blocks. Raises OSError."""
        self._descriptors = None
        self._opened.close()
        super().close()
