"""`core.evaluations`: transitions, identifiers, counters, and lists over several daemons."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import attrs
import orjson
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluations import (
    DAEMON_NAME_PATTERN,
    IDENTIFIER_PATTERN,
    LONG_DURATION_BUCKETS,
    SECRET_KEY_BYTES,
    SHORT_DURATION_BUCKETS,
    TRANSITIONS,
    EvaluationCounters,
    EvaluationState,
    Histogram,
    IdentifierIssuer,
    IllegalTransition,
    ListEntry,
    ListPage,
    MultiDaemonListCursor,
    check_transition,
    make_list_page,
    merge_list_pages,
    parse_list_cursor,
    parse_list_page,
)
from tawebeval.errors import InvalidCursor

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"


class TransitionTests(SynchronousTestCase):
    def test_transition_outside_of_the_table_is_refused(self) -> None:
        for state in EvaluationState:
            for following in EvaluationState:
                if following in TRANSITIONS[state]:
                    self.assertIs(check_transition(state, following), following)
                else:
                    with self.assertRaisesRegex(IllegalTransition, state.value):
                        check_transition(state, following)

    def test_documented_states_and_transitions_equal_the_transition_table(self) -> None:
        section = API.read_text("utf-8").partition("### States")[2]
        rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", section.partition("\n#")[0], re.M)
        shown = {name: set(re.findall(r"`(\w+)`", following)) for name, following in rows}
        self.assertEqual(
            shown,
            {state.value: {one.value for one in TRANSITIONS[state]} for state in EvaluationState},
        )


class HistogramTests(SynchronousTestCase):
    @given(
        st.lists(st.integers(-5, 5), unique=True, max_size=5).map(sorted),
        st.lists(st.integers(-7, 7)),
    )
    def test_bucket_counts_values_up_to_its_bound(
        self, bounds: list[int], values: list[int]
    ) -> None:
        histogram = Histogram(bounds)
        for value in values:
            histogram.record_value(value)
        expected = [(bound, sum(value <= bound for value in values)) for bound in bounds]
        self.assertEqual(list(histogram.list_buckets()), [*expected, (float("inf"), len(values))])
        self.assertEqual(histogram.sum, sum(values))

    def test_bounds_of_histogram_buckets_ascend(self) -> None:
        for bounds in (LONG_DURATION_BUCKETS, SHORT_DURATION_BUCKETS):
            self.assertEqual(sorted(set(bounds)), list(bounds))


@st.composite
def lives(draw: st.DrawFn) -> list[EvaluationState]:
    """Draw the states of an evaluation so far, by legal transitions."""
    life = [EvaluationState.QUEUED]
    while TRANSITIONS[life[-1]] and draw(st.booleans()):
        life.append(draw(st.sampled_from(sorted(TRANSITIONS[life[-1]], key=lambda one: one.value))))
    return life


class EvaluationTests(SynchronousTestCase):
    @given(st.lists(lives()))
    def test_each_evaluation_counts_in_its_state_and_stages(
        self, all_lives: list[list[EvaluationState]]
    ) -> None:
        tally = EvaluationCounters()
        for life in all_lives:
            tally.record_admission()
            for before, after in pairwise(life):
                tally.record_transition(
                    before, after, 2.0, "exit" if after is EvaluationState.FAILED else ""
                )
        self.assertEqual(tally.admitted_count, len(all_lives))
        for state in EvaluationState:
            there = sum(life[-1] is state for life in all_lives)
            been = sum(life.count(state) for life in all_lives)
            self.assertEqual(tally.counts_by_state[state], there)
            if state in (
                EvaluationState.FINISHED,
                EvaluationState.FAILED,
                EvaluationState.CANCELLED,
            ):
                reason = "exit" if state is EvaluationState.FAILED else ""
                self.assertEqual(tally.ended_counts_by_state_and_reason[state, reason], been)
            elif not state.has_ended:
                *_, (_, left) = tally.durations_by_state[state].list_buckets()
                self.assertEqual(left, been - there)
                self.assertEqual(tally.durations_by_state[state].sum, 2.0 * left)
        endings = sum(any(state.has_ended for state in life) for life in all_lives)
        self.assertEqual(tally.ended_counts_by_state_and_reason.total(), endings)

    def test_restored_evaluation_is_counted_in_its_state_and_not_as_accepted(self) -> None:
        counters = EvaluationCounters()
        counters.record_restored_evaluation(EvaluationState.RUNNING)
        counters.record_admission()
        self.assertEqual(counters.admitted_count, 1)
        self.assertEqual(counters.counts_by_state[EvaluationState.RUNNING], 1)

    def test_evaluation_that_ends_without_a_fault_clears_the_latest_fault(self) -> None:
        counters = EvaluationCounters()
        self.assertIsNone(counters.latest_machine_fault)
        for fault, expected in (("no sandbox", (5.0, "no sandbox")), (None, None)):
            counters.set_latest_machine_fault(fault, 5.0)
            self.assertEqual(counters.latest_machine_fault, expected)


KEY = bytes(range(SECRET_KEY_BYTES))


def repeating(drawn: bytes) -> Callable[[int], bytes]:
    """Return a source of randomness that has none."""
    return lambda count: (drawn * count)[:count]


draws = st.binary(min_size=1, max_size=13)
names = st.just("") | st.from_regex(DAEMON_NAME_PATTERN, fullmatch=True)


class IssuedTests(SynchronousTestCase):
    def test_identifiers_have_at_least_80_random_bits(self) -> None:
        asked: list[int] = []

        def random(count: int) -> bytes:
            asked.append(count)
            return os.urandom(count)

        identities = IdentifierIssuer(KEY, random)
        self.assertEqual(len({identities.issue_identifier() for _ in range(100)}), 100)
        self.assertGreaterEqual(min(asked) * 8, 80)

    @given(draws, st.binary(min_size=1, max_size=64))
    def test_identifiers_of_another_key_are_not_recognised(self, drawn: bytes, key: bytes) -> None:
        if key == KEY:
            return
        assert not IdentifierIssuer(KEY, os.urandom).has_issued(
            IdentifierIssuer(key, repeating(drawn)).issue_identifier()
        )

    @given(
        draws,
        st.integers(0, 39),
        st.one_of(st.text(max_size=2), st.sampled_from("aA=\u0131\u017f7-_\0\ud800\n ")),
    )
    def test_changed_identifier_is_not_recognised(
        self, drawn: bytes, place: int, other: str
    ) -> None:
        identities = IdentifierIssuer(KEY, repeating(drawn))
        identifier = identities.issue_identifier()
        for changed in (
            identifier[:place] + other + identifier[place + 1 :],
            identifier[:place] + other + identifier[place:],
            identifier[:place],
            identifier.upper(),
        ):
            assert identities.has_issued(changed) == (changed == identifier), changed

    def test_repr_of_the_issuer_has_no_key(self) -> None:
        self.assertNotIn(repr(KEY)[2:-1], repr(IdentifierIssuer(KEY, os.urandom)))

    @given(draws, st.text(max_size=5), st.text(max_size=5))
    def test_identifier_is_recognised_only_for_the_caller_it_was_issued_to(
        self, drawn: bytes, caller: str, other: str
    ) -> None:
        identities = IdentifierIssuer(KEY, repeating(drawn))
        identifier = identities.issue_identifier(caller)
        assert identities.has_issued(identifier, caller)
        assert identities.has_issued(identifier, other) == (caller == other)

    @given(draws, names, names, st.text(max_size=5))
    def test_identifier_begins_with_the_daemons_name(
        self, drawn: bytes, name: str, other: str, caller: str
    ) -> None:
        identifier = IdentifierIssuer(KEY, repeating(drawn), name).issue_identifier(caller)
        before, dash, own = identifier.rpartition("-")
        self.assertEqual((before, dash), (name, "-" if name else ""))
        self.assertTrue(re.fullmatch(IDENTIFIER_PATTERN, identifier), identifier)
        for read in (name, other):
            daemon = IdentifierIssuer(KEY, os.urandom, read)
            # Nor is it that daemon's with the name changed, whether it has one or not.
            for written in (identifier, f"{read}-{own}", own):
                expected = read == name and written == identifier
                self.assertEqual(daemon.has_issued(written, caller), expected, (read, written))

    def test_identifier_that_was_issued_once_stays_valid_in_later_versions(self) -> None:
        for name, identifier in (
            ("", "aaaaaaaaaaaaaaaaaaaaashy5uyx6gkm4qzx6j67"),
            ("a", "a-aaaaaaaaaaaaaaaaaaaaagkjvvtpndmqyqrnwg3i"),
        ):
            self.assertEqual(
                IdentifierIssuer(KEY, repeating(b"\0"), name).issue_identifier(), identifier
            )


NAMES = ("a", "b2", "judge")


@attrs.define
class FakeDaemon:
    """A daemon with a list, by whose clock evaluations were accepted in any order."""

    name: str
    created: list[str]

    def read_part(self, cursor: str | None, limit: int) -> ListPage:
        """Return the part after a cursor, as the registry does."""
        begin = parse_list_cursor(cursor) if cursor else 0
        end = min(begin + limit, len(self.created))
        data = [
            {"evaluation_id": f"{self.name}-{n}", "created": self.created[n]}
            for n in range(begin, end)
        ]
        return make_list_page(None if end == len(self.created) else str(end), data)


def identify(entry: ListEntry) -> str:
    """Return the identifier of an entry."""
    identifier: str = orjson.loads(orjson.dumps(entry.orjson_fragment))["evaluation_id"]
    return identifier


class EntryTests(SynchronousTestCase):
    def test_entry_takes_no_more_memory_than_its_bytes(self) -> None:
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        document = {"created": "", "metadata": "x" * 2000}
        before, _ = tracemalloc.get_traced_memory()
        entries = [ListEntry.make_from_document(document) for _ in range(100)]
        after, _ = tracemalloc.get_traced_memory()
        self.assertEqual(orjson.loads(entries[0].encoded_json), document)
        self.assertLess(after - before, 100 * 2300)


class JointListTests(SynchronousTestCase):
    @given(st.data())
    def test_each_evaluation_is_listed_once(self, data: st.DataObject) -> None:
        times = st.lists(st.integers(0, 9).map(str), max_size=12)
        daemons = {name: FakeDaemon(name, data.draw(times)) for name in NAMES}
        before = {name: len(daemon.created) for name, daemon in daemons.items()}
        listed: list[str] = []
        after = ""
        for attempt in range(100):
            self.assertRegex(after, r"\A[A-Za-z0-9_-]*\Z")
            cursor = MultiDaemonListCursor.parse(after, NAMES)
            asked = cursor.find_unfinished_cursors(NAMES)
            # In the end all are there, so that a client that asks again comes to an end.
            away = data.draw(st.sets(st.sampled_from(NAMES))) if attempt < 20 else set()
            parts = {
                name: daemons[name].read_part(place, data.draw(st.integers(1, 5)))
                for name, place in asked.items()
                if name not in away
            }
            joint = merge_list_pages(cursor, asked, parts)
            listed += map(identify, joint.entries)
            if joint.end_cursor is not None:
                self.assertNotEqual(joint.end_cursor, after)
                after = joint.end_cursor
            elif not away & set(asked):
                break
            if data.draw(st.booleans()):  # accepted while the list is read
                daemons[data.draw(st.sampled_from(NAMES))].created.append("5")
        else:
            self.fail("the list has no end")
        for name, daemon in daemons.items():
            own = [each for each in listed if each.startswith(f"{name}-")]
            self.assertEqual(own, [f"{name}-{n}" for n in range(len(own))])
            self.assertTrue(before[name] <= len(own) <= len(daemon.created))

    @given(st.lists(st.lists(st.integers(0, 99).map("{:02}".format)), max_size=3))
    def test_merged_entries_are_ordered_by_time(self, times: list[list[str]]) -> None:
        parts = {
            name: make_list_page(None, [{"created": each} for each in sorted(created)])
            for name, created in zip(NAMES, times, strict=False)
        }
        joint = merge_list_pages(MultiDaemonListCursor(), parts, parts)
        found = [entry.created_time for entry in joint.entries]
        self.assertEqual(found, sorted(chain(*times)))

    def test_joint_list_ends_if_no_unfinished_daemon_answers(self) -> None:
        whole = make_list_page(None, [])
        first = merge_list_pages(MultiDaemonListCursor(), ["a", "b2"], {"a": whole})
        self.assertEqual(first, ListPage("a", []))
        place = MultiDaemonListCursor.parse("a", NAMES)
        self.assertEqual(place.find_unfinished_cursors(["b2", "a"]), {"b2": None})
        last = merge_list_pages(place, ["b2"], {})
        self.assertEqual(last, ListPage(None, []))
        self.assertIsNone(merge_list_pages(place, ["b2"], {"b2": whole}).end_cursor)


class CursorTests(SynchronousTestCase):
    cursors = st.dictionaries(
        st.sampled_from(NAMES),
        st.none() | st.integers(1, 10**18 - 1).map(str),
    )

    @given(cursors)
    def test_cursor_is_read_as_it_was_written(self, places: dict[str, str | None]) -> None:
        text = str(MultiDaemonListCursor(places))
        self.assertEqual(MultiDaemonListCursor.parse(text, NAMES).cursors_by_daemon, places)

    def test_malformed_list_cursor_is_refused(self) -> None:
        for text in (
            *("_", "a_", "a_a", "c", "a-1_c", "a-0", "a-01", "a-", "a-1-", f"a-{10**18}", "A-1"),
            *("a-1x", "a b2", "a-1\n"),
        ):
            with self.assertRaises(InvalidCursor, msg=text):
                MultiDaemonListCursor.parse(text, NAMES)
        for text in ("", "0", "01", "-1", "1_", "٣"):
            error = self.assertRaises(InvalidCursor, parse_list_cursor, text)
            self.assertIn("begin again without `after`", str(error))
        self.assertEqual(parse_list_cursor("17"), 17)


class AnswerTests(SynchronousTestCase):
    def parse(self, **changes: Any) -> ListPage:
        entry = {"evaluation_id": "a-1", "created": "2026", "new": [1]}
        whole = {"daemon": "a", "begin": None, "end": "1", "data": [entry], **changes}
        return parse_list_page(orjson.dumps(whole), "a")

    def test_entry_keeps_unknown_members(self) -> None:
        part = self.parse()
        self.assertEqual(part.end_cursor, "1")
        self.assertEqual(
            orjson.dumps([one.orjson_fragment for one in part.entries]),
            b'[{"evaluation_id":"a-1","created":"2026","new":[1]}]',
        )

    def test_malformed_list_of_another_daemon_is_refused_with_a_message(self) -> None:
        for changes, words in (
            ({"daemon": "b"}, "the answer is of the daemon 'b'"),
            ({"end": "end"}, "malformed cursor"),
            ({"end": 1}, "not a list of evaluations"),
            ({"data": [{"evaluation_id": "a-1"}]}, "not a list of evaluations"),
            ({"data": {}}, "not a list of evaluations"),
        ):
            with self.assertRaisesRegex(ValueError, re.escape(words)):
                self.parse(**changes)
        deep = b'{"daemon":"a","end":null,"data":[{"evaluation_id":"","created":"","x":%s}]}' % (
            b"[" * 600 + b"]" * 600
        )
        for body in (b"", b"<html>", b"[]", b"1", b"\xff", b"[" * 10**5, deep):
            with self.assertRaisesRegex(ValueError, "not a list of evaluations"):
                parse_list_page(body, "a")
