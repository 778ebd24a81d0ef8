"""The cgroup of one evaluation, and the detection of the controllers that a machine offers.

`open_cgroups` tries each controller in version 2 and in version 1, and reports the controllers that
work and the reasons why others do not. Everything here blocks, mostly not for long.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from resource import struct_rusage
from typing import Literal, TypeVar

import attrs

from tawebeval.config import LimitSettings
from tawebeval.linux.cgroups import controllers
from tawebeval.linux.cgroups.controllers import CgroupController
from tawebeval.linux.cgroups.filesystem import (
    CgroupDirectory,
    CgroupOperations,
    find_cgroups_of_process,
    kill_and_remove,
    remove_on_failure,
)
from tawebeval.linux.cgroups.parents import (
    CgroupOwner,
    ParentCgroup,
    UnifiedParentCgroup,
    make_legacy_parent,
    make_unified_parent,
)

Resource = Literal["memory", "processes", "cpu", "weight"]

ActiveControllers = Mapping[Resource, tuple[CgroupController, CgroupDirectory]]
"""Each controller with the directory in which it is available."""

T = TypeVar("T")


_EVALUATION = "evaluation-"  # begins the names of cgroups
_BLOCK = 512  # bytes: in blocks of this size getrusage(2) counts input and output
_KIB = 1024  # bytes: the unit of its `ru_maxrss`


@attrs.frozen
class ResourceUsage:
    """Seconds of all processors and peak bytes of memory; None if unknown."""

    cpu_seconds: float | None
    peak_memory_bytes: int | None


@attrs.define
class EvaluationCgroup:
    """The cgroup of one evaluation, in each hierarchy.

    Made by `CgroupManager.make_evaluation_cgroup`.

    `parents` has the controllers with the parent cgroups, `name` is the cgroup's name in each.
    `submission_peak_memory_bytes` is the sum of the peak bytes of the submission's programs when
    `find_exceeded_limits` found that memory is exceeded, 0 before.
    """

    _parents: ActiveControllers
    name: str
    _time: Callable[[], float] = time.monotonic
    _exceeded: frozenset[Resource] = frozenset()
    _removed: bool = False
    _looked: float = -inf  # when `find_exceeded_limits` last read the files
    _cpu_due: float = 0.0  # the earliest time at which the processor time can be over its limit
    submission_peak_memory_bytes: int = attrs.field(default=0, init=False)
    _most_memory: int = 0  # bytes without the page cache, as `find_exceeded_limits` has seen

    @property
    def _parts(self) -> Sequence[tuple[Resource, CgroupController, CgroupDirectory]]:
        """Each controller with the directory of this cgroup."""
        return [
            (what, control, parent / self.name) for what, (control, parent) in self._parents.items()
        ]

    @property
    def _directories(self) -> Sequence[CgroupDirectory]:
        return [parent / self.name for parent in list_controller_directories(self._parents)]

    def make_cgroup(self, limits: LimitSettings) -> None:
        """Make the cgroup with these limits. Blocks.

        Raises: OSError; then nothing is left behind.
        """
        with ExitStack() as made:
            for directory in self._directories:
                directory.make_cgroup()
                made.enter_context(remove_on_failure(directory))
            for _, control, directory in self._parts:
                control.set_limit(directory, limits)

    @property
    def exists(self) -> bool:
        """Whether the cgroup still exists. Blocks, hardly."""
        return all(directory.has_file("cgroup.procs") for directory in self._directories)

    def has_process(self, pid: int) -> bool:
        """Return whether a process is in the cgroup. Blocks, hardly."""
        with suppress(OSError), open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            return any(line.rstrip("\n").endswith(f"/{self.name}") for line in file)
        return False

    def find_procs_files(self) -> Sequence[str]:
        """Return the files, up to three, into which a process writes "0" to enter.

        The process must have a single thread; its later children are in the cgroup, too. It cannot
        leave while it does not see the file system of cgroups.
        """
        return [group.find_procs_file() for group in self._directories]

    def find_resource_directories(self) -> Mapping[str, tuple[int, str]]:
        """Return the version, 1 or 2, and the path of the cgroup, by the resource."""
        return {
            what: (2 if directory.has_file("cgroup.subtree_control") else 1, directory.path)
            for what, _, directory in self._parts
            if what != "weight"
        }

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return the usage, when all processes have ended. Blocks, for a few small reads.

        `rusage` is the usage that wait4(2) has returned; None if it was not called.
        """
        self.find_exceeded_limits()
        return ResourceUsage(self._cpu_seconds(), self._peak_memory(rusage))

    def _peak_memory(self, rusage: struct_rusage | None) -> int | None:
        """Return the peak memory in bytes, without the page cache, as near as the kernel tells.

        The kernel counts the page cache, too. So this is the largest of some lower estimates:

        - what `find_exceeded_limits` has seen;
        - the peak less the most that the page cache can have been: bytes read and written, or
          what is left now;
        - the peak less what is left now. That includes files that were removed meanwhile, so it is
          bounded by the largest process (`ru_maxrss`), which includes files that it has mapped.
        """
        charged = _known(control.read_memory_charge(group) for _, control, group in self._parts)
        if charged is None:
            return self._most_memory or None
        if "memory" in self._exceeded:  # then the kernel had dropped the page cache
            return charged.peak_bytes
        moved, largest = 0, charged.peak_bytes
        if rusage is not None:
            moved = _BLOCK * (rusage.ru_inblock + rusage.ru_oublock)
            largest = _KIB * rusage.ru_maxrss
        return max(
            self._most_memory,
            charged.peak_bytes - max(charged.current_bytes, moved),
            min(charged.peak_bytes - charged.current_bytes, largest),
        )

    def _cpu_seconds(self) -> float | None:
        return _known(control.read_cpu_seconds(group) for _, control, group in self._parts)

    def is_over_cpu_limit(self, limit: float, measure: Callable[[], float]) -> bool:
        """Tell whether more than `limit` seconds of processor time are used.

        Asks only when all processors together can have used that much: a file, or `measure` if no
        controller measures. Blocks, hardly.
        """
        now = self._time()
        if now < self._cpu_due:
            return False
        used = self._cpu_seconds()
        if used is None:
            used = measure()
        self._cpu_due = now + (limit - used) / (os.cpu_count() or 1)
        return used > limit

    def find_exceeded_limits(self, patience: float = 0.0) -> frozenset[Resource]:
        """Return the limits that have stopped a process. Blocks, for a few small reads.

        A result is used again for `patience` seconds. `remove_cgroup` ends the reading, for its
        killing looks like a limit.
        """
        now = self._time()
        if not self._removed and now - self._looked >= patience:
            self._looked = now
            memory = (
                _known(each.read_memory_without_cache(group) for _, each, group in self._parts) or 0
            )
            self._most_memory = max(self._most_memory, memory)
            found = {what for what, each, group in self._parts if each.is_limit_exceeded(group)}
            if "memory" in found - self._exceeded:
                self.submission_peak_memory_bytes = sum(
                    each.read_submission_peak_memory_bytes(group) for _, each, group in self._parts
                )
            if found:  # mostly nothing is found, and no new set is needed
                self._exceeded |= found
        return self._exceeded

    def remove_cgroup(self) -> None:
        """Kill all processes and remove the cgroup. Blocks, for up to a second.

        Raises: OSError, if the cgroup stays; call again later.
        """
        self._removed = True
        for _, error in kill_and_remove(self._directories):
            raise error


def _known(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def list_controller_directories(controllers: ActiveControllers) -> Sequence[CgroupDirectory]:
    """Return the directories of all controllers, each once."""
    return list(dict.fromkeys(directory for _, directory in controllers.values()))


_TRIES = 3  # at making a parent while other daemons end and remove theirs

# The controllers of each resource: in version 2 and in version 1.
_CONTROLLERS: Mapping[Resource, tuple[CgroupController, CgroupController]] = {
    "memory": (controllers.MemoryController(), controllers.LegacyMemoryController()),
    "processes": (controllers.PidsController(), controllers.PidsController()),
    "cpu": (controllers.CpuMeter(), controllers.LegacyCpuMeter()),
    "weight": (
        controllers.CpuWeightController("cpu.weight", controllers.WEIGHT),
        controllers.CpuWeightController("cpu.shares", controllers.SHARES),
    ),
}

_ENFORCED: Mapping[Resource, str] = {
    "memory": "limited for all processes of an evaluation together",
    "processes": "limited for each evaluation",
    "cpu": "measured and limited for all processes of an evaluation together",
    "weight": "each evaluation has the same share of processor time, the daemon a larger one",
}
_MISSING: Mapping[Resource, str] = {
    "memory": "limited for each process alone (RLIMIT_DATA), without shared memory; an excess"
    " is not reported",
    "processes": "limited by RLIMIT_NPROC in a sandbox, not at all without; an excess is not"
    " reported",
    "cpu": "measured by /proc and limited for all processes of an evaluation together, without"
    " ended children of processes that ignore SIGCHLD",
    "weight": "an evaluation with many processes slows down the others, and the daemon (nice 10)"
    " less",
}

_GIT, _PROBE = "git", "probe"  # beside the evaluations
_NICENESS = 10

# Options by which systemd-run delegates the cgroups of its unit to the daemon.
_DELEGATED = "-p Delegate=yes -p OOMPolicy=continue"
_UNIT = (
    "start the daemon by a unit with Delegate=memory pids cpu and without ProtectControlGroups=yes,"
    " such as tawebeval.service (under such a unit: boot the machine with the kernel parameter"
    " systemd.unified_cgroup_hierarchy=1, for cgroup controllers of version 2)"
)
_WRITABLE = "make /sys/fs/cgroup writable"
_VERSION_2 = (
    "boot the machine with the kernel parameter systemd.unified_cgroup_hierarchy=1, or start the"
    " daemon as root, without tawebeval.service, and set service.user"
)
_AS_ROOT = "on a server, start the daemon as root, and set service.user"

ParentCgroupFactory = Callable[[CgroupDirectory, str, CgroupOwner], ParentCgroup]


@attrs.frozen
class CgroupManager:
    """The daemon's use of cgroups; made by `open_cgroups`, or by `open_starter_cgroups`.

    `enforced_resources` has "memory" and "processes" if these are limited, "cpu" if processor time
    is measured, "weight" if each evaluation has the same share of the processors.
    `unenforced_resources` has the reason for each other one, `unenforced_resources_remedy` is a
    sentence for the operator.

    `git_parts` are the controllers for git where evaluations have those of the starter.
    """

    _parents: Sequence[ParentCgroup]
    _parts: ActiveControllers
    unenforced_resources: Mapping[Resource, str]
    unenforced_resources_remedy: str = ""
    _git_parts: ActiveControllers | None = None

    @property
    def enforced_resources(self) -> frozenset[Resource]:
        """The resources that are limited or measured here."""
        return frozenset(self._parts)

    @property
    def git_procs_files(self) -> Sequence[str]:
        """The files to which git writes "0": all git commands share one weight."""
        parts = self._parts if self._git_parts is None else self._git_parts
        if "weight" not in parts:
            return ()
        _, parent = parts["weight"]
        return [(parent / _GIT).find_procs_file()]

    @property
    def evaluator_niceness(self) -> int:
        """The increment of the nice value of evaluators and git; 0 if "weight" is enforced."""
        return 0 if "weight" in self._parts else _NICENESS

    def query_oom_policy(self) -> str:
        """Return `OOMPolicy=` of the unit if systemd sees the cgroups of evaluations; "" otherwise.

        Blocks, as long as systemd does.
        """
        control, parent = self._parts.get("memory", (None, None))
        if self._git_parts is not None and parent and control is _CONTROLLERS["memory"][0]:
            return parent.operations.query_oom_policy(parent.path)
        for each in self._parents:
            if isinstance(each, UnifiedParentCgroup) and each.directory == parent:
                return parent.operations.query_oom_policy(each.daemon_cgroup.path)
        return ""

    @property
    def enforcement_warning(self) -> str:
        """A sentence for the operator; "" if every resource is enforced."""
        if not self.unenforced_resources:
            return ""
        return (
            f"no cgroup limits {', '.join(self.unenforced_resources)} of an evaluation: each"
            " process has limits of its own, and an excess is not reported; `tawebeval doctor` says"
            f" more; {self.unenforced_resources_remedy}"
        )

    def describe_enforcement(self, what: Resource) -> str:
        """Return how a resource is limited, with the reason if its controller is missing."""
        if what in self.enforced_resources:
            return f"{what}: {_ENFORCED[what]}"
        return f"{what}: {_MISSING[what]} ({self.unenforced_resources[what]})"

    def make_evaluation_cgroup(self, identifier: str, limits: LimitSettings) -> EvaluationCgroup:
        """Return a new cgroup with these limits, named by `identifier`. Blocks, hardly.

        Raises: OSError; then nothing is left behind.
        """
        group = EvaluationCgroup(self._parts, f"{_EVALUATION}{identifier}")
        group.make_cgroup(limits)
        return group

    def find_evaluation_cgroup(self, name: str) -> EvaluationCgroup | None:
        """Return an existing cgroup of the starter, by its name. Blocks, hardly."""
        group = EvaluationCgroup(self._parts, name)
        return group if group.exists else None

    def list_evaluation_cgroups(self) -> set[str]:
        """Return the names of all cgroups of evaluations. Blocks. Raises: OSError."""
        return {
            name
            for parent in list_controller_directories(self._parts)
            for name in (os.path.basename(group.path) for group in parent.list_children())
            if name.startswith(_EVALUATION)
        }

    def remove_evaluation_cgroup(self, name: str) -> None:
        """Kill all processes of a cgroup, and remove it. Blocks, for up to a second.

        Raises: OSError, if the cgroup stays.
        """
        EvaluationCgroup(self._parts, name).remove_cgroup()

    def describe_parents(self) -> str:
        """Return the parent cgroups, for `open_starter_cgroups` in another process."""
        parents = {
            what: [2 if control is _CONTROLLERS[what][0] else 1, parent.path]
            for what, (control, parent) in self._parts.items()
        }
        return json.dumps({"parents": parents, "missing": dict(self.unenforced_resources)})

    def remove_dead_parents(self, kind: str) -> None:
        """Kill and remove parent cgroups of processes that have ended.

        Their names, as for `open_cgroups`, are `kind`, a hyphen and the number of the process.
        """
        name = re.compile(rf"tawebeval-{kind}-(\d+)")
        for parent in self._parents:
            around = attrs.evolve(parent.directory, path=os.path.dirname(parent.directory.path))
            for place in around.list_children():
                found = name.fullmatch(os.path.basename(place.path))
                if found is not None and not Path("/proc", found[1]).exists():
                    kill_and_remove([place])

    def remove_all_cgroups(self) -> None:
        """Kill and remove all remaining cgroups, with their parents as far as permitted."""
        for parent in self._parents:
            parent.remove_cgroups()


def open_cgroups(
    name: str,
    owner: CgroupOwner = None,
    *,
    proc: Path = Path("/proc/self"),
    files: CgroupOperations | None = None,
) -> CgroupManager:
    """Find the resources that can be limited here, and make the parent cgroup of evaluations.

    `name` is unique for the daemon's state directory: processes in cgroups of this name are a dead
    daemon's, and are killed. `owner` is the user that the daemon is about to become, who may then
    make cgroups; one cgroup of that user, in each hierarchy, outlives the daemon. In version 2 the
    daemon moves into a cgroup of its own. `proc` and `files` are seams for tests. Blocks.
    """
    return _Detection(f"tawebeval-{name}", owner, files or CgroupOperations()).open(proc)


def open_starter_cgroups(
    own: CgroupManager, description: str, files: CgroupOperations | None = None
) -> CgroupManager:
    """Return a manager that makes the cgroups of evaluations below parents of the starter.

    `description` is what `describe_parents` has returned in the starter's process. Nothing there is
    moved or killed, not even at the end. The rest, such as the cgroup of git, is as in `own`.
    Blocks.
    """
    files = files or CgroupOperations()
    told = json.loads(description)
    parts: dict[Resource, tuple[CgroupController, CgroupDirectory]] = {}
    missing: dict[Resource, str] = {}
    for what, ways in _CONTROLLERS.items():
        if what not in told["parents"]:
            missing[what] = told["missing"].get(what, "no cgroup controller")
            continue
        version, path = told["parents"][what]
        control, parent = ways[2 - version], CgroupDirectory(path, files)
        try:
            kill_and_remove([parent / _PROBE])  # of a daemon that was killed at its start
            _probe(control, parent)
            parts[what] = (control, parent)
        except OSError as error:
            missing[what] = _reason(error)
    legacy = any(version == 1 for version, _ in told["parents"].values())
    remedy = _find_remedy(files, legacy=legacy)
    return CgroupManager(own._parents, parts, missing, remedy, own._parts)


def find_pids_controller_parent(description: str) -> str | None:
    """Return the parent cgroup with the limit of processes; None without one.

    `description` is as for `open_starter_cgroups`, or "".
    """
    told = json.loads(description)["parents"].get("processes") if description else None
    return None if told is None else str(told[1])


@attrs.define
class _Detection:
    """One detection of controllers, which makes parent cgroups where a controller works."""

    _name: str
    _owner: CgroupOwner
    _files: CgroupOperations
    _parents: dict[str, ParentCgroup | OSError] = attrs.field(factory=dict)

    def open(self, proc: Path) -> CgroupManager:
        try:
            mounts = find_cgroups_of_process(proc)
        except OSError as error:
            container = self._files.find_container()
            remedy = container.describe_cgroup_remedy(legacy=False) if container else _WRITABLE
            return CgroupManager([], {}, dict.fromkeys(_CONTROLLERS, _reason(error)), remedy)
        parts: dict[Resource, tuple[CgroupController, CgroupDirectory]] = {}
        missing: dict[Resource, str] = {}
        for what, (control, legacy) in _CONTROLLERS.items():
            reasons = []
            ways: list[tuple[CgroupController, ParentCgroupFactory, str | None]] = [
                (control, make_unified_parent, mounts.unified_path),
                (legacy, make_legacy_parent, mounts.controller_paths.get(legacy.name)),
            ]
            # Where version 1 has the memory controller, version 2 is for systemd's own use: it
            # limits nothing, and the daemon would leave the cgroup that systemd expects it in.
            if "memory" in mounts.controller_paths:
                ways.reverse()
            for offer, make_parent, path in ways:
                if path is None or what in parts:
                    continue
                try:
                    parent = self._find_parent(make_parent, path)
                    parent.check_controller(offer.name)
                    _probe(offer, parent.directory)
                    if what == "weight":
                        self._make_git(parent.directory / _GIT)
                    parts[what] = (offer, parent.directory)
                except OSError as error:
                    reasons.append(_reason(error))
            if what not in parts:
                missing[what] = "; ".join(reasons) or "no cgroup controller"
        remedy = _find_remedy(self._files, legacy="memory" in mounts.controller_paths)
        return CgroupManager(
            self._close_unused(list_controller_directories(parts)), parts, missing, remedy
        )

    def _make_git(self, group: CgroupDirectory) -> None:
        group.make_cgroup_if_missing()
        if self._owner is not None:
            group.delegate_to_user(self._owner, os.path.basename(group.find_procs_file()))

    def _find_parent(self, make_parent: ParentCgroupFactory, path: str) -> ParentCgroup:
        """Make a parent cgroup, once for all of its controllers. Raises: OSError."""
        if path not in self._parents:
            try:
                self._parents[path] = self._make_parent(
                    make_parent, CgroupDirectory(path, self._files)
                )
            except OSError as error:
                self._parents[path] = error
        parent = self._parents[path]
        if isinstance(parent, OSError):
            raise parent
        return parent

    def _make_parent(self, make_parent: ParentCgroupFactory, own: CgroupDirectory) -> ParentCgroup:
        # Root's doctor, at its end, removes the user's cgroup in which the parent is to be.
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                return make_parent(own, self._name, self._owner)
        return make_parent(own, self._name, self._owner)

    def _close_unused(self, directories: Sequence[CgroupDirectory]) -> Sequence[ParentCgroup]:
        """Close the parents without a controller, and return the others."""
        parents = [parent for parent in self._parents.values() if isinstance(parent, ParentCgroup)]
        for parent in parents:
            if parent.directory not in directories:
                parent.remove_cgroups()
        return [parent for parent in parents if parent.directory in directories]


def _probe(control: CgroupController, parent: CgroupDirectory) -> None:
    """Try a controller on a child cgroup. Raises: OSError, if it does not work."""
    group = parent / _PROBE
    limits = LimitSettings()
    group.make_cgroup()
    try:
        control.set_limit(group, limits)
        if not control.is_limit_set(group, limits):
            raise OSError(None, f"has no effect for {control.name!r}", group.path)
    finally:
        kill_and_remove([group])


def _find_remedy(files: CgroupOperations, *, legacy: bool) -> str:
    """Return the remedy for missing resources; `legacy`: version 1 has the memory controller."""
    systemd_run = files.find_systemd_run()
    if not legacy and systemd_run is not None:
        command = f"; or by: {systemd_run} --pty {_DELEGATED} tawebeval serve"
        return _UNIT + command if systemd_run else _UNIT
    container = files.find_container()
    if container is not None and systemd_run is None:
        return container.describe_cgroup_remedy(legacy=legacy)
    if os.geteuid() == 0:
        return _WRITABLE
    return _AS_ROOT if systemd_run is None else _VERSION_2


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"
