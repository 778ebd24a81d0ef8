"""`core.segi`: parsers that continue from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import segi
from tawebeval.core.events import EventBatch
from tawebeval.core.segi import MAX_FILE_HEADERS_BYTES, Markers, SegiParser
from tawebeval_client.results import ResultSummary
from tests.cases.strategies import (
    MARKERS,
    MAX_FILE,
    MAX_VALUE,
    SMALL_STEPS,
    answer_wanted_file,
    decode,
    stdouts,
)

MAX_STATE = 1024
READ = 64 * 1024

Call: TypeAlias = 'int | Literal["flush", "turn", "answer"]'
"""A call of a parser: `feed` of that many bytes, or another method."""

calls = st.lists(
    st.one_of(
        st.integers(1, 12), st.integers(1, 400), st.sampled_from(["flush", "turn", "answer"])
    ),
    max_size=12,
)

outputs = st.lists(
    st.one_of(
        stdouts,
        st.integers(0, 9).map(lambda n: b'\n~DB\n{"type":"score","score":%d}\n' % n),
        st.sampled_from(
            [
                b'~DB\n{"type":"progress","done":1,"total":2}\n~DE\n',
                b"\n~DB\n[\n" + b"1\n" * 9,
                b"\n~FB\n" + b"x" * (MAX_FILE_HEADERS_BYTES + MAX_FILE + 20),
                b"\n~FB\n\n" + b"x\n" * (MAX_FILE_HEADERS_BYTES + MAX_FILE) + b"~FE\n",
                b"\n~FB\nX-SEGI-As: path\n\na\n~FE\n",
                b"\n~FB\nX-SEGI-As: path\n\nrefused\n~FE\n~DB\n1\n~DE\n",
            ]
        ),
    ),
    max_size=4,
).map(b"".join)
"""Any stdout, with more results, long blocks and paths than elsewhere."""


class Player:
    """A run's stdout, the parser that gets it, and all events so far."""

    def __init__(self, stdout: bytes, markers: Markers = MARKERS) -> None:
        self.events: list[str | bytes] = []
        self.fed = 0
        self.parser = SegiParser(markers, max_value=MAX_VALUE, max_file=MAX_FILE)
        self._stdout = stdout
        self._markers = markers

    def call(self, call: Call) -> None:
        """Make a call, unless the parser does not allow that call now."""
        parser = self.parser
        if isinstance(call, int):
            chunk = self._stdout[self.fed : self.fed + call]
            self.fed += len(chunk)
            self._take(parser.feed(chunk))
        elif call == "flush":
            self._take(parser.flush_partial_line())
        elif call == "turn" and parser.has_pending_input:
            self._take(parser.parse_pending())
        elif call == "answer" and parser.awaited_file is not None:
            self._take(answer_wanted_file(parser))

    def resume(self) -> Player:
        """Return a player with a resumed parser, which has the same events so far."""
        number, packed = self.parser.make_checkpoint()
        assert len(packed) < MAX_STATE
        assert 0 <= number <= self.fed
        player = Player(self._stdout, self._markers)
        player.events += self.events
        player.fed = number
        player.parser = SegiParser.make_from_checkpoint(
            packed, self._markers, max_value=MAX_VALUE, max_file=MAX_FILE
        )
        player.parser.result_summary = ResultSummary.unpack(self.parser.result_summary.pack())
        assert player.parser.make_checkpoint() == (number, packed)
        return player

    def settle(self) -> None:
        while self.parser.has_pending_input:
            self.call("turn")

    def finish(self) -> None:
        """Feed the rest, answer all wanted files, and end stdout."""
        self.call(len(self._stdout))
        self.settle()
        while self.parser.awaited_file is not None:
            self.call("answer")
            self.settle()
        self._take(self.parser.finish())

    def _take(self, batch: EventBatch) -> None:
        self.events += decode(batch)


def settle(parser: SegiParser) -> None:
    """Parse all that was fed, and forget the events."""
    while parser.has_pending_input:
        parser.parse_pending()


def describe(parser: SegiParser) -> tuple[object, ...]:
    """Return all that the parser shows."""
    return (
        parser.make_checkpoint(),
        parser.has_pending_input,
        parser.has_partial_line,
        parser.awaited_file,
        parser.result_summary.pack(),
    )


def check_same_calls(stdout: bytes, before: Sequence[Call], after: Sequence[Call]) -> None:
    """Hold that a resumed parser that has got the rest equals the first one in every call."""
    first = Player(stdout)
    for call in before:
        first.call(call)
    second = first.resume()
    second.call(first.fed - second.fed)
    players = first, second
    for player in players:
        player.settle()
    for call in after:
        assert second.events == first.events
        assert describe(second.parser) == describe(first.parser)
        for player in players:
            player.call(call)
    for player in players:
        player.finish()
    assert second.events == first.events
    assert describe(second.parser) == describe(first.parser)


class SmallStepTests(SynchronousTestCase):
    def setUp(self) -> None:
        for name, size in SMALL_STEPS.items():
            self.patch(segi, name, size)

    @given(outputs, calls, calls)
    def test_resumed_parser_returns_the_same_events_as_the_first_one(
        self, stdout: bytes, before: list[Call], after: list[Call]
    ) -> None:
        check_same_calls(stdout, before, after)


class CutTests(SynchronousTestCase):
    def check(self, stdout: bytes, markers: Markers = MARKERS, *, in_parts: bool = False) -> None:
        """Resume after each byte, and compare with the parser that was not interrupted.

        With `in_parts` the bytes before come by fives, each flushed.
        """
        for size in range(len(stdout) + 1):
            first = Player(stdout, markers)
            for part in [*[5] * (size // 5), size % 5] if in_parts else [size]:
                first.call(part)
                if in_parts:
                    first.call("flush")
            second = first.resume()
            first.finish()
            second.finish()
            self.assertEqual(second.events, first.events, size)

    def test_parser_resumes_at_any_cut_of_each_kind_of_stdout(
        self,
    ) -> None:
        for stdout in (
            b"",
            b"\n",
            b"\n\na\n\n~DB\n1\n~DE\n\nb\n",
            b"~DB\n1\n\xe2\x82\xac\n2\n[\n~DE\n~DB\n[\n~DE\n",
            b"~DB\n[\n[\n~FB\n\na\n~FE\nx\n~D",
            b"~DB\n~DB\n" + b"x" * 2 * MAX_VALUE + b"\n" + b"x" * 2 * MAX_VALUE + b"\n~DE\n",
            b"\xf0\x9f\x98\x80\xf0\x9f\x98\n\xf0\x9f",
            b"~FB\nX-SEGI-As: path\n\na\n~FE\n~FB\nX-SEGI-As: path\n\nrefused\n~FE\n~DB\n0\n~DE\n",
            b"~FB\n\n" + b"x" * (MAX_FILE_HEADERS_BYTES + MAX_FILE + 30) + b"\n~FE\na",
        ):
            self.check(stdout)
            self.check(stdout, in_parts=True)

    def test_malformed_checkpoint_is_refused(self) -> None:
        for packed in (b"", b"\x90", b"\xff" * 9, ResultSummary().pack()):
            with self.assertRaises(msgspec.DecodeError):
                SegiParser.make_from_checkpoint(
                    packed, MARKERS, max_value=MAX_VALUE, max_file=MAX_FILE
                )


class ResumeDistanceTests(SynchronousTestCase):
    def check(self, start: bytes, piece: bytes, sizes: Sequence[int] = (READ, 1000)) -> None:
        """Hold the number to its bound in 1 MB of pieces after `start`, also after a resume."""
        limit = 20_000
        bound = limit + READ + MAX_FILE_HEADERS_BYTES
        for size in sizes:
            parser = SegiParser(MARKERS, max_value=limit, max_file=limit)
            parser.feed(start)
            fed = len(start)
            chunk = (piece * size)[:size]
            while fed < 2**20:
                fed += len(chunk)
                parser.feed(chunk)
                number, packed = parser.make_checkpoint()
                self.assertLessEqual(fed - number, bound)
                self.assertLess(len(packed), MAX_STATE)
                settle(parser)
            again = SegiParser.make_from_checkpoint(
                packed, MARKERS, max_value=limit, max_file=limit
            )
            again.feed((start + chunk * (fed // size + 1))[number:fed])
            settle(again)
            for tail in (b"\n~DE\n", b"\n~FE\nx"):
                self.assertEqual(decode(again.feed(tail)), decode(parser.feed(tail)))

    def test_resuming_in_an_endless_line_value_or_file_parses_few_bytes_again(self) -> None:
        for start, piece in (
            (b"", b"x"),
            (b"", b"\xff"),
            (b"~DB\n", b"x"),
            (b"~DB\n", b"\xff"),
            (b"~DB\n", b"\xe2\x82"),
            (b"~DB\n", b"[1]\n"),
            (b"~FB\n\n", b"x"),
            (b"~FB\n\n", b"\n~F"),
            (b"~FB\nx", b"\n"),
        ):
            self.check(start, piece)
