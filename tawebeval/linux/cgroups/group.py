"""Limits for a whole process tree, by cgroups of version 2 or 1, whichever a machine has.

What can be limited is different from one machine to the next: `open_cgroups` tries it, and
tells what works, and why the rest does not. All of this blocks, though mostly not for long.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from tawebeval.config import Limits
from tawebeval.linux.cgroups import controllers
from tawebeval.linux.cgroups.controllers import Control
from tawebeval.linux.cgroups.filesystem import Directory, Kernel, sweep
from tawebeval.linux.cgroups.groups import Group, Parts, What, directories
from tawebeval.linux.cgroups.hierarchies import parse_hierarchies
from tawebeval.linux.cgroups.parents import Home, Owner, UnifiedHome, settle_legacy, settle_unified
from tawebeval.linux.cgroups.sparegroup import SpareGroup

_TRIES = 3  # at settling where others end

# What serves for each: under version 2, and under version 1.
_CONTROLS: Mapping[What, tuple[Control, Control]] = {
    "memory": (controllers.Memory(), controllers.LegacyMemory()),
    "processes": (controllers.Processes(), controllers.Processes()),
    "cpu": (controllers.Cpu(), controllers.LegacyCpu()),
    "weight": (
        controllers.Weight("cpu.weight", controllers.WEIGHT),
        controllers.Weight("cpu.shares", controllers.SHARES),
    ),
}

_ENFORCED: Mapping[What, str] = {
    "memory": "limited, for all processes of an evaluation together",
    "processes": "limited, for all of an evaluation together",
    "cpu": "measured and limited, for all processes of an evaluation together",
    "weight": "each evaluation has the same share of the processors, the daemon a larger one",
}
_MISSING: Mapping[What, str] = {
    "memory": "limited for each process alone (RLIMIT_DATA), without what they share, and not"
    " reported",
    "processes": "limited for the sandbox (RLIMIT_NPROC), without one not at all, and not reported"
    " when the limit is met",
    "cpu": "limited for each process alone (RLIMIT_CPU), and not reported",
    "weight": "processor time is shared by processes: an evaluation with many of them slows down"
    " the others, and less so the daemon (nice 10)",
}

_GIT = "git"  # beside the evaluations
_NICENESS = 10
_PATIENCE = 30.0  # seconds for systemd-run

# What systemd-run is told, so that the groups below that of its unit are the daemon's.
_DELEGATED = "-p Delegate=yes -p OOMPolicy=continue"
_UNIT = (
    "start the daemon by a unit that has Delegate=memory pids cpu and no ProtectControlGroups=yes, "
    "such as tawebeval.service"
)
_WRITABLE = "let /sys/fs/cgroup be writable: in a container, by a cgroup namespace of its own"
_AS_ROOT = "start the daemon as root, and name a user in service.user"

Settle = Callable[[Directory, str, Owner], Home]


@attrs.frozen
class Remedy:
    """What helps where cgroups cannot be had.

    `systemd_run` is the command that starts a program under systemd; "" where there is none.
    """

    what: str
    systemd_run: str = ""

    def __str__(self) -> str:
        """Return it as a sentence."""
        if not self.systemd_run:
            return self.what
        return f"{self.what}; or by: {self.systemd_run} --pty {_DELEGATED} tawebeval serve"

    def tried(self) -> Remedy:
        """Return it without the command if that does not work here. Blocks."""
        if not self.systemd_run:
            return self
        command = f"{self.systemd_run} --quiet --pipe --wait {_DELEGATED} true"
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PATIENCE,
            )
            if done.returncode == 0:
                return self
        return Remedy(self.what)


@attrs.frozen
class Cgroups:
    """What this daemon can do with cgroups; made by `open_cgroups`.

    `enforced` has "memory" and "processes" where these are limited, "cpu" where processor time is
    measured, and "weight" where each evaluation has the same share of it. `missing` are the others,
    with the reasons.
    """

    _homes: Sequence[Home]
    _parts: Parts
    missing: Mapping[What, str]
    remedy: Remedy = Remedy("")
    _spare: SpareGroup = attrs.field(init=False, repr=False, eq=False)

    @_spare.default
    def _no_spare(self) -> SpareGroup:
        return SpareGroup(self._made)

    @property
    def enforced(self) -> frozenset[What]:
        """What is limited, or measured, here."""
        return frozenset(self._parts)

    @property
    def git_entry(self) -> Sequence[str]:
        """The files to which git writes "0": all of git has the share of one evaluation."""
        if "weight" not in self._parts:
            return ()
        _, home = self._parts["weight"]
        return [(home / _GIT).entrance()]

    @property
    def niceness(self) -> int:
        """How much higher the nice value of evaluators and git has to be than the daemon's."""
        return 0 if "weight" in self._parts else _NICENESS

    def oom_policy(self) -> str:
        """Return `OOMPolicy=` of the daemon's unit where systemd sees the groups; "" elsewhere.

        Blocks, as long as systemd does.
        """
        home = self._parts["memory"][1] if "memory" in self._parts else None
        for each in self._homes:
            if isinstance(each, UnifiedHome) and each.directory == home:
                return home.kernel.oom_policy(each.own.path)
        return ""

    @property
    def problems(self) -> Sequence[str]:
        """What the operator should know, in sentences; none where everything works."""
        found = [self.describe(what) for what in self.missing]
        return [*found, str(self.remedy)] if found else []

    def describe(self, what: What) -> str:
        """Return how one resource is limited, and for a missing controller also the reason."""
        if what in self.enforced:
            return f"{what}: {_ENFORCED[what]}"
        return f"{what}: {_MISSING[what]} ({self.missing[what]})"

    def make(self, identifier: str, limits: Limits) -> Group:
        """Return a group with these limits for an evaluation, whose name it has if it is new.

        Blocks. Raises OSError when it cannot be made, and then leaves nothing behind.
        """
        return self._spare.take(limits) or self._made(f"evaluation-{identifier}", limits)

    def make_spare(self, limits: Limits) -> None:
        """Let the next evaluation, if it has these limits, find its group made. Blocks."""
        self._spare.renew(limits)

    def _made(self, name: str, limits: Limits) -> Group:
        group = Group(self._parts, name)
        group.make(limits)
        return group

    def remove_left(self, is_left: Callable[[str], bool]) -> None:
        """Kill and remove the places beside our own whose names say that nobody closes them."""
        for home in self._homes:
            around = attrs.evolve(home.directory, path=os.path.dirname(home.directory.path))
            for place in around.groups():
                if is_left(os.path.basename(place.path)):
                    sweep([place])

    def close(self) -> None:
        """Kill all groups that there still are and remove them, and what else can be removed."""
        for home in self._homes:
            home.close()


def open_cgroups(
    name: str,
    owner: Owner = None,
    *,
    proc: Path = Path("/proc/self"),
    kernel: Kernel | None = None,
) -> Cgroups:
    """Find out what can be limited here, and make the places for the groups of evaluations.

    `name` is of this daemon's state directory, and of no other's: who is found in groups under
    this name is a dead daemon's, and is killed. `owner`, a user and a group of users, gets the
    rights to make groups: the one who the daemon is about to become. One group of theirs, in each
    hierarchy, outlives the daemon. Under version 2 it moves the daemon into a group of its own.
    Blocks.
    """
    return _Opening(f"tawebeval-{name}", owner, kernel or Kernel()).open(proc)


@attrs.define
class _Opening:
    """Looks for what can be done, and makes places where something can."""

    _name: str
    _owner: Owner
    _kernel: Kernel
    _homes: dict[str, Home | OSError] = attrs.field(factory=dict)

    def open(self, proc: Path) -> Cgroups:
        try:
            texts = [(proc / name).read_text("utf-8") for name in ("mountinfo", "cgroup")]
        except OSError as error:
            return Cgroups([], {}, dict.fromkeys(_CONTROLS, _reason(error)), Remedy(_WRITABLE))
        hierarchies = parse_hierarchies(*texts)
        parts: dict[What, tuple[Control, Directory]] = {}
        missing: dict[What, str] = {}
        for what, (control, legacy) in _CONTROLS.items():
            reasons = []
            ways: list[tuple[Control, Settle, str | None]] = [
                (control, settle_unified, hierarchies.unified),
                (legacy, settle_legacy, hierarchies.controllers.get(legacy.controller)),
            ]
            # Where version 1 has the memory, version 2 is there for systemd's own use: nothing
            # can be limited by it, and the daemon would leave the group that it is looked for in.
            if "memory" in hierarchies.controllers:
                ways.reverse()
            for offer, settle, path in ways:
                if path is None or what in parts:
                    continue
                try:
                    home = self._settled(settle, path)
                    home.require(offer.controller)
                    _probe(offer, home.directory)
                    if what == "weight":
                        self._make_git(home.directory / _GIT)
                    parts[what] = (offer, home.directory)
                except OSError as error:
                    reasons.append(_reason(error))
            if what not in parts:
                missing[what] = "; ".join(reasons) or "there is no cgroup controller for it"
        remedy = _find_remedy(self._kernel, legacy="memory" in hierarchies.controllers)
        return Cgroups(self._used(directories(parts)), parts, missing, remedy)

    def _make_git(self, group: Directory) -> None:
        group.make_if_missing()
        if self._owner is not None:
            group.give(self._owner, os.path.basename(group.entrance()))

    def _settled(self, settle: Settle, path: str) -> Home:
        """Settle in a group, once, though several controls may be there; raises OSError."""
        if path not in self._homes:
            try:
                self._homes[path] = self._home(settle, Directory(path, self._kernel))
            except OSError as error:
                self._homes[path] = error
        home = self._homes[path]
        if isinstance(home, OSError):
            raise home
        return home

    def _home(self, settle: Settle, own: Directory) -> Home:
        # Root's doctor, at its end, takes the group of the user along in which we are to be.
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                return settle(own, self._name, self._owner)
        return settle(own, self._name, self._owner)

    def _used(self, directories: Sequence[Directory]) -> Sequence[Home]:
        """Return the places that serve for something, and give up the others."""
        homes = [home for home in self._homes.values() if isinstance(home, Home)]
        for home in homes:
            if home.directory not in directories:
                home.close()
        return [home for home in homes if home.directory in directories]


def _probe(control: Control, home: Directory) -> None:
    """Try a control on a group of its own; raises OSError when it does not work."""
    group = home / "probe"
    limits = Limits()
    group.make()
    try:
        control.limit(group, limits)
        if not control.holds(group, limits):
            raise OSError(None, f"has no effect for {control.controller!r}", group.path)
    finally:
        sweep([group])


def _find_remedy(kernel: Kernel, *, legacy: bool) -> Remedy:
    """Return what helps where something is missing; `legacy` where version 1 has the memory."""
    systemd_run = kernel.systemd_run()
    if legacy or systemd_run is None:
        return Remedy(_WRITABLE if os.geteuid() == 0 else _AS_ROOT)
    return Remedy(_UNIT, systemd_run)


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"
