"""The /etc of sandboxes: one directory with copies of a few of the machine's files.

bwrap shows a directory at the price of a single file, and sandboxes need sixteen files. Before each
start the status of the machine's files tells which of them have changed; these are copied again,
each by a rename. The directory itself stays the same, so running sandboxes see changes, too.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from threading import Lock

import attrs

from tawebeval.linux.filetree import add_path_to_errors, remove_tree

# Nanoseconds after which another change of a file has another time.
_TICK = 20_000_000

_Status = tuple[int, int, int]  # device, inode, and time of the last change in nanoseconds


@attrs.frozen
class _Entry:
    """One entry of the directory, by its kind (inode(7))."""

    kind: int
    mode: int = 0
    source: str | None = None  # of a copy
    content: bytes = b""  # or the target of a link


@attrs.define
class PreparedEtc:
    """A directory that sandboxes show as /etc.

    - `copied_patterns`: what is copied from `source_directory`, as for glob(3).
    - `extra_files`: other files, by their names.
    - `mount_points`: paths below `source_directory` over which sandboxes mount something.
    """

    directory: Path
    copied_patterns: Sequence[str]
    extra_files: Mapping[str, bytes]
    mount_points: Sequence[str] = ()
    source_directory: str = "/etc"
    _seen: dict[str, _Status | None] = attrs.field(factory=dict, init=False, eq=False)
    _lock: Lock = attrs.field(factory=Lock, init=False, eq=False)

    def update(self) -> None:
        """Copy what has changed since the last call. Blocks, hardly. Raises: OSError."""
        with self._lock:
            if not self._is_current():
                self._copy_changes()

    def _is_current(self) -> bool:
        seen = self._seen
        return bool(seen) and all(_read_status(path) == seen[path] for path in seen)

    def _copy_changes(self) -> None:
        self._seen, seen = {}, dict[str, _Status | None]()
        wanted = dict(self._scan(seen))
        for name, entry in self._list_mount_points():
            above = os.path.dirname(name)
            # Nothing is written through a link.
            if not above or (above in wanted and wanted[above].kind == stat.S_IFDIR):
                wanted.setdefault(name, entry)
        latest = max((status[2] for status in seen.values() if status), default=0)
        if time.time_ns() - latest < _TICK:
            time.sleep(_TICK / 1e9)
        self.directory.mkdir(exist_ok=True)
        self.directory.chmod(0o755)
        for path in sorted(self.directory.rglob("*"), reverse=True):
            if str(path.relative_to(self.directory)) not in wanted:
                remove_tree(path)
        for name, entry in wanted.items():
            if not _is_same(self.directory / name, entry):
                self._replace(self.directory / name, entry)
        seen[str(self.directory)] = _read_status(str(self.directory))
        self._seen = seen

    def _scan(self, seen: dict[str, _Status | None]) -> Iterator[tuple[str, _Entry]]:
        """Yield what there should be, directories before their entries."""
        for pattern in self.copied_patterns:
            above = os.path.dirname(pattern)
            folder = os.path.join(self.source_directory, above)
            seen[folder] = _read_status(folder)
            for name in sorted(glob(pattern, root_dir=self.source_directory)):
                yield from _name_parents(name)
                yield from _scan_path(os.path.join(self.source_directory, name), name, seen)
        for name, content in self.extra_files.items():
            yield name, _Entry(stat.S_IFREG, 0o644, content=content)

    def _list_mount_points(self) -> Iterator[tuple[str, _Entry]]:
        for path in self.mount_points:
            name = os.path.relpath(path, self.source_directory)
            if name != "." and not name.startswith(".."):
                yield from _name_parents(name)
                if os.path.isdir(path):
                    yield name, _Entry(stat.S_IFDIR, 0o755)
                elif os.path.exists(path):
                    yield name, _Entry(stat.S_IFREG, 0o644)

    def _replace(self, path: Path, entry: _Entry) -> None:
        is_directory = path.is_dir() and not path.is_symlink()
        if entry.kind == stat.S_IFDIR:
            if not is_directory:
                path.unlink(missing_ok=True)
                path.mkdir()
            path.chmod(entry.mode)
            return
        if is_directory:
            remove_tree(path)
        new = self.directory.with_name(f"{self.directory.name}.new")
        new.unlink(missing_ok=True)
        if entry.kind == stat.S_IFLNK:
            os.symlink(entry.content, os.fsencode(new))
        else:
            content, mode = _read_file(entry)
            with add_path_to_errors(new):
                new.write_bytes(content)
                new.chmod(mode)
        new.replace(path)


def _is_same(path: Path, entry: _Entry) -> bool:
    """Tell whether an entry is right, so that nothing is renamed over it.

    That would remove what running sandboxes have mounted over it.
    """
    try:
        found = path.lstat()
        if stat.S_IFMT(found.st_mode) != entry.kind:
            return False
        if entry.kind == stat.S_IFLNK:
            return os.readlink(os.fsencode(path)) == entry.content
        if entry.kind == stat.S_IFDIR:
            return stat.S_IMODE(found.st_mode) == entry.mode
        content, mode = _read_file(entry)
        if (stat.S_IMODE(found.st_mode), found.st_size) != (mode, len(content)):
            return False
        return not content or path.read_bytes() == content
    except OSError:
        return False


def _read_file(entry: _Entry) -> tuple[bytes, int]:
    """Return the content and mode of a file; it is empty if the machine's cannot be read."""
    if entry.source is None:
        return entry.content, entry.mode
    try:
        return Path(entry.source).read_bytes(), entry.mode
    except (PermissionError, FileNotFoundError):
        return b"", 0


def _scan_path(
    path: str, name: str, seen: dict[str, _Status | None]
) -> Iterator[tuple[str, _Entry]]:
    """Yield a file, or a directory and all that it holds; nothing for another kind."""
    try:
        found = os.stat(path)
    except OSError:
        seen[path] = None
        return
    seen[path], mode = _identify(found), found.st_mode
    if stat.S_ISREG(mode):
        yield name, _Entry(stat.S_IFREG, mode & 0o777, path)
    elif stat.S_ISDIR(mode):
        yield name, _Entry(stat.S_IFDIR, mode & 0o777 | 0o700)
        # While the machine installs packages, files come and go.
        with suppress(PermissionError, FileNotFoundError), os.scandir(path) as children:
            for child in children:
                below = f"{name}/{child.name}"
                if child.is_symlink():
                    with suppress(FileNotFoundError):
                        target = os.readlink(os.fsencode(child.path))
                        yield below, _Entry(stat.S_IFLNK, content=target)
                else:
                    yield from _scan_path(child.path, below, seen)


def _name_parents(name: str) -> Iterator[tuple[str, _Entry]]:
    parts = name.split("/")
    for count in range(1, len(parts)):
        yield "/".join(parts[:count]), _Entry(stat.S_IFDIR, 0o755)


def _read_status(path: str) -> _Status | None:
    """Return what changes when a file changes; None if there is no file."""
    try:
        return _identify(os.stat(path))
    except OSError:
        return None


def _identify(found: os.stat_result) -> _Status:
    return found.st_dev, found.st_ino, found.st_ctime_ns
