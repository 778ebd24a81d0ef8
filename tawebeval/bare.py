"""One bare repository on the disk: which commits are in it, and how others get there.

Beside what git keeps there it has `url`, for people, and `commits/`: a marker for each
commit that is here with all of its tree, named by the commit's OID and holding the tree's.
So whether a commit is here is known without asking git.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs
from twisted.internet.defer import DeferredLock

from tawebeval.errors import EvaluationError
from tawebeval.form import Repository
from tawebeval.git import Git, Outcome
from tawebeval.signals import Threads
from tawebeval.workspace import Workspace, remove

_FETCH = (
    "fetch",
    "--quiet",
    "--force",
    "--no-tags",
    "--no-recurse-submodules",
    "--no-write-fetch-head",
    "--no-auto-maintenance",
)
_EVERYTHING = 2**31 - 1  # the depth that git takes for "all of it"
_OID = re.compile(r"[0-9a-f]{40}")
# What git says when a server has a commit, or may have it, but does not hand it out.
_NOT_OFFERED = re.compile(
    "does not allow request for unadvertised object|find remote ref|dumb http transport|"
    "does not support shallow"
)
# What a server says that would hand out any commit, but has no such one.
_NOT_THERE = re.compile("not our ref|want [0-9a-f]{40} not valid|missing object referenced")


@attrs.frozen
class Commit:
    """A commit and its tree, by their OIDs."""

    oid: str
    tree: str


@attrs.define
class BareRepository:
    """The repository at `path`, which the first fetch makes; only one fetches at a time.

    Each attempt to fetch takes at most `timeout` seconds.
    """

    path: Path
    _git: Git
    _threads: Threads
    _timeout: float
    _lock: DeferredLock = attrs.field(factory=DeferredLock)

    def known(self, oid: str) -> Commit | None:
        """Return the commit if it is marked as being here."""
        try:
            tree = self._marker(oid).read_text()
        except OSError:
            return None
        return Commit(oid, tree) if _OID.fullmatch(tree) else None

    def _marker(self, oid: str) -> Path:
        return self.path / "commits" / oid

    def _mark(self, commit: Commit) -> None:
        unfinished = self._marker(commit.oid).with_suffix(".new")
        unfinished.write_text(commit.tree)
        unfinished.replace(self._marker(commit.oid))

    def touch(self) -> None:
        """Note when it was used last, for whoever loads the cache."""
        with suppress(OSError):
            os.utime(self.path)

    def size(self) -> int:
        """Return the number of bytes that it takes on the disk. Blocks."""
        size = 0
        for directory, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):
                    size += os.lstat(os.path.join(directory, name)).st_blocks * 512
        return size

    def tidy(self) -> None:
        """Remove what an interrupted fetch leaves: locks and unfinished packs. Blocks."""
        for pattern in ("*.lock", "refs/**/*.lock", "objects/pack/tmp_*", "objects/tmp_*"):
            for leftover in self.path.glob(pattern):
                remove(leftover)

    async def check_out(self, commit: Commit, workspace: Workspace) -> None:
        """Put the tree of a commit that is here into the workspace. Raises EvaluationError."""
        outcome = await self._git(
            self.path,
            f"--work-tree={workspace.tree}",
            *("read-tree", "--reset", "-u", commit.tree),
            environment={"GIT_INDEX_FILE": str(workspace.index)},
            timeout=self._timeout,
        )
        if outcome.status:
            raise _failed("the commit's tree could not be checked out", outcome)

    async def fetch(self, repository: Repository, oid: str) -> Commit:
        """Return the commit, once it is here. Raises EvaluationError where it is not to be had."""
        await self._lock.acquire()
        complete = False
        try:
            await self._initialise(repository.url)
            commit = await self._find(oid) or await self._ask(repository, oid)
            await self._threads.run(self._mark, commit)
            complete = True
            return commit
        finally:
            try:
                if not complete:
                    await self._threads.run(self.tidy)
            finally:
                self._lock.release()

    async def _initialise(self, url: str) -> None:
        if self.path.exists():
            return
        unfinished = self.path.with_suffix(".new")
        await self._threads.run(remove, unfinished)
        outcome = await self._git(unfinished, "init", "--quiet", "--bare", "--template=")
        if outcome.status:
            raise _failed("the repository's cache could not be made", outcome)

        def finish() -> None:
            (unfinished / "commits").mkdir()
            (unfinished / "url").write_text(url + "\n")
            unfinished.rename(self.path)

        await self._threads.run(finish)

    async def _find(self, oid: str) -> Commit | None:
        """Return the commit if git has it here, marked or not."""
        outcome = await self._git(
            self.path, "log", "--no-walk", "--no-show-signature", "--format=%H %T", oid, "--"
        )
        found, _, tree = outcome.stdout.strip().partition(" ")
        # git takes the OID of a tag, too, for the commit that it names.
        return Commit(oid, tree) if outcome.status == 0 and found == oid else None

    async def _ask(self, repository: Repository, oid: str) -> Commit:
        """Fetch a commit over the network, by the cheapest way that the server allows."""
        for way in _ways(repository, oid):
            deepen: tuple[str, ...] = ()
            if (self.path / "shallow").exists() and not way[0].startswith("--depth"):
                deepen = (f"--depth={_EVERYTHING}",)
            outcome = await self._git(self.path, *_FETCH, *deepen, *way, timeout=self._timeout)
            if outcome.timed_out:
                raise _failed(
                    f"the repository could not be fetched within {self._timeout:g} seconds", outcome
                )
            if outcome.status == 0:
                commit = await self._find(oid)
                if commit is not None:
                    return commit
            elif _NOT_THERE.search(outcome.stderr):
                break
            elif not _NOT_OFFERED.search(outcome.stderr):
                raise _failed("the repository could not be fetched", outcome)
        raise EvaluationError("commit", f"the repository has no commit {oid}")


def _ways(repository: Repository, oid: str) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of `git fetch` by which a commit may be had, the cheapest first."""
    depth = f"--depth={repository.depth or 1}"
    source = ("--end-of-options", repository.url)
    yield depth, *source, f"{oid}:refs/commits/{oid}"
    if repository.branch:
        branch = f"refs/heads/{repository.branch}:refs/origin/heads/{repository.branch}"
        if repository.depth:
            yield depth, *source, branch
        else:
            yield *source, branch
    yield "--prune", *source, "refs/*:refs/origin/*"


def _failed(message: str, outcome: Outcome) -> EvaluationError:
    return EvaluationError("repository", message, {"stderr": outcome.stderr})
