"""Cgroups as the kernel shows them: mounted hierarchies, directories of small files (cgroups(7)).

There are two versions, and a machine may have both at once: in version 1 each controller has a
hierarchy of its own, or shares one with others; version 2 has one hierarchy for all controllers
that version 1 does not have. A mount may show a part of a hierarchy only, as in containers, and a
process may be outside of that part.

Any operation on a cgroup may raise OSError: a container shows its cgroups without write
permission, a kernel lacks a controller, a cgroup is still busy.
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
from pathlib import Path

import attrs

from tawebeval.linux.container import Container, find_container

_ESCAPE = re.compile(r"\\([0-7]{3})")  # of spaces and the like in mountinfo

_UNIFIED = ""  # the "controller" of version 2, as /proc/PID/cgroup writes it


@attrs.frozen
class ProcessCgroups:
    """The directories of a process's own cgroups, as absolute paths.

    `controller_paths` has the directory for each controller of version 1, `unified_path` is the
    directory in version 2; None without version 2.
    """

    controller_paths: Mapping[str, str]
    unified_path: str | None


@attrs.frozen
class _Mount:
    root: str  # the cgroup that is shown at `point`
    point: str
    controllers: frozenset[str]


def find_cgroups_of_process(proc: Path = Path("/proc/self")) -> ProcessCgroups:
    """Return the cgroups of a process, by its directory in /proc. Blocks. Raises: OSError."""
    mountinfo, membership = (
        (proc / name).read_text("utf-8", "surrogateescape") for name in ("mountinfo", "cgroup")
    )
    return parse_cgroups_of_process(mountinfo, membership)


def parse_cgroups_of_process(mountinfo: str, membership: str) -> ProcessCgroups:
    """Parse /proc/PID/mountinfo and /proc/PID/cgroup (proc(5)); unknown lines are left out."""
    mounts = list(_mounts(mountinfo))
    found = {}
    for line in membership.splitlines():
        _, controllers, own = line.split(":", 2)
        for controller in controllers.split(","):
            # The shortest mount point; of two mounts at one place the upper one.
            places = [
                (-len(mount.point), number, place)
                for number, mount in enumerate(mounts)
                if controller in mount.controllers and (place := _place(mount, own)) is not None
            ]
            if places:
                found[controller] = max(places)[-1]
    unified = found.pop(_UNIFIED, None)
    return ProcessCgroups(found, unified)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        # ID, parent, device, root, mount point, options, any number of tags - type, source,
        # options of the file system, which in version 1 name its controllers.
        mount, _, kind = line.partition(" - ")
        root, point = (_unescape(field) for field in mount.split(" ")[3:5])
        name, *_, options = kind.split(" ")
        if name == "cgroup2":
            yield _Mount(root, point, frozenset([_UNIFIED]))
        elif name == "cgroup":
            yield _Mount(root, point, frozenset(options.split(",")))


def _place(mount: _Mount, own: str) -> str | None:
    """Return the path at which a mount shows the cgroup `own`; None if the mount does not."""
    root = mount.root.rstrip("/")
    if ".." in (*root.split("/"), *own.split("/")):  # outside of the cgroup namespace
        return None
    if not f"{own}/".startswith(f"{root}/"):
        return None
    return (mount.point + own[len(root) :]).rstrip("/")


def _unescape(field: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), field)


# Seconds between attempts to remove a cgroup; about one second in all.
_WAITS = tuple(0.001 * 2**n for n in range(10))
_PASSES = 50  # maximum searches for processes that start while others are killed
_BATCH = 64  # maximum pidfds that are open at once
_READ = 4096  # bytes: the kernel returns a page at a time

SYSTEMD_MARKER_DIRECTORY = "/run/systemd/system"  # exists where systemd runs (sd_booted(3))
_PATIENCE = 10.0  # seconds for systemd to answer

_WAIT_FOR = frozenset({errno.EBUSY, errno.ENOTEMPTY})


class CgroupOperations:
    """Every change to cgroups, and systemd's view of them; a seam for tests."""

    def sleep(self, seconds: float) -> None:
        """Sleep. Blocks."""
        time.sleep(seconds)

    def write_file(self, path: str, text: str) -> None:
        """Write to a file of a cgroup; the file has to exist."""
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        except OSError as error:
            error.filename = path  # which only os.open knows by itself
            raise
        finally:
            os.close(descriptor)

    def make_cgroup(self, path: str) -> None:
        """Make a cgroup; the kernel adds its files."""
        os.mkdir(path, 0o755)

    def remove_cgroup(self, path: str) -> None:
        """Remove a cgroup, which has to be empty, with its files."""
        os.rmdir(path)

    def change_owner(self, path: str, owner: tuple[int, int]) -> None:
        """Give a cgroup, or a file of one, to a user and a group of users."""
        os.chown(path, *owner)

    def kill_processes(self, pids: Collection[int], still: Callable[[], Collection[int]]) -> None:
        """Kill those of `pids` that are still in `still()` once pidfds hold them.

        So no process is killed that has got the number of an ended one.
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
        """Tell whether systemd has delegated a cgroup. Blocks, as long as systemd does.

        Without delegation systemd takes controllers away at any time, and ends the daemon when an
        evaluation meets its memory limit (OOMPolicy=). For a user the permissions of the files
        tell the same, except below the user's own systemd, which marks nothing.
        """
        if not os.path.isdir(SYSTEMD_MARKER_DIRECTORY):
            return True
        with suppress(OSError):
            if not {"trusted.delegate", "user.delegate"}.isdisjoint(os.listxattr(path)):
                return True
        if os.geteuid() == 0:
            return False
        return "/user@" not in path or _unit_property(path, "Delegate") == "yes"

    def query_oom_policy(self, path: str) -> str:
        """Return systemd's reaction to an out-of-memory kill in or below a cgroup.

        "stop" and "kill" end the unit; "" is unknown. Blocks, as long as systemd does.
        """
        return _unit_property(path, "OOMPolicy") if os.path.isdir(SYSTEMD_MARKER_DIRECTORY) else ""

    def find_container(self) -> Container | None:
        """Return the container of this process; None if it is in none."""
        return find_container()

    def find_systemd_run(self) -> str | None:
        """Return the `systemd-run` command of this user.

        "" means that the user has no systemd, None that the machine has none.
        """
        if not os.path.isdir(SYSTEMD_MARKER_DIRECTORY):
            return None
        if os.geteuid() == 0:
            return "systemd-run"
        own = find_user_runtime_directory()
        if not os.path.exists(f"{own}/systemd/private"):
            return ""
        known = os.environ.get("XDG_RUNTIME_DIR") == own
        return "systemd-run --user" if known else f"XDG_RUNTIME_DIR={own} systemd-run --user"


def _unit_property(path: str, name: str) -> str:
    """Return a property of the systemd unit that owns a cgroup; "" if unknown.

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
            env={**os.environ, "XDG_RUNTIME_DIR": find_user_runtime_directory()},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def find_user_runtime_directory() -> str:
    """Return the runtime directory of the user (pam_systemd(8)), where systemd's sockets are."""
    return f"/run/user/{os.geteuid()}"


@attrs.frozen
class CgroupDirectory:
    """One cgroup in one hierarchy, at the absolute `path`."""

    path: str
    operations: CgroupOperations = attrs.field(repr=False, eq=False)

    def __truediv__(self, name: str) -> CgroupDirectory:
        return CgroupDirectory(f"{self.path}/{name}", self.operations)

    def read_file(self, name: str) -> str:
        """Return the content of a file of the cgroup.

        A Python file object would take twice as many system calls, and all running cgroups are
        read again and again.
        """
        descriptor = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(lambda: os.read(descriptor, _READ), b"")).decode("ascii")
        finally:
            os.close(descriptor)

    def write_file(self, name: str, text: str) -> None:
        """Write to a file of the cgroup; the file has to exist."""
        self.operations.write_file(f"{self.path}/{name}", text)

    def write_file_if_exists(self, name: str, text: str) -> None:
        """Write to a file that not every kernel has."""
        with suppress(FileNotFoundError):
            self.write_file(name, text)

    def read_number(self, name: str) -> int | None:
        """Return the number that is the whole content of a file; None without one."""
        with suppress(OSError, ValueError):
            return int(self.read_file(name))
        return None

    def read_flat_keyed_file(self, name: str) -> Mapping[str, int]:
        """Return the numbers of a flat keyed file, by name."""
        found = {}
        with suppress(OSError):
            for line in self.read_file(name).splitlines():
                key, _, value = line.partition(" ")
                if value.isdecimal():
                    found[key] = int(value)
        return found

    def sum_numbers_in_file(self, name: str, figures: re.Pattern[str]) -> int | None:
        """Return the sum of the numbers that a pattern finds in a file; None without one."""
        with suppress(OSError):
            found = figures.findall(self.read_file(name))
            return sum(map(int, found)) if found else None
        return None

    def has_file(self, name: str) -> bool:
        """Tell whether the cgroup has a file of this name."""
        return os.path.exists(f"{self.path}/{name}")

    def make_cgroup(self) -> None:
        """Make the cgroup."""
        self.operations.make_cgroup(self.path)

    def make_cgroup_if_missing(self) -> None:
        """Make the cgroup unless it exists."""
        with suppress(FileExistsError):
            self.make_cgroup()

    def remove_cgroup(self) -> None:
        """Remove the cgroup, which has to be empty."""
        self.operations.remove_cgroup(self.path)

    def delegate_to_user(self, owner: tuple[int, int], *names: str) -> None:
        """Let a user make children of this cgroup, and write to the named files of it."""
        for path in (self.path, *(f"{self.path}/{name}" for name in names)):
            self.operations.change_owner(path, owner)

    def enter_cgroup(self) -> None:
        """Move this process, with all of its threads, into the cgroup."""
        self.write_file("cgroup.procs", "0")

    def find_procs_file(self) -> str:
        """Return the file to which a process with a single thread writes "0" to enter.

        Version 1 has `tasks`, for single threads. With `cgroup.procs` the kernel moves all threads
        of a process and first keeps every process from starting one, which takes some 15 ms.
        """
        return f"{self.path}/{'tasks' if self.has_file('tasks') else 'cgroup.procs'}"

    def list_children(self) -> list[CgroupDirectory]:
        """Return the children of this cgroup."""
        with os.scandir(self.path) as entries:
            return [self / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def list_processes(self) -> set[int]:
        """Return the processes in the cgroup, without those in its children."""
        # 0 is a process outside of the process namespace.
        return set(map(int, self.read_file("cgroup.procs").split())) - {0}

    def kill_other_processes(self) -> None:
        """Kill the processes in the cgroup but this one, and those that they start meanwhile.

        A fork bomb may win against this.
        """
        seen = {os.getpid()}
        for _ in range(_PASSES):
            new = sorted(self.list_processes() - seen)
            if not new:
                return
            for start in range(0, len(new), _BATCH):
                self.operations.kill_processes(new[start : start + _BATCH], self.list_processes)
            seen.update(new)

    def kill_processes(self) -> None:
        """Kill the processes in the cgroup, and let no new process start there."""
        try:
            self.write_file("cgroup.kill", "1")
        except OSError:  # version 1, or before Linux 5.14
            with suppress(OSError):  # only where this hierarchy counts processes
                self.write_file("pids.max", "0")
            self.kill_other_processes()


@contextmanager
def remove_on_failure(*directories: CgroupDirectory) -> Iterator[None]:
    """Remove empty cgroups when the body raises OSError.

    Removing takes no descriptor, so it works where the body lacked one.
    """
    try:
        yield
    except OSError:
        for directory in directories:
            with suppress(OSError):
                directory.remove_cgroup()
        raise


def kill_and_remove(
    directories: Iterable[CgroupDirectory],
) -> list[tuple[CgroupDirectory, OSError]]:
    """Kill all processes in cgroups and their descendants, and remove all of these cgroups.

    Return the cgroups that stay, with the reasons. Blocks, about a second at most: a killed
    process holds its cgroup until the kernel has released it.
    """
    # Nearly all are empty and have no children, and nothing needs listing or killing.
    busy = [directory for directory in directories if not _remove_empty(directory)]
    left = [each for directory in busy for each in _deepest_first(directory)]
    stays: list[tuple[CgroupDirectory, OSError]] = []
    for wait in _WAITS:
        stays = []
        for each in left:
            try:
                each.remove_cgroup()
            except FileNotFoundError:
                pass
            except OSError as error:
                stays.append((each, error))
                with suppress(OSError):
                    each.kill_processes()
        left = [each for each, _ in stays]
        if not any(error.errno in _WAIT_FOR for _, error in stays):
            break
        left[0].operations.sleep(wait)
    return stays


def _remove_empty(directory: CgroupDirectory) -> bool:
    """Remove a cgroup; return False if it stays."""
    with suppress(OSError):
        directory.remove_cgroup()
        return True
    return False


def _deepest_first(directory: CgroupDirectory) -> list[CgroupDirectory]:
    with suppress(FileNotFoundError):
        return [
            *(each for group in directory.list_children() for each in _deepest_first(group)),
            directory,
        ]
    return []
