"""The trees of commits that a node keeps, for nodes without a shared directory.

Each tree lies in a directory with its key as the name, beside a file with its size, below a
directory of this user and this boot: after a loss of power a file may be empty. Evaluators get
copies, and do not see the cache.

All programs on the node use it at once. Each holds a shared lock (flock(2)) on the trees that it
uses, which are not removed. A lock on the cache itself is held for as long as a rename takes. A
tree that is missing, or has lost files to a cleaner of old files, is received by one program, while
the others that need it wait for a time. A program that cannot use the cache says so on stderr, and
goes on without it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attrs

from tawebeval.linux.filetree import open_directory_path, remove_tree
from tawebeval.sandbox.disk_usage import BLOCK_BYTES
from tawebeval.slurm.jobs import format_node_message
from tawebeval.slurm.tree_stream import TreeSize, measure_tree

TREE_WAIT_SECONDS = 60.0
"""Seconds for which a program waits for another one that receives the same tree."""

LOCK_WAIT_SECONDS = 10.0
"""Seconds for which a program waits for the lock of the cache."""

_PREFIX = "tawebeval-trees-"
_POLL = 0.05  # seconds between two attempts to get a lock
_LOCKS = 4096  # empty files for the locks of those that receive a tree
_TREE, _SIZE = "tree", "size"


@attrs.define(eq=False)
class TreeCache(ExitStack):
    """The cache in `directory`, of at most `max_bytes` bytes; a context, which unlocks its trees.

    `temporary_directory` is a directory of this program on the same file system, which is removed
    in the end. `problem` is the reason why the cache is not used, None while it is.
    """

    directory: Path
    max_bytes: int
    temporary_directory: Path
    problem: str | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        super().__init__()

    @classmethod
    def open(cls, parent: Path, limit: int, place: Path) -> TreeCache:
        """Return the cache below `parent`; remove those of earlier boots. Blocks.

        The cache is not used, if its directory is not this user's alone.
        """
        prefix = f"{_PREFIX}{os.geteuid()}-"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        cache = cls(parent / f"{prefix}{boot}", limit, place)
        try:
            _make_own_directory(cache.directory)
        except OSError as error:
            cache._go_without(error)
        for path in parent.glob(f"{prefix}*"):
            with suppress(OSError):  # another program removes it, too
                if path != cache.directory and path.lstat().st_uid == os.geteuid():
                    remove_tree(path)
        return cache

    def provide_tree(self, key: str, receive: Callable[[Path], TreeSize]) -> Path:
        """Return a tree, which stays until the context ends; `receive` makes a missing one. Blocks.

        Raises: OSError, and what `receive` raises.
        """
        received = self.temporary_directory / "received"
        with ExitStack() as receiving:
            if (found := self._find_or_wait(key, receiving)) is not None:
                return found
            (received / _TREE).mkdir(parents=True)
            size = receive(received / _TREE)
            added = self._add_tree(key, received, size) if self.problem is None else None
        return added or received / _TREE

    def _go_without(self, error: OSError) -> None:
        self.problem = f"the cache of trees is not used: {error}"
        print(format_node_message(os.uname().nodename, self.problem), file=sys.stderr)

    def _find_or_wait(self, key: str, receiving: ExitStack) -> Path | None:
        """Return a kept tree, or None once this program may receive it, as `receiving` ensures."""
        if self.problem is not None:
            return None
        try:
            found = self._find_tree(key)
            if found is None:
                is_alone = receiving.enter_context(self._lock_receiving(key))
                found = self._find_tree(key, removes_damaged=is_alone)
        except OSError as error:
            self._go_without(error)
            return None
        return found

    @contextmanager
    def _lock_receiving(self, key: str) -> Iterator[bool]:
        """Hold the lock of those that receive a tree; False, if another one takes too long."""
        with open(self.directory / f"lock-{int(key, 16) % _LOCKS}", "wb") as file:
            yield _wait_for_lock(file.fileno(), TREE_WAIT_SECONDS)

    @contextmanager
    def _lock_cache(self) -> Iterator[None]:
        """Hold the lock of the cache. Raises: TimeoutError, OSError."""
        path = self.directory / "lock"
        with open(path, "wb") as file:
            if not _wait_for_lock(file.fileno(), LOCK_WAIT_SECONDS):
                raise TimeoutError(errno.ETIMEDOUT, "another program does not unlock", str(path))
            yield

    def _find_tree(self, key: str, *, removes_damaged: bool = False) -> Path | None:
        """Return a kept tree that has lost nothing, and lock it until the context ends."""
        with self._lock_cache():
            found = self._use_tree(key)
        if found is None or _is_whole(found):
            return found
        if removes_damaged:
            with self._lock_cache(), suppress(FileNotFoundError):
                found.parent.rename(self.temporary_directory / "damaged")
        return None

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

    def _add_tree(self, key: str, received: Path, size: TreeSize) -> Path | None:
        """Keep a received tree, if there is room; return its path."""
        evicted, added = self.temporary_directory / "evicted", None
        try:
            evicted.mkdir()
            (received / _SIZE).write_text(
                f"{size.entry_count} {size.content_bytes}", encoding="ascii"
            )
            with self._lock_cache():
                is_new = not (self.directory / key).exists()
                if is_new and self._make_room(_count_bytes(size), evicted):
                    received.rename(self.directory / key)
                    added = self._use_tree(key)
        except OSError as error:
            self._go_without(error)
        with suppress(OSError):  # it is removed with `place`
            remove_tree(evicted)
        return added

    def _make_room(self, size: int, evicted: Path) -> bool:
        """Move the least recently used trees that nobody uses to `evicted`, if that is enough."""
        trees = sorted(self._list_trees(), key=lambda path: path.stat().st_mtime_ns)
        sizes = {path: _count_bytes(_read_size(path)) for path in trees}
        excess = sum(sizes.values()) + size - self.max_bytes
        if size > self.max_bytes or sum(sizes[path] for path in trees if _is_unused(path)) < excess:
            return False
        for path in filter(_is_unused, trees):
            if excess <= 0:
                break
            excess -= sizes[path]
            path.rename(evicted / path.name)
        return True

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
    return size.content_bytes + size.entry_count * BLOCK_BYTES


def _is_whole(tree: Path) -> bool:
    """Tell whether a tree has all that it was kept with: cleaners remove old files."""
    try:
        top = open_directory_path(tree)
        try:
            return measure_tree(top) == _read_size(tree.parent)
        finally:
            os.close(top)
    except OSError:
        return False


def _make_own_directory(path: Path) -> None:
    """Make a directory, unless it is there. Raises: OSError, if it is not this user's alone."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or stat.S_IMODE(status.st_mode) & 0o777 != 0o700
    ):
        raise PermissionError(errno.EPERM, "not a directory of this user alone", str(path))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(descriptor: int, seconds: float) -> bool:
    """Lock a file; return False if that takes longer."""
    deadline = time.monotonic() + seconds
    while not (is_locked := _try_lock(descriptor)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return is_locked


def _is_unused(path: Path) -> bool:
    """Tell whether nobody uses a tree, nor will while the cache is locked."""
    descriptor = open_directory_path(path)
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)
