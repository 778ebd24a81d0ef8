"""The places in which the groups of evaluations are made: one directory in each hierarchy.

A place has a name of its own below the group that the daemon was started in, so that all
limits which that has hold for the evaluations, too. What is found there is a dead daemon's.

Under version 1 that is all. Under version 2 a group that has limits for the groups in it
cannot have processes of its own, so the daemon goes into a group beside the evaluations':

    <own>/                  where the daemon was started
    <own>/tawebeval-NAME/   the place
        daemon/             the daemon, and its git
        evaluation-ID/      one for each evaluation

Whoever moves a process needs the right to do so in the next group above both ends. Because
the daemon is below the place, too, the place is all that a user has to be given.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import attrs
from twisted.logger import Logger

from tawebeval.cgroupfs import Directory, sweep

_DAEMON = "daemon"
_CONTROLLERS = ("memory", "pids")

Owner = tuple[int, int] | None

log = Logger()


@attrs.frozen
class Home:
    """A place that is ready for groups."""

    directory: Directory

    def require(self, controller: str) -> None:
        """Raise OSError unless groups here can have a controller."""

    def close(self) -> None:
        """Kill and remove all groups here, and the place itself if the rights are there."""
        with suppress(OSError):
            _sweep(self.directory.groups())
            self.directory.remove()


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
            for controller in self.controllers:
                self.directory.write("cgroup.subtree_control", f"-{controller}")
            for controller in self.enabled:
                self.own.write("cgroup.subtree_control", f"-{controller}")
            self.own.enter()
            (self.directory / _DAEMON).remove()
            self.directory.remove()


def settle_legacy(own: Directory, name: str, owner: Owner) -> Home:
    """Make a place under version 1; raises OSError."""
    home = own / name
    home.make_if_missing()
    with _removed_in_failure(home):
        _end_leftovers(home, home.groups())
        with suppress(OSError):  # always so in newer kernels, and sometimes not to be changed
            home.write("memory.use_hierarchy", "1")
        if owner is not None:
            home.give(owner)
    return Home(home)


def settle_unified(own: Directory, name: str, owner: Owner) -> UnifiedHome:
    """Make a place under version 2, and move this process into it; raises OSError."""
    suffix = f"/{name}/{_DAEMON}"
    settled = own.path.endswith(suffix)  # a daemon that has executed itself anew
    if settled:
        own = attrs.evolve(own, path=own.path.removesuffix(suffix))
    if not own.kernel.is_delegated(own.path):
        raise OSError(None, "systemd has not delegated it to the daemon", own.path)
    home = own / name
    daemon = home / _DAEMON
    home.make_if_missing()
    with _removed_in_failure(daemon, home):
        # Who else is in the daemon's own group, when it is there itself, cannot be told.
        _end_leftovers(home, _without_daemon(home) if settled else home.groups())
        if not settled:
            daemon.make_if_missing()
            daemon.enter()
        if owner is not None:
            home.give(owner, "cgroup.procs")
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
            home.write("cgroup.subtree_control", f"+{controller}")
            controllers.add(controller)
        except OSError as error:
            refused[controller] = error
            if error.errno == errno.EBUSY:
                error.strerror = "others are in the group that the daemon was started in"
    return UnifiedHome(home, own, frozenset(controllers), refused, enabled)


def _without_daemon(home: Directory) -> Sequence[Directory]:
    return [group for group in home.groups() if group != home / _DAEMON]


def _end_leftovers(home: Directory, groups: Iterable[Directory]) -> None:
    home.kill_members()
    _sweep(groups)


def _sweep(groups: Iterable[Directory]) -> None:
    for group, error in sweep(groups):
        log.error("{path} stays: {error}", path=group.path, error=error)


@contextmanager
def _removed_in_failure(*directories: Directory) -> Iterator[None]:
    """Remove groups again, if they are empty, when the body raises OSError."""
    try:
        yield
    except OSError:
        for directory in directories:
            with suppress(OSError):
                directory.remove()
        raise
