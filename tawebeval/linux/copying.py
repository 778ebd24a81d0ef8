"""Walking over directories however deep they are, and copying them. Everything here blocks.

A stranger's tree may be deeper than Python's recursion goes, and its paths may be as long as the
kernel takes them: it is walked without recursion, by paths relative to its top.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tawebeval.linux.diskfaults import naming

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 2**30  # bytes that are copied by one call, at most
# Why copy_file_range(2) does not work between two file systems, where another way does.
_APART = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def walk(top: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what is below an open directory: paths relative to it, directories before their own.

    No symbolic link is followed as long as nobody changes it meanwhile.
    """
    waiting = ["."]
    while waiting:
        above = waiting.pop()
        directory = os.open(above, _DIRECTORY, dir_fd=top)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    path = os.path.join(above, entry.name)
                    status = entry.stat(follow_symlinks=False)
                    yield path, status
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(path)
        finally:
            os.close(directory)


def copy(source: Path, target: Path) -> None:
    """Copy what is below a directory into an empty one: names, bytes, modes. Raises OSError.

    There may be directories, regular files and symbolic links. An error has a path, at least that
    of `target`.
    """
    below = os.open(source, _DIRECTORY)
    try:
        into = os.open(target, _DIRECTORY)
        try:
            with naming(target):
                for path, status in walk(below):
                    _copy_one(path, stat.S_IFMT(status.st_mode), status, below, into)
        finally:
            os.close(into)
    finally:
        os.close(below)


def _copy_one(path: str, kind: int, status: os.stat_result, below: int, into: int) -> None:
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(path, dir_fd=below), path, dir_fd=into)
    elif kind == stat.S_IFDIR:
        os.mkdir(path, dir_fd=into)
        os.chmod(path, stat.S_IMODE(status.st_mode), dir_fd=into)
    elif kind == stat.S_IFREG:
        reading = os.open(path, _READ, dir_fd=below)
        try:
            writing = os.open(path, _WRITE, 0o600, dir_fd=into)
            try:
                _copy_bytes(reading, writing)
                os.fchmod(writing, stat.S_IMODE(status.st_mode))
            finally:
                os.close(writing)
        finally:
            os.close(reading)
    else:
        raise OSError(errno.EINVAL, "neither a file, a directory nor a link", path)


def _copy_bytes(reading: int, writing: int) -> None:
    """Copy a file, within the kernel, and on some file systems without a byte being moved."""
    try:
        while os.copy_file_range(reading, writing, _PIECE):
            pass
    except OSError as error:
        if error.errno not in _APART:
            raise
        while os.sendfile(writing, reading, None, _PIECE):
            pass
