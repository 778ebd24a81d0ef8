"""A disk without a past, for all temporary directories.

File systems owe something to what was on them before: ext4 without a journal looks for numbers that
no file had lately, and with `discard` waits for the device after each removal. Such pauses are in
ours and in the baseline in different proportions, and say nothing about either. So what is measured
lies on a new ext4, made as Debian's installer makes one, in a file on the usual disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = 6 * 2**30  # bytes; what is not written is not on the disk
_CLONE_NEWNS = 0x20000
_COMMANDS = (
    ("mount", "--make-rprivate", "/"),
    # The tables of inodes now, for the kernel would write them in the midst of everything.
    ("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", "{image}"),
    ("mount", "-o", "loop", "{image}", "{place}"),
)
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@contextmanager
def fresh() -> Iterator[str]:
    """Have temporary directories made on a new disk, where this process may mount one.

    Gives a line that tells where they are. The mount is this process's own and of what it starts,
    so nothing of it stays however that ends.
    """
    usual = tempfile.gettempdir()
    descriptor, name = tempfile.mkstemp(prefix="tawebeval-disk-")
    os.close(descriptor)
    image = Path(name)
    place = Path(tempfile.mkdtemp(prefix="tawebeval-disk-"))
    try:
        try:
            mount_image(image, place)
        except OSError as error:
            yield f"directories in {usual}, on {_kind(usual)}: {error.strerror}"
            return
        finally:
            image.unlink()
        tempfile.tempdir = os.environ["TMPDIR"] = str(place)
        try:
            yield f"directories on a new ext4, in a file on {_kind(usual)}"
        finally:
            tempfile.tempdir = os.environ["TMPDIR"] = usual
            subprocess.run(["umount", "--lazy", place], check=True)
    finally:
        place.rmdir()


def mount_image(image: Path, place: Path) -> None:
    """Mount a new file system for this process. Raises OSError, whose `strerror` says why not."""
    usual = os.statvfs(image)
    if usual.f_bavail * usual.f_frsize < SIZE:
        raise OSError(errno.ENOSPC, f"no other disk (less than {SIZE} bytes are free)")
    os.truncate(image, SIZE)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, f"no other disk ({os.strerror(number)})")
    for command in _COMMANDS:
        argv = [word.format(image=image, place=place) for word in command]
        try:
            done = subprocess.run(argv, env={"PATH": _PATH}, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise OSError(error.errno, f"no other disk ({argv[0]} is not there)") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(None, f"no other disk ({said})")
    place.chmod(0o1777)


def _kind(path: str) -> str:
    """Return the kind of the file system on which a path is."""
    return subprocess.check_output(["df", "--output=fstype", path], text=True).split()[-1]
