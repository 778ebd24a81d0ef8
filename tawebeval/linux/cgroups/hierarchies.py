"""Which cgroup hierarchies a process can see, and where its own group is in each (cgroups(7)).

There are two versions, and a machine may have both at once: in version 1 each controller
has a tree of its own, or shares one with some others; version 2 has one tree for all
controllers that version 1 does not have. A mount may show a part of a tree only, as in
containers, and a process may be outside of that part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs

_ESCAPE = re.compile(r"\\([0-7]{3})")  # of spaces and the like in mountinfo

_UNIFIED = ""  # stands for version 2 where names of controllers do; /proc writes it so, too


@attrs.frozen
class Hierarchies:
    """The directories of a process's own groups, as absolute paths.

    `controllers` has them by the name of each controller of version 1; `unified` is that
    of version 2, None where there is none.
    """

    controllers: Mapping[str, str]
    unified: str | None


@attrs.frozen
class _Mount:
    root: str  # the group that is shown at `point`
    point: str
    controllers: frozenset[str]


def parse_hierarchies(mountinfo: str, membership: str) -> Hierarchies:
    """Read /proc/PID/mountinfo and /proc/PID/cgroup (proc(5)); what is odd there is left out."""
    mounts = list(_mounts(mountinfo))
    found = {}
    for line in membership.splitlines():
        _, controllers, own = line.split(":", 2)
        for controller in controllers.split(","):
            # The shortest way to it, and of two mounts at one place the upper one.
            places = [
                (-len(mount.point), number, place)
                for number, mount in enumerate(mounts)
                if controller in mount.controllers and (place := _place(mount, own)) is not None
            ]
            if places:
                found[controller] = max(places)[-1]
    unified = found.pop(_UNIFIED, None)
    return Hierarchies(found, unified)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        # ID, parent, device, root, mount point, options, any number of tags - type, source,
        # options of the file system: those of version 1 have its controllers among them.
        mount, _, kind = line.partition(" - ")
        root, point = (_unescape(field) for field in mount.split(" ")[3:5])
        name, *_, options = kind.split(" ")
        if name == "cgroup2":
            yield _Mount(root, point, frozenset([_UNIFIED]))
        elif name == "cgroup":
            yield _Mount(root, point, frozenset(options.split(",")))


def _place(mount: _Mount, own: str) -> str | None:
    """Return where a mount shows the group `own`; None if that is not below what it shows."""
    root = mount.root.rstrip("/")
    if ".." in (*root.split("/"), *own.split("/")):  # outside of the cgroup namespace
        return None
    if not f"{own}/".startswith(f"{root}/"):
        return None
    return (mount.point + own[len(root) :]).rstrip("/")


def _unescape(field: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), field)
