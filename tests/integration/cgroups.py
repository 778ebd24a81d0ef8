"""What tests of limits of whole process trees need of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from tawebeval.linux.cgroups import find_own_cgroup
from tests.run import NEEDS_CGROUPS


def reason_to_skip() -> str | None:
    """Tell why daemons of the tests have no limits of process trees; None where they have."""
    own = find_own_cgroup()
    if own is not None and os.geteuid() and os.access(own, os.W_OK):
        controllers = Path(own, "cgroup.controllers").read_text("ascii").split()
        if {"cpu", "memory", "pids"} <= {*controllers}:
            return None
    return f"{NEEDS_CGROUPS}none is delegated to the user of the tests"
