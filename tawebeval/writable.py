"""A tree of its own for each evaluation, over a checkout that nobody may change."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import attrs

from tawebeval.copying import copy
from tawebeval.launching import Launch, Launching
from tawebeval.privileges import User
from tawebeval.starting import Started
from tawebeval.workspace import Workspace


class Trees(Protocol):
    """Makes writable trees, and starts in them what is to write to them."""

    def open(self, user: User | None = None) -> None:
        """Prepare to start programs; as `user`, if one is given. Blocks. Raises OSError."""

    def start(
        self, checkout: Path, workspace: Workspace, launch: Launch
    ) -> tuple[Started, int | None]:
        """Start what has, as the tree of the workspace, one that is in the beginning as `checkout`.

        If that is to be seen for it alone there is a descriptor by which it can be read from
        anywhere. Blocks. Raises OSError.
        """

    def close(self) -> None:
        """Start nothing any more; what was started runs on. Blocks, hardly."""


@attrs.define(eq=False)
class Copies:
    """Makes them by copying everything."""

    _launching: Launching = attrs.field(factory=Launching)

    def open(self, user: User | None = None) -> None:
        """Prepare to start programs; as `user`, if one is given. Blocks. Raises OSError."""
        self._launching.close()
        self._launching = Launching(user=user)
        self._launching.open()

    def start(self, checkout: Path, workspace: Workspace, launch: Launch) -> tuple[Started, None]:
        """Start what has a copy. Blocks, the longer the larger that is. Raises OSError."""
        copy(checkout, workspace.tree)
        started, _ = self._launching.start(launch)
        return started, None

    def close(self) -> None:
        """Start nothing any more; what was started runs on. Blocks, hardly."""
        self._launching.close()
