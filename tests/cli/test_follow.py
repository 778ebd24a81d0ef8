"""`cli.follow`: evaluations shown to their end, and files that stay in their directory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.follow import DownloadDirectory, EvaluationReader
from tawebeval.errors import DiscardedCursor, EvaluationExpired, EvaluationNotFound, RequestError
from tawebeval_client import NamedFile, Page
from tawebeval_client.http import build_refusal
from tests.cases.client import Fate
from tests.cases.command import REPOSITORY, CommandTestCase, LineClient
from tests.cases.screen import CLEAR, Shown


def discarded(oldest: str) -> Iterator[Page]:
    """Yield no page, for only what follows that cursor is there."""
    yield from ()
    raise build_refusal(410, b'{"oldest": "%s"}' % oldest.encode())


class FollowTests(CommandTestCase):
    def follow(
        self,
        identifier: str,
        shown: Shown,
        folder: DownloadDirectory | None = None,
        after: str | None = None,
    ) -> int:
        reader = EvaluationReader(self.make_context(shown.screen), identifier, after)
        return reader.follow_evaluation(folder)

    def test_file_is_saved_under_its_base_name_and_a_failed_save_exits_with_status_2(self) -> None:
        identifier = self.line.begin()
        shown, root = Shown(), Path(self.mktemp())
        start = '{"type":"file","content_type":"text/plain","content_base64":"aGk=","filename":'
        self.line.child.print(self.block(f'{start}"../a.txt"}}'))
        self.line.child.end()
        self.assertEqual(self.follow(identifier, shown, DownloadDirectory(root)), 0)
        self.assertEqual((root / "a.txt").read_bytes(), b"hi")
        self.assertIn(f"saved as {root}/a.txt", shown.notes.getvalue())
        identifier = self.line.begin()
        self.line.child.print(self.block(f'{start}".."}}') + b"more\n")
        self.line.child.end()
        self.assertEqual(self.follow(identifier, shown, DownloadDirectory(root)), 2)
        self.assertIn("not saved: ", shown.notes.getvalue())
        self.assertEqual(shown.out.getvalue(), "more\n")

    def test_directory_that_may_not_be_written_exits_with_status_2(self) -> None:
        self.patch(DownloadDirectory, "save_file", Mock(side_effect=PermissionError(13, "", "b/a")))
        identifier, shown = self.line.begin(), Shown()
        file = '{"type":"file","content_type":"","content_base64":"","filename":"a"}'
        self.line.child.print(self.block(file))
        self.line.child.end()
        self.assertEqual(self.follow(identifier, shown, DownloadDirectory(Path("b"))), 2)
        self.assertIn("cannot write b/a", shown.notes.getvalue())

    def test_summary_of_cases_is_printed_unless_following_begins_after_a_cursor(self) -> None:
        case = '{"type":"case","case":"1","verdict":"accepted"}'
        for after, shown in (("1", []), (None, ["summary: 2/2 cases"])):
            identifier = self.line.begin()
            self.line.child.print(self.block(case, case))
            self.line.child.end()
            options = () if after is None else ("--after", after)
            notes = self.run_command("follow", *options, identifier).stderr.splitlines()
            self.assertEqual([note for note in notes if "accepted" not in note], shown)

    def test_markers_within_lines_cause_one_warning(self) -> None:
        identifier = self.line.begin()
        block = self.block("1")[1:]
        self.line.child.print(b"x" + block[:20])
        self.line.settle()
        self.line.child.print(block[20:] + b"y" + self.block("2")[1:])
        self.line.child.end()
        result = self.run_command("follow", identifier)
        self.assertEqual(result.exit_code, 0)
        self.assertEqual(result.stdout.count("~tawebeval:data-begin:"), 2)
        self.assertEqual(
            result.stderr,
            "warning: EVALUATION_DATA_BEGIN is not alone on its line, or ends no block: the block"
            " is shown as text; print newlines before and after it (`printf '\\n'`)\n",
        )

    def test_empty_stdout_causes_a_warning_if_reading_began_at_the_start(self) -> None:
        identifier = self.line.begin()
        self.line.child.end()
        result = self.run_command("follow", identifier)
        self.assertEqual(result.exit_code, 0)
        self.assertEqual(result.stderr, "the evaluator printed nothing on stdout\n")
        identifier = self.printed(b"a\n")
        self.assertEqual(self.run_command("follow", "--after", "2", identifier).stderr, "")

    def test_follow_fails_if_the_evaluation_expires_meanwhile(self) -> None:
        for error in (EvaluationExpired(), EvaluationNotFound()):
            for printed in ("", "a"):
                self.line = self.make()
                self.check_lost(error, printed, "evaluate", *REPOSITORY, "--seed", "1", "x=1")
                self.line = self.make()
                self.check_lost(error, printed, "follow", self.line.begin())

        self.lose(DiscardedCursor("0"), EvaluationNotFound())
        self.assertEqual(self.run_command("follow", self.line.begin()).exit_code, 1)

    def check_lost(self, error: RequestError, printed: str, *arguments: str) -> None:
        """Hold that a command says so, and how it ends, after it has shown what was printed."""
        steps = iter(range(1000))

        def meanwhile() -> None:
            step = next(steps)
            if step == 4 and printed:
                self.line.child.print(printed.encode())
            if step == 100:  # when a poll has been answered, if only by an empty page
                self.lose(error)

        self.meanwhile = meanwhile
        result = self.run_command(*arguments)
        self.assertEqual(result.exit_code, 1, result.output)
        self.assertEqual((result.stdout, result.stderr), (printed, f"failed: {error}\n"))

    def test_follow_fails_if_the_server_answers_410_with_the_cursor_that_was_sent(self) -> None:
        shown = Shown()
        self.patch(LineClient, "pages", lambda *_, **__: discarded("3"))
        self.assertEqual(self.follow("x", shown, after="3"), 1)
        self.assertIn("failed: the server answers 410", shown.notes.getvalue())


class DownloadTests(CommandTestCase):
    def test_download_saves_files_and_exits_with_status_2_if_content_is_missing(self) -> None:
        folder = Path(self.mktemp())
        submission = {
            "source": NamedFile("../a.py", b"print(1)\n"),
            "raw": NamedFile("b.bin", b"\0\xff"),
            "big": NamedFile("c.txt", b"x" * (257 << 10)),
        }
        identifier = self.line.begin(submission=submission)
        result = self.run_command("download", identifier, str(folder))
        self.assertEqual(result.exit_code, 2)
        self.assertIn("c.txt\n  not saved: the files are too large together", result.stderr)
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.assertEqual(found, {"a.py": b"print(1)\n", "b.bin": b"\0\xff"})
        identifier = self.line.begin()
        result = self.run_command("download", identifier, str(folder))
        self.assertEqual((result.exit_code, result.stdout), (0, ""))
        self.assertEqual((folder / "source.txt").read_bytes(), b"print()\n")

    def test_file_with_null_content_is_not_saved_and_an_empty_file_is_saved(self) -> None:
        folder = Path(self.mktemp())
        files = [
            {"field": "a", "filename": "a", "text": None, "base64": None},
            {"field": "b", "filename": "b", "text": None, "base64": ""},
            {"field": "c", "filename": "c", "text": ""},
        ]
        self.patch(LineClient, "submission", lambda *_: files)
        result = self.run_command("download", "x", str(folder))
        self.assertEqual(result.exit_code, 2, result.output)
        self.assertEqual(
            {each.name: each.read_bytes() for each in folder.iterdir()}, {"b": b"", "c": b""}
        )


class FolderTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.root.mkdir()
        (self.root / "victim").write_bytes(b"old")
        self.folder = DownloadDirectory(self.root / "made" / "here")

    def test_file_is_saved_in_the_directory_under_its_base_name(self) -> None:
        for name in ("a.txt", "../../a.txt", "/etc/a.txt", "..\\a.txt"):
            path = DownloadDirectory(self.folder.path).save_file(name, b"new")
            self.assertEqual(path, self.folder.path / "a.txt")
            self.assertEqual(path.read_bytes(), b"new")
            self.assertEqual([p.name for p in self.folder.path.iterdir()], ["a.txt"])
            path.unlink()
        self.assertEqual(sorted(p.name for p in self.root.iterdir()), ["made", "victim"])

    def test_invalid_file_names_are_refused(self) -> None:
        for name in ("", ".", "..", "a/", "a\0b", "x" * 300):
            self.assertRaises(ValueError, self.folder.save_file, name, b"new")

    def test_existing_file_or_link_is_replaced_by_a_plain_file(self) -> None:
        self.folder.path.mkdir(parents=True)
        (self.folder.path / "a.txt").symlink_to((self.root / "victim").resolve())
        for content in (b"long and old", b"new"):
            path = DownloadDirectory(self.folder.path).save_file("a.txt", content)
            self.assertFalse(path.is_symlink())
            self.assertEqual(path.read_bytes(), content)
        self.assertEqual((self.root / "victim").read_bytes(), b"old")
        (self.root / "plain").touch()
        self.assertEqual(path.stat().st_mode, (self.root / "plain").stat().st_mode)

    def test_files_of_the_same_name_get_numbers_and_a_failed_save_leaves_no_file(self) -> None:
        (self.folder.path / "a.txt").mkdir(parents=True)
        self.assertRaises(OSError, self.folder.save_file, "a.txt", b"new")
        self.assertEqual([p.name for p in self.folder.path.iterdir()], ["a.txt"])
        (self.folder.path / "a.txt").rmdir()
        names = ["a.txt", "a-2.txt", "a.txt", "b/a.txt", "a-2.txt", "Makefile", "Makefile"]
        saved = [self.folder.save_file(n, b"%d" % i) for i, n in enumerate(names)]
        self.assertEqual(
            [path.name for path in saved],
            ["a.txt", "a-2.txt", "a-3.txt", "a-4.txt", "a-2-2.txt", "Makefile", "Makefile-2"],
        )
        self.assertEqual([int(path.read_bytes()) for path in saved], list(range(7)))

    def test_partial_file_is_removed_if_writing_fails(self) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        self.assertRaises(OSError, self.folder.save_file, "a.txt", b"x" * 1000)
        self.assertEqual(list(self.folder.path.iterdir()), [])


class TerminalTests(CommandTestCase):
    def follow_on_terminal(self, identifier: str) -> str:
        shown = Shown(terminal=True)
        EvaluationReader(self.make_context(shown.screen), identifier).follow_evaluation()
        return shown.out.getvalue()

    def test_status_line_has_state_and_queue_place_until_the_evaluator_runs(self) -> None:
        self.line = self.make(running=1)
        self.line.begin()
        identifier = self.line.begin()
        first = self.line.child
        steps = iter(range(1000))

        def meanwhile() -> None:
            step = next(steps)
            if step == 4:
                first.end()
            if step == 50:
                self.line.child.print(b"a\n")
                self.line.child.end()

        self.meanwhile = meanwhile
        shown = self.follow_on_terminal(identifier)
        self.assertTrue(shown.startswith(f"{CLEAR}queued, 0 ahead{CLEAR}"), shown)
        self.assertTrue(shown.endswith(f"{CLEAR}running{CLEAR}a\n{CLEAR}running{CLEAR}"), shown)
        self.assertEqual(self.follow_on_terminal(self.printed(b"a\n")), "a\n")

    def test_first_output_is_shown_at_once_after_a_long_time_in_the_queue(self) -> None:
        self.line = self.make(running=1)
        self.line.begin()
        identifier = self.line.begin()
        first, steps = self.line.child, iter(range(1000))
        pause = Mock()

        def meanwhile() -> None:
            step = next(steps)
            if step == 50:
                first.end()
            if self.line.child is not first and self.line.child.is_running:
                self.line.child.print(b"a\n")
                self.line.child.end()

        self.patch(LineClient, "pause", pause)
        self.meanwhile = meanwhile
        shown = self.follow_on_terminal(identifier)
        self.assertIn("a\n", shown)
        pause.assert_not_called()

    def test_status_line_is_left_out_if_the_status_request_fails(self) -> None:
        identifier = self.printed(b"a\n")
        self.line.fail_once(Fate.NONSENSE)
        self.assertEqual(self.follow_on_terminal(identifier), "a\n")

    def test_status_line_shows_the_results_below_the_output_until_the_end(self) -> None:
        identifier = self.line.begin()
        case = '{"type":"case","case":"a","verdict":"wrong_answer","time":1,"memory":2048}'
        progress = '{"type":"progress","done":1,"total":2}'
        pages = [b"one\n" + self.block(case, progress), b"half", b" two\n"]
        steps = iter(range(1000))

        def meanwhile() -> None:
            if next(steps) > 10 and self.line.child.is_running:
                self.line.child.print(pages.pop(0)) if pages else self.line.child.end()

        self.meanwhile = meanwhile
        bar = f"[{'#' * 15}{'-' * 15}]"
        status = f"running, {bar} 1/2, 0/1 cases (1 wrong answer)"
        self.assertEqual(
            self.follow_on_terminal(identifier),
            f"{CLEAR}running{CLEAR}one\ncase a: wrong answer (1.000 s, 2 KiB)\n"
            f"{CLEAR}{status}{CLEAR}half two\n"
            f"{CLEAR}{status}{CLEAR}summary: 0/1 cases (1 wrong answer)\n",
        )
