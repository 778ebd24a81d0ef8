"""A cgroup as the kernel shows it: a directory of small files (cgroups(7)).

Everything here may raise OSError: a container shows its cgroups without the right to
write, a kernel lacks a controller, a group is still busy.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import attrs

# How long to wait for a group to become empty, in seconds: about one in all.
_WAITS = tuple(0.001 * 2**n for n in range(10))
_PASSES = 50  # the most looks for processes that were started while others were killed
_BATCH = 64  # the most pidfds that are open at once
_READ = 4096  # bytes: the kernel writes down a page at a time

_SYSTEMD = "/run/systemd/system"  # is there where systemd runs (sd_booted(3))
_PATIENCE = 10.0  # seconds for systemd to answer

_WAIT_FOR = frozenset({errno.EBUSY, errno.ENOTEMPTY})


class Kernel:
    """All that is done to groups, other than reading their files; tests have another."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def write(self, path: str, text: str) -> None:
        """Write to a file of a group; there has to be one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        except OSError as error:
            error.filename = path  # which only os.open knows by itself
            raise
        finally:
            os.close(descriptor)

    def make(self, path: str) -> None:
        """Make a group; the kernel puts its files there."""
        os.mkdir(path, 0o755)

    def remove(self, path: str) -> None:
        """Remove a group, which has to be empty; its files go with it."""
        os.rmdir(path)

    def give(self, path: str, owner: tuple[int, int]) -> None:
        """Make a group, or a file of one, a user's and a group of users'."""
        os.chown(path, *owner)

    def kill(self, pids: Collection[int], still: Callable[[], Collection[int]]) -> None:
        """Kill processes, of which only those in `still()` are meant.

        That is asked when they are held fast, so that none is killed who has got the number of
        one that has ended.
        """
        held = {}
        try:
            for pid in pids:
                with suppress(OSError):
                    held[pid] = os.pidfd_open(pid)
            for pid in held.keys() & still():
                with suppress(OSError):
                    signal.pidfd_send_signal(held[pid], signal.SIGKILL)
        finally:
            for descriptor in held.values():
                os.close(descriptor)

    def is_delegated(self, path: str) -> bool:
        """Tell whether systemd leaves the groups below one alone. Blocks, as long as systemd does.

        Without this, systemd takes the controllers away from there again when it likes, and ends
        the daemon when an evaluation meets its limit of memory (OOMPolicy=). To a user the rights
        of the files say the same, but for those of the user's own systemd, which marks nothing.
        """
        if not os.path.isdir(_SYSTEMD):
            return True
        with suppress(OSError):
            if not {"trusted.delegate", "user.delegate"}.isdisjoint(os.listxattr(path)):
                return True
        if os.geteuid() == 0:
            return False
        return "/user@" not in path or _unit_property(path, "Delegate") == "yes"

    def oom_policy(self, path: str) -> str:
        """Return what systemd does when the kernel kills for want of memory in or below a group.

        That is "stop" or "kill" where systemd ends the unit, and "" where nobody knows. Blocks, as
        long as systemd does.
        """
        return _unit_property(path, "OOMPolicy") if os.path.isdir(_SYSTEMD) else ""

    def systemd_run(self) -> str | None:
        """Return the command by which this user starts something under systemd.

        That is "" where the user has no systemd, and None where the machine has none.
        """
        if not os.path.isdir(_SYSTEMD):
            return None
        if os.geteuid() == 0:
            return "systemd-run"
        own = _runtime_directory()
        if not os.path.exists(f"{own}/systemd/private"):
            return ""
        known = os.environ.get("XDG_RUNTIME_DIR") == own
        return "systemd-run --user" if known else f"XDG_RUNTIME_DIR={own} systemd-run --user"


def _unit_property(path: str, name: str) -> str:
    """Return a property of the systemd unit that a group belongs to; "" if it is not known.

    Blocks, as long as systemd does.
    """
    # /…/user@UID.service/… are the units of a user's own systemd.
    before, users, below = path.partition("/user@")
    parts = below.split("/")[1:] if users else before.split("/")
    units = [part for part in parts if part.endswith((".service", ".scope"))]
    if not units:
        return ""
    options = ("--user",) if users else ()
    try:
        asked = subprocess.run(
            ["systemctl", *options, "show", "--value", f"--property={name}", units[-1]],
            env={**os.environ, "XDG_RUNTIME_DIR": _runtime_directory()},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def _runtime_directory() -> str:
    return f"/run/user/{os.geteuid()}"


@attrs.frozen
class Directory:
    """One group in one hierarchy, at `path`."""

    path: str
    kernel: Kernel = attrs.field(repr=False, eq=False)

    def __truediv__(self, name: str) -> Directory:
        return Directory(f"{self.path}/{name}", self.kernel)

    def read(self, name: str) -> str:
        """Return what a file of the group says.

        Without an object of Python's for the file, which asks the kernel twice as many things: all
        running groups are read again and again.
        """
        descriptor = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(lambda: os.read(descriptor, _READ), b"")).decode("ascii")
        finally:
            os.close(descriptor)

    def write(self, name: str, text: str) -> None:
        """Write to a file of the group; there has to be one."""
        self.kernel.write(f"{self.path}/{name}", text)

    def write_if_there(self, name: str, text: str) -> None:
        """Write to a file that not every kernel has."""
        with suppress(FileNotFoundError):
            self.write(name, text)

    def number(self, name: str) -> int | None:
        """Return a number that stands alone in a file; None without one."""
        with suppress(OSError, ValueError):
            return int(self.read(name))
        return None

    def counts(self, name: str) -> Mapping[str, int]:
        """Return the numbers of a file with a name and a number on each line."""
        found = {}
        with suppress(OSError):
            for line in self.read(name).splitlines():
                key, _, value = line.partition(" ")
                if value.isdecimal():
                    found[key] = int(value)
        return found

    def sum(self, name: str, figures: re.Pattern[str]) -> int | None:
        """Return the sum of the numbers that a pattern finds in a file; None where it has none."""
        with suppress(OSError):
            found = figures.findall(self.read(name))
            return sum(map(int, found)) if found else None
        return None

    def has(self, name: str) -> bool:
        """Tell whether the group has a file of this name."""
        return os.path.exists(f"{self.path}/{name}")

    def make(self) -> None:
        """Make the group."""
        self.kernel.make(self.path)

    def make_if_missing(self) -> None:
        """Make the group where it is not there."""
        with suppress(FileExistsError):
            self.make()

    def remove(self) -> None:
        """Remove the group, which has to be empty."""
        self.kernel.remove(self.path)

    def give(self, owner: tuple[int, int], *names: str) -> None:
        """Let a user make groups in this one, and write to those files of it that are named."""
        for path in (self.path, *(f"{self.path}/{name}" for name in names)):
            self.kernel.give(path, owner)

    def enter(self) -> None:
        """Move this process, with all of its threads, into the group."""
        self.write("cgroup.procs", "0")

    def entrance(self) -> str:
        """Return the file to which a process with a single thread writes "0" to get in.

        Version 1 has one for single threads. The other is for all threads of a process: for that
        the kernel keeps everybody from starting any, and waits some 15 ms until that is sure.
        """
        return f"{self.path}/{'tasks' if self.has('tasks') else 'cgroup.procs'}"

    def groups(self) -> list[Directory]:
        """Return the groups in this one."""
        with os.scandir(self.path) as entries:
            return [self / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def members(self) -> set[int]:
        """Return the processes in the group, those in groups below it not among them."""
        # 0 is one that is outside of the process namespace.
        return set(map(int, self.read("cgroup.procs").split())) - {0}

    def kill_members(self) -> None:
        """Kill the processes in the group, but not this one, and those that they start meanwhile.

        Who forks fast enough may win against this.
        """
        seen = {os.getpid()}
        for _ in range(_PASSES):
            new = sorted(self.members() - seen)
            if not new:
                return
            for start in range(0, len(new), _BATCH):
                self.kernel.kill(new[start : start + _BATCH], self.members)
            seen.update(new)

    def kill(self) -> None:
        """Kill the processes in the group, and let it have no new ones."""
        try:
            self.write("cgroup.kill", "1")
        except OSError:  # version 1, or before Linux 5.14
            with suppress(OSError):  # only where this hierarchy counts processes
                self.write("pids.max", "0")
            self.kill_members()


@contextmanager
def removed_in_failure(*directories: Directory) -> Iterator[None]:
    """Remove groups again, if they are empty, when the body raises OSError.

    That takes no descriptor, for the lack of which it may have been raised.
    """
    try:
        yield
    except OSError:
        for directory in directories:
            with suppress(OSError):
                directory.remove()
        raise


def sweep(directories: Iterable[Directory]) -> list[tuple[Directory, OSError]]:
    """Kill everybody in some groups and in those below them, and remove all of these.

    Returns those that stay, and why. Blocks, about a second at most: a process that was killed
    holds its group until it has really gone.
    """
    left = [each for directory in directories for each in _deepest_first(directory)]
    stays: list[tuple[Directory, OSError]] = []
    for wait in _WAITS:
        stays = []
        for each in left:
            try:
                each.remove()  # what is empty, as nearly all are, need not be killed
            except FileNotFoundError:
                pass
            except OSError as error:
                stays.append((each, error))
                with suppress(OSError):
                    each.kill()
        left = [each for each, _ in stays]
        if not any(error.errno in _WAIT_FOR for _, error in stays):
            break
        left[0].kernel.sleep(wait)
    return stays


def _deepest_first(directory: Directory) -> list[Directory]:
    with suppress(FileNotFoundError):
        return [
            *(each for group in directory.groups() for each in _deepest_first(group)),
            directory,
        ]
    return []
