"""A directory tree as a stream of bytes, for nodes without a shared directory.

The stream has for each entry a line with its kind, path, mode and size in bytes, and the content of
a file, or the target of a link. The last line is `null`. Unlike tar(5) it has no other kinds of
entries, and no header that a reader would have to hold whole.

The tree of a commit is a stranger's: its links may lead anywhere, and are never followed. A stream
with another path than one below the top is broken.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any

import attrs
import msgspec

from tawebeval.linux.filetree import open_directory_path, walk_tree

CHUNK_BYTES = 128 * 1024
"""Bytes of a stream that are in memory at once, at least; at most twice as many."""

MAX_LINE_BYTES = 32 * 1024
"""Bytes of the line of one entry: six for each byte of a path."""

MAX_LEVELS = 256
"""Components of a path: the node has a descriptor for each of them."""

_MAX_TARGET = 4096  # bytes of a link's target (PATH_MAX)
_FILE, _DIRECTORY, _LINK = "f", "d", "l"
_Size = Annotated[int, msgspec.Meta(ge=0)]
_KINDS = {stat.S_IFREG: _FILE, stat.S_IFDIR: _DIRECTORY, stat.S_IFLNK: _LINK}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BrokenStream(Exception):
    """A stream that is no stream of a tree, or not a whole one."""


class StreamEnded(BrokenStream):
    """A stream whose sender is gone."""

    def __init__(self) -> None:
        super().__init__("the stream ends too early")


@attrs.frozen
class TreeSize:
    """The number of entries of a tree, and the bytes of its files and links."""

    entry_count: int
    content_bytes: int


def measure_tree(top: int) -> TreeSize:
    """Return the size of the tree below an open directory. Blocks. Raises: OSError."""
    entries = content_bytes = 0
    for _, status in walk_tree(top):
        entries += 1
        content_bytes += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return TreeSize(entries, content_bytes)


def encode_tree(path: Path) -> Iterator[bytes]:
    """Yield the stream of a tree that nobody changes, in pieces. Blocks. Raises: OSError."""
    gathered = bytearray()
    top = open_directory_path(path)
    try:
        for name, status in walk_tree(top):
            for part in _encode_entry(top, name, status):
                gathered += part
                if len(gathered) >= CHUNK_BYTES:
                    piece = bytes(gathered)
                    gathered.clear()
                    yield piece
    finally:
        os.close(top)
    yield bytes(gathered + _encode_line(None))


def _encode_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _encode_entry(top: int, name: str, status: os.stat_result) -> Iterator[bytes]:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        raise OSError(errno.EINVAL, "neither a file, a directory nor a symbolic link", name)
    if name.count("/") > MAX_LEVELS:  # it begins with "./"
        raise OSError(errno.EINVAL, f"a path has more than {MAX_LEVELS} components", name)
    mode, size = stat.S_IMODE(status.st_mode) & 0o777, status.st_size
    yield _encode_line([kind, os.path.normpath(name), mode, 0 if kind == _DIRECTORY else size])
    if kind == _LINK:
        yield os.fsencode(os.readlink(name, dir_fd=top))
    elif kind == _FILE:
        with open(os.open(name, _READ, dir_fd=top), "rb", buffering=0) as file:
            while size:
                part = file.read(min(size, CHUNK_BYTES))
                if not part:
                    raise OSError(errno.EIO, "the file has become shorter", name)
                size -= len(part)
                yield part


def decode_tree(stream: IO[bytes], target: Path) -> TreeSize:
    """Make the tree of a stream in an empty directory; return its size. Blocks.

    Raises: BrokenStream; OSError, with a path.
    """
    entries = content_bytes = 0
    with _Unpacking(target) as unpacking:
        while (entry := read_line(stream, tuple[str, str, int, _Size] | None)) is not None:
            kind, name, mode, size = entry
            unpacking.make_entry(stream, kind, name, mode & 0o777, size)
            entries += 1
            content_bytes += size
    return TreeSize(entries, content_bytes)


def read_line(stream: IO[bytes], kind: Any) -> Any:
    """Return the next line, JSON of a type. Raises: BrokenStream, OSError."""
    line = stream.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise BrokenStream("a line is too long") if len(line) == MAX_LINE_BYTES else StreamEnded
    try:
        # The standard library's: names that are not UTF-8 have surrogates.
        return msgspec.convert(json.loads(line), kind)
    except ValueError:
        raise BrokenStream(f"no entry: {line[:80]!r}") from None


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    """Return the next bytes of a stream. Raises: BrokenStream, OSError."""
    content = stream.read(size)
    if len(content) != size:
        raise StreamEnded
    return content


class _Unpacking(ExitStack):
    """The entries of one stream, as they are made below `target`."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target
        self._parts: list[str] = []  # the path of the directory that is open
        self._opened = [open_directory_path(target)]  # it is the last; before it, those above it
        self.callback(self._close_directories, 0)

    def make_entry(self, stream: IO[bytes], kind: str, path: str, mode: int, size: int) -> None:
        """Make an entry, whose directory was made before."""
        parts = path.split("/")
        if "\0" in path or any(part in ("", ".", "..") for part in parts):
            raise BrokenStream(f"the path {path[:80]!r} is not one below the top")
        if len(parts) > MAX_LEVELS:
            raise BrokenStream(f"a path has more than {MAX_LEVELS} components")
        try:
            self._open_directory(parts[:-1])
            self._make(stream, kind, parts[-1], mode, size)
        except OSError as error:
            error.filename = str(self._target / path)
            raise

    def _make(self, stream: IO[bytes], kind: str, name: str, mode: int, size: int) -> None:
        above = self._opened[-1]
        if kind == _DIRECTORY and not size:
            os.mkdir(name, 0o700, dir_fd=above)
            os.chmod(name, mode | stat.S_IRWXU, dir_fd=above)
        elif kind == _LINK and size <= _MAX_TARGET:
            os.symlink(os.fsdecode(read_exactly(stream, size)), name, dir_fd=above)
        elif kind == _FILE:
            with open(os.open(name, _WRITE, 0o600, dir_fd=above), "wb", buffering=0) as file:
                while size:
                    part = memoryview(read_exactly(stream, min(size, CHUNK_BYTES)))
                    size -= len(part)
                    while part:
                        part = part[file.write(part) :]
                os.fchmod(file.fileno(), mode)
        else:
            raise BrokenStream(f"an entry of the kind {kind[:8]!r}")

    def _open_directory(self, parts: list[str]) -> None:
        """Open a directory by one component at a time: a link among them is not followed."""
        while self._parts != parts[: len(self._parts)]:
            self._parts.pop()
            self._close_directories(1 + len(self._parts))
        for part in parts[len(self._parts) :]:
            self._opened.append(os.open(part, _READ | os.O_DIRECTORY, dir_fd=self._opened[-1]))
            self._parts.append(part)

    def _close_directories(self, left: int) -> None:
        while len(self._opened) > left:
            os.close(self._opened.pop())
