"""The user of the daemon if root starts the demo."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

USER = "nobody"


def is_root() -> bool:
    """Return whether root runs the demo."""
    return os.geteuid() == 0


def user_options() -> list[str]:
    """Return the options of ``serve``, ``try`` and ``doctor`` that root needs."""
    return ["--user", USER] if is_root() else []


def give(*paths: Path) -> None:
    """As root, give files and directories to the daemon's user."""
    if is_root():
        user = pwd.getpwnam(USER)
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)
