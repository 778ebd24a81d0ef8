"""Limits of fetches: time, bytes on the disk, and the size of the commit's tree.

A tree of a few kilobytes in a repository can be billions of files when it is checked out. So git
lists the tree before anything of it is written, and is killed as soon as the list is over a limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeadlineExceeded
from twisted.internet.task import LoopingCall

from tawebeval.core.evaluations import Commit, Submodule
from tawebeval.deferreds import WorkerThreads
from tawebeval.errors import EvaluationFailure, format_size
from tawebeval.linux.filetree import get_disk_bytes, remove_tree
from tawebeval.sandbox.disk import BLOCK_BYTES

if TYPE_CHECKING:
    from tawebeval.git.command import GitResult  # needs TLS, which `try` does without

_LINE_KEPT = 1024  # bytes of a line that does not end
_FOUND = re.compile(rb"([0-9a-f]{40}) ([0-9a-f]{40})\n")
_SUBMODULE = b"160000"  # the mode of its entry, whose object is a commit
_PATH_MAX = 4096  # bytes: PATH_MAX of Linux

COMMIT_MARKERS_DIRECTORY = "commits"
"""The directory of a repository with the markers, of which there may be many."""

ORIGIN_REFS_DIRECTORY = "refs/origin"
"""The directory of a repository with the refs of the server."""

_T = TypeVar("_T")
_LOOK_SECONDS = 0.25  # between two measurements of what git writes


@attrs.frozen
class TreeLimits:
    """The size that a tree may have, with its submodules.

    `max_files` counts directories and links, too.
    """

    max_files: int
    max_bytes: int
    max_submodules: int = 0

    def check_submodules(self, path: str, count: int) -> None:
        """Raise EvaluationFailure if a tree with `count` submodules is over the limit.

        `path` is that of the last one.
        """
        if count > self.max_submodules:
            allowed = f"over {self.max_submodules} submodules" if self.max_submodules else "one"
            raise EvaluationFailure(
                "repository",
                f"the commit has a submodule at {path!r}; {allowed} in all is not allowed",
                {"path": path},
            )

    def check_tree(self, files: int, size: int) -> None:
        """Raise EvaluationFailure if a tree with these many `files` and bytes is over a limit."""
        if files > self.max_files:
            raise EvaluationFailure(
                "repository",
                f"the commit has over {self.max_files} files and directories",
            )
        if size > self.max_bytes:
            raise EvaluationFailure(
                "repository",
                f"the commit's files are over {format_size(self.max_bytes)} "
                "(repositories.tree_bytes)",
                {"limit": "repositories.tree_bytes", "value": self.max_bytes},
            )


def build_commit_inspection_commands(oid: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the two git commands whose output `CommitInspectionParser` reads."""
    return (
        ("log", "--no-walk", "--no-show-signature", "--format=%H %T", oid, "--"),
        ("ls-tree", "-r", "-t", "-l", "-z", oid),
    )


class CommitInspectionParser:
    """Parser of the output of `build_commit_inspection_commands`, read in chunks.

    `before`: number of commands, without output of interest, that run before them in the same
    sandbox. A NUL ends the output of each command but the last, if the command exited with 0.
    """

    def __init__(self, limits: TreeLimits, *, before: int = 0) -> None:
        self._limits = limits
        self._before = before
        self._printed = [b""]  # by each command; of the list only the beginning of one entry
        self._file_count = self._total_bytes = 0
        self._has_gitattributes = False
        self._submodules: list[Submodule] = []

    def has_inspection_begun(self) -> bool:
        """Tell whether the commands before the inspection have exited with 0."""
        return len(self._printed) > self._before

    def feed(self, chunk: bytes) -> None:
        """Parse a chunk. Raises EvaluationFailure as soon as the tree is over a limit."""
        while not self._is_listing():
            printed, nul, chunk = chunk.partition(b"\0")
            self._printed[-1] = (self._printed[-1] + printed)[-_LINE_KEPT:]
            if not nul:
                return
            self._printed.append(b"")
        *entries, self._printed[-1] = (self._printed[-1] + chunk).split(b"\0")
        for entry in entries:
            self._count_entry(entry)
        self._check_path(self._printed[-1].partition(b"\t")[2])

    def _count_entry(self, entry: bytes) -> None:
        head, _, path = entry.partition(b"\t")
        self._check_path(path)
        self._file_count += 1
        self._has_gitattributes |= path.rpartition(b"/")[2] == b".gitattributes"
        mode, _, oid, size = head.split()
        if mode == _SUBMODULE:
            name = path.decode("utf-8", "surrogateescape")
            self._submodules.append(Submodule(name, oid.decode()))
            self._limits.check_submodules(name, len(self._submodules))
        self._total_bytes += int(size) if size.isdigit() else 0
        self._limits.check_tree(self._file_count, self._total_bytes)

    def _check_path(self, path: bytes) -> None:
        if len(path) > _PATH_MAX:
            raise EvaluationFailure(
                "repository", f"the commit has a path of over {format_size(_PATH_MAX)}"
            )

    def _is_listing(self) -> bool:
        return len(self._printed) > self._before + 1

    def is_tree_or_blob(self) -> bool:
        """Tell whether git has the object, which is neither a commit nor a tag of one."""
        return self._is_listing() and not self._printed[self._before]

    @property
    def commit(self) -> Commit | None:
        """The commit, with as much of its tree as was listed; None if git does not have it.

        Of an annotated tag it is the commit that the tag names.
        """
        found = _FOUND.fullmatch(self._printed[self._before]) if self._is_listing() else None
        if found is None:
            return None
        return Commit(
            found[1].decode(),
            found[2].decode(),
            self._file_count,
            self._total_bytes,
            tuple(self._submodules),
            self._has_gitattributes,
        )


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

    async def run_within_timeout(
        self, working: Coroutine[Deferred[Any], Any, _T], words: str, more: str = ""
    ) -> _T:
        """Return the result of `working`, within the timeout. Raises: EvaluationFailure."""
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
    submodule_count: int = 0
    _deadline: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._deadline = self._limits.clock.seconds() + self._limits.timeout

    @property
    def remaining_bytes(self) -> int:
        """Bytes that a fetch may add."""
        return max(self._limits.max_bytes - self.spent_bytes, 0)

    def make_size_failure(self) -> EvaluationFailure:
        """Return the error of a fetch that would add more."""
        words = "the repositories of the commit are" if self.spent_bytes else "the repository is"
        return EvaluationFailure(
            "repository",
            f"{words} over {format_size(self._limits.max_bytes)} (repositories.fetch_bytes)",
            {"limit": "repositories.fetch_bytes", "value": self._limits.max_bytes},
        )

    def count_submodule(self, path: str) -> None:
        """Count the submodule at `path`. Raises: EvaluationFailure if it is one too many."""
        self.submodule_count += 1
        self._limits.tree_limits.check_submodules(path, self.submodule_count)

    def check_time(self) -> None:
        """Raise EvaluationFailure if no further fetch may begin."""
        if self._limits.clock.seconds() > self._deadline:
            raise self._limits.make_timeout_failure("the fetches of submodules")


def walk_files(top: Path, skipped: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a directory by their relative paths. Blocks.

    The directory of the name `skipped` in `top` is left out.
    """
    for parent, _, names in _walk(top, skipped):
        inside = parent[len(str(top)) + 1 :]
        for name in names:
            with suppress(OSError):  # of a file that disappears
                yield os.path.join(inside, name), os.lstat(os.path.join(parent, name))


def _walk(top: Path, skipped: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what os.walk does, without the directory of the name `skipped` in `top`. Blocks."""
    for parent, directories, names in os.walk(top):
        if parent == str(top) and skipped in directories:
            directories.remove(skipped)
        yield parent, directories, names


class ByteLimitExceeded(Exception):
    """Work was cancelled since it has written too much."""


async def run_within_byte_limit(
    clock: Any,
    threads: WorkerThreads,
    work: Coroutine[Deferred[Any], Any, _T],
    measure: Callable[[], int],
    limit: int,
) -> _T:
    """Return the result of `work`; call `measure` in a thread again and again meanwhile.

    Raises: ByteLimitExceeded, when the cancelled work has ended, if that returned over `limit`.
    """
    working, is_over = Deferred.fromCoroutine(work), False

    async def look() -> None:
        nonlocal is_over
        if await threads.run_in_thread(measure) > limit and not is_over:
            is_over = True
            working.cancel()

    looking = LoopingCall(lambda: Deferred.fromCoroutine(look()))
    looking.clock = clock
    looking.start(_LOOK_SECONDS, now=False)
    try:
        return await working
    except CancelledError:
        if is_over:
            raise ByteLimitExceeded from None
        raise
    finally:
        looking.stop()


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

    `fetch` has the kernel limit each file, and so the one pack that a server sends. But git writes
    a file, with its directories, for each ref of the server: their sum is measured again and again.

    Raises: EvaluationFailure, of `fetch` or for too many bytes.
    """
    before, _ = await threads.run_in_thread(_measure, repository)
    limit = budget.remaining_bytes
    failure, result = None, None
    try:
        result = await run_within_byte_limit(
            clock, threads, fetch(), lambda: _measure(repository)[0], before + limit
        )
    except ByteLimitExceeded:
        await threads.run_in_thread(remove_tree, repository / ORIGIN_REFS_DIRECTORY)
        failure = budget.make_size_failure()
    except EvaluationFailure as error:
        failure = error
    after, largest = await threads.run_in_thread(_measure, repository)
    # A file at the kernel's limit has made git fail.
    if after - before > limit or (largest >= limit and not is_complete()):
        if is_complete():
            await threads.run_in_thread(remove_tree, repository)
        failure = budget.make_size_failure()
    if result is None or failure is not None:
        assert failure is not None, "without a result"
        raise failure
    budget.spent_bytes += max(after - before, 0)
    return result


def _measure(repository: Path) -> tuple[int, int]:
    """Return the bytes of a repository, and those of its largest unfinished file. Blocks.

    A directory counts as one block. The markers, of which there may be 100,000, are left out.
    """
    directory_count = sum(len(found) for _, found, _ in _walk(repository, COMMIT_MARKERS_DIRECTORY))
    size, largest = directory_count * BLOCK_BYTES, 0
    for name, status in walk_files(repository, COMMIT_MARKERS_DIRECTORY):
        size += get_disk_bytes(status)
        if "tmp_" in name:  # of index-pack
            largest = max(largest, status.st_size)
    return size, largest
