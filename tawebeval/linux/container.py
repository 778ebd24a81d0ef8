"""The container that this process runs in, and the options by which its engine permits more.

docs/operate.md says what the sandbox needs of a container.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

ENGINE_MARKS_ROOT = Path("/")
"""The directory in which engines leave their marks."""

_PID_NAMESPACE = "proc/self/ns/pid"
# The machine's own namespace of processes (PROC_PID_INIT_INO of linux/proc_ns.h), in which no
# container is, but a machine that was made from an image, with all of its marks.
_INITIAL = 0xEFFFFFFC

SECCOMP_PROFILE_PATH = "/usr/share/doc/tawebeval/etc/seccomp.json"
"""The profile of system calls for engines, as the Debian package installs it."""


@attrs.frozen
class Container:
    """The options of an engine: for its profile of system calls, for /proc, and for cgroups."""

    seccomp_option: str
    proc_mount_option: str
    cgroup_option: str

    @property
    def namespaces_remedy(self) -> str:
        """How a container permits namespaces and mounts."""
        return (
            f"start the container with {self.seccomp_option}, and with --security-opt"
            " apparmor=unconfined if the engine's AppArmor profile forbids them"
        )

    @property
    def proc_remedy(self) -> str:
        """How a container permits mounts of /proc."""
        return f"start the container with {self.proc_mount_option}, which leaves /proc unmasked"

    @property
    def cgroup_remedy(self) -> str:
        """How a container gives cgroups to its processes."""
        return f"start the container with {self.cgroup_option} and --cgroupns=private"


_SECCOMP = f"--security-opt seccomp=seccomp.json (a copy of {SECCOMP_PROFILE_PATH})"
PODMAN = Container(
    _SECCOMP,
    "--security-opt unmask=/proc/*",
    "--security-opt unmask=/sys/fs/cgroup",
)
DOCKER = Container(
    _SECCOMP,
    "--security-opt systempaths=unconfined",
    "--security-opt writable-cgroups=true (Docker 28)",
)
_OTHER = Container(
    f"the seccomp profile {SECCOMP_PROFILE_PATH}",
    "a /proc without masked paths",
    "a writable /sys/fs/cgroup",
)
# Files that engines make.
_MARKS: Mapping[str, Container] = {"run/.containerenv": PODMAN, ".dockerenv": DOCKER}
# What engines, and systemd, set in the environment (https://systemd.io/CONTAINER_INTERFACE).
_VARIABLE = "container"


def find_container(environment: Mapping[str, str] | None = None) -> Container | None:
    """Return the container of this process; None if none is known. Blocks, hardly."""
    with suppress(OSError):
        if (ENGINE_MARKS_ROOT / _PID_NAMESPACE).stat().st_ino == _INITIAL:
            return None
    for mark, container in _MARKS.items():
        if (ENGINE_MARKS_ROOT / mark).exists():
            return container
    said = (os.environ if environment is None else environment).get(_VARIABLE, "")
    if not said:
        return None
    return {"podman": PODMAN, "docker": DOCKER}.get(said, _OTHER)
