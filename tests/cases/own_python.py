"""Scripts in a Python of their own: for what cannot be undone, or is told from outside alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tawebeval
from tests.cases.patience import LONG_PATIENCE

_ROOT = Path(tawebeval.__file__).parent.parent


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script that can import what is tested; return how it ends, and what it says.

    Of the environment of the tests it has PATH alone, and `variables` besides.
    """
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(_ROOT),
            **variables,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG_PATIENCE,
    )


def printed_by(script: str, *arguments: str, **variables: str) -> str:
    """Return what such a script prints; fail, with what it complains of, where it fails."""
    done = run_script(script, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout
