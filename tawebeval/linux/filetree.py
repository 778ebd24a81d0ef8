"""Directory trees that strangers have made: walking, copying and removing them; disk errors.

A stranger's tree may be deeper than Python's recursion goes, its paths as long as the kernel takes
them, its modes anything, and any name may become a symbolic link meanwhile. So trees are walked by
paths relative to an open directory, and no link is followed. Copying and removing are left to cp(1)
and rm(1), so that no stranger can use up the daemon's descriptors. Everything here blocks.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from tawebeval.linux.kernel_files import call_libc

_FEW_ENTRIES = 64
_CP, _RM, _CHMOD = "/bin/cp", "/bin/rm", "/bin/chmod"  # whatever the daemon's PATH is
_COMPLAINT = 8 * 1024  # bytes: more than a line with a path

DISK_FULL_REMEDY = "free some disk space"
"""The remedy for a full disk."""

KERNEL_DIRECTORIES = tuple(map(Path, ("/proc", "/sys", "/dev")))
"""Directories whose files lead to what the daemon has open, so strangers may name none of them."""

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


def replace_private_file(path: Path, content: bytes) -> None:
    """Replace a file, whole or not at all, by one that only the user may read. Raises: OSError."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with add_path_to_errors(unfinished), open(descriptor, "wb") as file:
            file.write(content)
        rename_durably(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


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
        with add_path_to_errors(path):
            call_libc("syncfs", descriptor)
    finally:
        os.close(descriptor)


def get_disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file takes on the disk."""
    return status.st_blocks * 512  # stat(2)


def is_disk_full_error(error: OSError) -> bool:
    """Tell whether the disk, or the user's quota, is full."""
    return error.errno in _FULL


def mentions_disk_full(said: str) -> bool:
    """Tell whether a program's output reports a full disk or quota."""
    return any(os.strerror(number) in said for number in _FULL)


def is_transient_error(error: OSError) -> bool:
    """Return whether an error is a lack of descriptors or memory, which may pass."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def describe_disk_error(error: OSError) -> str:
    """Return path, if it has one, and reason of an error, with the remedy if the disk is full."""
    path = "" if error.filename is None else f"{error.filename}: "
    remedy = f"; {DISK_FULL_REMEDY}" if is_disk_full_error(error) else ""
    return f"{path}{error.strerror}{remedy}"


_LIST_MODE_BITS = stat.S_IRUSR | stat.S_IXUSR  # to list a directory and to look at its entries

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_listable_directory(name: str, parent: int | None) -> int:
    """Open a directory of this user's, without following links. Raises: OSError.

    A directory that cannot be listed gets all mode bits of the owner.
    """
    place = os.open(name, os.O_PATH | _FLAGS, dir_fd=parent)
    try:
        if os.fstat(place).st_mode & _LIST_MODE_BITS != _LIST_MODE_BITS:
            os.chmod(f"/proc/self/fd/{place}", stat.S_IRWXU)
        return os.open(".", _FLAGS, dir_fd=place)
    finally:
        os.close(place)


_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_regular_file(path: Path) -> IO[bytes]:
    """Open a file to read it, and do not follow a link in its place.

    Raises: OSError; FileNotFoundError also for anything but a regular file.
    """
    file = open(os.open(path, _READ | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    return file


def open_directory_nofollow(path: Path) -> int:
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


_READ_MODE_BITS = {
    stat.S_IFREG: stat.S_IRUSR,
    stat.S_IFDIR: _LIST_MODE_BITS,
}
# cp(1) uses whole paths: the rest is for directories of the daemon above.
_MAX_PATH_BYTES = 4096 - 512


def measure_tree(root: Path, check: Callable[[int, int], object]) -> tuple[int, int]:
    """Return the number of files in a tree of this user's, and of bytes that its copy may take.

    `check(files, size)` is called at each file. Raises: OSError (PermissionError for files that the
    owner may not read, ENAMETOOLONG for paths too long to copy); what `check` raises.
    """
    files = size = 0
    _check_readable(root.lstat(), str(root))
    top = open_directory_nofollow(root)
    try:
        for path, status in walk_tree(top):
            _check_readable(status, path)
            if len(os.fsencode(path)) > _MAX_PATH_BYTES:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            files += 1
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
            check(files, size)
    finally:
        os.close(top)
    return files, size


def check_and_copy_tree(
    source: Path, target: Path, check: Callable[[int, int], object]
) -> tuple[int, int]:
    """Copy a tree into an empty directory unless `check` raises; return its files and bytes.

    In new files, which no process has open that works on the source. Raises: as `measure_tree` and
    `copy_tree`.
    """
    figures = measure_tree(source, check)
    copy_tree(source, target)
    return figures


def _check_readable(status: os.stat_result, path: str) -> None:
    bits = _READ_MODE_BITS.get(stat.S_IFMT(status.st_mode), 0)
    if status.st_mode & bits != bits:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def copy_tree(source: Path, target: Path, subdirectory: str = "") -> None:
    """Copy names, bytes, modes and times from below `source` into an empty directory.

    That is `target`, or the directory at `subdirectory` below it, to which no symbolic link leads.
    Raises: OSError, always with a path.
    """
    into = open_directory_nofollow(target)
    try:
        for part in subdirectory.split("/") if subdirectory else ():
            parent, into = into, os.open(part, _FLAGS, dir_fd=into)
            os.close(parent)
        mode = stat.S_IMODE(os.fstat(into).st_mode)
        options = ("-RP", "--preserve=mode,timestamps", "--")  # by the times make(1) builds again
        paths = (f"{source}/.", f"/proc/self/fd/{into}")
        said = run_command_read_stderr_line(_CP, *options, *paths, descriptors=[into])
        os.fchmod(into, mode)  # cp takes the source's
        os.utime(into)
    finally:
        os.close(into)
    if said:
        number = errno.ENOSPC if mentions_disk_full(said) else errno.EIO
        raise OSError(number, said, str(target))


def remove_tree(*paths: Path) -> None:
    """Remove directories with their content, and files, if they exist. Raises: OSError."""
    left = []
    for path in paths:
        try:
            _remove_if_small(os.fspath(path), None, _FEW_ENTRIES)  # rm(1) takes milliseconds
        except OSError:
            left.append(path)
    if not left:
        return
    said = run_command_read_stderr_line(_RM, "-rf", "--", *left)
    if said:  # directories without permissions
        run_command_read_stderr_line(_CHMOD, "-R", "u+rwX", "--", *left)
        said = run_command_read_stderr_line(_RM, "-rf", "--", *left)
    for path in left:
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, said or "cannot be removed", str(path))


def _remove_if_small(name: str, parent: int | None, most: int, *, is_directory: bool = True) -> int:
    """Remove a file, or a directory with less than `most` entries below it, and follow no link.

    Return how many more entries might be removed. Raises: OSError; then a part may be left.
    """
    try:
        if is_directory:
            os.rmdir(name, dir_fd=parent)  # most are empty
        else:
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        directory = open_listable_directory(name, parent)
        try:
            with os.scandir(directory) as entries:
                below = [
                    (entry.name, entry.is_dir(follow_symlinks=False))
                    for entry in islice(entries, max(most, 0))
                ]
            for each, is_below in below:
                most = _remove_if_small(each, directory, most - 1, is_directory=is_below)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=parent)
    return most


def run_command_read_stderr_line(*command: str | Path, descriptors: Collection[int] = ()) -> str:
    """Run a command with open descriptors to its end; return the first line of its stderr.

    Without one that is its exit status, "" for 0. Each of millions of files may cause a line: only
    the first is kept.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"LC_ALL": "C"},
        pass_fds=descriptors,
    ) as child:
        assert child.stderr is not None, "it is a pipe"
        said = child.stderr.read(_COMPLAINT)
        while child.stderr.read(_COMPLAINT):
            pass
    failure = f"{command[0]}: exit status {child.returncode}" if child.returncode else ""
    return said.decode(errors="replace").partition("\n")[0] or failure
