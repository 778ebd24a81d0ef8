"""Opening directories in which a stranger's programs have written, whatever modes they have left.

They are this user's all the same, and no link is followed. Everything here blocks, hardly.
"""

from __future__ import annotations

import os
import stat

LISTED = stat.S_IRUSR | stat.S_IXUSR
"""The rights to list what is in a directory, and to look at it."""
EMPTIED = stat.S_IRWXU
"""The rights to list what is in a directory, and to remove it."""

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(name: str, parent: int | None, rights: int) -> int:
    """Open a directory; one that lacks any of those `rights` gets them all. Raises OSError."""
    place = os.open(name, os.O_PATH | _FLAGS, dir_fd=parent)
    try:
        if os.fstat(place).st_mode & rights != rights:
            os.chmod(f"/proc/self/fd/{place}", stat.S_IRWXU)
        return os.open(".", _FLAGS, dir_fd=place)
    finally:
        os.close(place)
