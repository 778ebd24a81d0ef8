"""The git that there is, looked at before anything depends on it."""

from __future__ import annotations

import re
import subprocess

from tawebeval.errors import ConfigurationError
from tawebeval.git.command import PATH

OLDEST = (2, 37)
"""Older ones do not know `http.curloptResolve`: they would look a checked name up again."""

_VERSION = re.compile(r"git version (\d+)\.(\d+)\S*")
_REMEDY = f"install git {OLDEST[0]}.{OLDEST[1]} or newer, where the daemon finds it: {PATH}"


def check_git() -> str:
    """Return what version of git there is, in its own words. Blocks.

    Raises ConfigurationError, with the remedy, where there is none or too old a one.
    """
    try:
        said = subprocess.run(
            ["git", "version"],
            env={"PATH": PATH, "LC_ALL": "C", "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"there is no git that runs ({error}); {_REMEDY}") from None
    version = _VERSION.match(said)
    if version is None:
        raise ConfigurationError(f"git says {said!r} instead of its version; {_REMEDY}")
    if (int(version[1]), int(version[2])) < OLDEST:
        raise ConfigurationError(f"{said} is too old; {_REMEDY}")
    return said
