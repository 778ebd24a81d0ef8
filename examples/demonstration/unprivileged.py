"""The user of the daemon if root starts the demo."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

from demonstration.as_nobody import USER


def is_root() -> bool:
    """Return whether root runs the demo."""
    return os.geteuid() == 0


def build_command(name: str) -> list[str]:
    """Return the command of a program beside this Python, as an unprivileged user."""
    program = str(Path(sys.executable).with_name(name))
    script = str(Path(__file__).with_name("as_nobody.py"))
    return [sys.executable, script, program] if is_root() else [program]


def give(*paths: Path) -> None:
    """As root, give files and directories to the daemon's user."""
    if is_root():
        user = pwd.getpwnam(USER)
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)
