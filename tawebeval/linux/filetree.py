"""Directory trees that strangers have made: walking, copying and removing them; disk errors.

A stranger's tree may be deeper than Python's recursion goes, its paths as long as the kernel takes
them, its modes anything, and any name may become a symbolic link meanwhile. So trees are walked by
paths relative to an open directory, and no link is followed.

A small and shallow tree, as nearly all are, is removed in this process, before another program
would have begun. Others are left to rm(1), which needs no more descriptors for more levels, so that
no stranger can use up the daemon's. Everything here blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

import attrs

DISK_FULL_REMEDY = "free some disk space"
"""The remedy for a full disk."""

_libc = ctypes.CDLL(None, use_errno=True)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add `path` to an OSError of the body that names none, as errors of writing do."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file so that it is complete whenever `target` exists, also after a power failure.

    Raises: OSError.
    """
    with add_path_to_errors(source):
        _synchronize(source)
        source.rename(target)
        _synchronize(target.parent)


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path: Path) -> None:
    """Write all that the kernel holds of a file system to its disk (syncfs(2)). Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)


def is_disk_full(error: OSError) -> bool:
    """Tell whether the disk, or the user's quota, is full."""
    return error.errno in _FULL


def mentions_disk_full(said: str) -> bool:
    """Tell whether a program's output reports a full disk or quota."""
    return any(os.strerror(number) in said for number in _FULL)


def is_passing_error(error: OSError) -> bool:
    """Return whether an error is a lack of descriptors or memory, which may pass."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def describe_disk_error(error: OSError) -> str:
    """Return path, if it has one, and reason of an error, with the remedy if the disk is full."""
    path = "" if error.filename is None else f"{error.filename}: "
    remedy = f"; {DISK_FULL_REMEDY}" if is_disk_full(error) else ""
    return f"{path}{error.strerror}{remedy}"


DIRECTORY_LIST_MODE_BITS = stat.S_IRUSR | stat.S_IXUSR
"""The mode bits to list a directory and to look at its entries."""
DIRECTORY_REMOVE_MODE_BITS = stat.S_IRWXU
"""The mode bits to list a directory and to remove its entries."""

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(name: str, parent: int | None, rights: int) -> int:
    """Open a directory of this user's, without following links. Raises: OSError.

    A directory that lacks any of the mode bits `rights` gets all of the owner's.
    """
    place = os.open(name, os.O_PATH | _FLAGS, dir_fd=parent)
    try:
        if os.fstat(place).st_mode & rights != rights:
            os.chmod(f"/proc/self/fd/{place}", stat.S_IRWXU)
        return os.open(".", _FLAGS, dir_fd=place)
    finally:
        os.close(place)


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 2**30  # maximum bytes to copy by one call


def open_regular_file(path: Path) -> IO[bytes]:
    """Open a file to read it, and do not follow a link in its place.

    Raises: OSError; FileNotFoundError also for anything but a regular file.
    """
    file = open(os.open(path, _READ | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    return file


def make_sealed_memfd(name: str, content: bytes) -> int:
    """Return the descriptor of a file in memory that nobody can change. Raises: OSError.

    Without seals a descriptor that was opened for reading can be opened for writing by proc(5).
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(descriptor, content, 0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def open_directory_path(path: Path) -> int:
    """Return a descriptor of a directory, whose path may not be a link. Raises: OSError."""
    return os.open(path, _FLAGS)


def walk_tree(top: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield relative path and status of everything below the open directory `top`.

    A directory comes before its entries. Symbolic links are not followed as long as nobody changes
    the tree meanwhile. Raises: OSError.
    """
    # Names, not paths: a tree of 50,000 directories with the longest paths has 200 MB of paths.
    waiting = [(0, ".")]  # directories to enter, with the number of components above
    parts: list[str] = []  # of the path of the directory that was entered last
    while waiting:
        level, name = waiting.pop()
        parts[level:] = [name]
        above = "/".join(parts)
        directory = os.open(above, _FLAGS, dir_fd=top)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    yield f"{above}/{entry.name}", status
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((level + 1, entry.name))
        finally:
            os.close(directory)


def copy_tree(source: Path, target: Path, subdirectory: str = "") -> None:
    """Copy names, bytes and modes from below `source` into an empty directory.

    That is `target`, or the directory at `subdirectory` below it, to which no symbolic link leads.

    Raises: OSError, always with a path; also for entries other than directories, regular files and
    symbolic links.
    """
    below = open_directory_path(source)
    try:
        into = open_directory_path(target)
        try:
            for part in subdirectory.split("/") if subdirectory else ():
                parent, into = into, os.open(part, _FLAGS, dir_fd=into)
                os.close(parent)
            with add_path_to_errors(target):
                for name, status in walk_tree(below):
                    _copy_one(name, stat.S_IFMT(status.st_mode), status, below, into)
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
        raise OSError(errno.EINVAL, "neither a file, a directory nor a symbolic link", path)


def _copy_bytes(reading: int, writing: int) -> None:
    """Copy a file within the kernel."""
    while os.sendfile(writing, reading, None, _PIECE):
        pass


_RM, _CHMOD = "/bin/rm", "/bin/chmod"  # whatever the daemon's PATH is
_COMPLAINT = 8 * 1024  # bytes: more than a line with a path
_LEVELS = 16  # of directories, for each of which a descriptor is open
MAX_ENTRIES_REMOVED_IN_PROCESS = 500  # that are removed in this process


def remove_tree(directory: Path) -> None:
    """Remove a directory with its content, or a file, if it exists. Raises: OSError."""
    if _remove_small(directory):
        return
    run_and_read_stderr_line(_RM, "-rf", "--", directory)
    if os.path.lexists(directory):  # directories without permissions
        run_and_read_stderr_line(_CHMOD, "-R", "u+rwX", "--", directory)
        said = run_and_read_stderr_line(_RM, "-rf", "--", directory)
        if os.path.lexists(directory):
            raise OSError(errno.ENOTEMPTY, said or "cannot be removed", str(directory))


def _remove_small(directory: Path) -> bool:
    """Remove a small directory, or a file; return False if it, or a part of it, is left."""
    try:
        _Emptying(MAX_ENTRIES_REMOVED_IN_PROCESS).remove(str(directory), None, _LEVELS)
    except (OSError, _TooLarge):
        return False
    return True


class _TooLarge(Exception):
    """A tree that is too large to be removed in this process."""


@attrs.define
class _Emptying:
    """One removal of up to `left` entries. Raises: _TooLarge, OSError."""

    left: int

    def remove(self, name: str, parent: int | None, levels: int) -> None:
        """Remove a file, or a directory with at most `levels` of directories; never follow a link.

        Directories without permissions are common: an overlay leaves one behind.
        """
        try:
            os.rmdir(name, dir_fd=parent)  # most are empty, and a look into one takes eight calls
        except FileNotFoundError:
            return
        except NotADirectoryError:
            os.unlink(name, dir_fd=parent)
        except OSError:
            place = os.open(name, os.O_PATH | _FLAGS, dir_fd=parent)
            try:
                self._empty(place, levels)
            finally:
                os.close(place)
            os.rmdir(name, dir_fd=parent)

    def _empty(self, place: int, levels: int) -> None:
        """Remove the entries of a directory, by a descriptor with O_PATH."""
        path = f"/proc/self/fd/{place}"
        if os.fstat(place).st_mode & DIRECTORY_REMOVE_MODE_BITS != DIRECTORY_REMOVE_MODE_BITS:
            os.chmod(path, stat.S_IRWXU)
        with os.scandir(path) as entries:  # of a descriptor it takes three calls more
            found = list(islice(entries, self.left + 1))
        self.left -= len(found)
        if self.left < 0 or levels == 0:
            raise _TooLarge
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                self.remove(entry.name, place, levels - 1)
            else:
                os.unlink(entry.name, dir_fd=place)


def run_and_read_stderr_line(*command: str | Path) -> str:
    """Run a command to its end; return the first line of its stderr.

    Each of millions of files may cause a line: only the first is kept.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None, "it is a pipe"
        said = child.stderr.read(_COMPLAINT)
        while child.stderr.read(_COMPLAINT):
            pass
    return said.decode(errors="replace").partition("\n")[0]
