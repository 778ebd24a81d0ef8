"""The user that a daemon becomes where the tests are root's, and what it has to be given."""

from __future__ import annotations

import atexit
import os
import pwd
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from tests.run import ROOT

USER = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
"""Whom daemons become; None where the tests, and so the daemons, are not root's."""

PYTHON_AS_USER = (
    (sys.executable, str(ROOT / "tests" / "as_nobody.py")) if USER else (sys.executable,)
)
"""The Python of the tests, which becomes that user where a script refuses root."""


def give(path: Path) -> None:
    """Let a file or directory belong to the daemons' user."""
    if USER:
        os.chown(path, USER.pw_uid, USER.pw_gid, follow_symlinks=False)


def find_program(name: str) -> Path:
    """Return the path of a program beside this Python, which becomes the daemons' user."""
    program = Path(sys.executable).with_name(name)
    if not USER:
        return program
    folder = Path(tempfile.mkdtemp(prefix="tawebeval-programs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = folder / name
    script.write_text(f'#!/bin/sh\nexec {shlex.join((*PYTHON_AS_USER, str(program)))} "$@"\n')
    script.chmod(0o755)
    return script


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
