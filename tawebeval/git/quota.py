"""A command that fetches, kept within its bytes; one that is not leaves none behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall

from tawebeval.deferreds import Threads
from tawebeval.errors import EvaluationError
from tawebeval.git.command import Outcome
from tawebeval.git.trees import TreeLimits
from tawebeval.linux.filetree import remove

_LOOK = 0.25  # seconds between two looks at how much a fetch has brought


@attrs.frozen
class FetchLimits:
    """What may be fetched.

    A fetch may take `timeout` seconds with all its attempts, each of which may bring `size`
    bytes; checking out may take as long again, and what is checked out may be as `tree` says.
    """

    clock: Any
    timeout: float
    size: int
    tree: TreeLimits


MARKERS = "commits"
"""The directory in a repository that is not git's; it has a file for each commit."""

Files = Mapping[str, os.stat_result]


def files(directory: Path) -> Files:
    """Return the files below a directory, by names relative to it, but for `MARKERS`. Blocks."""
    found = {}
    for parent, directories, names in os.walk(directory):
        inside = parent[len(str(directory)) + 1 :]
        if not inside:
            directories[:] = [name for name in directories if name != MARKERS]
        for name in names:
            with suppress(OSError):
                found[os.path.join(inside, name)] = os.lstat(os.path.join(parent, name))
    return found


def disk_use(found: Files) -> int:
    """Return how many bytes files take on the disk."""
    return sum(status.st_blocks * 512 for status in found.values())


async def bounded(
    limits: FetchLimits,
    threads: Threads,
    fetch: Callable[[], Coroutine[Deferred[Any], Any, Outcome]],
    repository: Path,
    complete: Callable[[], bool],
) -> Outcome:
    """Return how `fetch` ends; raise EvaluationError when it brings too many bytes.

    `complete` tells whether all of it is there, whatever becomes of what `fetch` does besides.
    When that raises EvaluationError before, what it has brought does not stay, either.

    The kernel has to keep each file within the limit, and so the pack that a usual server
    sends. A server of plain files sends many: their sum is looked at again and again.
    """
    before = await threads.run(files, repository)
    over = False
    fetching = Deferred.fromCoroutine(fetch())

    async def look() -> None:
        nonlocal over
        now = await threads.run(files, repository)
        if not over and disk_use(now) - disk_use(before) > limits.size:
            over = True
            fetching.cancel()

    watch = LoopingCall(lambda: Deferred.fromCoroutine(look()))
    watch.clock = limits.clock
    watch.start(_LOOK, now=False)
    try:
        outcome = await fetching
    except CancelledError:
        if not over:
            raise
    except EvaluationError:
        if not await threads.run(_is_over, repository, before, limits.size, complete()):
            await threads.run(_undo, repository, before)
            raise
    else:
        if not await threads.run(_is_over, repository, before, limits.size, complete()):
            return outcome
    finally:
        watch.stop()
    if complete() or not await threads.run(_undo, repository, before):
        # Quicker than the looks. Refs lead to what was fetched: it goes with the whole cache of
        # this repository.
        await threads.run(remove, repository)
    raise EvaluationError(
        "repository",
        f"the repository was not fetched: it has more than {limits.size} bytes",
        {"limit": "repositories.fetch_bytes", "value": limits.size},
    )


def _is_over(repository: Path, before: Files, limit: int, complete: bool) -> bool:
    """Tell whether a fetch has brought more than it may, or has been stopped by it. Blocks."""
    after = files(repository)
    if complete:
        return disk_use(after) - disk_use(before) > limit
    return any(after[name].st_size >= limit for name in after.keys() - before)


def _undo(repository: Path, before: Files) -> bool:
    """Remove the objects that a fetch has brought, if it did not come to its end. Blocks.

    Tell whether they were: when refs have changed it was at its end already, and the objects are
    referred to.
    """
    after = files(repository)
    for name, status in after.items():
        if name.startswith(("refs", "packed-refs")) and (
            name not in before or before[name].st_mtime_ns != status.st_mtime_ns
        ):
            return False
    for name in after.keys() - before:
        if name.startswith("objects"):
            (repository / name).unlink(missing_ok=True)
    return True
