"""`tawebeval.overlay` with a fake process that mounts: what follows from what it answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import overlay as module
from tawebeval.overlay import Overlays, start_mounter
from tawebeval.privileges import User
from tawebeval.workspace import Workspace
from tawebeval.writable import WritableTree


@attrs.define
class FakeMounter:
    """Mounts nothing, and answers with two descriptors, or raises `error`."""

    error: OSError | None = None
    asked: list[tuple[Path, ...]] = attrs.field(factory=list)
    closed: int = 0
    prefix: tuple[str, ...] = ("enter", "it", "--")

    def mount(self, paths: tuple[Path, ...]) -> tuple[int, int]:
        """Answer."""
        self.asked.append(paths)
        if self.error is not None:
            raise self.error
        return os.open("/dev/null", os.O_RDONLY), os.open("/", os.O_RDONLY)

    def close(self) -> None:
        """Count."""
        self.closed += 1


class OverlaysTestCase(SynchronousTestCase):
    """A checkout with a file, and processes of which each that is started is in `started`."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.checkout = self.root / "checkout"
        self.checkout.mkdir(parents=True)
        (self.checkout / "file").write_text("as it was")
        self.started: list[tuple[FakeMounter, User | None]] = []
        self.cannot: OSError | None = None
        self.patch(module, "start_mounter", self.start_mounter)
        self.overlays = Overlays()
        self.count = 0

    def start_mounter(self, user: User | None = None) -> FakeMounter:
        """Start one."""
        if self.cannot is not None:
            raise self.cannot
        self.started.append((FakeMounter(), user))
        return self.started[-1][0]

    @property
    def mounter(self) -> FakeMounter:
        """The process that was started last."""
        return self.started[-1][0]

    def workspace(self) -> Workspace:
        """Return a new one."""
        self.count += 1
        upload = self.root / "upload"
        (upload / "submission").mkdir(parents=True)
        workspace = Workspace(self.root / str(self.count))
        workspace.create(upload)
        return workspace

    def make(self) -> tuple[Workspace, WritableTree, list[str]]:
        """Make a tree; return it with its workspace, and what was logged."""
        workspace = self.workspace()
        with capturedLogs() as events:
            tree = self.overlays.make(self.checkout, workspace)
        self.addCleanup(tree.close)
        return workspace, tree, [str(formatEvent(event)) for event in events]

    def assert_copied(self, workspace: Workspace, tree: WritableTree) -> None:
        """Hold that a tree is a copy, for which nothing has to be entered."""
        self.assertEqual((workspace.tree / "file").read_text(), "as it was")
        self.assertEqual(tree, WritableTree())


class MakeTests(OverlaysTestCase):
    """How trees are made."""

    def test_overlay(self) -> None:
        """One is mounted where the tree belongs, over what changes in it."""
        self.overlays.open()
        workspace, tree, said = self.make()
        work = workspace.root / "work"
        self.assertEqual(self.mounter.asked, [(self.checkout, workspace.tree, work)])
        for directory in (work, workspace.tree):
            self.assertEqual(list(directory.iterdir()), [])
            self.assertEqual(directory.stat().st_mode, workspace.home.stat().st_mode)
        self.assertEqual((tree.prefix, said), (("enter", "it", "--"), []))

    def test_never_opened(self) -> None:
        """Without a process there are copies."""
        workspace, tree, said = self.make()
        self.assert_copied(workspace, tree)
        self.assertEqual((self.started, said), ([], []))

    def test_cannot_be_opened(self) -> None:
        """Where none can be started that is why, and no more is said of it each time."""
        self.cannot = OSError(None, "unshare: Operation not permitted")
        self.overlays.open()
        self.assertEqual(self.overlays.problem, "unshare: Operation not permitted")
        workspace, tree, said = self.make()
        self.assert_copied(workspace, tree)
        self.assertEqual(said, [])

    def test_opened_for_another_user(self) -> None:
        """It may be another user's."""
        user = User("taweb", 1000, 1001, frozenset(), "/")
        self.overlays.open(user)
        self.assertEqual(self.started, [(FakeMounter(), user)])

    def test_given_up(self) -> None:
        """What does not work is given up, and ended."""
        self.overlays.open()
        self.assertIsNone(self.overlays.problem)
        self.overlays.give_up("it changes the cache")
        self.assertEqual((self.overlays.problem, self.mounter.closed), ("it changes the cache", 1))
        workspace, tree, _ = self.make()
        self.assert_copied(workspace, tree)
        self.assertEqual(len(self.started), 1)

    def test_refused(self) -> None:
        """A tree that cannot be mounted is copied, which the log tells; the next one may be."""
        self.overlays.open()
        self.mounter.error = OSError(28, "No space left on device")
        workspace, tree, said = self.make()
        self.assert_copied(workspace, tree)
        self.assertEqual(len(said), 1)
        self.assertIn("No space left", said[0])
        self.mounter.error = None
        _, tree, said = self.make()
        self.assertEqual((tree.prefix, said), (("enter", "it", "--"), []))
        self.assertEqual((len(self.started), self.mounter.closed), (1, 0))

    def test_ended(self) -> None:
        """A process that has ended, or hangs, is replaced by another one for the next tree."""
        self.overlays.open()
        for number, error in enumerate((ConnectionResetError("gone"), TimeoutError("slow")), 1):
            self.mounter.error = error
            workspace, tree, said = self.make()
            self.assert_copied(workspace, tree)
            self.assertEqual((len(said), self.mounter.closed), (1, 1))
            _, tree, _ = self.make()
            self.assertEqual((tree.prefix, len(self.started)), (("enter", "it", "--"), number + 1))

    def test_no_checkout(self) -> None:
        """Where nothing can be made of a checkout it is an error."""
        self.checkout.rename(self.mktemp())
        with self.assertRaises(FileNotFoundError):
            self.overlays.make(self.checkout, self.workspace())

    def test_close(self) -> None:
        """The process is ended once."""
        self.overlays.open()
        self.overlays.close()
        self.overlays.close()
        self.assertEqual(self.mounter.closed, 1)


class WritableTreeTests(OverlaysTestCase):
    """What a tree holds open."""

    def test_entered(self) -> None:
        """When somebody has entered it only what leads to its files is held, until the end."""
        self.overlays.open()
        _, tree, _ = self.make()
        namespace, directory = tree.namespace, tree.directory
        assert namespace is not None and directory is not None
        tree.entered()
        tree.entered()
        self.assertRaises(OSError, os.fstat, namespace)
        os.fstat(directory)
        tree.close()
        tree.close()
        self.assertRaises(OSError, os.fstat, directory)

    def test_never_entered(self) -> None:
        """What nobody has entered is closed as well."""
        self.overlays.open()
        _, tree, _ = self.make()
        before = [tree.namespace, tree.directory]
        tree.close()
        for descriptor in before:
            assert descriptor is not None
            self.assertRaises(OSError, os.fstat, descriptor)


class StartTests(SynchronousTestCase):
    """A start that fails, and what is said then; integration tests have those that succeed."""

    def start(self, *scripts: str) -> str:
        """Start with these programs as Python; return why it cannot."""
        pythons = []
        for script in scripts:
            path = Path(self.mktemp()).resolve()
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            pythons.append(str(path))
        self.patch(module, "_UNSHARE", ())
        self.patch(module, "_PYTHONS", pythons)
        before = os.listdir("/proc/self/fd")
        with self.assertRaises(OSError) as caught:
            start_mounter()
        self.assertEqual(os.listdir("/proc/self/fd"), before)
        return str(caught.exception.strerror)

    def test_last_words(self) -> None:
        """The last line of each, each once."""
        said = self.start("echo Traceback >&2; echo no module >&2", "echo no right >&2; exit 1")
        self.assertEqual(said, "no module; no right")
        self.assertEqual(self.start("echo same >&2", "echo same >&2"), "same")

    def test_silent(self) -> None:
        """One that says nothing has ended, at least."""
        self.assertEqual(self.start("exit 0"), "the process that mounts has ended")

    def test_not_there(self) -> None:
        """So it is said where there is no such program."""
        self.patch(module, "_UNSHARE", ("/nonexistent",))
        self.patch(module, "_PYTHONS", ("/nonexistent",))
        with self.assertRaises(OSError) as caught:
            start_mounter()
        self.assertIn("No such file", str(caught.exception.strerror))

    def test_slow(self) -> None:
        """One that does not become ready in time is ended."""
        self.patch(module, "_PATIENCE", 0.05)
        self.assertIn("timed out", self.start("exec sleep 60"))

    def test_another_python(self) -> None:
        """The second is taken where the first does not do."""
        said: list[Any] = []

        def start(python: str, user: User | None) -> str:
            said.append((python, user))
            if python == "first":
                raise OSError(None, "no")
            return "started"

        self.patch(module, "_start", start)
        self.patch(module, "_PYTHONS", ("first", "second", "third"))
        self.assertEqual(start_mounter(), "started")
        self.assertEqual(said, [("first", None), ("second", None)])
