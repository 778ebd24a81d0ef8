"""Checked-out trees of commits, one for each tree, which evaluations see below their own changes.

A checkout is a directory of the cache, `<repository>-<tree>-<files>-<bytes>.tree`. It gets that
name when it is complete, and never changes. A daemon that takes the cache over compares the numbers
in the name with the tree.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs
from twisted.logger import Logger

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.counters import CacheCounters
from tawebeval.deferreds import SingleFlight, WorkerThreads
from tawebeval.linux.filetree import remove_tree, walk_tree

CHECKOUT_SUFFIX = ".tree"
_NAME = re.compile(
    rf"[0-9a-f]{{40}}-[0-9a-f]{{40}}-([0-9]+)-([0-9]+){re.escape(CHECKOUT_SUFFIX)}", re.ASCII
)

TreeWriter = Callable[[Path, Path], Awaitable[None]]
"""Function that checks a tree out into the first directory, with git's index in the second."""

log = Logger()


@attrs.define
class _StoredCheckout:
    """A checkout on the disk; `size` in bytes. One with users is not evicted."""

    path: Path
    size: int
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
    """The checkouts in the directory `root`; `disk_bytes` is their bytes on the disk.

    `on_use` is called with the path of a checkout at each use.
    """

    _root: Path
    _threads: WorkerThreads
    _tally: CacheCounters = attrs.field(factory=CacheCounters)
    _on_use: Callable[[Path], object] = lambda path: None
    disk_bytes: int = 0
    # The least recently used first.
    _stored: OrderedDict[str, _StoredCheckout] = attrs.field(factory=OrderedDict)
    _creations: SingleFlight[str, None] = attrs.field(factory=SingleFlight)
    _count: int = 0  # of names for unfinished and detached directories

    def load_checkout(self, path: Path) -> None:
        """Take over a checkout of an earlier daemon, or remove it if it is incomplete. Blocks.

        Call this for the least recently used checkout first.
        """
        described = _NAME.fullmatch(path.name)
        try:
            *there, size = _measure(path)
        except OSError:
            described = None
        if described and there == [int(figure) for figure in described.groups()]:
            self._add(path, size)
        else:
            log.warn("{path} is damaged; removing it", path=path)
            remove_tree(path)

    async def provide_checkout(
        self,
        repository: str,
        commit: Commit,
        write: TreeWriter,
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
        name = f"{repository}-{tree}-{commit.file_count}-{commit.size}{CHECKOUT_SUFFIX}"
        stored = self._find(name)
        if not again:
            self._tally.record_lookup("checkouts", stored is not None)
        while stored is None:
            await self._creations.run_once(name, lambda: self._create(name, write))
            stored = self._find(name)
        self._on_use(stored.path)
        return stored.use(commit)

    def resume_checkout(self, commit: Commit, path: Path) -> Checkout:
        """Return a checkout that is in use already. It may be damaged: then its user sees it so."""
        stored = self._stored.get(path.name)
        return Checkout(commit, path, lambda: None) if stored is None else stored.use(commit)

    def _find(self, name: str) -> _StoredCheckout | None:
        stored = self._stored.get(name)
        if stored is not None and not stored.path.is_dir():
            log.warn("{path} was removed; checking it out again", path=stored.path)
            self._forget(name)
            return None
        if stored is not None:
            self._stored.move_to_end(name)
        return stored

    async def _create(self, name: str, write: TreeWriter) -> None:
        self._count += 1
        unfinished = self._root / f"{name}.new{self._count}"
        tree, index = unfinished / "tree", unfinished / "index"

        def begin() -> None:
            for directory in (unfinished, tree, index):
                directory.mkdir()

        def finish() -> int:
            size = _measure(tree)[2]
            try:
                tree.rename(self._root / name)
            except OSError as error:
                # A cancelled creation was completed by its thread: that checkout is as good.
                if error.errno != errno.ENOTEMPTY:
                    raise
            return size

        try:
            await self._threads.run_in_thread(begin)
            await write(tree, index)
            size = await self._threads.run_in_thread(finish)
            self._add(self._root / name, size)
        finally:
            await self._threads.run_in_thread(remove_tree, unfinished)

    def _add(self, path: Path, size: int) -> None:
        if path.name not in self._stored:
            self._stored[path.name] = _StoredCheckout(path, size)
            self.disk_bytes += size

    def _forget(self, name: str) -> None:
        self.disk_bytes -= self._stored.pop(name).size

    def detach_excess(self, capacity: int) -> Iterator[Path]:
        """Rename the least recently used until the rest has at most `capacity` bytes.

        Checkouts in use stay. Yields the new paths, for removal.
        """
        if self.disk_bytes <= capacity:
            return  # after almost every checkout, with thousands in the cache
        for name, stored in list(self._stored.items()):
            if self.disk_bytes > capacity and not stored.users:
                yield self._detach(name)

    def detach_repository(self, repository: str) -> Iterator[Path]:
        """Rename all checkouts of a repository that are not in use. Yields the new paths."""
        for name, stored in list(self._stored.items()):
            if name.startswith(f"{repository}-") and not stored.users:
                yield self._detach(name)

    def _detach(self, name: str) -> Path:
        self._count += 1
        path = self._stored[name].path
        detached = path.with_name(f"{name}.old{self._count}")
        with suppress(FileNotFoundError):
            path.rename(detached)
        self._forget(name)
        return detached


def _measure(path: Path) -> tuple[int, int, int]:
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
