"""`sandbox.workspace`: directories, paths that lead out of them, and started programs."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.form import SubmissionFile
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.starter_client import StarterClient, spawn_starter
from tawebeval.sandbox.workspace import EvaluatorFileRefused, Workspace, WorkspaceLauncher
from tests.cases.patience import PATIENCE
from tests.cases.starters import eventually, is_alive, sh


class WorkspaceTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.root.mkdir()
        upload = self.root / "upload"
        (upload / "submission" / "source").mkdir(parents=True)
        (upload / "submission" / "source" / "x.py").write_text("x")
        self.workspace = Workspace(self.root / "one")
        self.workspace.create_directories(
            upload, self.workspace.make_sandboxed_view(Path("/evaluation"))
        )
        self.checkout = Path(self.mktemp()).resolve() / "checkout"
        self.checkout.mkdir(parents=True)
        self.secret = self.root / "secret"
        self.secret.write_text("secret")


class DirectoryTests(WorkspaceTestCase):
    def test_workspace_takes_over_the_upload_and_makes_directories(self) -> None:
        self.assertEqual({p.name for p in self.root.iterdir()}, {"one", "secret"})
        path = self.workspace.locate_submitted_file(SubmissionFile("source", "x.py"))
        self.assertEqual(path.read_text(), "x")
        self.assertTrue(path.is_absolute())
        for directory in (
            self.workspace.tree_directory,
            self.workspace.temporary_directory,
            self.workspace.home_directory,
        ):
            self.assertEqual(list(directory.iterdir()), [])
        self.assertFalse(os.path.lexists(self.workspace.overlay_work_directory))

    def test_overlay_work_directory_is_removed_with_any_content(self) -> None:
        volatile = self.workspace.overlay_work_directory / "work" / "incompat" / "volatile"
        for more in ((), ("work/index",), ("work/incompat/volatile/more", "other")):
            volatile.mkdir(parents=True)
            (volatile / "dirty").touch()
            for name in more:
                (self.workspace.overlay_work_directory / name).mkdir()
            for directory in (volatile, volatile.parent, volatile.parent.parent):
                directory.chmod(0)
            self.workspace.remove_all_but_output(keep_submission=True)
            self.assertEqual(os.listdir(self.workspace.root), ["submission"])

    def test_sandboxed_evaluator_sees_its_own_paths(self) -> None:
        view = self.workspace.make_sandboxed_view(Path("/evaluation"))
        file = self.workspace.locate_submitted_file(SubmissionFile("source", "x.py"))
        for path, seen in (
            (self.workspace.tree_directory / "a", "/evaluation/tree/a"),
            (self.workspace.temporary_directory, "/evaluation/tmp"),
            (file, "/evaluation/submission/source/x.py"),
        ):
            self.assertEqual(view.translate_path(path), Path(seen))
            self.assertEqual(self.workspace.make_unsandboxed_view().translate_path(path), path)

    def test_working_directory_is_found_through_links_in_the_tree(self) -> None:
        (self.checkout / "a" / "b").mkdir(parents=True)
        (self.checkout / "link").symlink_to("a/b")
        for given, found in (("", ""), ("a", "a"), ("a/b", "a/b"), ("link", "a/b")):
            path = self.workspace.locate_working_directory(given, self.checkout)
            self.assertEqual(path, self.workspace.tree_directory / found)

    def test_missing_working_directory_is_refused(self) -> None:
        (self.checkout / "file").touch()
        (self.checkout / "loop").symlink_to("loop")
        for given in ("missing", "file", "file/x", "loop", "x" * 300):
            error = self.assertRaises(
                EvaluationFailure, self.workspace.locate_working_directory, given, self.checkout
            )
            self.assertEqual(error.reason, "directory")

    def test_working_directory_outside_of_the_tree_is_refused(self) -> None:
        tree = self.checkout
        (tree / "up").symlink_to("..")
        (tree / "tmp").symlink_to(self.workspace.temporary_directory)
        (tree / "root").symlink_to("/")
        (tree / "twice").symlink_to("up")
        self.checkout.with_name("checkout2").mkdir()
        (tree / "sibling").symlink_to("../checkout2")
        for given in ("up", "tmp", "root", "root/etc", "twice", "up/home", "sibling", ".."):
            error = self.assertRaises(
                EvaluationFailure, self.workspace.locate_working_directory, given, self.checkout
            )
            self.assertEqual(error.reason, "directory")
            self.assertIn("out of", error.message)


class ReadFileTests(WorkspaceTestCase):
    def read(self, path: str, limit: int = 100, opened: int | None = None) -> bytes:
        directory = self.workspace.tree_directory / "a"
        directory.mkdir(exist_ok=True)
        view = attrs.evolve(self.workspace.make_unsandboxed_view(), tree_descriptor=opened)
        return self.workspace.read_file(path, directory, limit, view)

    def test_mounted_tree_is_read_by_its_descriptor(self) -> None:
        mounted = Path(self.mktemp())
        (mounted / "a").mkdir(parents=True)
        (mounted / "a" / "file").write_text("mounted")
        (mounted / "out").symlink_to(self.secret)
        (self.workspace.tree_directory / "a").mkdir()
        (self.workspace.tree_directory / "a" / "file").write_text("beneath")
        (self.workspace.temporary_directory / "file").write_text("temporary")
        descriptor = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, descriptor)

        for _ in range(2):
            self.assertEqual(self.read("file", opened=descriptor), b"mounted")
        self.assertEqual(self.read("../../tmp/file", opened=descriptor), b"temporary")
        for path in ("../out", "../../../secret", ".."):
            self.assertRaises(EvaluatorFileRefused, self.read, path, opened=descriptor)

    def refuse(self, path: str, limit: int = 100) -> str:
        error = self.assertRaises(EvaluatorFileRefused, self.read, path, limit)
        self.assertNotIn("secret content", str(error))
        return str(error)

    def test_files_in_writable_directories_are_read(self) -> None:
        for directory in (
            self.workspace.tree_directory,
            self.workspace.temporary_directory,
            self.workspace.home_directory,
        ):
            path = directory / "deep" / "er" / "file"
            path.parent.mkdir(parents=True)
            path.write_bytes(b"\0content\xff")
            self.assertEqual(self.read(str(path)), b"\0content\xff")
        for relative in ("../deep/er/file", "./../deep//er/./file", "../../tmp/deep/er/file"):
            self.assertEqual(self.read(relative), b"\0content\xff")

    def test_files_outside_are_refused(self) -> None:
        for path in (
            "/etc/passwd",
            str(self.secret),
            "../../../secret",
            "../../submission/source/x.py",
            "../../index",
            "../..",
            "/proc/self/environ",
            "/dev/zero",
            "//etc/passwd",
            str(self.workspace.tree_directory) + "2/x",
        ):
            self.assertIn("outside", self.refuse(path), path)

    def test_symbolic_links_are_refused(self) -> None:
        tree = self.workspace.tree_directory
        (tree / "real").mkdir()
        (tree / "real" / "file").write_text("x")
        (tree / "link").symlink_to("real")
        (tree / "file").symlink_to("real/file")
        (tree / "out").symlink_to(self.secret)
        (tree / "up").symlink_to("../..")
        (tree / "dangling").symlink_to("nowhere")
        for path in ("../link/file", "../file", "../out", "../up/secret", "../dangling"):
            self.refuse(path)
        self.assertEqual(self.read("../real/file"), b"x")

    def test_replaced_directories_are_refused(self) -> None:
        self.workspace.temporary_directory.rmdir()
        self.workspace.temporary_directory.symlink_to("/etc")
        self.refuse(str(self.workspace.temporary_directory / "passwd"))

    def test_other_kinds_of_files_are_refused(self) -> None:
        os.mkfifo(self.workspace.tree_directory / "fifo")
        (self.workspace.tree_directory / "directory").mkdir()
        for path in ("../fifo", "../directory", "..", "."):
            self.refuse(path)
        self.refuse("../missing")
        self.refuse("../directory/missing/file")
        self.refuse("")

    def test_file_at_the_size_limit_is_read_and_a_larger_file_refused(self) -> None:
        for size in (100, 101):
            (self.workspace.temporary_directory / str(size)).write_bytes(b"x" * size)
        self.assertEqual(len(self.read("../../tmp/100")), 100)
        self.assertIn("over 100 bytes", self.refuse("../../tmp/101"))

    def test_endless_file_is_read_to_the_limit(self) -> None:
        with open(self.workspace.temporary_directory / "sparse", "wb") as file:
            file.truncate(2**40)
        self.refuse("../../tmp/sparse")

    def test_file_that_grows_beyond_the_limit_is_refused(self) -> None:
        (self.workspace.temporary_directory / "file").write_bytes(b"x" * 101)
        empty = SimpleNamespace(st_mode=stat.S_IFREG, st_size=0)
        self.patch(os, "fstat", lambda descriptor: empty)
        self.refuse("../../tmp/file", 100)

    def test_too_long_paths_are_refused_and_undecodable_names_read(self) -> None:
        for path in ("a\0b", "x" * 300, "x/" * 3000, "\udcff" * 200 + "x" * 100):
            self.refuse(path)
        name = "\udcff\n ü"
        (self.workspace.tree_directory / "a").mkdir(exist_ok=True)
        (self.workspace.tree_directory / "a" / name).write_text("odd")
        self.assertEqual(self.read(name), b"odd")

    def test_no_descriptor_stays_open(self) -> None:
        (self.workspace.tree_directory / "file").write_text("x")
        before = os.listdir("/proc/self/fd")
        self.read("../file")
        for path in ("../file/x", "..", "/etc/passwd"):
            self.refuse(path)
        self.assertEqual(os.listdir("/proc/self/fd"), before)


LAUNCH = sh("exec sleep 600")


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


class StarterTests(TreesTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.socket = self.root / "starter" / "socket"
        self.launcher = WorkspaceLauncher(self.socket)
        self.addCleanup(self.launcher.close)

    def connect(self) -> None:
        self.launcher.connect_starter()
        self.launcher.overlay_problem = "no overlays here"

    def test_close_ends_the_own_starter_and_its_programs(self) -> None:
        self.connect()
        pid = self.launcher.starter.pid
        program = self.launcher.start_program(self.checkout, self.make_workspace(), LAUNCH)
        self.launcher.close()
        self.launcher.close()
        self.assertEqual((is_alive(pid), is_alive(program.pid)), (False, False))

    def test_close_leaves_a_starter_of_another_program_running(self) -> None:
        spawn_starter(self.socket)
        shared = WorkspaceLauncher(self.socket, is_own=False)
        shared.connect_starter()
        pid = shared.starter.pid
        shared.close()
        self.assertTrue(is_alive(pid))
        StarterClient.connect(self.socket).stop_starter()

    def test_starter_of_a_killed_daemon_is_replaced(self) -> None:
        spawn_starter(self.socket)
        former = StarterClient.connect(self.socket)
        self.connect()
        self.assertFalse(is_alive(former.pid))
        self.assertNotEqual(self.launcher.starter.pid, former.pid)
        former.close()

    def test_kill_program_kills_the_program_and_closes_its_overlay(self) -> None:
        self.connect()
        workspace = self.make_workspace()
        program = self.launcher.start_program(self.checkout, workspace, LAUNCH)
        self.launcher.kill_program(workspace)
        eventually(lambda: not is_alive(program.pid))
        self.assertEqual(self.launcher.starter.list_programs(), set())
        self.launcher.kill_program(workspace)
        self.assertIsNone(self.launcher.starter.reopen_overlay(workspace.output_directory))

    def test_kill_program_without_a_starter_does_nothing(self) -> None:
        self.launcher.kill_program(Workspace(self.root))

    def test_missing_checkout_is_an_error(self) -> None:
        self.connect()
        self.checkout.rename(self.mktemp())
        self.assertRaises(
            OSError, self.launcher.start_program, self.checkout, self.make_workspace(), LAUNCH
        )
        self.assertEqual(self.launcher.starter.list_programs(), set())

    def test_program_in_a_copied_tree_prints_into_the_output_file(self) -> None:
        self.connect()
        workspace = self.make_workspace()
        launch = sh("cat file")._replace(directory=str(workspace.tree_directory))
        self.launcher.start_program(self.checkout, workspace, launch)
        ended = self.launcher.starter.wait_for_program(workspace.output_directory, PATIENCE)
        self.assertEqual(ended, (0, b"as it was"))


class ForgettingTests(TreesTestCase):
    def test_kill_program_raises_only_transient_errors(self) -> None:
        launcher = WorkspaceLauncher(self.root / "socket")
        workspace = self.make_workspace()
        for number, is_raised in ((errno.EMFILE, True), (errno.ECONNREFUSED, False), (None, False)):

            def fail(directory: Path, number: int | None = number) -> None:
                raise OSError(number, "why")

            launcher._client = SimpleNamespace(forget_program_blocking=fail)  # type: ignore[assignment]
            raised = self.assertRaises(OSError) if is_raised else nullcontext()
            with raised as caught:
                launcher.kill_program(workspace)
            self.assertEqual(caught and caught.exception.errno, number if is_raised else None)
