"""Checked-out trees of commits, one for each tree, which evaluations see below their own changes.

A checkout is a directory of the cache, `<repository>-<tree>-<files>-<bytes>-<boot>.tree`. It gets
that name when it is complete, and never changes. After a power failure files may lack their
content, so checkouts of an earlier boot of the machine are not used. The numbers in the name tell
the size.
"""

from __future__ import annotations

import os
import re
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import attrs
from twisted.logger import Logger

from tawebeval.core.checkout import Checkout, Commit
from tawebeval.core.counters import GitCacheCounters
from tawebeval.deferreds import SingleFlight, WorkerThreads
from tawebeval.linux.filetree import open_directory_path, remove_tree, walk_tree
from tawebeval.sandbox.disk_usage import BLOCK_BYTES

CHECKOUT_SUFFIX = ".tree"
_NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{40}-([0-9]+)-([0-9]+)-([0-9a-f]{8})\.tree", re.ASCII)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

WriteTree = Callable[[Path, Path], Awaitable[None]]
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
    """The checkouts in the directory `root`; `disk_bytes` is the most that they take on the disk.

    `boot`: eight hexadecimal digits, which identify the boot of the machine.
    """

    _root: Path
    _threads: WorkerThreads
    _tally: GitCacheCounters = attrs.field(factory=GitCacheCounters)
    _boot: str = attrs.field(factory=lambda: _BOOT_ID.read_text()[:8])
    disk_bytes: int = 0
    # The least recently used first.
    _stored: OrderedDict[str, _StoredCheckout] = attrs.field(factory=OrderedDict)
    _creations: SingleFlight[str, None] = attrs.field(factory=SingleFlight)

    def load_checkout(self, path: Path) -> bool:
        """Take over a checkout of an earlier daemon; return False for any other path.

        Call this for the least recently used checkout first.
        """
        described = _NAME.fullmatch(path.name)
        if described is None or described[3] != self._boot:
            return False
        self._add(path.name)
        return True

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
        figures = f"{commit.file_count}-{commit.size}"
        name = f"{repository}-{tree}-{figures}-{self._boot}{CHECKOUT_SUFFIX}"
        stored = self._find(name)
        if not again:
            self._tally.record_lookup("checkouts", stored is not None)
        while stored is None:
            await self._creations.run_once(name, lambda: self._create(name, write))
            stored = self._find(name)
        return stored.use(commit)

    def resume_checkout(self, commit: Commit, path: Path) -> Checkout:
        """Return a checkout that is in use already."""
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

    async def _create(self, name: str, write: WriteTree) -> None:
        unfinished = self._root / f"{name}.new-{uuid4().hex}"
        tree, index = unfinished / "tree", unfinished / "index"
        is_complete = False

        def begin() -> None:
            for directory in (unfinished, tree, index):
                directory.mkdir()

        def finish() -> None:
            nonlocal is_complete
            tree.rename(self._root / name)
            is_complete = True

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
                if is_complete:
                    self._add(name)

    def _add(self, name: str) -> None:
        described = _NAME.fullmatch(name)
        assert described is not None, "the name of a checkout"
        # A file rarely fills its last block.
        size = int(described[2]) + (int(described[1]) + 1) * BLOCK_BYTES
        self._stored[name] = _StoredCheckout(self._root / name, size)
        self.disk_bytes += size

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


@contextmanager
def open_tree(tree: Path) -> Iterator[int]:
    """Yield a descriptor of a directory for `walk_tree`. Blocks. Raises: OSError."""
    top = open_directory_path(tree)
    try:
        yield top
    finally:
        os.close(top)


def measure_tree(tree: Path) -> int:
    """Return the bytes of the files of a tree. Blocks."""
    with open_tree(tree) as top:
        found = (status for _, status in walk_tree(top))
        return sum(one.st_size for one in found if not stat.S_ISDIR(one.st_mode))
