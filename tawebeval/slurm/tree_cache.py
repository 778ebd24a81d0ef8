"""The trees of commits that a node keeps, for nodes without a shared directory.

Each tree lies in a directory with its key as the name, beside a file with its size, below a
directory of this user and this boot: after a loss of power a file may be empty. Evaluators get
copies, and do not see the cache.

All programs on the node use it at once. Each holds a shared lock (flock(2)) on the trees that it
uses, which are not removed. A lock on the cache itself is held for as long as a rename takes. A
tree that is missing, or has lost files to a cleaner of /tmp, is received by one program, while the
others that need it wait for a time.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs

from tawebeval.linux.filetree import open_directory_path, remove_tree
from tawebeval.sandbox.disk_usage import BLOCK_BYTES
from tawebeval.slurm.tree_stream import TreeSize, measure_tree

WAIT_SECONDS = 60.0
"""Seconds for which a program waits for another one that receives the same tree."""

_PREFIX = "tawebeval-trees-"
_POLL = 0.05  # seconds between two attempts to get a lock
_LOCKS = 16  # files for the locks of those that receive a tree
_TREE, _SIZE = "tree", "size"


@attrs.define(eq=False)
class TreeCache(ExitStack):
    """The cache in `directory`, of at most `limit` bytes; a context, which unlocks its trees.

    `place` is a directory of this program on the same file system, which is removed in the end.
    """

    directory: Path
    limit: int
    place: Path

    def __attrs_post_init__(self) -> None:
        super().__init__()

    @classmethod
    def open(cls, parent: Path, limit: int, place: Path) -> TreeCache:
        """Return the cache below `parent`; remove those of earlier boots. Blocks. Raises: OSError.

        Raises: PermissionError, if the directory is not this user's alone.
        """
        prefix = f"{_PREFIX}{os.geteuid()}-"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        directory = parent / f"{prefix}{boot}"
        directory.mkdir(mode=0o700, exist_ok=True)
        for path in parent.glob(f"{prefix}*"):
            status = path.lstat()
            if path == directory and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
                raise PermissionError(None, "another user can write there", str(path))
            if path != directory and status.st_uid == os.geteuid():
                with suppress(OSError):
                    remove_tree(path)
        return cls(directory, limit, place)

    def provide_tree(self, key: str, receive: Callable[[Path], TreeSize]) -> Path:
        """Return a tree, which stays until the context ends; `receive` makes a missing one. Blocks.

        Raises: OSError, and what `receive` raises.
        """
        with self._lock_receiving(key):
            with self._lock_cache():
                found = self._use_tree(key)
            if found is not None and _is_whole(found):
                return found
            if found is not None:
                with self._lock_cache(), suppress(FileNotFoundError):
                    found.parent.rename(self.place / "damaged")
            received = self.place / "received"
            (received / _TREE).mkdir(parents=True)
            return self._add_tree(key, received, receive(received / _TREE))

    @contextmanager
    def _lock_receiving(self, key: str) -> Iterator[None]:
        """Hold the lock of those that receive a tree, unless another one takes too long."""
        with open(self.directory / f"lock-{int(key, 16) % _LOCKS}", "wb") as file:
            deadline = time.monotonic() + WAIT_SECONDS
            while not _try_lock(file.fileno()) and time.monotonic() < deadline:
                time.sleep(_POLL)
            yield

    @contextmanager
    def _lock_cache(self) -> Iterator[None]:
        with open(self.directory / "lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _use_tree(self, key: str) -> Path | None:
        """Lock a tree until the context ends, and note its use; the cache is locked."""
        path = self.directory / key
        try:
            descriptor = open_directory_path(path)
        except FileNotFoundError:
            return None
        self.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
        return path / _TREE

    def _add_tree(self, key: str, received: Path, size: TreeSize) -> Path:
        """Keep a received tree, if there is room; return its path."""
        (received / _SIZE).write_text(f"{size.entries} {size.content_bytes}", encoding="ascii")
        with self._lock_cache():
            if not (self.directory / key).exists() and self._make_room(_count_bytes(size)):
                received.rename(self.directory / key)
            return self._use_tree(key) or received / _TREE

    def _make_room(self, size: int) -> bool:
        """Take the least recently used trees that nobody uses out of the cache.

        They are removed with `place`, when the cache is not locked any more.
        """
        trees = sorted(self._list_trees(), key=lambda path: path.stat().st_mtime_ns)
        sizes = [_count_bytes(_read_size(path)) for path in trees]
        taken = sum(sizes)
        for number, path in enumerate(trees):
            if taken + size <= self.limit:
                break
            with _open_unused(path) as is_unused:
                if is_unused:
                    taken -= sizes[number]
                    path.rename(self.place / f"evicted-{number}")
        return taken + size <= self.limit

    def _list_trees(self) -> Iterator[Path]:
        return (path for path in self.directory.iterdir() if not path.name.startswith("lock"))


def _read_size(path: Path) -> TreeSize:
    """Return the size of a kept tree; none if a cleaner of old files has removed it."""
    try:
        entries, content_bytes = (path / _SIZE).read_text(encoding="ascii").split()
        return TreeSize(int(entries), int(content_bytes))
    except (FileNotFoundError, ValueError):
        return TreeSize(0, 0)


def _count_bytes(size: TreeSize) -> int:
    return size.content_bytes + size.entries * BLOCK_BYTES


def _is_whole(tree: Path) -> bool:
    """Tell whether a tree has all that it was kept with: cleaners remove old files of /tmp."""
    try:
        top = open_directory_path(tree)
    except FileNotFoundError:
        return False
    try:
        return measure_tree(top) == _read_size(tree.parent)
    finally:
        os.close(top)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _open_unused(path: Path) -> Iterator[bool]:
    """Tell whether nobody uses a tree, which is locked meanwhile."""
    descriptor = open_directory_path(path)
    try:
        yield _try_lock(descriptor)
    finally:
        os.close(descriptor)
