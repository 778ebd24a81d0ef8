"""A tree of its own for each evaluation, over a checkout that nobody may change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import attrs

from tawebeval.copying import copy
from tawebeval.workspace import Workspace


@attrs.define
class WritableTree:
    """What an evaluation has in its workspace as `tree`, which may be to be seen for it alone.

    Then `namespace` is a descriptor of the mount namespace in which it is, `prefix` what to put in
    front of a command that has this as its stdin to run it there, and `directory` a descriptor by
    which the tree can be read from anywhere. `close` closes both.
    """

    prefix: Sequence[str] = ()
    namespace: int | None = None
    directory: int | None = None

    def entered(self) -> None:
        """Let the namespace be held by nobody but those who are in it."""
        if self.namespace is not None:
            os.close(self.namespace)
            self.namespace = None

    def close(self) -> None:
        """Let go of it; the directories stay. Blocks."""
        self.entered()
        if self.directory is not None:
            os.close(self.directory)
            self.directory = None


class Trees(Protocol):
    """Makes writable trees."""

    def make(self, checkout: Path, workspace: Workspace) -> WritableTree:
        """Return a tree that is in the beginning as `checkout`. Blocks. Raises OSError."""


@attrs.frozen
class Copies:
    """Makes them by copying everything."""

    def make(self, checkout: Path, workspace: Workspace) -> WritableTree:
        """Return a copy. Blocks, the longer the larger it is. Raises OSError."""
        copy(checkout, workspace.tree)
        return WritableTree()
