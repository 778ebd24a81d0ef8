"""The cache of repositories: one for each URL, bounded, sound whatever happens.

A commit that is there is never fetched again. Objects of one URL are never reached through
another one, so nobody can read a repository by guessing at its commits. Nor are those that
were fetched with a credential ever reached without that one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import attrs
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from tawebeval.bare import BareRepository
from tawebeval.callers import ANYBODY
from tawebeval.checkouts import SUFFIX, Checkout, Checkouts
from tawebeval.commits import Commit
from tawebeval.credentials import Credential
from tawebeval.errors import EvaluationError
from tawebeval.form import Repository
from tawebeval.git import Git
from tawebeval.gitwords import is_damage
from tawebeval.keyring import Keyring
from tawebeval.quota import FetchLimits
from tawebeval.remotes import Remotes
from tawebeval.removal import remove
from tawebeval.shared import Shared
from tawebeval.signals import Threads
from tawebeval.tally import CacheTally

log = Logger()


@attrs.frozen
class _Wanted:
    """A commit that somebody wants, and the credential to fetch it with."""

    repository: Repository
    oid: str
    credential: Credential | None


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
        self._checkouts = Checkouts(root, threads, self.tally)
        # In the order of their last use.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

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
                entry.bare.tidy()
                entry.size = entry.bare.size()
        for path in self._take_excess():
            remove(path)

    def _add(self, name: str) -> _Entry:
        bare = BareRepository(
            self._root / name, self._git, self._threads, self._remotes, self._limits
        )
        entry = self._entries[name] = _Entry(bare)
        return entry

    async def check_out(self, repository: Repository, oid: str, caller: str = ANYBODY) -> Checkout:
        """Return a commit and its tree, fetching it first if it is not here.

        `caller` is for whom. Raises EvaluationError when the repository or the commit cannot
        be had.
        """
        self._remotes.check(repository.url)
        credential = self._keyring.choose(repository.url, caller)
        async with self._use(repository.url, credential) as entry:
            wanted = _Wanted(repository, oid, credential)
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
        self.tally.look("commits", commit is not None)
        if commit is None:
            commit = await entry.fetches.result(
                (wanted.repository, wanted.oid), lambda: self._fetch(entry, wanted)
            )
        self._limits.tree.check(commit.files, commit.size)
        before = self._checkouts.size
        checkout = await self._checkouts.provide(
            entry.bare.path.stem, commit, partial(entry.bare.check_out, commit)
        )
        try:
            if self._checkouts.size > before:
                await self._evict()
        except BaseException:
            checkout.release()
            raise
        return checkout

    @asynccontextmanager
    async def _use(self, url: str, credential: Credential | None) -> AsyncIterator[_Entry]:
        named = url.encode()
        if credential is not None:
            named += b"\0" + self._keyring.identity(credential)
        name = hashlib.sha256(named).hexdigest()[:40] + ".git"
        entry = self._entries.get(name) or self._add(name)
        self._entries.move_to_end(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            entry.bare.touch()

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
            await self._evict()

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
                del self._entries[name]
                self.tally.evictions += 1
                doomed.append(entry.bare.path.with_suffix(f".old{self.tally.evictions}"))
                with suppress(FileNotFoundError):
                    entry.bare.path.rename(doomed[-1])
                doomed += self._checkouts.take_all(entry.bare.path.stem)
                log.info(
                    "{path} is evicted from the cache: {size} bytes", path=name, size=entry.size
                )
        doomed += self._checkouts.take_excess(max(self._capacity - repositories, 0))
        return doomed
