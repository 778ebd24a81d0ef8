"""`core.evaluation_lists`: cursors of lists, and the list over several daemons."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import attrs
import orjson
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluation_lists import (
    DaemonListPage,
    ListCursor,
    ListEntry,
    MergedListCursor,
    MergedListPage,
    make_list_page,
    merge_list_pages,
    parse_list_cursor,
    parse_list_page,
)
from tawebeval.errors import InvalidCursor

MARK = "0123456789"
NAMES = ("a", "b2", "judge")


@attrs.define
class FakeDaemon:
    """A daemon with a list, by whose clock evaluations were accepted in any order."""

    name: str
    created: list[str]

    def read_part(self, cursor: str | None, limit: int) -> DaemonListPage:
        """Return the part after a cursor, as the registry does."""
        begin = parse_list_cursor(cursor).sequence_number if cursor else 0
        end = min(begin + limit, len(self.created))
        data = [
            {"evaluation_id": f"{self.name}-{n}", "created": self.created[n]}
            for n in range(begin, end)
        ]
        return make_list_page(
            None if end == len(self.created) else str(ListCursor(MARK, end)), data
        )


def identify(entry: ListEntry) -> str:
    """Return the identifier of an entry."""
    identifier: str = orjson.loads(orjson.dumps(entry.json_fragment))["evaluation_id"]
    return identifier


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
            cursor = MergedListCursor.parse(after, NAMES)
            asked = cursor.find_unfinished_lists(NAMES)
            # In the end all are there, so that a client that asks again comes to an end.
            away = data.draw(st.sets(st.sampled_from(NAMES))) if attempt < 20 else set()
            parts = {
                name: daemons[name].read_part(place, data.draw(st.integers(1, 5)))
                for name, place in asked.items()
                if name not in away
            }
            joint = merge_list_pages(cursor, asked, parts)
            self.assertEqual(joint.unavailable_daemons, sorted(away & set(asked)))
            listed += map(identify, joint.entries)
            if joint.end_cursor is not None:
                self.assertNotEqual(joint.end_cursor, after)
                after = joint.end_cursor
            elif not joint.unavailable_daemons:
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
    def test_entries_of_a_part_are_ordered_by_time(self, times: list[list[str]]) -> None:
        parts = {
            name: make_list_page(None, [{"created": each} for each in sorted(created)])
            for name, created in zip(NAMES, times, strict=False)
        }
        joint = merge_list_pages(MergedListCursor(), parts, parts)
        found = [entry.created_time for entry in joint.entries]
        self.assertEqual(found, sorted(chain(*times)))

    def test_list_goes_on_while_somebody_answers(self) -> None:
        whole = make_list_page(None, [])
        first = merge_list_pages(MergedListCursor(), ["a", "b2"], {"a": whole})
        self.assertEqual(first, MergedListPage("a", [], ["b2"]))
        place = MergedListCursor.parse("a", NAMES)
        self.assertEqual(place.find_unfinished_lists(["b2", "a"]), {"b2": None})
        last = merge_list_pages(place, ["b2"], {})
        self.assertEqual(last, MergedListPage(None, [], ["b2"]))
        self.assertIsNone(merge_list_pages(place, ["b2"], {"b2": whole}).end_cursor)


class CursorTests(SynchronousTestCase):
    cursors = st.dictionaries(
        st.sampled_from(NAMES),
        st.none() | st.builds(ListCursor, st.just(MARK), st.integers(1, 10**18 - 1)).map(str),
    )

    @given(cursors)
    def test_cursor_is_read_as_it_was_written(self, places: dict[str, str | None]) -> None:
        text = str(MergedListCursor(places))
        self.assertEqual(MergedListCursor.parse(text, NAMES).cursors_by_daemon, places)

    def test_what_is_no_cursor_is_refused(self) -> None:
        place = f"{MARK}-1"
        for text in (
            "_", "a_", "a_a", "c", f"a-{place}_c", f"a-{MARK}-0", f"a-{MARK}-01", "a-",
            f"a-{place}-", f"a-{MARK}-{10**18}", f"A-{place}", f"a-{place.upper()}x", "a b2",
            f"a-{place}\n",
        ):  # fmt: skip
            with self.assertRaises(InvalidCursor, msg=text):
                MergedListCursor.parse(text, NAMES)
        for text in ("", "1", f"{MARK}-0", f"{MARK[1:]}-1", f"{MARK}-1_", f"{MARK}-٣"):
            error = self.assertRaises(InvalidCursor, parse_list_cursor, text)
            self.assertIn("begin again without `after`", str(error))
        self.assertEqual(parse_list_cursor(place), ListCursor(MARK, 1))

    @given(st.text())
    def test_any_text_is_a_cursor_of_this_form_or_refused(self, text: str) -> None:
        try:
            cursor = MergedListCursor.parse(text, NAMES)
        except InvalidCursor:
            return
        self.assertEqual(sorted(str(cursor)), sorted(text))


class AnswerTests(SynchronousTestCase):
    def parse(self, **changes: Any) -> DaemonListPage:
        entry = {"evaluation_id": "a-1", "created": "2026", "new": [1]}
        whole = {"daemon": "a", "begin": None, "end": f"{MARK}-1", "data": [entry], **changes}
        return parse_list_page(orjson.dumps(whole), "a")

    def test_entry_keeps_unknown_members(self) -> None:
        part = self.parse()
        self.assertEqual(part.end_cursor, f"{MARK}-1")
        self.assertEqual(
            orjson.dumps([one.json_fragment for one in part.entries]),
            b'[{"evaluation_id":"a-1","created":"2026","new":[1]}]',
        )

    def test_garbage_of_another_daemon_is_refused_in_words(self) -> None:
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

    @given(st.binary())
    def test_nothing_but_a_list_is_taken_for_one(self, body: bytes) -> None:
        with self.assertRaises(ValueError):
            parse_list_page(body, "a")
