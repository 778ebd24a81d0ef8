"""`tawebeval.writable` with overlays that are really mounted, by whoever the daemon would be."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval import launching
from tawebeval.launching import Launch
from tawebeval.starting import wait_for
from tawebeval.workspace import Workspace
from tawebeval.writable import Trees
from tests.integration.unprivileged import WHO, give, temporary_folder
from tests.patience import PATIENCE


class OverlaysTests(SynchronousTestCase):
    """A checkout, and a workspace with nothing of it."""

    def setUp(self) -> None:
        self.trees = Trees()
        self.addCleanup(self.trees.close)
        folder = temporary_folder()
        self.addCleanup(shutil.rmtree, folder)
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        # What is made here by root is for whoever mounts; a daemon is that user by then.
        self.addCleanup(os.umask, os.umask(0))
        self.workspace = Workspace(folder / "workspace")
        for path in (self.workspace.root, self.workspace.tree):
            path.mkdir()
            give(path)

    def run_it(self, command: str) -> list[str]:
        """Return the lines that a shell command prints in a tree, which is an overlay."""
        file = self.checkout / "file"
        file.write_text("from below\n")
        give(file)
        launch = Launch(["/bin/sh", "-c", command], {}, str(self.workspace.tree))
        started, top = self.trees.start(self.checkout, self.workspace, launch)
        assert top is not None
        os.close(top)
        status, printed = wait_for(started, PATIENCE)
        self.assertEqual(status, 0, printed)
        return printed.decode().splitlines()

    def test_mounted_again(self) -> None:
        """When the launcher dies after it has mounted one the next makes another, no copy."""
        killed = self.workspace.root / "killed"
        source, mounted = launching._SOURCE.decode(), "        step = START\n"
        self.assertIn(mounted, source)
        die = (
            f"        if not os.path.exists({str(killed)!r}):\n"
            f"            open({str(killed)!r}, 'w').close()\n"
            "            os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        self.patch(launching, "_SOURCE", source.replace(mounted, mounted + die).encode())
        self.trees.mount(WHO)
        with capturedLogs() as events:
            told = self.run_it("cat file; echo more >>file; cat file")
        self.assertTrue(killed.exists())
        self.assertEqual(told, ["from below", "from below", "more"])
        (said,) = (str(formatEvent(event)) for event in events)
        self.assertIn("another one is started", said)

    def test_file_systems(self) -> None:
        """All files of an overlay are of one device, also with a cache on another file system.

        By that those which have lost their names are known, and count for the limit of the disk.
        """
        other = Path("/dev/shm")
        if other.stat().st_dev == self.checkout.stat().st_dev:
            raise SkipTest("there is no other file system")
        self.checkout = Path(tempfile.mkdtemp(dir=other))
        self.addCleanup(shutil.rmtree, self.checkout)
        self.checkout.chmod(0o755)
        self.trees.mount(WHO)
        devices = self.run_it("echo >new; stat -c %d . new file")
        self.assertEqual(len(devices), 3)
        self.assertEqual(len(set(devices)), 1, devices)
