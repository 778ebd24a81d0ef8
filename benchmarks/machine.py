"""What figures were measured on: processors and versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

_PACKAGES = ("tawebeval", "Twisted", "klein", "orjson", "msgspec")


def describe() -> list[str]:
    """Return what matters for the figures, one line each."""
    cores = len(os.sched_getaffinity(0))
    release = ".".join(platform.release().split(".")[:2])
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return [
        f"{cores} cores of {platform.machine()}",
        f"{platform.system()} {release}, {python}",
        ", ".join(f"{package} {version(package)}" for package in _PACKAGES),
    ]


def load() -> float:
    """Return the load average of the last minute, in which the benchmarks themselves count."""
    return os.getloadavg()[0]
