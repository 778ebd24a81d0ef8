"""The cache of repositories: one for each URL, bounded, sound whatever happens.

A commit that is there is never fetched again. Objects of one URL are never reached through
another one, so nobody can read a repository by guessing at its commits. Nor are those that
were fetched with a credential ever reached without that one.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.form import Repository
from tawebeval.core.tally import CacheTally
from tawebeval.core.tokens import ANYBODY
from tawebeval.deferreds import Threads, in_background
from tawebeval.errors import EvaluationError
from tawebeval.git.checkouts import SUFFIX, Checkouts
from tawebeval.git.command import Git
from tawebeval.git.credentials import Credential
from tawebeval.git.gitwords import is_damage
from tawebeval.git.keyring import Keyring
from tawebeval.git.quota import FetchLimits
from tawebeval.git.remotes import Remotes
from tawebeval.git.repository import BareRepository
from tawebeval.linux.filetree import remove
from tawebeval.shared import Shared

log = Logger()


@attrs.frozen
class _Wanted:
    """A commit that somebody wants, maybe `again`, and the credential to fetch it with."""

    repository: Repository
    oid: str
    credential: Credential | None
    again: bool


@attrs.define
class _Entry:
    """A place in the cache; `size` in bytes. What has users is not evicted."""

    bare: BareRepository
    size: int = 0
    users: int = 0
    fetches: Shared[tuple[Repository, str], Commit] = attrs.field(factory=Shared)


class Repositories:
    """Provides the trees of commits.

    The cache lies in `root` and is kept below `capacity` bytes, as far as what is in use
    allows. `remotes` says which URLs are permitted, `limits` what may be fetched, `keyring`
    who may use which credentials.
    """

    def __init__(
        self,
        root: Path,
        git: Git,
        threads: Threads,
        remotes: Remotes,
        limits: FetchLimits,
        keyring: Keyring,
        *,
        capacity: int,
    ) -> None:
        self._root = root
        self._git = git
        self._threads = threads
        self._capacity = capacity
        self._remotes = remotes
        self._limits = limits
        self._keyring = keyring
        self.tally = CacheTally()
        # What was used since that was noted on the disk, the last one last.
        self._used: dict[Path, None] = {}
        self._noting = False
        self._taken = 0
        self._checkouts = Checkouts(root, threads, self.tally, self._use_path)
        # In the order of their last use.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._worn: dict[str, None] = {}  # those that need maintenance
        self._maintenance: Deferred[None] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """How many bytes of the disk the cache takes, by what there is in it."""
        repositories = sum(entry.size for entry in self._entries.values())
        return {"repositories": repositories, "checkouts": self._checkouts.size}

    def load(self) -> None:
        """Take over what an earlier daemon has left in the cache, if it fits. Blocks."""
        found = []
        for path in self._root.iterdir():
            if path.suffix in (".git", SUFFIX):
                found.append((path.stat().st_mtime, path))
            else:
                remove(path)  # half made, or half removed
        for _, path in sorted(found):
            if path.suffix == SUFFIX:
                self._checkouts.load(path)
            else:
                entry = self._add(path.name)
                entry.size = entry.bare.load()
        for path in self._take_excess():
            remove(path)

    def _add(self, name: str) -> _Entry:
        bare = BareRepository(
            self._root / name, self._git, self._threads, self._remotes, self._limits
        )
        entry = self._entries[name] = _Entry(bare)
        return entry

    def needs_network(self, repository: Repository, oid: str, caller: str = ANYBODY) -> bool:
        """Tell whether `check_out` would fetch over a network. Blocks, hardly.

        Raises EvaluationError.
        """
        if not self._remotes.check(repository.url):
            return False
        credential = self._keyring.choose(repository.url, caller)
        entry = self._entries.get(self._name(repository.url, credential))
        return entry is None or entry.bare.known(oid) is None

    async def check_out(
        self, repository: Repository, oid: str, caller: str = ANYBODY, *, again: bool = False
    ) -> Checkout:
        """Return a commit and its tree, fetching it first if it is not here.

        `caller` is for whom; who asks `again` is not counted once more. Raises EvaluationError
        when the repository or the commit cannot be had.
        """
        self._remotes.check(repository.url)
        credential = self._keyring.choose(repository.url, caller)
        async with self._use(repository.url, credential) as entry:
            wanted = _Wanted(repository, oid, credential, again)
            generation, used = entry.bare.generation, entry.bare.used
            try:
                return await self._provide(entry, wanted)
            except EvaluationError as error:
                # What was never whole is not damaged: there the repository itself is broken.
                stderr = str(error.members.get("stderr", ""))
                if error.reason == "lost" or not (used and is_damage(stderr)):
                    raise
                log.warn(
                    "{path} is damaged, and fetched anew: {stderr}",
                    path=entry.bare.path,
                    stderr=stderr,
                )
            await entry.bare.discard(generation)
            return await self._provide(entry, wanted)

    async def _provide(self, entry: _Entry, wanted: _Wanted) -> Checkout:
        commit = entry.bare.known(wanted.oid)
        if not wanted.again:
            self.tally.look("commits", commit is not None)
        if commit is None:
            commit = await entry.fetches.result(
                (wanted.repository, wanted.oid), lambda: self._fetch(entry, wanted)
            )
        self._limits.tree.check(commit.files, commit.size)
        before = self._checkouts.size
        checkout = await self._checkouts.provide(
            entry.bare.path.stem,
            commit,
            partial(entry.bare.check_out, commit),
            again=wanted.again,
        )
        try:
            if self._checkouts.size > before:
                await self._evict()
        except BaseException:
            checkout.release()
            raise
        return checkout

    def _name(self, url: str, credential: Credential | None) -> str:
        named = url.encode()
        if credential is not None:
            named += b"\0" + self._keyring.identity(credential)
        return hashlib.sha256(named).hexdigest()[:40] + ".git"

    @asynccontextmanager
    async def _use(self, url: str, credential: Credential | None) -> AsyncIterator[_Entry]:
        name = self._name(url, credential)
        entry = self._entries.get(name) or self._add(name)
        self._entries.move_to_end(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            if entry.users or not entry.bare.is_blank:
                self._use_path(entry.bare.path)
            else:  # or there would be one for each URL that somebody makes up
                await self._threads.run(remove, self._take(name))

    def _use_path(self, path: Path) -> None:
        self._used.pop(path, None)
        self._used[path] = None

    def note_uses(self) -> None:
        """Begin to note on the disk what was used lately, unless that is being done."""
        if self._used and not self._noting:
            used = tuple(self._used)
            self._used.clear()
            self._noting = True
            in_background(self._note(used), log, "uses cannot be noted")

    async def _note(self, used: Sequence[Path]) -> None:
        try:
            await self._threads.run(_touch, used)
        finally:
            self._noting = False

    async def _fetch(self, entry: _Entry, wanted: _Wanted) -> Commit:
        begin, ended = self._limits.clock.seconds(), "failed"
        try:
            commit = await entry.bare.fetch(wanted.repository, wanted.oid, wanted.credential)
            ended = "fetched"
        except CancelledError:
            ended = "cancelled"
            raise
        else:
            return commit
        finally:
            self.tally.fetches[ended] += 1
            self.tally.seconds.observe(self._limits.clock.seconds() - begin)
            entry.size = await self._threads.run(entry.bare.size)
            if entry.bare.needs_maintenance:
                self._worn[entry.bare.path.name] = None
            await self._evict()

    def maintain(self) -> None:
        """Begin maintenance of the repository that has needed it longest, unless one has it."""
        if not self._worn or self._maintenance is not None:
            return
        name = next(iter(self._worn))
        del self._worn[name]
        entry = self._entries.get(name)
        if entry is not None and 2 * entry.size <= self._capacity:
            self._maintenance = in_background(self._maintain(entry), log, "maintenance: a defect")
            self._maintenance.addBoth(self._maintained)

    def _maintained(self, _: object) -> None:
        self._maintenance = None

    async def _maintain(self, entry: _Entry) -> None:
        path, before = entry.bare.path, entry.size
        entry.users += 1
        entry.size += before  # what is packed anew is there twice meanwhile
        try:
            await self._evict()
            await entry.bare.maintain(before)
        except CancelledError:
            log.info(
                "{path}: maintenance was stopped, for fetches or the end of the daemon", path=path
            )
        except (EvaluationError, OSError) as error:
            members = error.members if isinstance(error, EvaluationError) else {}
            log.warn(
                "{path}: maintenance has failed: {error}: {stderr}",
                path=path,
                error=error,
                stderr=members.get("stderr", ""),
            )
        finally:
            entry.users -= 1
            entry.size = await self._threads.run(entry.bare.size)

    async def close(self) -> None:
        """Stop maintenance, and return when it has stopped."""
        self._worn.clear()
        if self._maintenance is not None:
            self._maintenance.cancel()
            await self._maintenance

    async def _evict(self) -> None:
        """Remove what was used longest ago until the rest fits."""
        for path in self._take_excess():
            await self._threads.run(remove, path)

    def _take_excess(self) -> list[Path]:
        """Take what was used longest ago out of the cache; return what is to be removed.

        Checkouts, which are made again without a network, have half of it for themselves.
        """
        doomed = list(self._checkouts.take_excess(self._capacity // 2))
        repositories = self.sizes["repositories"]
        for name, entry in list(self._entries.items()):
            if repositories + self._checkouts.size > self._capacity and not entry.users:
                repositories -= entry.size
                self.tally.evictions += 1
                doomed.append(self._take(name))
                doomed += self._checkouts.take_all(entry.bare.path.stem)
                log.info(
                    "{path} is evicted from the cache: {size} bytes", path=name, size=entry.size
                )
        doomed += self._checkouts.take_excess(max(self._capacity - repositories, 0))
        return doomed

    def _take(self, name: str) -> Path:
        """Take a repository out of the cache; return what is to be removed."""
        path = self._entries.pop(name).bare.path
        self._taken += 1
        taken = path.with_suffix(f".old{self._taken}")
        with suppress(FileNotFoundError):
            path.rename(taken)
        return taken


def _touch(paths: Sequence[Path]) -> None:
    """Note that these were used, in their order, for whoever loads the cache. Blocks."""
    for path in paths:
        with suppress(OSError):
            os.utime(path)
