"""Limits of fetches, and the bytes that they add to a repository on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeadlineExceeded
from twisted.internet.task import LoopingCall

from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.git.command import GitResult
from tawebeval.git.commits import TreeLimits
from tawebeval.linux.filetree import remove_tree

MARKERS_DIRECTORY = "commits"
"""The directory of a repository with the markers, of which there may be many."""

_T = TypeVar("_T")
_POLL_INTERVAL = 0.25  # seconds between two measurements of what git writes


@attrs.frozen
class FetchLimits:
    """Limits of fetches and trees.

    `timeout`: seconds for a fetch with all its attempts, and as many for checking out.
    `max_bytes`: bytes that all fetches of one commit may add, those of its submodules among them.
    `tree_limits`: limits of the commit's tree.
    """

    clock: Any
    timeout: float
    max_bytes: int
    tree_limits: TreeLimits

    def make_timeout_failure(self, words: str, more: str = "", **members: str) -> EvaluationFailure:
        """Return the error of what took longer than the timeout; `words` name it."""
        return EvaluationFailure(
            "repository",
            f"{words} took over {self.timeout:g} seconds (repositories.fetch_timeout){more}",
            {**members, "limit": "repositories.fetch_timeout", "value": self.timeout},
        )

    async def finish_in_time(
        self, working: Coroutine[Deferred[Any], Any, _T], words: str, more: str = ""
    ) -> _T:
        """Return the result of `working`, within the timeout. Raises: EvaluationError."""
        try:
            return await Deferred.fromCoroutine(working).addTimeout(self.timeout, self.clock)
        except DeadlineExceeded:
            raise self.make_timeout_failure(words, more) from None


@attrs.define
class FetchBudget:
    """What the fetches of one commit may take, those of its submodules among them.

    `spent_bytes` were added so far. The last fetch begins within the timeout.
    """

    _limits: FetchLimits
    spent_bytes: int = 0
    _submodule_count: int = 0
    _deadline: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._deadline = self._limits.clock.seconds() + self._limits.timeout

    @property
    def remaining_bytes(self) -> int:
        """Bytes that a fetch may add."""
        return max(self._limits.max_bytes - self.spent_bytes, 0)

    def make_failure(self) -> EvaluationFailure:
        """Return the error of a fetch that would add more."""
        words = "the repositories of the commit are" if self.spent_bytes else "the repository is"
        return EvaluationFailure(
            "repository",
            f"{words} over {format_size(self._limits.max_bytes)} (repositories.fetch_bytes)",
            {"limit": "repositories.fetch_bytes", "value": self._limits.max_bytes},
        )

    def count_submodule(self, path: str) -> None:
        """Count the submodule at `path`. Raises: EvaluationError if it is one too many."""
        self._submodule_count += 1
        self._limits.tree_limits.check_submodules(path, self._submodule_count)

    def check_time(self) -> None:
        """Raise EvaluationError if no further fetch may begin."""
        if self._limits.clock.seconds() > self._deadline:
            raise self._limits.make_timeout_failure("the fetches of submodules")


def iterate_files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a directory, without markers, by their relative paths. Blocks."""
    for parent, directories, names in os.walk(directory):
        inside = parent[len(str(directory)) + 1 :]
        if not inside:
            directories[:] = [name for name in directories if name != MARKERS_DIRECTORY]
        for name in names:
            with suppress(OSError):  # of a file that disappears
                yield os.path.join(inside, name), os.lstat(os.path.join(parent, name))


def get_disk_bytes(status: os.stat_result) -> int:
    """Return the bytes of a file on the disk."""
    return status.st_blocks * 512


class LimitExceeded(Exception):
    """Work was cancelled since it is over a limit."""


async def run_until_over(
    clock: Any,
    work: Coroutine[Deferred[Any], Any, _T],
    is_over: Callable[[], Coroutine[Deferred[Any], Any, bool]],
) -> _T:
    """Return the result of `work`; call `is_over` again and again meanwhile.

    Raises: LimitExceeded, when the cancelled work has ended, if that returned True.
    """
    working = Deferred.fromCoroutine(work)
    was_over = False

    async def poll() -> None:
        nonlocal was_over
        if not was_over and await is_over():
            was_over = True
            working.cancel()

    polling = LoopingCall(lambda: Deferred.fromCoroutine(poll()))
    polling.clock = clock
    polling.start(_POLL_INTERVAL, now=False)
    try:
        return await working
    except CancelledError:
        if was_over:
            raise LimitExceeded from None
        raise
    finally:
        polling.stop()


async def fetch_within_byte_budget(
    clock: Any,
    budget: FetchBudget,
    threads: WorkerThreads,
    fetch: Callable[[], Coroutine[Deferred[Any], Any, GitResult]],
    repository: Path,
    is_complete: Callable[[], bool],
) -> GitResult:
    """Return the result of `fetch`, which may add the rest of `budget` to `repository`.

    `is_complete` tells whether the fetch is done, whatever becomes of the commands after it. A
    complete fetch that is over the limit takes the repository with it: refs name its objects.

    `fetch` has the kernel limit each file, and so the one pack that a usual server sends. A server
    of static files sends many files; their sum is measured again and again.

    Raises: EvaluationError, of `fetch` or for too many bytes.
    """
    before, _ = await threads.run_in_thread(_measure, repository)
    limit = budget.remaining_bytes

    async def is_over() -> bool:
        now, _ = await threads.run_in_thread(_measure, repository)
        return now - before > limit

    failure, result = None, None
    try:
        result = await run_until_over(clock, fetch(), is_over)
    except LimitExceeded:
        failure = budget.make_failure()
    except EvaluationFailure as error:
        failure = error
    after, largest = await threads.run_in_thread(_measure, repository)
    # A file at the kernel's limit has made git fail.
    if after - before > limit or (largest >= limit and not is_complete()):
        if is_complete():
            await threads.run_in_thread(remove_tree, repository)
        failure = budget.make_failure()
    if result is None or failure is not None:
        assert failure is not None, "without a result"
        raise failure
    budget.spent_bytes += max(after - before, 0)
    return result


def _measure(repository: Path) -> tuple[int, int]:
    """Return the bytes of a repository, and those of its largest unfinished file. Blocks."""
    size = largest = 0
    for name, status in iterate_files(repository):
        size += get_disk_bytes(status)
        if "tmp_" in name or name.endswith(".temp"):  # of index-pack and http-fetch
            largest = max(largest, status.st_size)
    return size, largest
