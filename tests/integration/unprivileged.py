"""The user that a daemon becomes where the tests are root's, and what it has to be given."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from pathlib import Path

from tawebeval.linux.privileges import User

USER = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
"""Whom daemons become; None where the tests, and so the daemons, are not root's."""

WHO = User(USER.pw_name, USER.pw_uid, USER.pw_gid, frozenset(), "/") if USER else None
"""The same, for parts of a daemon."""

SERVICE = f'\n[service]\nuser = "{USER.pw_name}"\n' if USER else ""
"""What a daemon's configuration has to say for that."""


def give(path: Path) -> None:
    """Let a file or directory belong to the daemons' user."""
    if USER:
        os.chown(path, USER.pw_uid, USER.pw_gid, follow_symlinks=False)


def temporary_folder(prefix: str = "tawebeval-test-") -> Path:
    """Make a folder that the daemons' user can enter; return its path without links."""
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    give(folder)
    return folder


def _python() -> str:
    """Return a Python that runs in the sandbox, as the daemons' user: the system's."""
    found = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    assert found, "there is no python3 in /usr"
    return found


PYTHON = _python()
"""What evaluators run."""
