"""How much room the state and the cache may need, for `tawebeval doctor`, and how much there is.

What is reckoned here stands in docs/operations.md, under "Sizing".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tawebeval.config import Configuration
from tawebeval.daemon.findings import Finding, Health
from tawebeval.daemon.state import existing
from tawebeval.sandbox.disk import measure


@attrs.frozen
class _Directory:
    """One of the two: how many bytes it may need, and has of them; by which `settings`."""

    path: Path
    needed: int
    taken: int
    settings: tuple[str, ...]


def judge_room(
    configuration: Configuration, running: int, state: Path, cache: Path
) -> Iterator[Finding]:
    """Yield whether there is room for so many evaluations at once, on each file system.

    Where both are on one it is for the sum. What the cache has taken already it need not find any
    more. Blocks, the longer the more there is in the cache. Raises OSError.
    """
    limits, repositories = configuration.limits, configuration.repositories
    directories = (
        _Directory(
            state,
            limits.uploads + running * (limits.disk + repositories.tree_bytes),
            0,
            ("limits.uploads", "limits.disk", "repositories.tree_bytes"),
        ),
        _Directory(
            cache,
            repositories.cache
            + (running + repositories.fetches)
            * (repositories.fetch_bytes + repositories.tree_bytes),
            min(_taken(cache), repositories.cache),
            ("repositories.cache", "repositories.fetch_bytes", "repositories.tree_bytes"),
        ),
    )
    systems: dict[int, list[_Directory]] = {}
    for each in directories:
        systems.setdefault(os.stat(existing(each.path)).st_dev, []).append(each)
    for system in systems.values():
        yield _judge(system, configuration.health.free_disk)


def _judge(system: Sequence[_Directory], spare: int) -> Finding:
    """Tell whether all that is on one file system fits, with so many bytes to spare."""
    taken = sum(each.taken for each in system)
    room = shutil.disk_usage(existing(system[0].path)).free + taken
    needed = sum(each.needed for each in system) + spare
    paths = " and ".join(str(each.path) for each in system)
    free = "are free or in the cache" if taken else "are free"
    what = f"{paths}: {_gigabytes(room)} {free}, and {_gigabytes(needed)} may be needed"
    if room >= needed:
        return Finding("disk", Health.OK, what)
    settings = dict.fromkeys(name for each in system for name in each.settings)
    remedy = f"a larger file system, or lower {', '.join(settings)}, evaluations.running"
    return Finding("disk", Health.WEAKER, what, remedy)


def _taken(cache: Path) -> int:
    try:
        return measure(cache, ()).size
    except OSError:  # it is not there yet, or closed, which is said of it elsewhere
        return 0


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
