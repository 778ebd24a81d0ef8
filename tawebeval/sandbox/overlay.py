"""The writable tree of each evaluation, over a checkout that does not change.

The tree is an overlay mount: changes go to a directory of the evaluation, and nothing is copied in
advance. Mounting needs a capability, which a user has in a user namespace of its own. So the
launcher runs in such a namespace and mounts each overlay in a new mount namespace, which is the
evaluator's. The daemon, outside of that namespace, reads the tree by a descriptor.

Without a sandbox, or where overlays do not work, the tree is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tawebeval.linux.child import StartedProcess
from tawebeval.linux.filetree import copy_tree
from tawebeval.linux.keeper_client import RunningKeeper
from tawebeval.linux.launcher_client import (
    LauncherClient,
    LaunchSpec,
    MountedOverlay,
    OverlayLayers,
)
from tawebeval.linux.privileges import User
from tawebeval.sandbox.workspace import Workspace


class WritableTrees:
    """The maker of writable trees, which also starts the programs that write to them.

    Trees are overlays if `overlay_problem` is None, and otherwise copies for that reason. `keeper`
    starts the programs, None if the daemon does.
    """

    def __init__(self, keeper: RunningKeeper | None = None) -> None:
        self.overlay_problem: str | None = "nothing is mounted yet"
        self._keeper = keeper
        self._launching = LauncherClient()

    def use_overlays(self, user: User | None = None, paths: Sequence[str] = ()) -> None:
        """Make overlays from now on, or copies if overlays do not work. Blocks.

        `user` runs the launcher; None is the present user. `paths` are what started programs
        usually need. Raises: OSError, if the launcher cannot be started at all.
        """
        try:
            self._open(LauncherClient(mounting=True, user=user, keeper=self._keeper, paths=paths))
        except OSError as error:
            self.use_copies(str(error.strerror or error), user)
        else:
            self.overlay_problem = None

    def use_copies(self, problem: str, user: User | None = None) -> None:
        """Make copies from now on; `problem` is the reason. Blocks. Raises: OSError."""
        self.overlay_problem = problem
        self._open(LauncherClient(user=user, keeper=self._keeper))

    def _open(self, launching: LauncherClient) -> None:
        self._launching.close()
        self._launching = launching
        launching.start_launcher()

    def start_program(
        self, checkout: Path, workspace: Workspace, launch: LaunchSpec
    ) -> tuple[StartedProcess, MountedOverlay | None]:
        """Start a program, with a tree of the workspace that begins as `checkout`. Blocks.

        Copying blocks the longer the larger the checkout is. Return the overlay, too, if there is
        one: only the program sees it, and the caller closes its top. Raises: OSError;
        OverlayMountError, if the overlay cannot be mounted.
        """
        if self.overlay_problem is None:
            layers = OverlayLayers(
                checkout, workspace.tree_directory, workspace.overlay_work_directory
            )
            layers.work.mkdir()
            return self._launching.start_program(launch, layers)
        copy_tree(checkout, workspace.tree_directory)
        return self._launching.start_program(launch)

    def start_program_without_tree(self, launch: LaunchSpec) -> StartedProcess:
        """Start a program that has no tree of its own. Blocks. Raises: OSError."""
        return self._launching.start_program(launch)[0]

    def stop_launcher(self) -> None:
        """End the launcher; started programs run on. Blocks, hardly."""
        self._launching.close()
