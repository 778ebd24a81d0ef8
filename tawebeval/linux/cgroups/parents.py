"""The places in which the groups of evaluations are made: one directory in each hierarchy.

A place has a name of its own below the group that the daemon was started in, so that all
limits which that has hold for the evaluations, too. What is found there is a dead daemon's.

Under version 1 that is all. Under version 2 a group that has limits for the groups in it
cannot have processes of its own, so the daemon goes into a group beside the evaluations':

    <own>/                  where the daemon was started
    <own>/tawebeval-NAME/   the place
        daemon/             the daemon
        git/                its git, also under version 1, where the share of processors is
        evaluation-ID/      one for each evaluation, but for those that have
        spare-NUMBER/       one that was made ahead

Whoever moves a process needs the right to do so in the next group above both ends, and whoever
removes a group that in the one around it. So root, about to become a user, makes the place
in a group that it gives to that user, for all daemons of that user. This one stays:

    <own>/tawebeval-uid-UID/
        ended/              under version 2: where daemons go at their end, to leave the place
        tawebeval-NAME/     the place, which the daemon removes
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import attrs
from twisted.logger import Logger

from tawebeval.linux.cgroups.controllers import SHARES, WEIGHT
from tawebeval.linux.cgroups.filesystem import Directory, removed_in_failure, sweep

_DAEMON = "daemon"
_ENDED = "ended"
_CONTROLLERS = ("memory", "pids", "cpu")
# The daemon's share of the processors is ten times that of an evaluation, under version 2. Under
# version 1 it is beside the place, which has of each processor as much as one process has.
_WEIGHT = 10 * WEIGHT
_MOST_SHARES = 2**18  # that the kernel takes

Owner = tuple[int, int] | None

log = Logger()


@attrs.frozen
class Home:
    """A place that is ready for groups; `shared` is the user's group around it, if there is one."""

    directory: Directory
    shared: Directory | None

    def require(self, controller: str) -> None:
        """Raise OSError unless groups here can have a controller."""

    def close(self) -> None:
        """Kill and remove all groups here, and what is around them if the rights are there."""
        with suppress(OSError):
            _sweep(self.directory.groups())
            self.directory.remove()
            if self.shared is not None:
                self.shared.remove()


@attrs.frozen
class UnifiedHome(Home):
    """A place under version 2, in the group `own`.

    `controllers` are those that groups here can have, `refused` says of others why they cannot.
    `enabled` are those that `own` has only for this place's sake.
    """

    own: Directory
    controllers: frozenset[str]
    refused: Mapping[str, OSError]
    enabled: Sequence[str]

    def require(self, controller: str) -> None:
        """Raise OSError unless groups here can have a controller."""
        if controller in _CONTROLLERS and controller not in self.controllers:
            missing = OSError(None, f"has no controller {controller!r}", self.own.path)
            raise self.refused.get(controller, missing)

    def close(self) -> None:
        """Kill and remove all groups here, and let the daemon go back where it was, if it may."""
        with suppress(OSError):
            _sweep(_without_daemon(self.directory))
            around, refuge = self.directory, self.directory / _DAEMON
            if self.shared is not None:
                around, refuge = self.shared, self.shared / _ENDED
                refuge.enter()
                _remove(self.directory / _DAEMON, self.directory)
            # From here on it is for those who have kept their rights.
            for group, controllers in ((around, self.controllers), (self.own, self.enabled)):
                for controller in controllers:
                    group.write("cgroup.subtree_control", f"-{controller}")
            self.own.enter()
            _remove(refuge, around)


def settle_legacy(own: Directory, name: str, owner: Owner) -> Home:
    """Make a place under version 1; raises OSError."""
    shared = _shared(own, owner)
    home = (shared or own) / name
    with removed_in_failure(home, *filter(None, [shared])):
        for group in filter(None, (shared, home)):
            group.make_if_missing()
            with suppress(OSError):  # always so in newer kernels, and sometimes not to be changed
                group.write("memory.use_hierarchy", "1")
            with suppress(OSError):
                shares = min(SHARES * (os.cpu_count() or 1), _MOST_SHARES)
                group.write_if_there("cpu.shares", str(shares))
            if owner is not None:
                group.give(owner)
        _end_leftovers(home, home.groups())
    return Home(home, shared)


def settle_unified(own: Directory, name: str, owner: Owner) -> UnifiedHome:
    """Make a place under version 2, and move this process into it; raises OSError."""
    below = _shared(Directory("", own.kernel), owner) or Directory("", own.kernel)
    suffix = (below / name / _DAEMON).path
    settled = own.path.endswith(suffix)  # a daemon that has executed itself anew
    if settled:
        own = attrs.evolve(own, path=own.path.removesuffix(suffix))
    if not own.kernel.is_delegated(own.path):
        raise OSError(None, "systemd has not delegated it to the daemon", own.path)
    shared = _shared(own, owner)
    home = (shared or own) / name
    daemon = home / _DAEMON
    around = [shared, shared / _ENDED] if shared is not None else []
    with removed_in_failure(daemon, home, *reversed(around)):
        for group in (*around, home):
            group.make_if_missing()
            if owner is not None:
                group.give(owner, "cgroup.procs")
        # Who else is in the daemon's own group, when it is there itself, cannot be told.
        _end_leftovers(home, _without_daemon(home) if settled else home.groups())
        if not settled:
            daemon.make_if_missing()
            daemon.enter()
    # What was enabled in the top group of all, which has no type, others may soon rely on.
    is_top = not own.has("cgroup.type")
    controllers, enabled, refused = set(), [], {}
    for controller in _CONTROLLERS:
        try:
            if controller not in own.read("cgroup.controllers").split():
                continue
            if controller not in own.read("cgroup.subtree_control").split():
                own.write("cgroup.subtree_control", f"+{controller}")
                enabled.extend([] if is_top else [controller])
            for group in filter(None, (shared, home)):
                group.write("cgroup.subtree_control", f"+{controller}")
            controllers.add(controller)
        except OSError as error:
            refused[controller] = error
            if error.errno == errno.EBUSY:
                error.strerror = "others are in the group that the daemon was started in"
    with suppress(OSError):  # of a daemon that has executed itself anew it is root's
        daemon.write_if_there("cpu.weight", str(_WEIGHT))
    return UnifiedHome(home, shared, own, frozenset(controllers), refused, enabled)


def _shared(own: Directory, owner: Owner) -> Directory | None:
    """Return the group, in `own`, of all daemons of a user; None where nobody is given one."""
    return own / f"tawebeval-uid-{owner[0]}" if owner is not None else None


def _remove(*groups: Directory) -> None:
    for group in groups:
        group.remove()


def _without_daemon(home: Directory) -> Sequence[Directory]:
    return [group for group in home.groups() if group != home / _DAEMON]


def _end_leftovers(home: Directory, groups: Iterable[Directory]) -> None:
    home.kill_members()
    _sweep(groups)


def _sweep(groups: Iterable[Directory]) -> None:
    for group, error in sweep(groups):
        log.error("{path} stays: {error}", path=group.path, error=error)
