"""Removing directories in which a stranger's programs have written. Everything here blocks.

What is small and shallow, as nearly all are, is removed in this process, which is done before
another program would have begun. The rest is left to rm(1): it needs no more descriptors for
more levels, so no stranger can take all of the daemon's, and it does not keep its threads busy.
"""

from __future__ import annotations

import errno
import os
import subprocess
from itertools import islice
from pathlib import Path

import attrs

from tawebeval.linux.opening import EMPTIED, open_directory

_RM, _CHMOD = "/bin/rm", "/bin/chmod"  # whatever the daemon's PATH is
_COMPLAINT = 8 * 1024  # bytes: more than a line with a path
_LEVELS = 16  # of directories, for each of which a descriptor is open
_ENTRIES = 500  # that are removed in this process


def remove(directory: Path) -> None:
    """Remove a directory and all in it; one that is gone already is as good. Raises OSError."""
    if not os.path.lexists(directory) or _removed_here(directory):
        return
    _run(_RM, "-rf", "--", directory)
    if os.path.lexists(directory):  # directories without permissions
        _run(_CHMOD, "-R", "u+rwX", "--", directory)
        said = _run(_RM, "-rf", "--", directory)
        if os.path.lexists(directory):
            raise OSError(errno.ENOTEMPTY, said or "cannot be removed", str(directory))


def empty(directory: Path) -> None:
    """Remove all that is in a directory of ours, as `remove` does. Raises OSError."""
    for path in directory.iterdir():
        remove(path)


def _removed_here(directory: Path) -> bool:
    """Tell whether the directory has gone; where it is too large for that a part of it has."""
    try:
        _Emptying(_ENTRIES).remove(str(directory), None, _LEVELS)
    except (OSError, _TooLarge):
        return False
    return True


class _TooLarge(Exception):
    """There is more to be removed than is done here."""


@attrs.define
class _Emptying:
    """Removes up to `left` entries; raises _TooLarge, or OSError."""

    left: int

    def remove(self, name: str, parent: int | None, levels: int) -> None:
        """Remove a directory, in which there are no more `levels`; no link is ever followed.

        An overlay leaves a directory without permissions behind, so that there is one is usual.
        """
        directory = open_directory(name, parent, EMPTIED)
        try:
            self._empty(directory, levels)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=parent)

    def _empty(self, directory: int, levels: int) -> None:
        with os.scandir(directory) as entries:
            found = list(islice(entries, self.left + 1))
        self.left -= len(found)
        if self.left < 0 or levels == 0:
            raise _TooLarge
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                self.remove(entry.name, directory, levels - 1)
            else:
                os.unlink(entry.name, dir_fd=directory)


def _run(*command: str | Path) -> str:
    """Run a command to its end; return the first line of what it complains of.

    There may be a complaint for each file of millions: no more than one is kept.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None, "it is a pipe"
        said = child.stderr.read(_COMPLAINT)
        while child.stderr.read(_COMPLAINT):
            pass
    return said.decode(errors="replace").partition("\n")[0]
