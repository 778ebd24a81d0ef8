"""The parent cgroup of all evaluations of one daemon: one directory in each hierarchy.

The parent lies below the cgroup that the daemon was started in, so that the limits of that cgroup
hold for evaluations, too. Processes that a starting daemon finds in its parent cgroup are those of
a dead daemon.

In version 2 a cgroup with limits for its children cannot have processes of its own (the rule of
"no internal processes"), so the daemon moves into a cgroup beside the evaluations:

    <own>/                  the cgroup that the daemon was started in
    <own>/tawebeval-NAME/   the parent
        daemon/             the daemon
        git/                its git commands, in the hierarchy that has the cpu controller
        evaluation-ID/      one for each evaluation

The starter makes such a parent, too, and is in `daemon/`; the evaluations there are of one daemon
after the other.

Moving a process needs write permission on the common ancestor of both cgroups; removing a cgroup
needs write permission on its parent. So root, before it becomes the service user, makes the parent
in a cgroup that it gives to that user, for all daemons of that user. That cgroup stays:

    <own>/tawebeval-uid-UID/
        ended/              version 2: daemons move here at their end, to leave the parent
        tawebeval-NAME/     the parent, which the daemon removes
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import attrs
from twisted.logger import Logger

from tawebeval.linux.cgroups.controllers import SHARES, WEIGHT
from tawebeval.linux.cgroups.filesystem import CgroupDirectory, kill_and_remove, remove_on_failure

_DAEMON = "daemon"
_ENDED = "ended"
_CONTROLLERS = ("memory", "pids", "cpu")
# In version 2 the daemon's share of the processors is ten times that of an evaluation. In version 1
# the daemon is beside the parent, whose share of each processor is that of one process.
_WEIGHT = 10 * WEIGHT
_MOST_SHARES = 2**18  # that the kernel takes

CgroupOwner = tuple[int, int] | None
"""The user and group identifiers that a cgroup is given to; None leaves it to this process's."""

log = Logger()


@attrs.frozen
class ParentCgroup:
    """A parent cgroup that is ready for children.

    `user_cgroup` is the user's cgroup above, if any.
    """

    directory: CgroupDirectory
    user_cgroup: CgroupDirectory | None

    def check_controller(self, controller: str) -> None:
        """Raise OSError unless children can have a controller."""

    def remove_cgroups(self) -> None:
        """Kill and remove all children, and the cgroups above them as far as permitted."""
        with suppress(OSError):
            _sweep(self.directory.list_children())
            self.directory.remove_cgroup()
            if self.user_cgroup is not None:
                self.user_cgroup.remove_cgroup()


@attrs.frozen
class UnifiedParentCgroup(ParentCgroup):
    """A parent cgroup in version 2, below `daemon_cgroup`.

    `controllers` are available to children; `refused_controllers` has the reason for each other
    one. `enabled_controllers` are those that `daemon_cgroup` enables for this parent's sake only.
    """

    daemon_cgroup: CgroupDirectory
    controllers: frozenset[str]
    refused_controllers: Mapping[str, OSError]
    enabled_controllers: Sequence[str]

    def check_controller(self, controller: str) -> None:
        """Raise OSError unless children can have a controller."""
        if controller in _CONTROLLERS and controller not in self.controllers:
            missing = OSError(None, f"has no controller {controller!r}", self.daemon_cgroup.path)
            raise self.refused_controllers.get(controller, missing)

    def remove_cgroups(self) -> None:
        """Kill and remove all children; move the daemon back to `daemon_cgroup` if permitted."""
        with suppress(OSError):
            _sweep(_without_daemon(self.directory))
            around, refuge = self.directory, self.directory / _DAEMON
            if self.user_cgroup is not None:
                around, refuge = self.user_cgroup, self.user_cgroup / _ENDED
                refuge.enter_cgroup()
                _remove(self.directory / _DAEMON, self.directory)
            # The rest succeeds only for a user with write permission on `own`.
            for group, controllers in (
                (around, self.controllers),
                (self.daemon_cgroup, self.enabled_controllers),
            ):
                for controller in controllers:
                    group.write_file("cgroup.subtree_control", f"-{controller}")
            self.daemon_cgroup.enter_cgroup()
            _remove(refuge, around)


def make_legacy_parent(own: CgroupDirectory, name: str, owner: CgroupOwner) -> ParentCgroup:
    """Make a parent cgroup in version 1. Raises: OSError."""
    shared = _shared(own, owner)
    parent = (shared or own) / name
    with remove_on_failure(parent, *filter(None, [shared])):
        for group in filter(None, (shared, parent)):
            group.make_cgroup_if_missing()
            with suppress(OSError):  # always so in newer kernels, and sometimes not to be changed
                group.write_file("memory.use_hierarchy", "1")
            with suppress(OSError):
                shares = min(SHARES * (os.cpu_count() or 1), _MOST_SHARES)
                group.write_file_if_exists("cpu.shares", str(shares))
            if owner is not None:
                group.delegate_to_user(owner)
        _end_stale_processes(parent, parent.list_children())
    return ParentCgroup(parent, shared)


def make_unified_parent(own: CgroupDirectory, name: str, owner: CgroupOwner) -> UnifiedParentCgroup:
    """Make a parent cgroup in version 2, and move this process into it. Raises: OSError."""
    below = _shared(CgroupDirectory("", own.operations), owner) or CgroupDirectory(
        "", own.operations
    )
    suffix = (below / name / _DAEMON).path
    settled = own.path.endswith(suffix)  # a daemon that has executed itself anew
    if settled:
        own = attrs.evolve(own, path=own.path.removesuffix(suffix))
    if not own.operations.is_delegated(own.path):
        raise OSError(None, "systemd has not delegated it to the daemon", own.path)
    shared = _shared(own, owner)
    parent = (shared or own) / name
    daemon = parent / _DAEMON
    around = [shared, shared / _ENDED] if shared is not None else []
    with remove_on_failure(daemon, parent, *reversed(around)):
        for group in (*around, parent):
            group.make_cgroup_if_missing()
            if owner is not None:
                group.delegate_to_user(owner, "cgroup.procs")
        # Strangers in the daemon's own cgroup cannot be told from its own children.
        _end_stale_processes(parent, _without_daemon(parent) if settled else parent.list_children())
        if not settled:
            daemon.make_cgroup_if_missing()
            daemon.enter_cgroup()
    # Others may soon rely on a controller that is enabled in the root cgroup, which has no type.
    is_top = not own.has_file("cgroup.type")
    controllers, enabled, refused = set(), [], {}
    for controller in _CONTROLLERS:
        try:
            if controller not in own.read_file("cgroup.controllers").split():
                continue
            if controller not in own.read_file("cgroup.subtree_control").split():
                own.write_file("cgroup.subtree_control", f"+{controller}")
                enabled.extend([] if is_top else [controller])
            for group in filter(None, (shared, parent)):
                group.write_file("cgroup.subtree_control", f"+{controller}")
            controllers.add(controller)
        except OSError as error:
            refused[controller] = error
            if error.errno == errno.EBUSY:
                error.strerror = "other processes are in the cgroup in which the daemon was started"
    with suppress(OSError):  # of a daemon that has executed itself anew it is root's
        daemon.write_file_if_exists("cpu.weight", str(_WEIGHT))
    return UnifiedParentCgroup(parent, shared, own, frozenset(controllers), refused, enabled)


def _shared(own: CgroupDirectory, owner: CgroupOwner) -> CgroupDirectory | None:
    """Return the cgroup, in `own`, of all daemons of a user; None without an owner."""
    return own / f"tawebeval-uid-{owner[0]}" if owner is not None else None


def _remove(*groups: CgroupDirectory) -> None:
    for group in groups:
        group.remove_cgroup()


def _without_daemon(parent: CgroupDirectory) -> Sequence[CgroupDirectory]:
    return [group for group in parent.list_children() if group != parent / _DAEMON]


def _end_stale_processes(parent: CgroupDirectory, groups: Iterable[CgroupDirectory]) -> None:
    parent.kill_other_processes()
    _sweep(groups)


def _sweep(groups: Iterable[CgroupDirectory]) -> None:
    for group, error in kill_and_remove(groups):
        log.error("the cgroup {path} cannot be removed: {error}", path=group.path, error=error)
