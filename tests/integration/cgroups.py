"""Cgroups of version 2 for daemons of tests, whose limits hold for whole process trees.

`make test-machine` runs the tests that need them, as an ordinary user in a delegated unit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.run import NEEDS_CGROUPS

DELEGATED = os.environ.get("TAWEBEVAL_TEST_CGROUP")
"""The directory of a delegated cgroup without processes of its own; None without."""

Test = TypeVar("Test", bound=Callable[..., Any])


def needs_cgroups(test: Test) -> Test:
    """Skip a test where the daemons of the tests have no cgroups."""
    if DELEGATED is None:
        test.skip = f"{NEEDS_CGROUPS}none is delegated to the user of the tests"  # type: ignore[attr-defined]
    return test


def enter_cgroup(name: str) -> Sequence[str]:
    """Return what begins a command that runs in a cgroup of this name; nothing without cgroups."""
    if DELEGATED is None:
        return ()
    group = Path(DELEGATED, name)
    group.mkdir(exist_ok=True)
    return ("sh", "-c", f'echo 0 >{group}/cgroup.procs && exec "$@"', "sh")


def remove_cgroup(name: str) -> None:
    """Remove the cgroup of this name, which has no processes any more."""
    if DELEGATED is not None:
        with contextlib.suppress(OSError):
            Path(DELEGATED, name).rmdir()
