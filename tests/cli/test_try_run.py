"""`cli.try_run`: the raw view of stdout, and the temporary directory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.error import ProcessDone
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.output import OutputError
from tawebeval.cli.try_run import OutputMarkerReplacer, OutputTeeProtocol, make_temporary_directory
from tawebeval.core.segi import Markers
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


def expected(output: str) -> str:
    """Return what is shown of it."""
    *lines, last = output.split("\n")  # which no terminator ends: it is no marker
    return "\n".join([*(WORDS.get(line, line) for line in lines), last])


def cut(output: bytes, places: Sequence[int]) -> list[bytes]:
    """Return output in pieces."""
    bounds = [0, *sorted(place % (len(output) + 1) for place in places), len(output)]
    return [output[begin:end] for begin, end in pairwise(bounds)]


class MarkerReplacerTests(SynchronousTestCase):
    """Markers become words, and nothing else is changed."""

    @given(OUTPUT, st.lists(st.integers(0, 10_000)))
    def test_markers_that_are_whole_lines_are_replaced(
        self, output: str, places: list[int]
    ) -> None:
        replacer = OutputMarkerReplacer(MARKERS)
        shown = [replacer.feed(some) for some in cut(output.encode(), places)]
        self.assertEqual("".join(shown) + replacer.finish(), expected(output))

    def test_partial_line_is_shown_at_once_unless_it_may_become_a_marker(self) -> None:
        replacer = OutputMarkerReplacer(MARKERS)
        self.assertEqual(replacer.feed(b"half"), "half")
        self.assertEqual(replacer.feed(b" ~taw"), " ~taw")
        self.assertEqual(replacer.feed(b"\n~taw"), "\n")
        self.assertEqual(replacer.feed(b"!"), "~taw!")

    def test_marker_within_a_line_is_not_replaced(self) -> None:
        marker = MARKERS.data_begin
        replacer = OutputMarkerReplacer(MARKERS)
        self.assertEqual(replacer.feed(b"x"), "x")
        self.assertEqual(replacer.feed(marker[:9]), marker[:9].decode())
        self.assertEqual(replacer.feed(marker[9:]), marker[9:].decode())
        self.assertEqual(replacer.feed(b"\n") + replacer.finish(), "\n")
        self.assertEqual(replacer.feed(b"x"), "x")
        self.assertEqual(replacer.feed(marker + b"\n"), f"{marker.decode()}\n")

    def test_invalid_utf_8_is_replaced(self) -> None:
        replacer = OutputMarkerReplacer(MARKERS)
        self.assertEqual(replacer.feed(b"\xff\xc3") + replacer.finish(), "\ufffd\ufffd")


class Noted(ProcessProtocol):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def connectionMade(self) -> None:
        self.told.append(self.transport)

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self.told.append((childFD, data))

    def childConnectionLost(self, childFD: int) -> None:
        self.told.append(childFD)

    def processExited(self, reason: Failure) -> None:
        self.told.append(("exited", reason))

    def processEnded(self, reason: Failure) -> None:
        self.told.append(("ended", reason))


class RawProtocolTests(SynchronousTestCase):
    """A protocol that is overheard."""

    def test_protocol_gets_all_calls_and_the_screen_gets_stdout(self) -> None:
        noted, shown, reason = Noted(), Shown(), Failure(ProcessDone(0))
        heard = OutputTeeProtocol(noted, OutputMarkerReplacer(MARKERS), shown.screen, self.fail)
        heard.makeConnection("the child")
        heard.childDataReceived(1, b"a")
        heard.childDataReceived(2, b"b")
        heard.childDataReceived(1, b"\n~")
        heard.childConnectionLost(2)
        heard.childConnectionLost(1)
        heard.processExited(reason)
        heard.processEnded(reason)
        self.assertEqual(
            noted.told,
            [
                *("the child", (1, b"a"), (2, b"b"), (1, b"\n~"), 2, 1),
                *(("exited", reason), ("ended", reason)),
            ],
        )
        self.assertEqual(shown.out.getvalue(), "a\n~")

    def test_broken_screen_is_reported_and_the_protocol_goes_on(self) -> None:
        noted, shown = Noted(), Shown()
        unread: list[OutputError] = []

        shown.out.broken = True
        heard = OutputTeeProtocol(noted, OutputMarkerReplacer(MARKERS), shown.screen, unread.append)
        heard.childDataReceived(1, b"a")
        self.assertEqual(
            (noted.told, [why.is_broken_pipe for why in unread]), ([(1, b"a")], [True])
        )


class ScratchTests(SynchronousTestCase):
    """A directory for temporary files."""

    def setUp(self) -> None:
        self.around = Path(self.mktemp()).resolve()
        self.around.mkdir()
        self.patch(tempfile, "tempdir", str(self.around))

    def test_temporary_directory_is_removed_at_the_end(self) -> None:
        with make_temporary_directory() as place:
            (place / "a").mkdir()
            self.assertEqual(list(self.around.iterdir()), [place])
        self.assertEqual(list(self.around.iterdir()), [])
