"""Containers of podman, as root or rootless, which are gone with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cases.patience import LONG_PATIENCE
from tests.run import ROOT

PROGRAMS = ("podman", "crun", "mmdebstrap")
# Of etc/compose.yaml, in podman's words; cgroups are left to the machine.
OPTIONS = (
    *("--cap-drop=ALL", "--read-only", "--tmpfs=/tmp", "--security-opt=no-new-privileges"),
    f"--security-opt=seccomp={ROOT}/etc/seccomp.json",
    "--security-opt=unmask=/proc/*",
)

_HYBRID = Path("/sys/fs/cgroup/unified")
_MANY = 4096


class Podman:
    """A store of images in a folder; `images` loads one from an archive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._storage = ["--root", f"{folder}/storage", "--runroot", f"{folder}/run"]

    def build_command(self, *words: str) -> list[str]:
        return [*_enter(), "podman", "--cgroup-manager=cgroupfs", *self._storage, *words]

    def load(self, archive: Path) -> None:
        self.run("load", "--quiet", "--input", str(archive))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run podman; return its exit status and output. Raises AssertionError. Blocks."""
        done = subprocess.run(
            self.build_command(*words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONG_PATIENCE,
        )
        # podman's own errors (podman-run(1)); 125 is also what it says of a wrong option.
        assert done.returncode not in (125, 126, 127), done.stderr
        return done

    def remove(self) -> None:
        if os.geteuid():  # the files belong to other users
            subprocess.run(["podman", "unshare", "rm", "-rf", self._folder], check=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def list_resource_options() -> Sequence[str]:
    """Return options that ask for lower limits than podman does, which may not be raised here."""
    if os.geteuid():
        return ()
    return (f"--ulimit=nofile={_MANY}:{_MANY}", f"--ulimit=nproc={_MANY}:{_MANY}")


def _enter() -> Sequence[str]:
    """Return what runs podman in a mount namespace, with which its mounts go.

    crun refuses a machine with both versions of cgroups, so the second is hidden.
    """
    is_root = os.geteuid() == 0
    if not _HYBRID.exists():
        return ("unshare", "--mount") if is_root else ()
    # What podman unshare mounts itself would stay for the user's other containers.
    enter = ("unshare", "--mount") if is_root else ("podman", "unshare", "unshare", "--mount")
    hide = f"umount {_HYBRID}" if is_root else f"mount -t tmpfs none {_HYBRID}"
    return (*enter, "sh", "-c", f'{hide} && exec "$@"', "sh")
