"""Imports before root is given up what Python would otherwise import some time later.

The interpreter, the virtualenv or the checkout may lie where only root can read. Then a module
that is not loaded yet could not be had any more when it is needed for the first time.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import tawebeval
import twisted
from tawebeval.errors import Problem

# What is imported in the middle of functions, and why it is called for.
LATER = {
    "encodings.ascii": "a lock is made, /proc is read",
    "encodings.idna": "a host's name is looked up",
}


# Of the package, what the daemon has no use for.
COMMAND = ("tawebeval.cli", "tawebeval.client")


def preload() -> None:
    """Import all modules of the package that the daemon has, and what others import late."""
    _import_all(tawebeval)
    for name in LATER:
        importlib.import_module(name)


def _import_all(package: ModuleType) -> None:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if found.name not in COMMAND:
            module = importlib.import_module(found.name)
            if found.ispkg:
                _import_all(module)


def find_unreadable() -> Iterator[Problem]:
    """Yield the directories of Python and of packages that the effective user may not read."""
    for file in (os.__file__, twisted.__file__, tawebeval.__file__):
        directory = Path(file).parent
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
            yield Problem(
                f"{directory} cannot be read by the user that the daemon runs as: what of it is"
                " not loaded yet cannot be",
                "install Python and tawebeval where every user can read",
            )
