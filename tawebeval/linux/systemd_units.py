"""The systemd unit that owns a cgroup.

Functions that ask systemd block, as long as systemd does.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

SYSTEMD_MARKER_DIRECTORY = "/run/systemd/system"
"""The directory that exists where systemd runs (sd_booted(3))."""

_ANSWER_TIMEOUT = 10.0  # seconds


def is_delegated(path: str) -> bool:
    """Tell whether systemd leaves a cgroup, in which this user may write, to this user. Blocks.

    Without delegation systemd takes controllers away at any time, and ends the daemon when an
    evaluation meets its memory limit (OOMPolicy=). Below the user's own systemd the permissions of
    the files do not tell.
    """
    if not os.path.isdir(SYSTEMD_MARKER_DIRECTORY):
        return True
    with suppress(OSError):
        if "user.delegate" in os.listxattr(path):
            return True
    _, users, below = path.partition("/user@")
    if not users:
        return True
    # /…/user@UID.service/… are the units of a user's own systemd.
    units = [part for part in below.split("/")[1:] if part.endswith((".service", ".scope"))]
    if not units:
        return False
    try:
        asked = subprocess.run(
            ["systemctl", "--user", "show", "--value", "--property=Delegate", units[-1]],
            env={**os.environ, "XDG_RUNTIME_DIR": find_user_runtime_directory()},
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == "yes"


def find_user_runtime_directory() -> str:
    """Return the runtime directory of the user (pam_systemd(8)), where systemd's sockets are."""
    return f"/run/user/{os.geteuid()}"
