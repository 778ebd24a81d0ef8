"""Trees of commits, checked out once each: what evaluations have below their own changes.

A checkout is a directory of the cache, `<repository>-<tree>-<files>-<bytes>.tree`. It appears
there when it is whole, by being renamed, and is never changed. Its name says how much has to be
in it, which is compared when a daemon takes the cache over.
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
from tawebeval.core.tally import CacheTally
from tawebeval.deferreds import Threads
from tawebeval.linux.copying import walk
from tawebeval.linux.filetree import remove
from tawebeval.shared import Shared

SUFFIX = ".tree"
_NAME = re.compile(rf"[0-9a-f]{{40}}-[0-9a-f]{{40}}-([0-9]+)-([0-9]+){re.escape(SUFFIX)}", re.ASCII)

Fill = Callable[[Path, Path], Awaitable[None]]
"""Checks a tree out into the first of two directories; the second is for git's index."""

log = Logger()


@attrs.define
class _Kept:
    """A checkout on the disk; `size` in bytes. What has users is not evicted."""

    path: Path
    size: int
    users: int = 0
    _checkout: Checkout | None = None  # of the commit that was asked for last

    def use(self, commit: Commit) -> Checkout:
        """Return it for one who uses it from now on; all who use one commit have the same."""
        self.users += 1
        if self._checkout is None or self._checkout.commit != commit:
            self._checkout = Checkout(commit, self.path, self._release)
        return self._checkout

    def _release(self) -> None:
        self.users -= 1


class Checkouts:
    """The checkouts in the directory `root`; `size` is how many bytes they take there.

    `used` is called with the path of each that is used.
    """

    def __init__(
        self,
        root: Path,
        threads: Threads,
        tally: CacheTally | None = None,
        used: Callable[[Path], object] = lambda path: None,
    ) -> None:
        self.size = 0
        self._tally = tally or CacheTally()
        self._used = used
        self._root = root
        self._threads = threads
        # In the order of their last use.
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._made: Shared[str, None] = Shared()
        self._count = 0

    def load(self, path: Path) -> None:
        """Take over what an earlier daemon has left, those used longest ago first. Blocks.

        What is not whole is removed.
        """
        described = _NAME.fullmatch(path.name)
        try:
            *there, size = _measure(path)
        except OSError:
            described = None
        if described and there == [int(figure) for figure in described.groups()]:
            self._keep(path, size)
        else:
            log.warn("{path} is damaged, and removed", path=path)
            remove(path)

    async def provide(
        self, repository: str, commit: Commit, fill: Fill, *, again: bool = False
    ) -> Checkout:
        """Return the tree of a commit of `repository`, a name; `fill` makes one that is not here.

        Who wants what is just being made waits for that; who asks `again` is not counted once
        more. Raises what `fill` does.
        """
        name = f"{repository}-{commit.tree}-{commit.files}-{commit.size}{SUFFIX}"
        kept = self._find(name)
        if not again:
            self._tally.look("checkouts", kept is not None)
        while kept is None:
            await self._made.result(name, lambda: self._make(name, fill))
            kept = self._find(name)
        self._used(kept.path)
        return kept.use(commit)

    def _find(self, name: str) -> _Kept | None:
        kept = self._kept.get(name)
        if kept is not None and not kept.path.is_dir():
            log.warn("{path} is gone, and made anew", path=kept.path)
            self._forget(name)
            return None
        if kept is not None:
            self._kept.move_to_end(name)
        return kept

    async def _make(self, name: str, fill: Fill) -> None:
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
                # One that was given up was just finished: it is whole, too.
                if error.errno != errno.ENOTEMPTY:
                    raise
            return size

        try:
            await self._threads.run(begin)
            await fill(tree, index)
            size = await self._threads.run(finish)
            self._keep(self._root / name, size)
        finally:
            await self._threads.run(remove, unfinished)

    def _keep(self, path: Path, size: int) -> None:
        if path.name not in self._kept:
            self._kept[path.name] = _Kept(path, size)
            self.size += size

    def _forget(self, name: str) -> None:
        self.size -= self._kept.pop(name).size

    def take_excess(self, capacity: int) -> Iterator[Path]:
        """Take out what was used longest ago until the rest is within `capacity` bytes.

        What is in use stays. Yields what is to be removed.
        """
        for name, kept in list(self._kept.items()):
            if self.size > capacity and not kept.users:
                yield self._take(name)

    def take_all(self, repository: str) -> Iterator[Path]:
        """Take out all of a repository but what is in use. Yields what is to be removed."""
        for name, kept in list(self._kept.items()):
            if name.startswith(f"{repository}-") and not kept.users:
                yield self._take(name)

    def _take(self, name: str) -> Path:
        self._count += 1
        path = self._kept[name].path
        doomed = path.with_name(f"{name}.old{self._count}")
        with suppress(FileNotFoundError):
            path.rename(doomed)
        self._forget(name)
        return doomed


def _measure(path: Path) -> tuple[int, int, int]:
    """Return how many files a tree has, how many bytes in them, and on the disk. Blocks."""
    count = size = use = 0
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _, status in walk(top):
            count += 1
            size += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            use += status.st_blocks * 512
    finally:
        os.close(top)
    return count, size, use
