"""One bare repository on the disk: which commits are in it, and how others get there.

Beside what git keeps there it has `url`, for people, and `commits/`: a marker for each
commit that is here with all of its tree, named by the commit's OID and holding the tree's,
how many files that has, and how many bytes. So whether a commit is here, and how large its
tree is, is known without asking git.

Only the newest commits have a ref, and so a line in `shallow`, which git sends to the server with
each fetch. The objects of the others stay, for nothing here removes objects without a ref.
Maintenance packs what fetches leave, so that the thousandth fetch takes as long as the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.defer import TimeoutError as TookTooLong

from tawebeval.core.checkout import Commit
from tawebeval.core.form import Repository
from tawebeval.core.hosts import Route
from tawebeval.deferreds import Threads
from tawebeval.errors import EvaluationError
from tawebeval.git import blank
from tawebeval.git.command import Git, Outcome
from tawebeval.git.commits import Look, look_at
from tawebeval.git.credentials import Credential
from tawebeval.git.gitwords import is_not_offered, is_not_there
from tawebeval.git.quota import MARKERS, FetchLimits, bounded, disk_use, files
from tawebeval.git.remotes import Remotes
from tawebeval.linux.filetree import remove
from tawebeval.resolver import LOOKUP
from tawebeval.sandbox.commands import Reach

T = TypeVar("T")

_FETCH = (
    "fetch",
    "--quiet",
    "--force",
    "--no-tags",
    "--no-recurse-submodules",
    "--no-write-fetch-head",
    "--no-auto-maintenance",
)
# Whoever allows `file` means repositories of other users, too, and git-upload-pack(1) is made
# for such: it does not run what their configuration names. Only that command is told so.
_SERVE_OTHERS = "--upload-pack=git -c safe.directory='*' upload-pack"
_LEFTOVERS = (
    *("*.lock", "refs/**/*.lock", "objects/tmp_*", "objects/pack/tmp_*"),
    *("objects/pack/.tmp-*", "objects/pack/*.keep"),
)
_EVERYTHING = 2**31 - 1  # the depth that git takes for "all of it"
# git looks for no deltas, and keeps those that servers have sent: so the time depends on the bytes.
_REPACK = ("repack", "--quiet", "-d", "-n", "--geometric=2", "--window=0", "--threads=1")
# git-prune(1) also removes the lines of `shallow` that no ref leads to.
_TIDY = (("pack-refs", "--all"), ("prune", "--expire=never"))
_DIRECTORIES = 48 * 1024  # bytes on the disk: a dozen of them
_NEWEST = 8  # commits that have a ref, on which a server can base what it sends
_MANY = 100  # files that fetches may add before maintenance, each two or three
_PATIENCE = 5.0  # seconds for which a fetch waits for maintenance, and that for fetches
_MARKER = re.compile(r"([0-9a-f]{40}) ([0-9]+) ([0-9]+)", re.ASCII)


@attrs.define
class BareRepository:
    """The repository at `path`, which the first fetch makes; only one fetches at a time.

    `generation` counts how often it was discarded. `is_blank` is whether no fetch has brought
    anything as yet.
    """

    path: Path
    _git: Git
    _threads: Threads
    _remotes: Remotes
    _limits: FetchLimits
    generation: int = 0
    is_blank: bool = True
    _lock: DeferredLock = attrs.field(factory=DeferredLock)
    _upkeep: Deferred[None] | None = None
    _fetches: int = 0
    _marked: int = 0  # bytes of the markers
    _files: int = 0  # besides the markers
    _step: int = _MANY
    _due: int = _MANY  # files, before maintenance is due

    def known(self, oid: str) -> Commit | None:
        """Return the commit if it is marked as being here."""
        try:
            marker = _MARKER.fullmatch(self._marker(oid).read_text())
        except OSError:
            return None
        return marker and Commit(oid, marker[1], int(marker[2]), int(marker[3]))

    def _marker(self, oid: str) -> Path:
        return self.path / MARKERS / oid

    def _mark(self, commit: Commit) -> None:
        unfinished = self._marker(commit.oid).with_suffix(".new")
        unfinished.write_text(f"{commit.tree} {commit.files} {commit.size}")
        self._marked += unfinished.stat().st_blocks * 512
        unfinished.replace(self._marker(commit.oid))

    @property
    def used(self) -> bool:
        """Whether a commit has ever been fetched into it. Blocks, hardly."""
        try:
            with os.scandir(self.path / MARKERS) as markers:
                return any(markers)
        except OSError:
            return False

    def load(self) -> int:
        """Take over what an earlier daemon has left; return its bytes on the disk. Blocks."""
        self.tidy()
        self._marked = disk_use(files(self.path / MARKERS))
        return self.size()

    def size(self) -> int:
        """Return the number of bytes that it takes on the disk. Blocks.

        Markers are counted as they are written, for there may be many.
        """
        found = files(self.path)
        self._files = len(found)
        self.is_blank = not self.used and not any(name.startswith("objects") for name in found)
        return disk_use(found) + self._marked + _DIRECTORIES

    def tidy(self) -> None:
        """Remove what a killed git leaves: locks and unfinished packs. Blocks."""
        for pattern in _LEFTOVERS:
            for leftover in self.path.glob(pattern):
                remove(leftover)
        for part in self.path.glob("objects/pack/pack-*"):
            if not all(part.with_suffix(suffix).exists() for suffix in (".pack", ".idx")):
                remove(part)

    @property
    def needs_maintenance(self) -> bool:
        """Whether fetches have left so many files that the next ones are slower."""
        return self._files >= self._due

    async def maintain(self, largest: int) -> None:
        """Pack what fetches have left, into a pack of at most `largest` bytes.

        Raises CancelledError when a fetch has waited for `_PATIENCE` seconds, or this has waited
        as long for fetches; EvaluationError when git fails.
        """
        await _within_patience(self._lock.acquire(), self._limits.clock)
        self._step *= 2  # until it succeeds, so that what fails is rarely tried
        try:
            self._upkeep = Deferred.fromCoroutine(self._pack(largest))
            if self._lock.waiting:
                _within_patience(self._upkeep, self._limits.clock)
            await self._upkeep
            self._step = _MANY
        finally:
            self._upkeep = None
            try:
                await self._threads.run(self._finish_maintenance)
            finally:
                self._lock.release()

    async def _pack(self, largest: int) -> None:
        outcome = await self._git(
            self.path,
            *_REPACK,
            then=_TIDY,
            timeout=self._limits.timeout,
            largest=largest,
            reach=Reach((self.path,)),
        )
        if outcome.status:
            raise _failed("the repository could not be packed", outcome)

    def _finish_maintenance(self) -> None:
        self.tidy()
        self.size()
        self._due = self._files + self._step

    async def _acquire(self) -> None:
        """Acquire the lock; stop maintenance that does not end soon."""
        if self._upkeep is not None:
            _within_patience(self._upkeep, self._limits.clock)
        await self._lock.acquire()

    async def check_out(self, commit: Commit, tree: Path, index: Path) -> None:
        """Put the tree of a commit that is here into the directory `tree`. Raises EvaluationError.

        In the directory `index` git keeps its index meanwhile.
        """
        outcome = await self._git(
            self.path,
            f"--work-tree={tree}",
            *("read-tree", "--reset", "-u", commit.tree),
            environment={"GIT_INDEX_FILE": str(index / "index")},
            timeout=self._limits.timeout,
            reach=Reach((tree, index)),
        )
        if outcome.timed_out:
            seconds = self._limits.timeout
            raise _failed(
                f"the commit's tree could not be checked out within {seconds:g} seconds",
                outcome,
                limit="repositories.fetch_timeout",
                value=seconds,
            )
        if outcome.status:
            raise _failed("the commit's tree could not be checked out", outcome)

    async def discard(self, generation: int) -> None:
        """Remove all of it that is of that `generation`, so that the next fetch begins anew."""
        await self._acquire()
        try:
            if self.generation == generation:
                self.generation += 1
                damaged = self.path.with_suffix(".damaged")
                with suppress(FileNotFoundError):
                    self.path.rename(damaged)
                await self._threads.run(remove, damaged)
        finally:
            self._lock.release()

    async def fetch(
        self, repository: Repository, oid: str, credential: Credential | None = None
    ) -> Commit:
        """Return the commit, once it is here. Raises EvaluationError where it is not to be had.

        All of it, with the wait for another fetch, has the time of the limits.
        """
        fetching = Deferred.fromCoroutine(self._fetch(repository, oid, credential))
        seconds = self._limits.timeout
        try:
            return await fetching.addTimeout(seconds, self._limits.clock)
        except TookTooLong:
            raise EvaluationError(
                "repository",
                f"the repository could not be fetched within {seconds:g} seconds, with all"
                " attempts and the wait for other fetches from it",
                {"limit": "repositories.fetch_timeout", "value": seconds},
            ) from None

    async def _fetch(
        self, repository: Repository, oid: str, credential: Credential | None
    ) -> Commit:
        await self._acquire()
        complete = False
        try:
            new = await self._threads.run(self._begin, repository.url)
            commit = None if new else await self._find(oid)
            if commit is None:
                commit = await self._ask(repository, oid, credential)
            await self._threads.run(self._mark, commit)
            complete = True
            return commit
        finally:
            try:
                if not complete:
                    await self._threads.run(self.tidy)
            finally:
                self._lock.release()

    def _begin(self, url: str) -> bool:
        """Make the repository if it is not there; tell whether it was made. Blocks."""
        if self.path.exists():
            return False
        unfinished = self.path.with_suffix(".new")
        remove(unfinished)
        blank.make(unfinished)
        (unfinished / MARKERS).mkdir()
        (unfinished / "url").write_text(url + "\n")
        unfinished.rename(self.path)
        self._marked = 0
        return True

    async def _find(self, oid: str) -> Commit | None:
        """Return the commit if git has it here, marked or not.

        Raises EvaluationError where its tree is over the limits.
        """
        look = Look(oid, self._limits.tree)
        log, ls_tree = look_at(oid)
        outcome = await self._git(self.path, *log, then=(ls_tree,), received=look.feed)
        return _found(look, outcome)

    async def _ask(self, repository: Repository, oid: str, credential: Credential | None) -> Commit:
        """Fetch a commit over the network, by the cheapest way that the server allows."""
        # Sooner than the fetch as a whole: a silent name server is not the repository's fault.
        within = min(LOOKUP, self._limits.timeout / 2)
        route, login = await self._remotes.route(repository.url, credential, within)
        if route.source is not None:
            await self._threads.run(self._remotes.check_source, route.source)
        reach = Reach((self.path,), route.readable, network=route.source is None)
        serve = () if route.source is None else (_SERVE_OTHERS,)
        self._fetches += 1
        ref = f"refs/commits/{self._fetches % _NEWEST}"
        for way in _ways(repository, route, f"{oid}:{ref}"):
            deepen: tuple[str, ...] = ()
            if (self.path / "shallow").exists() and not way[0].startswith("--depth"):
                deepen = (f"--depth={_EVERYTHING}",)
            look = Look(oid, self._limits.tree, before=1)
            fetch = partial(
                self._git,
                self.path,
                *(*_FETCH, *serve, *deepen, *way),
                # What was fetched is looked at on the spot: a sandbox less to be made.
                then=look_at(oid),
                received=look.feed,
                environment=route.environment,
                largest=self._limits.size,
                login=login,
                source=route.source,
                reach=reach,
            )
            outcome = await bounded(self._limits, self._threads, fetch, self.path, look.has_begun)
            if look.has_begun():
                commit = _found(look, outcome)
                if commit is not None:
                    return commit
            elif is_not_there(outcome.stderr):
                break
            elif not is_not_offered(outcome.stderr):
                raise _failed("the repository could not be fetched", outcome)
        raise EvaluationError("commit", f"the repository has no commit {oid}")


def _within_patience(deferred: Deferred[T], clock: Any) -> Deferred[T]:
    """Cancel a Deferred after `_PATIENCE` seconds."""
    return deferred.addTimeout(_PATIENCE, clock, lambda failure, _: failure)


def _ways(repository: Repository, route: Route, commit: str) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of `git fetch` by which a commit may be had, the cheapest first.

    `commit` is the refspec of the commit alone.
    """
    depth = f"--depth={repository.depth or 1}"
    source = ("--end-of-options", route.url)
    yield depth, *source, commit
    if repository.branch:
        branch = f"refs/heads/{repository.branch}:refs/origin/heads/{repository.branch}"
        if repository.depth:
            yield depth, *source, branch
        else:
            yield *source, branch
    yield "--prune", *source, "refs/*:refs/origin/*"


def _found(look: Look, outcome: Outcome) -> Commit | None:
    """Return the commit that git has found, whose tree it has to have listed, too."""
    if look.commit is not None and outcome.status:
        raise _failed("the commit's tree could not be listed", outcome)
    return look.commit


def _failed(message: str, outcome: Outcome, **members: str | float) -> EvaluationError:
    return EvaluationError("repository", message, {"stderr": outcome.stderr, **members})
