"""Checked-out trees of commits, one for each tree, which evaluations see below their own changes.

A checkout is a directory of the cache, `<repository>-<tree>-<files>-<bytes>.tree`. It gets that
name when it is complete, and never changes. A daemon that takes the cache over compares the numbers
in the name with the tree at the first use of each checkout: for 10,000 small ones that takes 0.6 s
of processor time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import attrs
from twisted.logger import Logger

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.counters import GitCacheCounters
from tawebeval.deferreds import SingleFlight, WorkerThreads
from tawebeval.linux.filetree import remove_tree, walk_tree
from tawebeval.sandbox.disk_usage import BLOCK_BYTES

CHECKOUT_SUFFIX = ".tree"
_NAME = re.compile(
    rf"[0-9a-f]{{40}}-[0-9a-f]{{40}}-([0-9]+)-([0-9]+){re.escape(CHECKOUT_SUFFIX)}", re.ASCII
)
# Errors that say nothing of the tree.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

WriteTree = Callable[[Path, Path], Awaitable[None]]
"""Function that checks a tree out into the first directory, with git's index in the second."""

log = Logger()


@attrs.define
class _StoredCheckout:
    """A checkout on the disk; `size` in bytes. One with users is not evicted.

    `is_complete`: None until somebody looks at a checkout of an earlier daemon, whose size is
    estimated until then; False for a damaged one.
    """

    path: Path
    size: int
    is_complete: bool | None = True
    users: int = 0
    _checkout: Checkout | None = None  # of the commit that was requested last

    def use(self, commit: Commit) -> Checkout:
        """Add a user; return the checkout, the same one for all users of one commit."""
        self.users += 1
        if self._checkout is None or self._checkout.commit != commit:
            self._checkout = Checkout(commit, self.path, self._release)
        return self._checkout

    def _release(self) -> None:
        self.users -= 1


@attrs.define(eq=False)
class CheckoutCache:
    """The checkouts in the directory `root`; `disk_bytes` is their bytes on the disk."""

    _root: Path
    _threads: WorkerThreads
    _tally: GitCacheCounters = attrs.field(factory=GitCacheCounters)
    disk_bytes: int = 0
    # The least recently used first.
    _stored: OrderedDict[str, _StoredCheckout] = attrs.field(factory=OrderedDict)
    _creations: SingleFlight[str, None] = attrs.field(factory=SingleFlight)
    _checks: SingleFlight[str, None] = attrs.field(factory=SingleFlight)
    _count: int = 0  # of names for unfinished directories

    def load_checkout(self, path: Path) -> None:
        """Take over a checkout of an earlier daemon, to be looked at when it is requested. Blocks.

        Call this for the least recently used checkout first.
        """
        described = _NAME.fullmatch(path.name)
        if described is None:
            log.warn("{path} is no checkout; removing it", path=path)
            remove_tree(path)
            return
        count, size = map(int, described.groups())
        # The most that it may take: a file rarely fills its last block.
        self._add(_StoredCheckout(path, size + count * BLOCK_BYTES, is_complete=None))

    async def get_or_create_checkout(
        self,
        repository: str,
        commit: Commit,
        write: WriteTree,
        *,
        content: str = "",
        again: bool = False,
    ) -> Checkout:
        """Return a checkout of a commit of `repository`, a name; `write` makes a missing one.

        Concurrent calls for one tree share one `write`. `content` takes the place of the tree's OID
        where there is more than the tree: 40 hexadecimal digits. `again`: not the first request
        of the evaluation, and so not counted. Raises: what `write` raises.
        """
        tree = content or commit.tree_oid
        figures = f"{commit.file_count}-{commit.size}{CHECKOUT_SUFFIX}"
        name = f"{repository}-{tree}-{figures}"
        while not await self._check(name):  # the new one gets another name
            tree = hashlib.sha256(tree.encode()).hexdigest()[:40]
            name = f"{repository}-{tree}-{figures}"
        stored = self._find(name)
        if not again:
            self._tally.record_lookup("checkouts", stored is not None)
        while stored is None:
            await self._creations.run_once(name, lambda: self._create(name, write))
            stored = self._find(name)
        return stored.use(commit)

    def resume_checkout(self, commit: Commit, path: Path) -> Checkout:
        """Return a checkout that is in use already. It may be damaged: then only its users see it.

        It stays as long as they use it.
        """
        stored = self._stored.get(path.name)
        return Checkout(commit, path, lambda: None) if stored is None else stored.use(commit)

    async def _check(self, name: str) -> bool:
        """Look at a checkout of an earlier daemon, once; remove it if it is damaged.

        Return False if it is damaged, but stays because it is in use. Raises: OSError.
        """
        while (stored := self._stored.get(name)) is not None and stored.is_complete is not True:
            if stored.is_complete is None:
                await self._checks.run_once(name, partial(self._inspect, stored))
            elif stored.users:
                return False
            else:
                log.warn("{path} is damaged; removing it", path=stored.path)
                await self._threads.run_in_thread(remove_tree, self._detach(name))
        return True

    async def _inspect(self, stored: _StoredCheckout) -> None:
        """Find out whether a checkout is complete, and its size."""
        stored.users += 1  # an eviction would change it meanwhile
        try:
            size = await self._threads.run_in_thread(_measure_complete, stored.path)
        finally:
            stored.users -= 1
        stored.is_complete = size is not None
        if size is not None:
            self.disk_bytes += size - stored.size
            stored.size = size

    def _find(self, name: str) -> _StoredCheckout | None:
        stored = self._stored.get(name)
        if stored is not None and not stored.path.is_dir():
            log.warn("{path} was removed; checking it out again", path=stored.path)
            self._forget(name)
            return None
        if stored is not None:
            self._stored.move_to_end(name)
        return stored

    async def _create(self, name: str, write: WriteTree) -> None:
        self._count += 1
        unfinished = self._root / f"{name}.new{self._count}"
        tree, index = unfinished / "tree", unfinished / "index"

        def begin() -> None:
            for directory in (unfinished, tree, index):
                directory.mkdir()

        def finish() -> None:
            stored = _StoredCheckout(self._root / name, measure_tree(tree)[2])
            tree.rename(stored.path)
            complete.append(stored)

        complete: list[_StoredCheckout] = []
        try:
            await self._threads.run_in_thread(begin)
            await write(tree, index)
            await self._threads.run_in_thread(finish)
        finally:
            try:
                await self._threads.run_in_thread(remove_tree, unfinished)
            finally:
                # Also after a cancellation, as the checkout is on the disk. Not before, as it might
                # be evicted before the request that waits for it uses it.
                for stored in complete:
                    self._add(stored)

    def _add(self, stored: _StoredCheckout) -> None:
        if stored.path.name not in self._stored:
            self._stored[stored.path.name] = stored
            self.disk_bytes += stored.size

    def _forget(self, name: str) -> None:
        self.disk_bytes -= self._stored.pop(name).size

    def evict_excess_checkouts(self, capacity: int) -> Iterator[Path]:
        """Rename the least recently used until the rest has at most `capacity` bytes.

        Checkouts in use stay. Yields the new paths, for removal.
        """
        if self.disk_bytes <= capacity:
            return  # after almost every checkout, with thousands in the cache
        for name, stored in list(self._stored.items()):
            if self.disk_bytes > capacity and not stored.users:
                yield self._detach(name)

    def evict_repository_checkouts(self, repository: str) -> Iterator[Path]:
        """Rename all checkouts of a repository that are not in use. Yields the new paths."""
        for name, stored in list(self._stored.items()):
            if name.startswith(f"{repository}-") and not stored.users:
                yield self._detach(name)

    def _detach(self, name: str) -> Path:
        detached = detach(self._stored[name].path)
        self._forget(name)
        return detached


def detach(path: Path) -> Path:
    """Rename a directory of the cache, if it exists; return the new path, for removal."""
    # Where an earlier removal failed, its name may be left over.
    detached = path.with_name(f"{path.name}.old-{uuid4().hex}")
    with suppress(FileNotFoundError):
        path.rename(detached)
    return detached


def _measure_complete(path: Path) -> int | None:
    """Return the bytes on the disk of a checkout, None if its tree is damaged. Blocks.

    Raises: OSError.
    """
    described = _NAME.fullmatch(path.name)
    assert described is not None, "the name of a checkout"
    try:
        *found, size = measure_tree(path)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return None
    return size if found == [int(figure) for figure in described.groups()] else None


def measure_tree(path: Path) -> tuple[int, int, int]:
    """Return the files of a tree, their bytes, and the bytes on the disk. Blocks."""
    count = size = use = 0
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _, status in walk_tree(top):
            count += 1
            size += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            use += status.st_blocks * 512
    finally:
        os.close(top)
    return count, size, use
