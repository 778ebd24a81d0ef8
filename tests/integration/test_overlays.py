"""`sandbox.workspace` with overlays that are really mounted, by the user of the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from math import inf
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter import LaunchSpec
from tawebeval.sandbox.disk import DiskMeter
from tawebeval.sandbox.workspace import Workspace, WorkspaceLauncher
from tests.cases.patience import PATIENCE
from tests.cases.starters import eventually

NAMELESS = """
exec 3>new 4>>folder/file; rm new folder/file
for each in 3 4; do head -c 1000000 /dev/zero >&$each; done
echo ready; exec sleep 600
"""


class OverlaysTests(SynchronousTestCase):
    """A checkout, and a workspace with nothing of it."""

    file = "file"

    def setUp(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        self.addCleanup(remove_tree, folder)  # the kernel closes directories of its own in it
        self.launcher = WorkspaceLauncher(folder / "starter" / "socket")
        self.addCleanup(self.launcher.close)
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        self.workspace = Workspace(folder / "workspace")
        for path in (
            self.workspace.root,
            self.workspace.tree_directory,
            self.workspace.output_directory,
        ):
            path.mkdir()
        self.launcher.connect_starter()
        self.assertIsNone(self.launcher.overlay_problem)

    def run_it(self, command: str) -> list[str]:
        """Return the lines that a shell command prints in a tree, which is an overlay."""
        file = self.checkout / self.file
        file.parent.mkdir(exist_ok=True)
        file.write_text("from below\n")
        launch = LaunchSpec(["/bin/sh", "-c", command], {}, str(self.workspace.tree_directory))
        program = self.launcher.start_program(self.checkout, self.workspace, launch)
        assert program.overlay_descriptor is not None
        os.close(program.overlay_descriptor)
        status, printed = self.launcher.starter.wait_for_program(program.directory, PATIENCE)
        self.assertEqual(status, 0, printed)
        self.launcher.kill_program(self.workspace)
        return printed.decode().splitlines()

    def test_overlay_gives_programs_no_rights_and_no_devices(self) -> None:
        content, *mounts = self.run_it("cat file /proc/self/mountinfo")
        self.assertEqual(content, "from below")
        tree = str(self.workspace.tree_directory)
        (line,) = (line for line in mounts if tree in line.split())
        self.assertLessEqual({"nosuid", "nodev"}, set(line.split()[5].split(",")))

    def test_link_in_place_of_a_layer_is_not_followed(self) -> None:
        self.run_it("true")
        for path in (
            self.checkout,
            self.workspace.tree_directory,
            self.workspace.overlay_work_directory,
        ):
            moved = Path(f"{path}.moved")
            path.rename(moved)
            path.symlink_to(moved)
            layers = (
                self.checkout,
                self.workspace.tree_directory,
                self.workspace.overlay_work_directory,
            )
            with self.assertRaisesRegex(OSError, "an overlay cannot", msg=path) as caught:
                self.launcher.starter.start_program(
                    self.workspace.output_directory, LaunchSpec(["/bin/true"], {}, "/"), layers
                )
            self.assertEqual(caught.exception.filename, str(path))
            path.unlink()
            moved.rename(path)

    def check_nameless(self) -> None:
        """Hold that a new file and a changed one count when both have lost their names."""
        self.run_it("true")
        remove_tree(self.workspace.overlay_work_directory)
        launch = LaunchSpec(["/bin/sh", "-c", NAMELESS], {}, str(self.workspace.tree_directory))
        program = self.launcher.start_program(self.checkout, self.workspace, launch)
        assert program.overlay_descriptor is not None
        os.close(program.overlay_descriptor)
        printed = self.workspace.output_directory / "stdout"
        eventually(lambda: printed.read_bytes() == b"ready\n")
        meter = DiskMeter(self.workspace.tree_directory, inf, inf, lambda: [program.pid])
        use = meter.measure_usage()
        self.launcher.kill_program(self.workspace)
        self.assertGreaterEqual(use.disk_bytes, 2 * 1_000_000)

    def test_unlinked_open_files_in_an_overlay_count_as_disk_usage(self) -> None:
        self.file = "folder/file"
        self.check_nameless()

    def test_unlinked_files_count_if_the_checkout_is_on_another_file_system(self) -> None:
        other = Path("/dev/shm")
        if other.stat().st_dev == self.checkout.stat().st_dev:
            raise SkipTest("there is no other file system")
        self.checkout = Path(tempfile.mkdtemp(dir=other))
        self.addCleanup(shutil.rmtree, self.checkout)
        self.checkout.chmod(0o755)
        (self.checkout / "empty").mkdir()  # as a submodule is
        self.file = "folder/file"
        self.check_nameless()
