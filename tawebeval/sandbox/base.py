"""What an evaluator runs in: what all sandboxes have in common, and the one that is none.

A `Sandbox` is the daemon's. It makes a `Cell` for each evaluation, which turns the
evaluator's command into a process to start, holds its limits, and knows how to end, to
measure and to judge what becomes of it.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Protocol

import attrs

from tawebeval.config import Limits
from tawebeval.core.checkout import Checkout
from tawebeval.errors import EvaluationError, over_limit
from tawebeval.linux.cgroups.group import Cgroups
from tawebeval.linux.cgroups.groups import Group, Usage
from tawebeval.linux.child import ChildProcess
from tawebeval.linux.launcher_client import Launch
from tawebeval.linux.reaper import Orphans, descendants, send
from tawebeval.linux.starting import Started
from tawebeval.sandbox.disk import BLOCK, MUCH, DiskWatch
from tawebeval.sandbox.overlay import Trees
from tawebeval.sandbox.workspace import NOT_THE_EVALUATORS, View, Workspace

_SIGNALS = 1024  # that wait to be taken: they are counted for all of a user's processes
# Seconds for which it may go unnoticed that a run has met a limit which the kernel enforces: there
# is nothing more to be had meanwhile.
_UNNOTICED = 1.0


@attrs.frozen
class Exit:
    """How an evaluator ended: by its exit status, or by a signal."""

    status: int | None
    signal: int | None = None


class Cell(ABC):
    """What one evaluator runs in."""

    def __init__(self, workspace: Workspace, checkout: Checkout, sandbox: Sandbox) -> None:
        limits = self.limits = sandbox.limits
        self.workspace = workspace
        self._checkout = checkout
        self._cgroups = sandbox.cgroups
        self._orphans = sandbox.orphans
        self._trees = sandbox.trees
        self._tree: int | None = None  # where it is to be seen for the evaluator alone
        self._group: Group | None = None
        # The limit is for what is added. What was checked out is there from the start, or comes
        # when it is changed: an overlay copies it then.
        commit = checkout.commit
        self._most_disk = limits.disk + commit.size + BLOCK * commit.files
        self._most_files = limits.disk_files + commit.files
        self._disk = DiskWatch(
            workspace.writable,
            self._most_disk,
            self._most_files,
            self._pids,
            apart=NOT_THE_EVALUATORS,
            since=time.time(),
            floor=limits.free_disk,
            held=workspace.quota_directory is not None,
        )
        self._first: ChildProcess | None = None

    @property
    def view(self) -> View:
        """How the evaluator sees its workspace."""
        view = self._seen()
        if self._tree is None:
            return view
        return attrs.evolve(view, opened={self.workspace.tree: self._tree})

    @abstractmethod
    def _seen(self) -> View:
        """Return what `view` is where nothing is mounted for the evaluator alone."""

    def start(self, command: str, environment: Mapping[str, str], directory: Path) -> Started:
        """Start the shell that runs `command` in `directory`, a path of ours. Blocks.

        Raises OSError. The child is known as ours, and somebody has to adopt it.
        """
        # Other users can read the names of groups: not by the identifier.
        self._group = self._cgroups.make(self.workspace.root.name, self.limits)
        launch = self.launch(command, environment, directory)
        launch = attrs.evolve(launch, groups=self._group.entry(), niceness=self._cgroups.niceness)
        with self._orphans.expecting() as tell:
            started, overlay = self._trees.start(self._checkout.path, self.workspace, launch)
            tell(started.pid)
        if overlay is not None:
            self._tree, self._disk.devices = overlay.top, overlay.devices
        return started

    @abstractmethod
    def launch(self, command: str, environment: Mapping[str, str], directory: Path) -> Launch:
        """Return what to start so that the shell runs `command` in `directory`, a path of ours.

        Raises OSError. Groups are not its concern.
        """

    @abstractmethod
    def signal(self, child: ChildProcess, number: int) -> None:
        """Send a signal to all processes of the run, of which `child` is the first."""

    @abstractmethod
    async def end(self) -> None:
        """End what the first process has left behind, and return when it is gone."""

    @abstractmethod
    def exit(self, status: int | None, number: int | None) -> Exit:
        """Return how the evaluator ended, whose first process ended so.

        Raises EvaluationError where the evaluator was not even started.
        """

    def started(self, child: ChildProcess) -> None:
        """Take note of the run's first process."""
        self._first = child

    def exceeded(self, final: bool = False, work: float = inf) -> EvaluationError | None:
        """Return which limit has been gone over, if one has. Blocks.

        `final` is for a run that has failed: it asks more closely why. Raises TooMuchWork where
        more than `work` looks at the disk are needed to tell; then no other limit has been gone
        over.
        """
        limits = self.limits
        # What has exited may wait for its readers for long, and takes nothing but room on the disk.
        if self._group is not None and (final or self._running):
            over = self._group.exceeded(0 if final else _UNNOTICED)
            if "memory" in over:
                return over_limit("memory", "memory", "bytes of memory", limits.memory)
            if "processes" in over:
                return over_limit("processes", "processes", "processes", limits.processes)
            if self._group.over_cpu(limits.cpu):
                return over_limit("cpu", "cpu", "seconds of processor time", limits.cpu)
        disk = self._disk.look(again=final, work=work)
        if disk.size > self._most_disk:
            return over_limit("disk", "disk", "bytes on disk", limits.disk)
        if disk.files > self._most_files or disk.too_deep:
            return over_limit("disk", "disk_files", "files on disk", limits.disk_files)
        if final and disk.largest >= limits.file_size:
            return over_limit("file_size", "file_size", "bytes in one file", limits.file_size)
        if final and self.short and (self.written >= MUCH or self.free < MUCH):
            return self.nearly_full()
        return None

    @property
    def written(self) -> int:
        """How many bytes the run has on the disk, as they were counted last."""
        return self._disk.use.size

    @property
    def free(self) -> float:
        """How many bytes of the disk were free at the last look."""
        return self._disk.free

    @property
    def short(self) -> bool:
        """Whether less was free at the last look than has to be."""
        return self.free < self.limits.free_disk

    def nearly_full(self) -> EvaluationError:
        """Return the error of a run that ends because the disk is nearly full."""
        floor = self.limits.free_disk
        return EvaluationError(
            "disk",
            "the disk of this machine is nearly full: less than limits.free_disk"
            f" ({floor} bytes) is free, and this run had {self.written} bytes on it",
            {"limit": "limits.free_disk", "value": floor},
        )

    def usage(self, waited: resource.struct_rusage | None) -> Usage:
        """Return what was used, as `Group.usage`, when all processes have ended. Blocks."""
        if self._group is None:
            return Usage(None, None)
        return self._group.usage(waited)

    def close(self) -> None:
        """Remove what the start has made, and kill whoever is still in it. Blocks.

        There is time then to make what the next start needs. Raises OSError where those who were
        killed have not gone soon; it may be called again.
        """
        if self._tree is not None:
            os.close(self._tree)
            self._tree = None
        if self._group is not None:
            self._group.remove()
            self._group = None
            self._cgroups.make_spare(self.limits)

    @property
    def _running(self) -> bool:
        return self._first is not None and self._first.running

    def _pids(self) -> Iterable[int]:
        # Once the first one has ended its number may be another process's.
        return descendants(self._first.pid) if self._first is not None and self._running else ()

    def _bounds(self, *, apart: bool) -> Mapping[str, tuple[int, int]]:
        """Return the limits of each single process, soft and hard, by their names.

        What groups limit as a whole is left to them. `apart` tells whether the user's processes
        are counted for this run alone. The hard limits of core dumps and, where a group measures
        it, of processor time are the daemon's: programs set higher ones for what they start.
        """
        limits, core = self.limits, _hard(resource.RLIMIT_CORE)
        measured = "cpu" in self._cgroups.enforced
        bounds = {
            "cpu": (limits.cpu, _hard(resource.RLIMIT_CPU) if measured else limits.cpu + 1),
            "fsize": (limits.file_size, limits.file_size),
            "nofile": (limits.open_files, limits.open_files),
            # With 1 byte the kernel writes no file and starts no crash handler. With 0 it starts
            # the machine's handler, as root (core(5)).
            "core": (1 if core else 0, core),
            "msgqueue": (0, 0),
            "sigpending": (_SIGNALS, _SIGNALS),
            "nice": (0, 0),
            "rtprio": (0, 0),
        }
        if apart and "processes" not in self._cgroups.enforced:
            bounds["nproc"] = (limits.processes, limits.processes)
        if "memory" not in self._cgroups.enforced:
            bounds["data"] = (limits.memory, limits.memory)
        return bounds


def _hard(number: int) -> int:
    return resource.getrlimit(number)[1]


class Sandbox(Protocol):
    """Makes cells, and has what these share."""

    limits: Limits  # of the cells that are made from now on
    cgroups: Cgroups
    orphans: Orphans
    trees: Trees

    def cell(self, workspace: Workspace, checkout: Checkout) -> Cell:
        """Return what the evaluator of this evaluation is to run in."""


class NoCell(Cell):
    """Runs the command as it is, with the rights of the daemon, and finds what it leaves."""

    _mark = b""  # until something is started

    def _seen(self) -> View:
        return self.workspace.as_it_is()

    def launch(self, command: str, environment: Mapping[str, str], directory: Path) -> Launch:
        """Return what runs the command by the shell."""
        # A secret of this run alone, which all of its processes inherit.
        self._mark = environment["EVALUATION_DATA_BEGIN"].encode()
        bounds = self._bounds(apart=False)
        return Launch(
            ["/bin/sh", "-c", command],
            environment,
            str(directory),
            limits={getattr(resource, f"RLIMIT_{name.upper()}"): bounds[name] for name in bounds},
        )

    def signal(self, child: ChildProcess, number: int) -> None:
        """Send a signal to the process group, and to descendants that have left it."""
        strays = descendants(child.pid)
        child.signalProcess(number)
        for pid in strays:
            send(pid, number)

    async def end(self) -> None:
        """Find the orphans of the run, and kill them."""
        if self._first is not None:
            self._first.signal_group(signal.SIGKILL)
        if self._mark:
            await self._orphans.end(self._mark, str(self.workspace.writable))

    def exit(self, status: int | None, number: int | None) -> Exit:
        """Return how the shell ended."""
        return Exit(status, number)


@attrs.define
class NoSandbox:
    """Runs commands as they are, with the rights of the daemon."""

    limits: Limits
    cgroups: Cgroups
    orphans: Orphans
    trees: Trees = attrs.field(factory=Trees, eq=False)

    def cell(self, workspace: Workspace, checkout: Checkout) -> Cell:
        """Return what the evaluator of this evaluation is to run in."""
        return NoCell(workspace, checkout, self)
