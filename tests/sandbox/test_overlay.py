"""`sandbox.workspace` with starters: what follows from what they can do."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux.starter_client import (
    MountedOverlay,
    OverlayLayers,
    OverlayMountError,
    StartedProgram,
    StarterClient,
    spawn_starter,
)
from tawebeval.sandbox import workspace as module
from tawebeval.sandbox.workspace import Workspace, WritableTrees
from tests.cases.patience import PATIENCE
from tests.cases.starters import eventually, is_alive, sh
from tests.fakes.children import NO_PROCESS

LAUNCH = sh("exec sleep 600")
OVERLAY = MountedOverlay(77, frozenset({39}))


@attrs.define
class FakeStarter:
    """Starts nothing, and notes what it was asked to; raises `error`."""

    mount_problem: str | None = None
    error: OSError | None = None
    asked: list[OverlayLayers | None] = attrs.field(factory=list)

    def start_program(
        self, directory: Path, launch: Any, layers: OverlayLayers | None = None
    ) -> StartedProgram:
        self.asked.append(layers)
        if self.error is not None:
            raise self.error
        return StartedProgram(directory, NO_PROCESS, 1, None if layers is None else OVERLAY)


class TreesTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.checkout = self.root / "checkout"
        self.checkout.mkdir(parents=True)
        (self.checkout / "file").write_text("as it was")

    def make_workspace(self) -> Workspace:
        upload = self.root / "upload"
        (upload / "submission").mkdir(parents=True)
        workspace = Workspace(self.root / "workspace")
        workspace.create_directories(upload, workspace.make_unsandboxed_view())
        return workspace

    def assert_copied(self, workspace: Workspace) -> None:
        self.assertEqual((workspace.tree_directory / "file").read_text(), "as it was")


class StartTests(TreesTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.starter = FakeStarter()
        self.spawned: list[Path] = []
        self.unable: OSError | None = None
        self.patch(module, "spawn_starter", self.spawn)
        self.patch(StarterClient, "connect", self.connect)
        self.trees = WritableTrees(self.root / "starter" / "socket")

    def spawn(self, path: Path) -> None:
        self.spawned.append(path)

    def connect(self, path: Path) -> FakeStarter:
        if not self.spawned or self.unable is not None:
            raise self.unable or FileNotFoundError(path)
        return self.starter

    def test_overlay_is_mounted_over_the_tree(self) -> None:
        self.trees.use_overlays()
        workspace = self.make_workspace()
        started = self.trees.start_program(self.checkout, workspace, LAUNCH)
        work = workspace.root / "work"
        layers = OverlayLayers(self.checkout, workspace.tree_directory, work)
        self.assertEqual((self.starter.asked, len(self.spawned)), ([layers], 1))
        for directory in (work, workspace.tree_directory):
            self.assertEqual(list(directory.iterdir()), [])
            self.assertEqual(directory.stat().st_mode, workspace.home_directory.stat().st_mode)
        self.assertEqual(started.overlay, OVERLAY)

    def test_trees_are_copies_without_overlays(self) -> None:
        self.starter.mount_problem = "unshare: Operation not permitted"
        self.trees.use_overlays()
        self.assertEqual(self.trees.overlay_problem, "unshare: Operation not permitted")
        workspace = self.make_workspace()
        started = self.trees.start_program(self.checkout, workspace, LAUNCH)
        self.assert_copied(workspace)
        self.assertEqual((self.starter.asked, started.overlay), ([None], None))

    def test_overlays_are_given_up_for_copies_by_the_same_starter(self) -> None:
        self.trees.use_overlays()
        self.trees.use_copies("it changes the cache")
        self.assertEqual(self.trees.overlay_problem, "it changes the cache")
        workspace = self.make_workspace()
        self.trees.start_program(self.checkout, workspace, LAUNCH)
        self.assert_copied(workspace)
        self.assertEqual(len(self.spawned), 1)

    def test_starter_that_cannot_be_connected_is_an_error(self) -> None:
        for error in (OSError(None, "no python"), ConfigurationError("of version 2")):
            self.unable = error  # type: ignore[assignment]
            with self.assertRaises(type(error)):
                self.trees.use_overlays()

    def test_failed_start_is_not_tried_again_with_a_copy(self) -> None:
        self.trees.use_overlays()
        workspace = self.make_workspace()
        self.starter.error = OverlayMountError(22, "Invalid argument")
        with self.assertRaises(OverlayMountError):
            self.trees.start_program(self.checkout, workspace, LAUNCH)
        self.assertEqual(len(self.starter.asked), 1)

    def test_missing_checkout_is_an_error(self) -> None:
        self.trees.use_copies("no overlays here")
        self.checkout.rename(self.mktemp())
        with self.assertRaises(FileNotFoundError):
            self.trees.start_program(self.checkout, self.make_workspace(), LAUNCH)
        self.assertEqual(self.starter.asked, [])


class StarterTests(TreesTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.socket = self.root / "starter" / "socket"
        self.trees = WritableTrees(self.socket)
        self.addCleanup(self.trees.close)

    def test_own_starter_ends_at_the_close(self) -> None:
        self.trees.use_copies("no overlays here")
        pid = self.trees.starter.pid
        program = self.trees.start_program(self.checkout, self.make_workspace(), LAUNCH)
        self.trees.close()
        self.trees.close()
        self.assertEqual((is_alive(pid), is_alive(program.pid)), (False, False))

    def test_starter_of_another_program_goes_on(self) -> None:
        spawn_starter(self.socket)
        shared = WritableTrees(self.socket, is_own=False)
        shared.use_copies("no overlays here")
        pid = shared.starter.pid
        shared.close()
        self.assertTrue(is_alive(pid))
        StarterClient.connect(self.socket).stop_starter()

    def test_starter_of_a_killed_daemon_is_replaced(self) -> None:
        spawn_starter(self.socket)
        former = StarterClient.connect(self.socket)
        self.trees.use_copies("no overlays here")
        self.assertFalse(is_alive(former.pid))
        self.assertNotEqual(self.trees.starter.pid, former.pid)
        former.close()

    def test_forgotten_program_is_killed(self) -> None:
        self.trees.use_copies("no overlays here")
        workspace = self.make_workspace()
        program = self.trees.start_program(self.checkout, workspace, LAUNCH)
        self.trees.forget_program(workspace)
        eventually(lambda: not is_alive(program.pid))
        self.assertEqual(self.trees.starter.list_programs(), {})
        self.trees.forget_program(workspace)
        self.assertIsNone(self.trees.reopen_overlay(workspace))

    def test_nothing_is_forgotten_without_a_starter(self) -> None:
        self.trees.forget_program(Workspace(self.root))

    def test_program_prints_into_its_file(self) -> None:
        self.trees.use_copies("no overlays here")
        workspace = self.make_workspace()
        self.trees.start_program(self.checkout, workspace, sh("echo printed"))
        ended = self.trees.starter.wait_for_program(workspace.output_directory, PATIENCE)
        self.assertEqual(ended, (0, b"printed\n"))


class ForgettingTests(TreesTestCase):
    def test_program_is_forgotten_later_if_descriptors_are_missing_now(self) -> None:
        trees = WritableTrees(self.root / "socket")
        workspace = self.make_workspace()
        for number, is_raised in ((errno.EMFILE, True), (errno.ECONNREFUSED, False), (None, False)):
            trees._client = ForgetfulStarter(OSError(number, "why"))  # type: ignore[assignment]
            try:
                trees.forget_program(workspace)
            except OSError as error:
                self.assertEqual((error.errno, is_raised), (number, True))
            else:
                self.assertFalse(is_raised)


@attrs.define
class ForgetfulStarter:
    """A starter that is asked to forget a program, and raises `error`."""

    error: OSError

    def forget_program_now(self, directory: Path) -> None:
        raise self.error
