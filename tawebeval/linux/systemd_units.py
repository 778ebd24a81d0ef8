"""The systemd unit that owns a cgroup.

Functions that ask systemd block, as long as systemd does. docs/operate.md has the units.
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
    return "/user@" not in path or _query_property(path, "Delegate") == "yes"


def query_oom_policy(path: str) -> str:
    """Return systemd's reaction to an out-of-memory kill in or below a cgroup. Blocks.

    "stop" and "kill" end the unit; "" is unknown.
    """
    return _query_property(path, "OOMPolicy") if os.path.isdir(SYSTEMD_MARKER_DIRECTORY) else ""


def find_user_runtime_directory() -> str:
    """Return the runtime directory of the user (pam_systemd(8)), where systemd's sockets are."""
    return f"/run/user/{os.geteuid()}"


def _query_property(path: str, name: str) -> str:
    """Return a property of the unit that owns a cgroup; "" if unknown. Blocks."""
    # /…/user@UID.service/… are the units of a user's own systemd.
    before, users, below = path.partition("/user@")
    parts = below.split("/")[1:] if users else before.split("/")
    units = [part for part in parts if part.endswith((".service", ".scope"))]
    if not units:
        return ""
    options = ("--user",) if users else ()
    try:
        asked = subprocess.run(
            ["systemctl", *options, "show", "--value", f"--property={name}", units[-1]],
            env={**os.environ, "XDG_RUNTIME_DIR": find_user_runtime_directory()},
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()
