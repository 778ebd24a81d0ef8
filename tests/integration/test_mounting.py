"""`linux.launcher_client` with overlays that are really mounted, by whoever the daemon would be."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.child import wait_for_exit
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.launcher_client import (
    LauncherClient,
    LaunchSpec,
    OverlayLayers,
    OverlayMountError,
)
from tests.cases.patience import PATIENCE
from tests.integration.unprivileged import WHO, give, temporary_folder


class MountingTests(SynchronousTestCase):
    """A launcher that mounts, and three directories for it."""

    def setUp(self) -> None:
        self.launching = LauncherClient(mounting=True, user=WHO)
        self.addCleanup(self.launching.close)
        folder = temporary_folder()
        self.addCleanup(remove_tree, folder)  # the kernel closes a directory of its own in it
        self.layers = OverlayLayers(*(folder / name for name in ("lower", "upper", "work")))
        for path in (self.layers.lower, self.layers.upper, self.layers.work):
            path.mkdir()
            give(path)
        (self.layers.lower / "file").write_text("from below\n")

    def run_it(self, command: str) -> str:
        """Return what a shell command prints that runs above the overlay."""
        launch = LaunchSpec(["/bin/sh", "-c", command], {}, str(self.layers.upper))
        started, overlay = self.launching.start_program(launch, self.layers)
        assert overlay is not None
        os.close(overlay.top_descriptor)
        status, printed = wait_for_exit(started, PATIENCE)
        self.assertEqual(status, 0, printed)
        return printed.decode()

    def test_options(self) -> None:
        """No program on it gets rights, and no device on it is one, whatever is in the tree."""
        content, *mounts = self.run_it("cat file /proc/self/mountinfo").splitlines()
        self.assertEqual(content, "from below")
        (line,) = (line for line in mounts if str(self.layers.upper) in line.split())
        self.assertLessEqual({"nosuid", "nodev"}, set(line.split()[5].split(",")))

    def test_links(self) -> None:
        """A link in place of any of the directories is not followed: nothing is begun."""
        for path in (self.layers.lower, self.layers.upper, self.layers.work):
            moved = Path(f"{path}.moved")
            path.rename(moved)
            path.symlink_to(moved)
            with self.assertRaises(OverlayMountError, msg=path) as caught:
                self.run_it("true")
            self.assertEqual(caught.exception.filename, str(path))
            path.unlink()
            moved.rename(path)
