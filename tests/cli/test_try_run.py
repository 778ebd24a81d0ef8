"""`cli.try_run`: the raw view of stdout, and the temporary directory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import try_run
from tawebeval.cli.output import OutputError
from tawebeval.cli.try_run import (
    RawOutput,
    describe_usage,
    find_hint,
    make_temporary_directory,
)
from tawebeval.core.segi import Markers
from tawebeval.linux.cgroups import ResourceUsage
from tests.cases.screen import Shown
from tests.fakes.world import straw

MARKERS = Markers.generate(straw())
WORDS = {
    MARKERS.data_begin.decode(): "<<< data begins >>>",
    MARKERS.data_end.decode(): "<<< data ends >>>",
    MARKERS.file_begin.decode(): "<<< file begins >>>",
    MARKERS.file_end.decode(): "<<< file ends >>>",
}

OUTPUT = st.lists(
    st.one_of(
        st.sampled_from([*WORDS, "\n", "~", "~tawebeval:", "x", " ", "ü", "\r"]),
        st.sampled_from(list(WORDS)).map(lambda marker: f"\n{marker}\n"),
        st.text(max_size=3),
    )
).map("".join)


class FakeStdout:
    """The stdout of an evaluator, in memory."""

    markers = MARKERS

    def __init__(self, content: bytes = b"") -> None:
        self.content = content
        self.stdout_bytes = len(content)

    def read_stdout(self, begin: int, end: int) -> bytes:
        return self.content[begin:end]


class RawOutputTests(SynchronousTestCase):
    @given(OUTPUT, st.lists(st.integers(0, 100), max_size=5))
    def test_lines_that_are_markers_become_words_and_nothing_else_changes(
        self, output: str, sizes: list[int]
    ) -> None:
        shown, stdout = Shown(), FakeStdout(output.encode())
        raw = RawOutput(shown.screen)
        for size in sorted(sizes):
            stdout.stdout_bytes = min(size, len(stdout.content))
            raw.show_new_output(stdout)
        stdout.stdout_bytes = len(stdout.content)
        raw.show_new_output(stdout, is_ended=True)
        expected = "\n".join(WORDS.get(line, line) for line in output.split("\n"))
        self.assertEqual(shown.out.getvalue(), expected)

    def test_partial_line_waits_for_its_end_unless_it_is_long(self) -> None:
        self.patch(try_run, "_READ", 100)
        shown, stdout = Shown(), FakeStdout(b"one\ntw")
        raw = RawOutput(shown.screen)
        raw.show_new_output(stdout)
        self.assertEqual(shown.out.getvalue(), "one\n")
        stdout.content += b"o" * 100
        stdout.stdout_bytes = len(stdout.content)
        raw.show_new_output(stdout)
        self.assertEqual(shown.out.getvalue(), "one\ntw" + "o" * 98)
        raw.show_new_output(stdout, is_ended=True)
        self.assertEqual(shown.out.getvalue(), "one\ntw" + "o" * 100)

    def test_invalid_utf_8_is_replaced(self) -> None:
        shown = Shown()
        RawOutput(shown.screen).show_new_output(FakeStdout(b"\xff\xc3"), is_ended=True)
        self.assertEqual(shown.out.getvalue(), "\ufffd\ufffd")

    def test_broken_screen_is_an_error_and_an_evaluator_that_never_started_is_none(self) -> None:
        shown = Shown()
        shown.out.broken = True
        raw = RawOutput(shown.screen)
        raw.show_new_output(None)
        self.assertRaises(OutputError, raw.show_new_output, FakeStdout(b"a\n"))


class HintTests(SynchronousTestCase):
    def test_hint_names_the_setting_of_the_error(self) -> None:
        where = "in the file of --config write"
        for message, hint in (
            ("it failed", ""),
            (
                "it used over 512 MiB of memory (limits.memory)",
                f"to change limits.memory, {where} [limits] and below it memory = VALUE",
            ),
            (
                "status 1; the sandbox has no network (sandbox.network)",
                f"to change sandbox.network, {where} [sandbox] and below it network = true",
            ),
            (
                "it ran for over 1 second (limits.wall_clock)",
                "to change limits.wall_clock, give another value by --limit wall_clock=VALUE",
            ),
        ):
            self.assertEqual(find_hint(message, {"wall_clock": 1}), hint)

    def test_usage_has_what_the_machine_can_measure(self) -> None:
        self.assertEqual(
            describe_usage(ResourceUsage(0.5, 3 * 2**20), 1.239, 2**29),
            "used 1.24 s, 0.50 s of processor time, 3 MiB of memory",
        )
        said = describe_usage(ResourceUsage(None, None), 1.239, 2**29)
        self.assertIn("used 1.24 s; limits.memory (512 MiB) held for each process alone", said)


class ScratchTests(SynchronousTestCase):
    def test_temporary_directory_is_removed_at_the_end(self) -> None:
        around = Path(self.mktemp()).resolve()
        around.mkdir()
        self.patch(tempfile, "tempdir", str(around))
        with make_temporary_directory() as place:
            (place / "a").mkdir()
            self.assertEqual(list(around.iterdir()), [place])
        self.assertEqual(list(around.iterdir()), [])
