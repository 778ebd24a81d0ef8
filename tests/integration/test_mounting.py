"""`linux.launcher_client` with overlays that are really mounted, by whoever the daemon would be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tawebeval.linux.launcher_client import (
    LauncherClient,
    LaunchSpec,
    OverlayLayers,
    OverlayMountError,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import launcher_client
from tawebeval.linux.child import wait_for_exit
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.bubblewrap import SYSTEM_ROOT_DIRECTORIES
from tests.cases.patience import PATIENCE
from tests.integration.unprivileged import WHO, give, temporary_folder


class MountingTestCase(SynchronousTestCase):
    """A launcher that mounts, and three directories for it."""

    def setUp(self) -> None:
        folder = self.folder = temporary_folder()
        self.addCleanup(remove_tree, folder)  # the kernel closes a directory of its own in it
        self.system = ["/usr", *(f"/{name}" for name in SYSTEM_ROOT_DIRECTORIES), "/missing"]
        self.launching = self.open()
        self.layers = OverlayLayers(*(folder / name for name in ("lower", "upper", "work")))
        for path in (self.layers.lower, self.layers.upper, self.layers.work):
            path.mkdir()
            give(path)
        (self.layers.lower / "file").write_text("from below\n")

    def open(self) -> LauncherClient:
        """Return a launcher that has been told of the system, and of the folder."""
        paths = [*self.system, str(self.folder)]
        launching = LauncherClient(mounting=True, user=WHO, paths=paths)
        self.addCleanup(launching.close)
        return launching

    def run_it(self, command: str, paths: Sequence[str] | None = None) -> str:
        """Return what a shell command prints that runs above the overlay."""
        directory = str(self.layers.upper)
        launch = LaunchSpec(["/bin/sh", "-c", command], {}, directory, needed_paths=paths)
        started, overlay = self.launching.start_program(launch, self.layers)
        assert overlay is not None
        os.close(overlay.root_descriptor)
        status, printed = wait_for_exit(started, PATIENCE)
        self.assertEqual(status, 0, printed)
        return printed.decode()

    def list_mounts(self, paths: Sequence[str] | None = None) -> set[str]:
        """Return where file systems are mounted that a program sees."""
        lines = self.run_again("cat /proc/self/mountinfo", paths).splitlines()
        return {line.split()[4] for line in lines}

    def run_again(self, command: str, paths: Sequence[str] | None = None) -> str:
        """Return what a command prints, whatever has run above the overlay before."""
        for path in (self.layers.work, self.layers.upper):
            remove_tree(path)
            path.mkdir()
            give(path)
        return self.run_it(command, paths)


class MountingTests(MountingTestCase):
    """What a program finds at its tree."""

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


class FewMountsTests(MountingTestCase):
    """The mounts of the machine that programs see."""

    def test_few(self) -> None:
        """A program that needs none besides those it was promised sees no other one."""
        found = self.list_mounts(["/usr/bin/env", str(self.layers.upper)])
        self.assertLessEqual({"/", "/usr", "/proc", "/dev", str(self.folder)}, found)
        shown = ("/usr", "/lib", "/bin", "/sbin", "/proc", "/dev", str(self.folder))
        self.assertEqual([path for path in found - {"/"} if not path.startswith(shown)], [])
        self.assertIn("/sys", self.list_mounts())

    def test_others(self) -> None:
        """One that needs another path, or may need any, sees all of them."""
        for paths in (None, ["/usr", "/etc"], ["/usr-local"], [f"{self.folder}.other"]):
            self.assertIn("/sys", self.list_mounts(paths), paths)

    def test_root(self) -> None:
        """Links lead where they do on the machine, and nothing can be written beside the tree."""
        told = self.run_it(
            "cd / && readlink bin lib; touch /new /tmp/new 2>&1; ls /; stat -c %A /usr", ["/usr"]
        )
        links = [os.readlink(path) for path in ("/bin", "/lib") if os.path.islink(path)]
        self.assertEqual(told.splitlines()[: len(links)], links)
        self.assertEqual(told.count("Read-only file system"), 2)
        self.assertNotIn("sys\n", told)

    def test_exchanged(self) -> None:
        """A directory that takes the place of another one is what the next program sees."""
        shown = temporary_folder()
        self.addCleanup(remove_tree, shown)
        (shown / "one").touch()
        self.system.append(str(shown))
        self.launching = self.open()
        self.assertEqual(self.run_again(f"ls {shown}", [str(shown)]), "one\n")
        remove_tree(shown)
        self.assertNotIn(str(shown), self.list_mounts([str(shown)]))
        shown.mkdir(mode=0o755)
        (shown / "other").touch()
        told = self.run_again(f"ls {shown}; ls -d /sys 2>/dev/null; true", [str(shown)])
        self.assertEqual(told, "other\n")

    def test_link(self) -> None:
        """A program that needs what lies behind a link sees all of them."""
        elsewhere = temporary_folder()
        self.addCleanup(remove_tree, elsewhere)
        (elsewhere / "file").touch()
        link = self.folder / "link"
        link.symlink_to(elsewhere)
        for path in (link, link / "file"):
            self.assertEqual(self.run_again(f"ls {link}", [str(path)]), "file\n")

    def test_refused(self) -> None:
        """Where the kernel refuses to reduce them, programs see all, and run."""
        source = launcher_client.LAUNCHER_SOURCE
        refused = source.replace(b"_libc.pivot_root(", b"_libc.pivot_root(b'/missing' or ")
        self.assertNotEqual(refused, source)
        self.patch(launcher_client, "LAUNCHER_SOURCE", refused)
        self.launching = self.open()
        self.assertIn("/sys", self.list_mounts(["/usr"]))

    def test_replaced(self) -> None:
        """A launcher in place of one that has ended makes them few again."""
        self.launching.start_launcher()
        assert self.launching.launcher is not None
        self.launching.launcher.process.kill()
        self.assertNotIn("/sys", self.list_mounts(["/usr"]))
