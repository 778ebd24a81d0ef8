"""The cache of repositories: bare, one for each URL, bounded, sound whatever happens.

A commit that is there is never fetched again. Its marker, a small file that holds the
OID of the commit's tree, says so without asking git:

    <cache>/<digest of the URL>.git/commits/<commit OID>

Objects of one URL are never reached through another one, so nobody can read a repository
by guessing at its commits.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredLock
from twisted.logger import Logger
from twisted.python.failure import Failure

from tawebeval.errors import EvaluationError
from tawebeval.form import Repository
from tawebeval.git import Git, Outcome
from tawebeval.signals import Latch, Threads, completed
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

log = Logger()


@attrs.frozen
class Commit:
    """A commit and its tree, by their OIDs."""

    oid: str
    tree: str


@attrs.define
class _Fetch:
    """A fetch under way, and how many wait for it."""

    latch: Latch[Commit | Failure] = attrs.field(factory=Latch)
    waiting: int = 0
    deferred: Deferred[None] | None = None


@attrs.define
class _Entry:
    """One cached repository; `size` in bytes. What has users is not evicted."""

    path: Path
    size: int = 0
    users: int = 0
    lock: DeferredLock = attrs.field(factory=DeferredLock)
    fetches: dict[tuple[Repository, str], _Fetch] = attrs.field(factory=dict)

    def marker(self, oid: str) -> Path:
        return self.path / "commits" / oid

    def known(self, oid: str) -> Commit | None:
        """Return the commit if it is marked as being here."""
        try:
            tree = self.marker(oid).read_text()
        except OSError:
            return None
        return Commit(oid, tree) if _OID.fullmatch(tree) else None

    def mark(self, commit: Commit) -> None:
        """Note that the commit is here with all of its tree."""
        marker = self.marker(commit.oid)
        unfinished = marker.with_suffix(".new")
        unfinished.write_text(commit.tree)
        unfinished.replace(marker)


class Repositories:
    """Provides the trees of commits.

    The cache lies in `root` and is kept below `capacity` bytes, as far as what is in use
    allows. A fetch takes at most `timeout` seconds for each attempt.
    """

    def __init__(
        self, root: Path, git: Git, threads: Threads, *, capacity: int, timeout: float
    ) -> None:
        self._root = root
        self._git = git
        self._threads = threads
        self._capacity = capacity
        self._timeout = timeout
        # In the order of their last use.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._evicted = 0
        self.fetches = 0  # how many times a network was asked

    def load(self) -> None:
        """Take over what an earlier daemon has left in the cache. Blocks."""
        found = []
        for path in self._root.iterdir():
            if path.suffix == ".git":
                found.append((path.stat().st_mtime, path))
            else:
                remove(path)  # half made, or half removed
        for _, path in sorted(found):
            _tidy(path)
            self._entries[path.name] = _Entry(path, _size(path))

    async def check_out(self, repository: Repository, oid: str, workspace: Workspace) -> Commit:
        """Put the tree of a commit into the workspace, fetching it first if it is not here.

        Raises EvaluationError when the repository or the commit cannot be had.
        """
        async with self._use(repository.url) as entry:
            commit = entry.known(oid) or await self._shared_fetch(entry, repository, oid)
            outcome = await self._git(
                entry.path,
                f"--work-tree={workspace.tree}",
                *("read-tree", "--reset", "-u", commit.tree),
                environment={"GIT_INDEX_FILE": str(workspace.index)},
                timeout=self._timeout,
            )
            if outcome.status:
                raise _failed("the commit's tree could not be checked out", outcome)
            return commit

    @asynccontextmanager
    async def _use(self, url: str) -> AsyncIterator[_Entry]:
        name = hashlib.sha256(url.encode()).hexdigest()[:40] + ".git"
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(self._root / name)
        self._entries.move_to_end(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            with suppress(OSError):
                os.utime(entry.path)  # for `load`

    async def _shared_fetch(self, entry: _Entry, repository: Repository, oid: str) -> Commit:
        """Fetch, or wait with those for whom the same is being fetched already."""
        key = repository, oid
        fetch = entry.fetches.get(key)
        if fetch is None:
            fetch = entry.fetches[key] = _Fetch()
            fetch.deferred = Deferred.fromCoroutine(self._fetch(entry, repository, oid)).addBoth(
                fetch.latch.set
            )
        fetch.waiting += 1
        try:
            result = await fetch.latch.wait()
        except CancelledError:
            if fetch.waiting == 1:
                # Nobody else wants it: end git, and see to it that later ones begin anew.
                entry.fetches.pop(key, None)
                assert fetch.deferred is not None
                fetch.deferred.cancel()
                await completed(fetch.latch)
            raise
        finally:
            fetch.waiting -= 1
            if fetch.latch.is_set and entry.fetches.get(key) is fetch:
                del entry.fetches[key]
        if isinstance(result, Failure):
            raise _own_copy(result.value)
        return result

    async def _fetch(self, entry: _Entry, repository: Repository, oid: str) -> Commit:
        await entry.lock.acquire()
        complete = False
        try:
            await self._initialise(entry, repository.url)
            commit = await self._find(entry, oid) or await self._ask(entry, repository, oid)
            await self._threads.run(entry.mark, commit)
            complete = True
            return commit
        finally:
            try:
                if not complete:
                    await self._threads.run(_tidy, entry.path)
                entry.size = await self._threads.run(_size, entry.path)
                await self._evict()
            finally:
                entry.lock.release()

    async def _initialise(self, entry: _Entry, url: str) -> None:
        if entry.path.exists():
            return
        unfinished = entry.path.with_suffix(".new")
        await self._threads.run(remove, unfinished)
        outcome = await self._git(unfinished, "init", "--quiet", "--bare", "--template=")
        if outcome.status:
            raise _failed("the repository's cache could not be made", outcome)

        def finish() -> None:
            (unfinished / "commits").mkdir()
            (unfinished / "url").write_text(url + "\n")
            unfinished.rename(entry.path)

        await self._threads.run(finish)

    async def _find(self, entry: _Entry, oid: str) -> Commit | None:
        """Return the commit if the cached repository has it."""
        outcome = await self._git(
            entry.path, "log", "--no-walk", "--no-show-signature", "--format=%H %T", oid, "--"
        )
        found, _, tree = outcome.stdout.strip().partition(" ")
        # git takes the OID of a tag, too, for the commit that it names.
        return Commit(oid, tree) if outcome.status == 0 and found == oid else None

    async def _ask(self, entry: _Entry, repository: Repository, oid: str) -> Commit:
        """Fetch a commit over the network, by the cheapest way that the server allows."""
        for arguments in _ways(repository, oid):
            if (entry.path / "shallow").exists() and not arguments[0].startswith("--depth"):
                arguments = (f"--depth={_EVERYTHING}", *arguments)
            self.fetches += 1
            outcome = await self._git(entry.path, *_FETCH, *arguments, timeout=self._timeout)
            if outcome.timed_out:
                raise _failed(
                    f"the repository could not be fetched within {self._timeout:g} seconds", outcome
                )
            if outcome.status == 0:
                commit = await self._find(entry, oid)
                if commit is not None:
                    return commit
            elif _NOT_THERE.search(outcome.stderr):
                break
            elif not _NOT_OFFERED.search(outcome.stderr):
                raise _failed("the repository could not be fetched", outcome)
        raise EvaluationError("commit", f"the repository has no commit {oid}")

    async def _evict(self) -> None:
        """Remove what was used longest ago until the rest fits."""
        excess = sum(entry.size for entry in self._entries.values()) - self._capacity
        for name, entry in list(self._entries.items()):
            if excess <= 0:
                break
            if entry.users:
                continue
            excess -= entry.size
            del self._entries[name]
            self._evicted += 1
            doomed = entry.path.with_suffix(f".old{self._evicted}")
            with suppress(FileNotFoundError):
                entry.path.rename(doomed)
            log.info("evicting {path} from the cache, {size} bytes", path=name, size=entry.size)
            await self._threads.run(remove, doomed)


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


def _own_copy(error: BaseException | None) -> BaseException:
    """Return what each of those who share a failure may raise with a traceback of its own."""
    assert error is not None
    return attrs.evolve(error) if isinstance(error, EvaluationError) else error


def _tidy(path: Path) -> None:
    """Remove what an interrupted fetch leaves in a repository: locks and unfinished packs."""
    for pattern in ("*.lock", "refs/**/*.lock", "objects/pack/tmp_*", "objects/tmp_*"):
        for leftover in path.glob(pattern):
            remove(leftover)


def _size(path: Path) -> int:
    """Return the number of bytes that the files below `path` take on the disk."""
    size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return size
