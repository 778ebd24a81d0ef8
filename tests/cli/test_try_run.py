"""`cli.try_run`: an evaluation without a daemon, and the end of work in a reactor."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

from click.testing import CliRunner
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tawebeval.cli.try_run import (
    await_exit_status,
    copy_working_tree,
    describe_resource_usage,
    read_event_pages,
    take_directory_snapshot,
    wait_for_file_change,
    write_upload_files,
)
from tawebeval.config import Configuration, EventBufferSettings
from tawebeval.core import events as core_events
from tawebeval.core.events import EventsEvicted
from tawebeval.core.form import SubmissionFile, pack_request
from tawebeval.deferreds import FairQueue
from tawebeval.errors import EvaluationFailure, InvalidField
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.starting import admit_evaluation
from tawebeval.evaluations.store import EvaluationDetails
from tawebeval.git.fetch_limits import TreeLimits
from tawebeval.linux.cgroups import ResourceUsage
from tawebeval.sandbox.workspace import Workspace
from tawebeval_client import EvaluationError as ErrorEvent
from tawebeval_client import Event, Text
from tests.cases.screen import Shown
from tests.fakes.world import World, make_request


class UsageTests(SynchronousTestCase):
    def test_usage_line_omits_what_was_not_measured(self) -> None:
        self.assertEqual(
            describe_resource_usage(ResourceUsage(0.5, 3 * 2**20), 1.239, 2**29),
            "used 1.24 s, 0.50 s of processor time, 3 MiB of memory",
        )
        said = describe_resource_usage(ResourceUsage(None, None), 1.239, 2**29)
        self.assertIn("used 1.24 s; limits.memory (512 MiB) held for each process alone", said)


class WorkingTreeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base = Path(self.mktemp()).resolve()
        self.root = self.base / "problem"
        (self.root / "inner" / "empty").mkdir(parents=True)
        (self.root / "run.sh").write_text("true\n")
        (self.root / "run.sh").chmod(0o755)
        (self.root / "inner" / "data").write_bytes(b"\0" * 1000)
        (self.root / "link").symlink_to("inner")
        (self.root / "dangling").symlink_to("/nonexistent")

    def copy(self, files: int = 100, size: int = 10_000, place: Path | None = None) -> Path:
        """Return the copy in a place; `files` and `size` are the limits."""
        place = place or self.base / "place"
        checkout = copy_working_tree(self.root, place, TreeLimits(files, size))
        self.commit = checkout.commit
        return checkout.path

    def test_copy_keeps_modes_links_and_empty_directories(self) -> None:
        tree = self.copy()
        self.assertEqual((tree / "inner" / "data").read_bytes(), b"\0" * 1000)
        self.assertTrue(os.access(tree / "run.sh", os.X_OK))
        self.assertEqual(os.readlink(tree / "link"), "inner")
        self.assertEqual(os.readlink(tree / "dangling"), "/nonexistent")
        self.assertEqual(list((tree / "inner" / "empty").iterdir()), [])
        self.assertEqual((self.commit.file_count, self.commit.size), (6, 1005))
        (tree / "run.sh").write_text("changed")
        shutil.rmtree(tree / "inner")
        self.assertEqual((self.root / "run.sh").read_text(), "true\n")
        self.assertTrue((self.root / "inner" / "data").exists())

    def test_copy_omits_the_git_directory_and_special_files(self) -> None:
        (self.root / ".git").mkdir()
        (self.root / "inner" / ".git").mkdir()
        os.mkfifo(self.root / "pipe")
        with socket.socket(socket.AF_UNIX) as listening:
            self.addCleanup(os.chdir, os.getcwd())
            os.chdir(self.root)  # for paths of sockets are short
            listening.bind("socket")
        (self.root / "workplace").mkdir()
        tree = self.copy(place=self.root / "workplace")
        self.assertEqual(
            sorted(path.name for path in tree.iterdir()), ["dangling", "inner", "link", "run.sh"]
        )
        self.assertTrue((tree / "inner" / ".git").is_dir())

    def test_working_tree_over_a_limit_is_refused(self) -> None:
        for limits in ({"files": 3}, {"size": 500}):
            error = self.assertRaises(EvaluationFailure, self.copy, **limits)
            self.assertEqual(error.reason, "repository")
            shutil.rmtree(self.base / "place")

    def test_error_names_the_path_that_cannot_be_copied(self) -> None:
        def copy(source: Path, target: Path) -> None:
            raise PermissionError(13, "Permission denied", str(source))

        patched = self.patch(shutil, "copy2", copy)
        error = self.assertRaises(EvaluationFailure, self.copy)
        self.assertIn(f"{self.root}/run.sh cannot be copied: Permission denied", str(error))
        patched.restore()
        self.root = self.base / "gone"
        shutil.rmtree(self.base / "place")
        self.assertIn(f"{self.root} cannot", str(self.assertRaises(EvaluationFailure, self.copy)))


class WatchTests(SynchronousTestCase):
    def test_file_change_is_reported_once_files_have_stopped_changing(self) -> None:
        clock, root = Clock(), Path(self.mktemp())
        root.mkdir()
        (root / "a").touch()
        outside = root.with_suffix(".py")
        take = partial(
            take_directory_snapshot, root, {"source": outside, "text": "x"}, root / "saved"
        )
        seen = take()
        waiting = Deferred.fromCoroutine(wait_for_file_change(clock, take, seen))

        def wait() -> None:
            clock.advance(1)
            self.assertNoResult(waiting)

        for name in (".a.swp", "a~", ".#a", "#a#", "4913", "a.tmp"):
            (root / name).touch()
        (root / ".git").mkdir()
        (root / ".git" / "index").touch()
        (root / "saved").mkdir()
        (root / "saved" / "file").touch()
        wait()
        (root / "a").unlink()
        wait()
        (root / "a").write_text("new")
        wait()
        outside.touch()
        wait()
        clock.advance(1)
        self.assertEqual(self.successResultOf(waiting), ["a", outside.name])


class UploadTests(SynchronousTestCase):
    def test_upload_has_the_same_directories_and_file_names_as_in_the_daemon(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / "a b.py").write_bytes(b"\xff")
        fields = {"source": folder / "a b.py", "language": "ü", "stdin": b"\r\n"}
        self.assertEqual(
            write_upload_files(fields, folder / "upload"),
            (
                SubmissionFile("source", "a b.py"),
                SubmissionFile("language", "language.txt"),
                SubmissionFile("stdin", "stdin.txt"),
            ),
        )
        submission = folder / "upload" / "submission"
        self.assertEqual((submission / "source" / "a b.py").read_bytes(), b"\xff")
        self.assertEqual((submission / "language" / "language.txt").read_text(), "ü")
        self.assertEqual((submission / "stdin" / "stdin.txt").read_bytes(), b"\r\n")
        self.assertRaises(
            OSError, write_upload_files, {"source": folder / "none"}, folder / "other"
        )
        self.assertRaises(
            InvalidField, write_upload_files, {"source": folder / ".."}, folder / "other"
        )


class PagesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.world = World(configuration=Configuration(buffers=EventBufferSettings(total=2048)))
        folder = Path(self.mktemp()).resolve()
        (folder / "upload").mkdir(parents=True)
        details = EvaluationDetails(
            "try", pack_request(make_request()), 7, upload_directory=folder / "upload"
        )
        workspace = Workspace(folder / "evaluation")
        self.evaluation = Evaluation(details, workspace, self.world.context())
        self.events = self.evaluation.events
        self.found: list[Event] = []
        self.cancelled: list[bool] = []
        self.lines = [b"line %d\n" % number for number in range(2000)]

    async def read(self) -> None:
        on_cancel = partial(self.cancelled.append, True)
        async for page in read_event_pages(self.evaluation, on_cancel):
            self.found.extend(page.events)

    def print(self) -> None:
        admit_evaluation(self.evaluation, FairQueue(running=1, queued=0))
        for index in range(0, len(self.lines), 100):
            self.world.child.print(b"".join(self.lines[index : index + 100]))
            self.world.turn()
            self.assertFalse(self.world.child.paused)

    def check_whole(self) -> None:
        *printed, last = self.found
        texts = [event.text for event in printed if isinstance(event, Text)]
        self.assertEqual("".join(texts).encode(), b"".join(self.lines))
        assert isinstance(last, ErrorEvent)
        self.assertEqual(last.members["status"], 3)
        self.assertTrue(self.evaluation.cleanup_completion.is_set)
        self.assertEqual(self.events.event_log.begin_cursor, self.events.event_log.end_cursor)

    def test_cancellations_lose_no_event_of_a_full_buffer(self) -> None:
        reading = Deferred.fromCoroutine(self.read())
        self.print()
        for _ in range(2):
            reading.cancel()
        self.assertNoResult(reading)
        self.assertEqual(len(self.cancelled), 2)
        self.world.child.end(3)
        self.world.turn()
        self.successResultOf(reading)
        self.check_whole()

    def test_evicted_events_are_read_from_the_disk(self) -> None:
        self.patch(core_events, "MIN_SEGMENT_BYTES", 500)
        self.patch(core_events, "MAX_SEGMENT_BYTES", 500)
        self.print()
        self.world.child.end(3)
        self.world.turn()
        self.assertRaises(EventsEvicted, self.events.read_now, 0, 1)
        self.successResultOf(Deferred.fromCoroutine(self.read()))
        self.check_whole()


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InlineReactor:
    def callFromThread(self, call: object) -> None:
        assert callable(call)
        call()


class ExitStatusTests(SynchronousTestCase):
    def setUp(self) -> None:
        for number in NUMBERS:
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            signal.signal(number, signal.SIG_DFL)

    def test_each_signal_cancels_the_work_and_the_first_sets_the_exit_status(self) -> None:
        for first, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)):
            cancelled = 0

            async def work() -> int:
                nonlocal cancelled
                while cancelled < 3:
                    try:
                        await Deferred()
                    except CancelledError:
                        cancelled += 1
                return 0

            ending = Deferred.fromCoroutine(
                await_exit_status(Shown().screen, work(), InlineReactor())
            )
            for number in (first, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            self.assertEqual(self.successResultOf(ending), status)
            for number in NUMBERS:
                self.assertEqual(signal.getsignal(number), signal.SIG_DFL)

    def test_interruption_and_unreadable_file_are_reported(self) -> None:
        async def wait() -> int:
            await Deferred()
            return 0

        async def read() -> int:
            raise PermissionError(13, "Permission denied", "a.py")

        shown = Shown()
        ending = Deferred.fromCoroutine(await_exit_status(shown.screen, wait(), InlineReactor()))
        signal.raise_signal(signal.SIGINT)
        self.assertEqual(self.successResultOf(ending), 130)
        ending = Deferred.fromCoroutine(await_exit_status(shown.screen, read(), InlineReactor()))
        self.assertEqual(self.successResultOf(ending), 2)
        self.assertEqual(shown.notes.getvalue(), "interrupted\na.py: Permission denied\n")


class DirectoryTests(SynchronousTestCase):
    def test_path_that_is_no_directory_is_named(self) -> None:
        root = Path(self.mktemp())
        root.mkdir()
        (root / "loop").symlink_to("loop")
        (root / "file").touch()
        for name, words in (
            ("loop", "too many levels of symbolic links"),
            ("file", "not a directory"),
            ("none", "no such file or directory"),
        ):
            arguments = ["try", str(root / name), "--evaluator", "true", "x=1"]
            result = CliRunner().invoke(main, arguments)
            self.assertEqual(result.exit_code, 2, result.exception)
            self.assertIn(f"{name}: {words}", " ".join(result.output.split()))
