"""Writable trees that are overlays: what is changed is kept apart, and nothing is copied before.

Only root may mount, be it root of a user namespace that a user has made for himself. So what starts
evaluators is in such a namespace, and mounts each overlay in a mount namespace of its own, which is
that evaluator's. The daemon, which cannot be in another user namespace, reads the tree by a
descriptor.
"""

from __future__ import annotations

from pathlib import Path

from twisted.logger import Logger

from tawebeval.launching import Launch, Launching, Layers
from tawebeval.privileges import User
from tawebeval.reports import NotMounted
from tawebeval.starting import Started
from tawebeval.workspace import Workspace
from tawebeval.writable import Copies

log = Logger()


class Overlays:
    """Makes overlays as long as `problem` is None, and copies where that says why it cannot."""

    def __init__(self) -> None:
        self.problem: str | None = "nothing is mounted yet"
        self._user: User | None = None
        self._launching = Launching()

    def open(self, user: User | None = None) -> None:
        """Begin to make overlays, if that can be done; as `user`, if one is given. Blocks.

        Raises OSError where nothing can be started, whatever its tree.
        """
        self._user = user
        self._launching.close()
        mounting = Launching(mounting=True, user=user)
        try:
            mounting.open()
        except OSError as error:
            self.give_up(str(error.strerror or error))
        else:
            self._launching, self.problem = mounting, None

    def give_up(self, problem: str) -> None:
        """Make copies from now on. Blocks. Raises OSError as `open` does."""
        self._launching.close()
        self._launching = Launching(user=self._user)
        self.problem = problem
        self._launching.open()

    def start(
        self, checkout: Path, workspace: Workspace, launch: Launch
    ) -> tuple[Started, int | None]:
        """Start what has, as the tree of the workspace, one that is in the beginning as `checkout`.

        With an overlay there is a descriptor of its top. Blocks. Raises OSError.
        """
        if self.problem is None:
            layers = Layers(checkout, workspace.tree, workspace.work)
            layers.work.mkdir()
            try:
                return self._launching.start(launch, layers)
            except NotMounted as error:
                log.warn("{path} is copied: {error}", path=checkout, error=error)
        return Copies(self._launching).start(checkout, workspace, launch)

    def close(self) -> None:
        """Start nothing any more; what was started runs on. Blocks, hardly."""
        self._launching.close()
