"""The user that the daemon becomes if root starts the demo."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

USER = "nobody"

SERVICE = f"""
# Neither git nor evaluators run as root.
[service]
user = "{USER}"
"""


def is_root() -> bool:
    """Return whether root runs the demo."""
    return os.geteuid() == 0


def give(*paths: Path) -> None:
    """As root, give files and directories to the daemon's user."""
    if is_root():
        user = pwd.getpwnam(USER)
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)
