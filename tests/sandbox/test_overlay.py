"""`sandbox.overlay` with launchers that are none: what follows from what they can do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
from tawebeval.linux.launcher_client import (
    LaunchSpec,
    MountedOverlay,
    OverlayLayers,
    OverlayMountError,
)
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.child import StartedProcess
from tawebeval.linux.privileges import User
from tawebeval.sandbox import overlay as module
from tawebeval.sandbox.overlay import WritableTrees
from tawebeval.sandbox.workspace import Workspace
from tests.fakes.children import NO_PROCESS

LAUNCH = LaunchSpec(["./it"], {}, "/")
STARTED = StartedProcess(NO_PROCESS, -1, -1, -1)
OVERLAY = MountedOverlay(77, frozenset({39}))


@attrs.define
class FakeLaunching:
    """Starts nothing, and notes what it was asked to; raises what is in `errors`, each once."""

    mounting: bool = False
    user: User | None = None
    cannot: OSError | None = None
    errors: list[OSError] = attrs.field(factory=list)
    asked: list[tuple[LaunchSpec, OverlayLayers | None]] = attrs.field(factory=list)
    opened: int = 0
    closed: int = 0

    def start_launcher(self) -> None:
        self.opened += 1
        if self.cannot is not None:
            raise self.cannot

    def start_program(
        self, launch: LaunchSpec, layers: OverlayLayers | None = None
    ) -> tuple[StartedProcess, MountedOverlay | None]:
        self.asked.append((launch, layers))
        if self.errors:
            raise self.errors.pop()
        return STARTED, None if layers is None else OVERLAY

    def close(self) -> None:
        self.closed += 1


class TreesTests(SynchronousTestCase):
    """A checkout with a file, and launchers, of which all that were made are in `made`."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.checkout = self.root / "checkout"
        self.checkout.mkdir(parents=True)
        (self.checkout / "file").write_text("as it was")
        self.made: list[FakeLaunching] = []
        self.cannot: OSError | None = None
        self.not_even: OSError | None = None  # without mounting
        self.patch(module, "LauncherClient", self.make)
        self.trees = WritableTrees()
        self.count = 0

    def make(
        self,
        *,
        mounting: bool = False,
        user: User | None = None,
        keeper: object = None,
        paths: Sequence[str] = (),
    ) -> FakeLaunching:
        """Make a launcher."""
        self.made.append(FakeLaunching(mounting, user, self.cannot if mounting else self.not_even))
        return self.made[-1]

    def start(self) -> tuple[Workspace, tuple[StartedProcess, MountedOverlay | None], list[str]]:
        """Start something; return its workspace, what came of it, and what was logged."""
        self.count += 1
        upload = self.root / "upload"
        (upload / "submission").mkdir(parents=True)
        workspace = Workspace(self.root / str(self.count))
        workspace.create_directories(upload, workspace.make_unsandboxed_view())
        with capturedLogs() as events:
            started = self.trees.start_program(self.checkout, workspace, LAUNCH)
        return workspace, started, [str(formatEvent(event)) for event in events]

    def assert_copied(self, workspace: Workspace, launching: FakeLaunching) -> None:
        """Hold that a tree is a copy, and that its program was started by that launcher."""
        self.assertEqual((workspace.tree_directory / "file").read_text(), "as it was")
        self.assertEqual(launching.asked[-1], (LAUNCH, None))

    def test_overlay(self) -> None:
        """One is mounted where the tree belongs, over what changes in it."""
        self.trees.use_overlays()
        workspace, started, said = self.start()
        work = workspace.root / "work"
        layers = OverlayLayers(self.checkout, workspace.tree_directory, work)
        self.assertTrue(self.made[-1].mounting)
        self.assertEqual(self.made[-1].asked, [(LAUNCH, layers)])
        for directory in (work, workspace.tree_directory):
            self.assertEqual(list(directory.iterdir()), [])
            self.assertEqual(directory.stat().st_mode, workspace.home_directory.stat().st_mode)
        self.assertEqual((started, said), ((STARTED, OVERLAY), []))

    def test_never_asked(self) -> None:
        """Then there are copies."""
        workspace, started, said = self.start()
        (launching,) = self.made
        self.assert_copied(workspace, launching)
        self.assertEqual((launching.mounting, started, said), (False, (STARTED, None), []))

    def test_cannot_mount(self) -> None:
        """Where nobody can mount that is why, and no more is said of it each time."""
        self.cannot = OSError(None, "unshare: Operation not permitted")
        user = User("taweb", 1000, 1001, frozenset(), "/")
        self.trees.use_overlays(user)
        self.assertEqual(self.trees.overlay_problem, "unshare: Operation not permitted")
        workspace, _, said = self.start()
        self.assert_copied(workspace, self.made[-1])
        self.assertEqual((self.made[-1].mounting, self.made[-1].user, said), (False, user, []))

    def test_nothing_can_be_started(self) -> None:
        """Where not even copies could be used by anybody, that is an error at once."""
        self.cannot = self.not_even = OSError(None, "no python")
        self.assertRaises(OSError, self.trees.use_overlays)
        self.assertEqual([each.opened for each in self.made[-2:]], [1, 1])

    def test_given_up(self) -> None:
        """What does not work is given up, and ended; what copies is the same user's."""
        user = User("taweb", 1000, 1001, frozenset(), "/")
        self.trees.use_overlays(user)
        mounting = self.made[-1]
        self.assertEqual((mounting.mounting, mounting.user), (True, user))
        self.assertIsNone(self.trees.overlay_problem)
        self.trees.use_copies("it changes the cache", user)
        self.assertEqual((self.trees.overlay_problem, mounting.closed), ("it changes the cache", 1))
        workspace, _, _ = self.start()
        self.assert_copied(workspace, self.made[-1])
        self.assertEqual((self.made[-1].mounting, self.made[-1].user), (False, user))

    def test_cannot_be_started(self) -> None:
        """What cannot be mounted or started is an error, and not tried again with a copy."""
        for error in (
            OverlayMountError(22, "Invalid argument"),
            FileNotFoundError(2, "No such file or directory"),
        ):
            self.trees.use_overlays()
            self.made[-1].errors.append(error)
            self.assertRaises(type(error), self.start)
            self.assertEqual(len(self.made[-1].asked), 1)

    def test_no_checkout(self) -> None:
        """Where nothing can be made of a checkout it is an error."""
        self.checkout.rename(self.mktemp())
        self.assertRaises(FileNotFoundError, self.start)

    def test_mounted_again(self) -> None:
        """Asked once more it has another launcher in the place of the first."""
        self.trees.use_overlays()
        first = self.made[-1]
        self.trees.use_overlays()
        self.assertEqual((first.closed, self.made[-1].closed), (1, 0))

    def test_close(self) -> None:
        """The launcher is ended."""
        self.trees.use_overlays()
        self.trees.stop_launcher()
        self.assertEqual(self.made[-1].closed, 1)
