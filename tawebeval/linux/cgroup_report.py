"""What the operator is told of cgroups: which resources they limit, and how to have the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tawebeval.linux.cgroups import CgroupManager, Resource
from tawebeval.linux.systemd_units import SYSTEMD_MARKER_DIRECTORY

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


def describe_enforcement(cgroups: CgroupManager, what: Resource) -> str:
    """Return how a resource is limited, with the reason if it is not."""
    if what in cgroups.enforced_resources:
        return f"{what}: {_ENFORCED[what]}"
    return f"{what}: {_MISSING[what]} ({cgroups.unenforced_resources[what]})"


def find_cgroup_remedy() -> str:
    """Return the remedy for resources that are not limited."""
    with suppress(OSError):
        if " - cgroup " in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape"):
            return _VERSION_2
    return _UNIT if os.path.isdir(SYSTEMD_MARKER_DIRECTORY) else _GIVEN
