"""`core.pages`: cursors and pages as the wire shows them (contract, section 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import ring as ring_module
from tawebeval.core.event_log import EventLog, EventMemory
from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_data_event, encode_text_events
from tawebeval.core.pages import (
    ALL_RECEIVED_CURSOR,
    EventPage,
    make_empty_last_page,
    make_page,
    parse_cursor,
    resolve_cursor,
)
from tawebeval.errors import DiscardedCursor, InvalidCursor

PLENTY = 10**9


def make_log() -> EventLog:
    """Return an empty log."""
    return EventLog(EventMemory(PLENTY))


def count_line_bytes(log: EventLog) -> int:
    """Return the size of the JSON Lines of a log in memory."""
    return sum(segment.ring.line_bytes for segment in log.segments if segment.ring is not None)


def log_of(*payloads: bytes, closed: bool = False) -> EventLog:
    """Return a log of data events, one batch each."""
    log = make_log()
    for payload in payloads:
        log.append_batch(encode_data_event(payload), 0)
    if closed:
        log.mark_end()
    return log


def read_page(log: EventLog, after: str | None, limit: int) -> EventPage:
    """Return the page after a cursor."""
    return make_page(log, after, log.read_events(resolve_cursor(log, after), limit))


def ask(log: EventLog, after: str | None, limit: int) -> EventPage:
    """Return a page as one who reads page by page gets it: asking acknowledges."""
    log.acknowledge(resolve_cursor(log, after))
    return read_page(log, after, limit)


class PageTests(SynchronousTestCase):
    def check(
        self, log: EventLog, after: str | None, end: str | None, data: list[object]
    ) -> EventPage:
        """Hold the page after a cursor against what it must say, as JSON."""
        page = ask(log, after, PLENTY)
        self.assertEqual(
            json.loads(page.encode_json()),
            {"begin": after, "end": end, "data": [{"type": "data", "payload": p} for p in data]},
        )
        return page

    def test_page_has_its_cursor_its_events_and_the_next_cursor(self) -> None:
        end = ALL_RECEIVED_CURSOR
        for payloads, closed, after, expected_end, data in (
            ((b"1", b"2"), False, None, "2", [1, 2]),
            ((), False, None, "0", []),  # null would stop every client
            ((b"1",), False, "0", "1", [1]),
            ((b"1", b"2", b"3"), False, "2", "3", [3]),
            ((b"1",), False, "1", "1", []),
            ((b"1", b"2"), True, None, end, [1, 2]),
            ((b"1", b"2"), True, "1", end, [2]),
            ((b"1",), True, "1", end, []),
            ((), True, None, end, []),
        ):
            page = self.check(log_of(*payloads, closed=closed), after, expected_end, list(data))
            self.assertIs(page.is_last_page, closed)

    def test_page_before_the_last_has_no_dummy_end(self) -> None:
        log = log_of(b"1", b"2", closed=True)
        page = ask(log, None, 1)
        self.assertEqual(
            (page.begin_cursor, page.end_cursor, page.is_last_page), (None, "1", False)
        )
        self.assertEqual(page.events, encode_data_event(b"1"))

    def test_page_after_the_dummy_end_is_empty_and_ends_at_null(self) -> None:
        page = make_empty_last_page()
        self.assertEqual(
            json.loads(page.encode_json()), {"begin": ALL_RECEIVED_CURSOR, "end": None, "data": []}
        )
        self.assertTrue(page.is_last_page)
        self.assertEqual(page, make_empty_last_page())

    def test_reading_alone_discards_nothing_wherever_it_begins(self) -> None:
        log = log_of(b"1", b"2", b"3")
        for after in ("2", None, "3", "1"):
            self.assertEqual(read_page(log, after, PLENTY).begin_cursor, after)
            self.assertEqual(log.begin_cursor, 0)
        self.assertRaises(InvalidCursor, read_page, log, "4", PLENTY)

    def test_times_do_not_change_where_a_page_ends(self) -> None:
        log = make_log()
        log.append_batch(encode_text_events(b"a\nb\nc"), 1500)
        limit = 2 * len(encode_text_events(b"a").lines) + 1
        page = make_page(log, None, log.read_timed_events(0, limit, "at {}".format))
        self.assertEqual((page.begin_cursor, page.end_cursor), (None, "2"))
        expected = [{"type": "text", "payload": one, "time": "at 1.5"} for one in ("a", "\n")]
        self.assertEqual(json.loads(page.encode_json())["data"], expected)


class EncodeTests(SynchronousTestCase):
    def test_form_on_the_wire(self) -> None:
        page = EventPage(None, "2", encode_text_events(b"a\n"))
        self.assertEqual(
            page.encode_json(),
            b'{"begin":null,"end":"2","data":'
            b'[{"type":"text","payload":"a"},{"type":"text","payload":"\\n"}]}',
        )

    def test_page_without_events(self) -> None:
        self.assertEqual(
            EventPage("7", "7", EMPTY_BATCH).encode_json(), b'{"begin":"7","end":"7","data":[]}'
        )


class CursorTests(SynchronousTestCase):
    def test_absent_and_empty_are_the_same(self) -> None:
        self.assertIs(parse_cursor(None), None)
        self.assertIs(parse_cursor(""), None)

    def test_cursor_is_given_back_exactly_as_it_came(self) -> None:
        for after in ("0", "1", "10", "9" * 18, ALL_RECEIVED_CURSOR):
            self.assertEqual(parse_cursor(after), after)

    def test_what_this_server_never_wrote_is_no_cursor_of_it_number_or_not(self) -> None:
        for after in (
            "00", "01", "-1", "+1", "1.0", "1e3", " 1", "1 ", "1\n", "1_0", "0x1", "x", "END",
            "end ", "null", "None", "\u0661", "\xb2", "\uff11", "9" * 19, "9" * 5000, "\0",
            "\ud800",
        ):  # fmt: skip
            self.assertRaises(InvalidCursor, parse_cursor, after)

    def test_error_shows_the_cursor_but_not_at_length_and_nothing_unprintable(self) -> None:
        error = self.assertRaises(InvalidCursor, parse_cursor, "\0\ud800" + "x" * 10_000)
        self.assertTrue(str(error).isprintable())
        self.assertLess(len(str(error)), 300)

    @given(st.one_of(st.text(), st.from_regex(r"[0-9a-z]{1,20}")))
    def test_whatever_passes_can_be_written_into_a_url_without_being_encoded(
        self, after: str
    ) -> None:
        try:
            cursor = parse_cursor(after)
        except InvalidCursor:
            return
        assert cursor is None or re.fullmatch(r"[A-Za-z0-9_-]+", cursor)


class NewsTests(SynchronousTestCase):
    def test_events_and_the_end_are_news(self) -> None:
        for page, news in (
            (EventPage("7", "7", EMPTY_BATCH), False),
            (EventPage(None, "0", EMPTY_BATCH), False),
            (EventPage("7", "8", EventBatch(1, b"1\n")), True),
            (EventPage("7", ALL_RECEIVED_CURSOR, EMPTY_BATCH), True),
            (make_empty_last_page(), True),
        ):
            self.assertIs(page.has_events_or_is_last, news, page)


class SkipTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.log = make_log()
        self.log.append_batch(EventBatch(4, b"1\n2\n3\n4\n"), 0)

    def test_skipped_events_are_counted_from_the_cursor(self) -> None:
        for after, skip, expected in ((None, 0, 0), (None, 3, 3), ("1", 2, 3), ("4", 0, 4)):
            self.assertEqual(resolve_cursor(self.log, after, skip), expected)

    def test_cursor_may_be_discarded_where_the_place_itself_is_not(self) -> None:
        self.log.acknowledge(2)
        self.assertEqual(resolve_cursor(self.log, "0", 2), 2)
        self.assertRaises(DiscardedCursor, resolve_cursor, self.log, "0", 1)

    def test_skip_beyond_the_newest_event_is_refused(self) -> None:
        for after, skip, said in (
            ("3", 2, "after: '3' with skip: 2 is after the newest event, 4"),
            (None, 5, "after: '' with skip: 5 is after the newest event, 4"),
            (ALL_RECEIVED_CURSOR, 1, "after: 'end' with skip: 1 is after the newest event, 4"),
            ("5", 0, "after: '5' is after the newest event, 4"),
        ):
            error = self.assertRaises(InvalidCursor, resolve_cursor, self.log, after, skip)
            self.assertEqual(error.detail, said)


SIZES = st.one_of(st.integers(0, 5), st.sampled_from([500, 4000, 9000, 20_000]))
"""Sizes of payloads, around the one from which the ring does not put batches together."""


class PagesMachine(RuleBasedStateMachine):
    """A log and its readers against a plain list of all events that there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.log = make_log()
        self.lines: list[bytes] = []
        self.closed = False
        self.acknowledged = 0
        self.cursor: str | None = None  # where one reader, who goes page by page, stands
        self.got: list[bytes] = []  # ... and what it has

    @initialize(counts=st.lists(st.integers(0, 4), max_size=4))
    def fill(self, counts: list[int]) -> None:
        for count in counts:
            self.append([0] * count)

    @precondition(lambda self: not self.closed)
    @rule(sizes=st.lists(SIZES, max_size=5))
    def append(self, sizes: list[int]) -> None:
        batch = EMPTY_BATCH
        for size in sizes:
            event = encode_data_event(b'"%d %s"' % (len(self.lines), b"x" * size))
            batch += event
            self.lines.append(event.lines)
        self.log.append_batch(batch, 0)

    @precondition(lambda self: len(self.lines) > 8)
    @rule()
    def close(self) -> None:
        self.log.mark_end()
        self.closed = True

    @rule(data=st.data(), limit=st.sampled_from([0, 1, 40, 100, 1000, 9050, PLENTY]))
    def poll(self, data: st.DataObject, limit: int) -> None:
        """Somebody asks after any cursor at all, which acknowledges what lies before it."""
        after = data.draw(st.one_of(st.none(), st.integers(0, len(self.lines) + 1).map(str)))
        begin = int(after or 0)
        if begin > len(self.lines):
            self.refused(InvalidCursor, after)
        elif begin < self.acknowledged:
            self.refused(DiscardedCursor, after)
        else:
            self.check(ask(self.log, after, limit), after, begin, limit)

    @rule(limit=st.sampled_from([0, 100, 5000, PLENTY]), received=st.booleans())
    def go_on(self, limit: int, received: bool) -> None:
        """Ask for the reader's next page, whether it is received or has to be asked for again."""
        if self.cursor == ALL_RECEIVED_CURSOR or int(self.cursor or 0) < self.acknowledged:
            return
        page = ask(self.log, self.cursor, limit)
        self.check(page, self.cursor, int(self.cursor or 0), limit)
        assert page.end_cursor is not None
        if received:
            self.cursor = page.end_cursor
            self.got += page.events.lines.splitlines(keepends=True)
            assert self.got == self.lines[: len(self.got)]

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Take events as a stream's reader does; an older cursor changes nothing."""
        after = data.draw(st.integers(0, len(self.lines)))
        self.log.acknowledge(after)
        self.skip(after)

    @rule()
    def ask_after_the_end(self) -> None:
        """Ask after the dummy end, which is no place in the log."""
        self.refused(InvalidCursor, ALL_RECEIVED_CURSOR)

    @rule()
    def read_all(self) -> None:
        batch = self.log.read_events(self.acknowledged, PLENTY)
        assert batch.lines == b"".join(self.lines[self.acknowledged :])

    def refused(self, error: Callable[..., Exception], after: str | None) -> None:
        """Hold that a cursor is refused; the invariants see that nothing changed."""
        try:
            ask(self.log, after, PLENTY)
        except (InvalidCursor, DiscardedCursor) as refusal:
            assert type(refusal) is error
            if isinstance(refusal, DiscardedCursor):
                assert refusal.extra_members["oldest"] == str(self.acknowledged)
        else:
            raise AssertionError(f"{after!r} was not refused")

    def skip(self, after: int) -> None:
        """Note an acknowledgement; the reader who has not come so far begins there."""
        self.acknowledged = max(self.acknowledged, after)

    def check(self, page: EventPage, after: str | None, begin: int, limit: int) -> None:
        self.skip(begin)
        expected: list[bytes] = []
        for line in self.lines[begin:]:
            if expected and sum(map(len, expected)) + len(line) > limit:
                break
            expected.append(line)
            if sum(map(len, expected)) > limit:
                break
        assert page.events == EventBatch(len(expected), b"".join(expected))
        assert page.begin_cursor == after
        end = begin + len(expected)
        finished = self.closed and end == len(self.lines)
        assert page.end_cursor == (ALL_RECEIVED_CURSOR if finished else str(end))
        assert page.is_last_page == finished
        assert re.fullmatch(r"[A-Za-z0-9_-]+", page.end_cursor)
        value = json.loads(page.encode_json())
        assert list(value) == ["begin", "end", "data"]
        assert (value["begin"], value["end"]) == (page.begin_cursor, page.end_cursor)
        assert value["data"] == [json.loads(line) for line in expected]

    @invariant()
    def books_are_right(self) -> None:
        assert self.log.begin_cursor == self.acknowledged
        assert self.log.end_cursor == len(self.lines)
        assert count_line_bytes(self.log) == sum(map(len, self.lines[self.acknowledged :]))
        assert self.log.has_ended == self.closed


class InterleavingTests(SynchronousTestCase):
    def test_pages_are_contiguous_repeatable_and_bounded(self) -> None:
        self.patch(ring_module, "MIN_BATCH_PART_BYTES", 64)
        run_state_machine_as_test(PagesMachine, settings=settings(stateful_step_count=40))
