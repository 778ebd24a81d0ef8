"""A tree of its own for each evaluation, over a checkout that nobody may change.

It is an overlay: what is changed is kept apart, and nothing is copied before. Only root may mount,
be it root of a user namespace that a user has made for himself. So what starts evaluators is in
such a namespace, and mounts each overlay in a mount namespace of its own, which is that
evaluator's. The daemon, which cannot be in another user namespace, reads the tree by a descriptor.

Where that cannot be done, and without a sandbox, it is a copy.
"""

from __future__ import annotations

from pathlib import Path

from twisted.logger import Logger

from tawebeval.linux import copying
from tawebeval.linux.launcher_client import Launch, Launching, Layers
from tawebeval.linux.privileges import User
from tawebeval.linux.reports import NotMounted, Overlay
from tawebeval.linux.starting import Started
from tawebeval.sandbox.workspace import Workspace

log = Logger()


class Trees:
    """Makes writable trees, and starts in them what is to write to them.

    They are overlays as long as `problem` is None, and copies where that says why.
    """

    def __init__(self) -> None:
        self.problem: str | None = "nothing is mounted yet"
        self._launching = Launching()
        self._proven = False  # that the file systems allow overlays

    def mount(self, user: User | None = None) -> None:
        """Make overlays from now on, or copies if it cannot; as `user`, if one is given. Blocks.

        Raises OSError where nothing can be started, whatever its tree.
        """
        try:
            self._open(Launching(mounting=True, user=user))
        except OSError as error:
            self.copy(str(error.strerror or error), user)
        else:
            self.problem = None
            self._proven = False

    def copy(self, problem: str, user: User | None = None) -> None:
        """Make copies from now on, for that reason. Blocks. Raises OSError as `mount` does."""
        self.problem = problem
        self._open(Launching(user=user))

    def _open(self, launching: Launching) -> None:
        self._launching.close()
        self._launching = launching
        launching.open()

    def start(
        self, checkout: Path, workspace: Workspace, launch: Launch
    ) -> tuple[Started, Overlay | None]:
        """Start what has, as the tree of the workspace, one that is in the beginning as `checkout`.

        Return the overlay, too, which only that process sees; the caller closes its top. Blocks,
        with a copy the longer the larger that is. Raises OSError, and NotMounted where none could
        be mounted since `mount`: after the first one a copy stands in for what is refused.
        """
        if self.problem is None:
            layers = Layers(checkout, workspace.tree, workspace.work)
            layers.work.mkdir()
            try:
                started = self._launching.start(launch, layers)
            except NotMounted as error:
                if not self._proven:
                    raise
                log.warn("{path} is copied: {error}", path=checkout, error=error)
            else:
                self._proven = True
                return started
        copying.copy(checkout, workspace.tree)
        return self._launching.start(launch)

    def close(self) -> None:
        """Start nothing any more; what was started runs on. Blocks, hardly."""
        self._launching.close()
