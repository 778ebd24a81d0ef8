"""Floods: whatever an evaluator prints is bounded work in each turn of the reactor.

Work is counted, not timed: by the calls that Python makes, and by the bytes of events.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from twisted.trial.unittest import SynchronousTestCase

from benchmarks.floods import FILE, VALUE, floods
from tawebeval.core.events import EventBatch, compute_base64_size
from tawebeval.core.segi import (
    MAX_BYTES_PARSED_PER_CALL,
    MAX_FILE_HEADERS_BYTES,
    Markers,
    SegiParser,
)

READ = 64 * 1024

MOST_CALLS = 40_000
"""In one turn; a call takes some 50 to 100 ns."""

EXPANSION = 33
"""Bytes of events that a byte of text becomes at most: lines of one control character."""

MOST_EVENTS = MAX_BYTES_PARSED_PER_CALL + max(
    EXPANSION * (READ + READ // 3),
    compute_base64_size(FILE) + 6 * MAX_FILE_HEADERS_BYTES,
    VALUE + 100,
)
"""Bytes in one turn: the 3.5 MiB of docs/scale.md, with the default limits."""


class FloodTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.markers = Markers.generate(os.urandom)

    def turns(
        self, stdout: bytes, measure: Callable[[Callable[[], EventBatch]], EventBatch]
    ) -> Iterator[EventBatch]:
        """Yield what each turn brings; `measure` lets it pass. The first file named is large."""
        parser = SegiParser(self.markers, max_value=VALUE, max_file=FILE)
        content = b"x" * FILE
        for place in range(0, len(stdout), READ):
            chunk = stdout[place : place + READ]
            yield measure(lambda chunk=chunk: parser.feed(chunk))
            while parser.has_pending_input or parser.awaited_file is not None:
                if parser.awaited_file is None:
                    yield measure(parser.parse_pending)
                else:
                    yield measure(lambda content=content: parser.supply_file(content))
                    content = b"x"
        yield measure(parser.finish)

    def test_turn_makes_a_bounded_number_of_calls_and_events(self) -> None:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        def measured(turn: Callable[[], EventBatch]) -> EventBatch:
            nonlocal calls
            calls = 0
            sys.setprofile(count)
            try:
                return turn()
            finally:
                sys.setprofile(None)

        for name, stdout in floods(self.markers, READ).items():
            for batch in self.turns(stdout, measured):
                self.assertLess(calls, MOST_CALLS, name)
                self.assertLess(len(batch.lines), MOST_EVENTS, name)
