"""Control groups, version 2: limits and usage of whole process trees (cgroups(7)).

`open_cgroups` makes the parent cgroup of all evaluations, below the cgroup that the daemon was
started in, and returns a `CgroupManager`. That makes one `EvaluationCgroup` for each evaluation,
and knows why resources are not limited; `describe_missing_limits` tells the operator. A machine
without usable cgroups is no error: limits of single processes then hold instead
(`sandbox.base`). For evaluations that outlive the daemon the starter has opened the cgroups,
and the daemon uses these by `open_starter_cgroups`.

A cgroup with limits for its children cannot have processes of its own, so the process that opens
the cgroups, the daemon or the starter, moves into a cgroup beside the evaluations:

    <own>/                  the cgroup that the process was started in, delegated to its user
    <own>/tawebeval-NAME/   the parent
        daemon/             the process itself
        git/                the daemon's git commands
        evaluation-ID/      one for each evaluation, with its limits
            evaluator/      its processes, but the programs of the submission (`sandbox.broker`)

Everything here blocks, mostly not for long. Any operation on a cgroup may raise OSError: a
container shows its cgroups without write permission, a kernel lacks a controller, a cgroup is still
busy. The kernel's admin-guide/cgroup-v2 describes the files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from math import inf
from pathlib import Path
from resource import struct_rusage
from typing import Literal

import attrs
from twisted.logger import Logger

from tawebeval.config import LimitSettings
from tawebeval.linux.kernel_files import (
    EVALUATOR_CGROUP_NAME,
    OWN_CGROUP_NAME,
    SUBMISSION_CGROUP_PREFIX,
    CgroupDirectory,
    UnremovedCgroups,
    is_pid_in_use,
    kill_and_remove_cgroups,
    remove_parent_cgroup,
)

SYSTEMD_MARKER_DIRECTORY = "/run/systemd/system"
"""The directory that exists where systemd runs (sd_booted(3))."""

Resource = Literal["memory", "processes", "cpu", "weight"]

# The controller of each resource; processor time is measured without one.
_CONTROLLERS: Mapping[Resource, str] = {
    "memory": "memory",
    "processes": "pids",
    "cpu": "",
    "weight": "cpu",
}
# With both, each program of the submission has limits of its own.
_DIVIDED: Set[Resource] = frozenset({"memory", "processes"})
_ANSWER_TIMEOUT = 10.0  # seconds for systemctl(1)
_WEIGHT = 100  # of a new cgroup (`cpu.weight`)
_DAEMON_WEIGHT = 10 * _WEIGHT
_NICENESS = 10
_GIT, _PROBE, _EVALUATION = "git", "probe", "evaluation-"
_BLOCK = 512  # bytes: in blocks of this size getrusage(2) counts input and output
_KIB = 1024  # bytes: the unit of its `ru_maxrss`
_INIT = "1"  # the number of the first process, as `cgroup.procs` has it
_OF_PROCESS = re.compile(r"tawebeval-[a-z]+-(\d+)")

log = Logger()


def find_own_cgroup(
    membership: Path = Path("/proc/self/cgroup"), mount: str = "/sys/fs/cgroup"
) -> str | None:
    """Return the directory of this process's cgroup, by its line in /proc/self/cgroup (cgroups(7)).

    None, if `mount` shows no such cgroup of version 2. Raises: OSError.
    """
    lines = membership.read_text("utf-8", "surrogateescape").splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/..")
    path = f"{mount}{own}".rstrip("/")
    return path if os.path.exists(f"{path}/cgroup.controllers") else None


def _log_kept(kept: UnremovedCgroups) -> None:
    for group, error in kept:
        log.error("the cgroup {path} cannot be removed: {error}", path=group.path, error=error)


@attrs.frozen
class ResourceUsage:
    """Seconds of all processors and peak bytes of memory; None if unknown."""

    cpu_seconds: float | None
    peak_memory_bytes: int | None


@attrs.define
class EvaluationCgroup:
    """The cgroup of one evaluation; made by `CgroupManager.make_evaluation_cgroup`.

    Without cgroups `directory` and `name` are empty. `submission_peak_memory_bytes` is the sum of
    the peak bytes of the submission's programs when `find_exceeded_limits` found that memory is
    exceeded, 0 before. The peaks of programs that have ended are gone, as a rule.
    """

    directory: CgroupDirectory = attrs.field(factory=lambda: CgroupDirectory(""))
    resources: frozenset[Resource] = frozenset()
    _time: Callable[[], float] = time.monotonic
    _exceeded: frozenset[Resource] = frozenset()
    _removed: bool = False
    _looked: float = -inf  # when `find_exceeded_limits` last read the files
    _cpu_due: float = 0.0  # the earliest time at which the processor time can be over its limit
    submission_peak_memory_bytes: int = attrs.field(default=0, init=False)
    _most_memory: int = 0  # bytes without the page cache, as `find_exceeded_limits` has seen

    @property
    def name(self) -> str:
        """The name of the cgroup below its parent; "" without cgroups."""
        return self.directory.name

    @property
    def procs_files(self) -> Sequence[str]:
        """The file into which a process with a single thread writes "0" to enter, if there is one.

        With limits of memory and processes that is in a cgroup below: only leaves have processes.

        The later children of the process are in the cgroup, too. They cannot leave while they do
        not see the file system of cgroups.
        """
        if not self.name:
            return []
        is_divided = self.resources >= _DIVIDED
        leaf = self.directory / EVALUATOR_CGROUP_NAME if is_divided else self.directory
        return [leaf.procs_file]

    def read_usage(self, rusage: struct_rusage | None) -> ResourceUsage:
        """Return the usage, when all processes have ended.

        `rusage` is the usage that wait4(2) has returned; None if it was not called.
        """
        self.find_exceeded_limits()
        return ResourceUsage(self._read_cpu_seconds(), self._read_peak_memory(rusage))

    def _read_peak_memory(self, rusage: struct_rusage | None) -> int | None:
        """Return the peak memory in bytes, without the page cache, as near as the kernel tells.

        The kernel counts the page cache, too. So this is the largest of some lower estimates:

        - what `find_exceeded_limits` has seen;
        - the peak less the most that the page cache can have been: bytes read and written, or
          what is left now;
        - the peak less what is left now. That includes files that were removed meanwhile, so it is
          bounded by the largest process (`ru_maxrss`), which includes files that it has mapped.
        """
        if "memory" not in self.resources:
            return None
        peak = self.directory.read_number("memory.peak")  # since Linux 5.19
        current = self.directory.read_number("memory.current")
        if peak is None or current is None:
            return self._most_memory or None
        if "memory" in self._exceeded:  # then the kernel had dropped the page cache
            return peak
        moved, largest = 0, peak
        if rusage is not None:
            moved = _BLOCK * (rusage.ru_inblock + rusage.ru_oublock)
            largest = _KIB * rusage.ru_maxrss
        return max(self._most_memory, peak - max(current, moved), min(peak - current, largest))

    def _read_cpu_seconds(self) -> float | None:
        if "cpu" not in self.resources:
            return None
        return self.directory.read_cpu_seconds()

    def is_over_cpu_limit(self, limit: float, measure: Callable[[], float]) -> bool:
        """Tell whether more than `limit` seconds of processor time are used.

        Asks only when all processors together can have used that much: the cgroup, or `measure` if
        the cgroup does not tell.
        """
        now = self._time()
        if now < self._cpu_due:
            return False
        used = self._read_cpu_seconds()
        if used is None:
            used = measure()
        self._cpu_due = now + (limit - used) / (os.cpu_count() or 1)
        return used > limit

    def find_exceeded_limits(self, patience: float = 0.0) -> frozenset[Resource]:
        """Return the limits that have stopped a process.

        A result is used again for `patience` seconds. `remove_cgroup` ends the reading, for its
        killing looks like a limit.
        """
        now = self._time()
        if self._removed or now - self._looked < patience:
            return self._exceeded
        self._looked = now
        found: set[Resource] = set()
        if "memory" in self.resources:
            self._most_memory = max(self._most_memory, self.directory.read_current_memory())
            if _is_memory_exceeded(self.directory):
                found.add("memory")
        if "processes" in self.resources and _is_process_limit_met(self.directory):
            found.add("processes")
        if "memory" in found - self._exceeded:
            with suppress(OSError):
                self.submission_peak_memory_bytes = sum(
                    each.read_number("memory.peak") or 0
                    for each in self.directory.list_children()
                    if each.name.startswith(SUBMISSION_CGROUP_PREFIX)
                )
        if found:  # mostly nothing is found, and no new set is needed
            self._exceeded |= found
        return self._exceeded

    def remove_cgroup(self) -> None:
        """Kill all processes and remove the cgroup. Blocks, for up to a second.

        Raises: OSError, if the cgroup stays; call again later.
        """
        self._removed = True
        for _, error in kill_and_remove_cgroups([self.directory] if self.name else []):
            raise error


def _is_memory_exceeded(group: CgroupDirectory) -> bool:
    """Tell whether the kernel killed a process, and this cgroup met its limit.

    Otherwise the machine, or a cgroup above this one, was out of memory.
    """
    has_killed = bool(group.read_numbers("memory.events").get("oom_kill"))
    return has_killed and group.has_met_memory_limit()


def _is_process_limit_met(group: CgroupDirectory) -> bool:
    """Tell whether a fork has failed, and this cgroup met its limit.

    Many kernels also count here a fork that failed for the limit of a cgroup above. Before Linux
    6.6 the two cannot be told apart.
    """
    if not any(each.has_refused_fork() for each in (group, group / EVALUATOR_CGROUP_NAME)):
        return False
    peak, limit = group.read_number("pids.peak"), group.read_number("pids.max")
    return peak is None or limit is None or peak >= limit


def _set_limits(group: CgroupDirectory, limits: LimitSettings, resources: Set[Resource]) -> None:
    """Limit resources, and make the cgroup of the evaluator if there may be others beside it."""
    if "memory" in resources:
        group.limit_memory(limits.memory)
    if "processes" in resources:
        group.write_file("pids.max", limits.processes)
    if resources >= _DIVIDED:
        group.write_file("cgroup.subtree_control", "+memory +pids")
        (group / EVALUATOR_CGROUP_NAME).make_cgroup()


def _make_parent(
    own: CgroupDirectory, parent: CgroupDirectory
) -> tuple[Sequence[str], Mapping[str, OSError]]:
    """Make a parent cgroup below `own`, and move this process into it. Raises: OSError.

    Return the controllers that `own` enables for this parent's sake only, and the reason for each
    controller that children cannot have.
    """
    if not is_delegated(own.path):
        raise OSError(None, "systemd has not delegated it to the daemon", own.path)
    home = parent / OWN_CGROUP_NAME
    try:
        with suppress(FileExistsError):
            parent.make_cgroup()
        dead = [each for each in own.list_children() if _is_of_dead_process(each.name)]
        _log_kept(kill_and_remove_cgroups([*parent.list_children(), *dead]))
        home.make_cgroup()
        home.enter_cgroup()
        with suppress(OSError):  # then the kernel refuses controllers
            # An init of a container, such as tini, starts the daemon in its own cgroup.
            if own.read_file("cgroup.procs").split() == [_INIT]:
                home.write_file("cgroup.procs", _INIT)
    except OSError:
        for group in (home, parent):
            with suppress(OSError):
                group.remove_cgroup()
        raise
    enabled, refused = [], {}
    for controller in filter(None, _CONTROLLERS.values()):
        try:
            if controller not in own.read_file("cgroup.controllers").split():
                raise OSError(None, f"has no controller {controller!r}", own.path)
            if controller not in own.read_file("cgroup.subtree_control").split():
                own.write_file("cgroup.subtree_control", f"+{controller}")
                enabled.append(controller)
            parent.write_file("cgroup.subtree_control", f"+{controller}")
        except OSError as error:
            refused[controller] = error
            if error.errno == errno.EBUSY:
                error.strerror = "other processes are in the cgroup in which the daemon was started"
    with suppress(OSError):
        home.write_file("cpu.weight", _DAEMON_WEIGHT)
    return enabled, refused


def is_delegated(path: str) -> bool:
    """Tell whether systemd leaves a cgroup, in which this user may write, to this user. Blocks.

    Without delegation systemd takes controllers away at any time, and ends the daemon when an
    evaluation meets its memory limit (OOMPolicy=). Below the user's own systemd the permissions of
    the files do not tell.
    """
    if not os.path.isdir(SYSTEMD_MARKER_DIRECTORY):
        return True
    _, users, below = path.partition("/user@")
    if not users:
        return True
    # /…/user@UID.service/… are the units of a user's own systemd.
    units = [part for part in below.split("/")[1:] if part.endswith((".service", ".scope"))]
    if not units:
        return False
    try:
        asked = subprocess.run(
            ["systemctl", "--user", "show", "--value", "--property=Delegate", units[-1]],
            # Where systemd's sockets are (pam_systemd(8)).
            env={**os.environ, "XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"},
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == "yes"


def _is_of_dead_process(name: str) -> bool:
    """Tell whether a parent cgroup is one of `try`, of a starter or the like that has ended."""
    found = _OF_PROCESS.fullmatch(name)
    return found is not None and not is_pid_in_use(int(found[1]))


@attrs.frozen
class CgroupManager:
    """The daemon's use of cgroups; made by `open_cgroups`, or by `open_starter_cgroups`.

    `unenforced_resources` has the reason for each resource that is not limited, measured or shared.
    Evaluations have cgroups in `evaluations_cgroup`, None without. To `git_procs_files` git writes
    "0": all git commands share one weight. `_parent` is the cgroup that this process has made and
    is in, below the cgroup `_own`, which enables the controllers `_enabled` for its sake only.
    """

    unenforced_resources: Mapping[Resource, str]
    evaluations_cgroup: CgroupDirectory | None = None
    git_procs_files: Sequence[str] = ()
    _parent: CgroupDirectory | None = None
    _own: CgroupDirectory | None = None
    _enabled: Sequence[str] = ()

    @property
    def enforced_resources(self) -> frozenset[Resource]:
        """The resources that are limited or measured here."""
        if self.evaluations_cgroup is None:
            return frozenset()
        return frozenset(_CONTROLLERS) - self.unenforced_resources.keys()

    @property
    def evaluator_niceness(self) -> int:
        """The increment of the nice value of evaluators and git; 0 if "weight" is enforced."""
        return 0 if "weight" in self.enforced_resources else _NICENESS

    def make_evaluation_cgroup(self, identifier: str, limits: LimitSettings) -> EvaluationCgroup:
        """Return a new cgroup with these limits, named by `identifier`.

        Raises: OSError; then nothing is left behind.
        """
        if self.evaluations_cgroup is None:
            return EvaluationCgroup()
        directory = self.evaluations_cgroup / f"{_EVALUATION}{identifier}"
        directory.make_cgroup()
        try:
            _set_limits(directory, limits, self.enforced_resources)
        except OSError:
            kill_and_remove_cgroups([directory])
            raise
        return EvaluationCgroup(directory, self.enforced_resources)

    def find_evaluation_cgroup(self, name: str) -> EvaluationCgroup | None:
        """Return an existing cgroup of the starter, by its name; with "", one without cgroups."""
        if not name or self.evaluations_cgroup is None:
            return EvaluationCgroup()
        group = EvaluationCgroup(self.evaluations_cgroup / name, self.enforced_resources)
        return group if os.path.exists(group.procs_files[0]) else None

    def remove_orphan_cgroups(self, kept: Collection[str]) -> None:
        """Kill and remove all cgroups of evaluations but those of these names. Blocks.

        What cannot be removed is logged. Raises: OSError.
        """
        children = self.evaluations_cgroup.list_children() if self.evaluations_cgroup else []
        evaluations = (each for each in children if each.name.startswith(_EVALUATION))
        _log_kept(kill_and_remove_cgroups(each for each in evaluations if each.name not in kept))

    def encode_parent_json(self) -> str:
        """Return the parent cgroup, for `open_starter_cgroups` in another process."""
        return json.dumps(
            {
                "evaluations": self.evaluations_cgroup and self.evaluations_cgroup.path,
                "own": self._own and self._own.path,
                "enabled": self._enabled,
                "missing": dict(self.unenforced_resources),
            }
        )

    def remove_all_cgroups(self) -> None:
        """Kill and remove all cgroups that `open_cgroups` has made, and move this process back."""
        if self._parent is not None and self._own is not None:
            _log_kept(remove_parent_cgroup(self._parent, self._own, self._enabled))


def open_cgroups(name: str, own: CgroupDirectory | None = None) -> CgroupManager:
    """Find the resources that can be limited here, and make the parent cgroup of evaluations.

    `name` is unique for the daemon's state directory: processes in a cgroup of this name are a dead
    daemon's, and are killed. With a name of letters, a hyphen and the number of this process, the
    cgroup is removed by the next process if this one is killed. This process moves into a cgroup of
    its own; `own` is the present one, found if None.
    """
    try:
        if own is None and (path := find_own_cgroup()) is not None:
            own = CgroupDirectory(path)
        if own is None:
            raise OSError(None, "the daemon is in no cgroup of version 2", "/proc/self/cgroup")
        parent = own / f"tawebeval-{name}"
        enabled, refused = _make_parent(own, parent)
    except OSError as error:
        return CgroupManager(dict.fromkeys(_CONTROLLERS, _reason(error)))
    missing = {
        what: _reason(refused[name]) for what, name in _CONTROLLERS.items() if name in refused
    }
    missing |= _probe(parent, _CONTROLLERS.keys() - missing.keys())
    git = parent / _GIT
    with suppress(FileExistsError):
        try:
            git.make_cgroup()
        except OSError as error:
            missing.setdefault("weight", _reason(error))
    git_procs_files = () if "weight" in missing else (git.procs_file,)
    made = CgroupManager(missing, parent, git_procs_files, parent, own, enabled)
    if missing.keys() == _CONTROLLERS.keys():
        made.remove_all_cgroups()
        return CgroupManager(missing)
    return made


def open_starter_cgroups(own: CgroupManager, description: str) -> CgroupManager:
    """Return a manager that makes the cgroups of evaluations below the parent of the starter.

    `description` is what `encode_parent_json` has returned in the starter's process. Nothing there
    is moved or killed, not even at the end. The rest, such as the cgroup of git, is as in `own`.
    """
    told = json.loads(description)
    missing: dict[Resource, str] = told["missing"]
    parent = None
    if told["evaluations"] is not None:
        parent = CgroupDirectory(told["evaluations"])
        kill_and_remove_cgroups([parent / _PROBE])  # of a daemon that was killed at its start
        missing |= _probe(parent, _CONTROLLERS.keys() - missing.keys())
    return attrs.evolve(
        own,
        unenforced_resources=missing,
        evaluations_cgroup=parent if missing.keys() != _CONTROLLERS.keys() else None,
    )


def find_process_limit_cgroup(description: str) -> str | None:
    """Return the parent cgroup with the limit of processes; None without one.

    `description` is as for `open_starter_cgroups`, or "".
    """
    told = json.loads(description or "{}")
    path: str | None = told.get("evaluations")
    return None if path is None or "processes" in told["missing"] else path


def _probe(parent: CgroupDirectory, resources: Set[Resource]) -> dict[Resource, str]:
    """Try to limit resources by a child cgroup; return why that does not work, for each."""
    group, missing = parent / _PROBE, dict[Resource, str]()
    for tried in (*({each} for each in resources), _DIVIDED & resources):
        try:
            group.make_cgroup()
            _set_limits(group, LimitSettings(), tried - missing.keys())
        except OSError as error:
            missing |= dict.fromkeys(tried - missing.keys(), _reason(error))
        finally:
            kill_and_remove_cgroups([group])
    return missing


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"


_UNIT = (
    "start the daemon by a unit with Delegate=memory pids cpu and without ProtectControlGroups=yes,"
    " such as tawebeval.service; or by: systemd-run --user --pty -p Delegate=yes"
    " tawebeval serve"
)
_VERSION_2 = (
    "boot the machine (of a container: its host) with the kernel parameter"
    " systemd.unified_cgroup_hierarchy=1, for cgroups of version 2 alone"
)
_GIVEN = (
    "as root, make a cgroup in /sys/fs/cgroup for the daemon, give it and its files cgroup.procs"
    " and cgroup.subtree_control to the daemon's user, and start the daemon in it; for a container"
    " see docs/install.md (Container)"
)


def describe_missing_limits(cgroups: CgroupManager) -> str:
    """Return a sentence for the operator; "" if every resource is enforced."""
    if not cgroups.unenforced_resources:
        return ""
    return (
        f"no cgroup limits {', '.join(cgroups.unenforced_resources)} of an evaluation: each"
        " process has limits of its own, and an excess is not reported; `tawebeval doctor` says"
        f" more; {find_cgroup_remedy()}"
    )


def describe_resource_limit(cgroups: CgroupManager, what: Resource) -> str:
    """Return how a resource is limited, with the reason if it is not."""
    if what in cgroups.enforced_resources:
        return f"{what}: enforced by cgroups"
    reason = cgroups.unenforced_resources[what]
    return f"{what}: not enforced by cgroups ({reason}); see docs/security.md (Cgroups)"


def find_cgroup_remedy() -> str:
    """Return the remedy for resources that are not limited."""
    with suppress(OSError):
        if " - cgroup " in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape"):
            return _VERSION_2
    return _UNIT if os.path.isdir(SYSTEMD_MARKER_DIRECTORY) else _GIVEN
