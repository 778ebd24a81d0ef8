"""Started by root, the daemon becomes another user; this is who, and what that needs."""

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
    """Tell whether the demonstration is root's."""
    return os.geteuid() == 0


def give(*paths: Path) -> None:
    """Let files and folders belong to whom the daemon becomes; nothing happens if it stays."""
    if is_root():
        user = pwd.getpwnam(USER)
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)
