"""`tawebeval_client.results`: the summary of an evaluator's results."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client.results import (
    MAX_GOAL_NAMES_BYTES,
    MAX_GOALS,
    MIN_RESULT_BYTES,
    TYPE_KEY_JSON,
    VERDICTS,
    ResultSummary,
    judge_evaluation,
)

EMPTY = {"goals": {}, "goals_omitted": 0, "cases": {}, "progress": None, "score": None}


def sum_up(*values: Any) -> dict[str, Any] | None:
    """Return the summary of values; those that are bytes are JSON already."""
    summary = ResultSummary()
    for value in values:
        summary.add_if_result(value if isinstance(value, bytes) else json.dumps(value).encode())
    return summary.build_json_object()


def describe(json_value: bytes) -> str:
    """Return what is said of a value that does not count."""
    summary = ResultSummary()
    summary.add_if_result(json_value)
    return summary.uncounted_value


def goal(name: str, reached: bool = True) -> dict[str, Any]:
    """Return the value that reports a goal."""
    return {"type": "goal_result", "goal": name, "result": reached}


def score(number: object, **others: object) -> bytes:
    """Return the value that reports a score, which may be written in any way."""
    members = "".join(f', "{name}": {value}' for name, value in others.items())
    return f'{{"type": "score", "score": {number}{members}}}'.encode()


results = st.lists(
    st.builds(goal, st.sampled_from("abc") | st.text(max_size=3), st.booleans())
    | st.builds(
        lambda case, verdict: {"type": "case", "case": case, "verdict": verdict},
        st.text(max_size=2),
        st.sampled_from(VERDICTS),
    )
    | st.builds(
        lambda done, total: {"type": "progress", "done": done, "total": total},
        st.integers(0, 2**53),
        st.integers(0, 2**53),
    )
    | st.builds(
        lambda one, maximum: {"type": "score", "score": one, "maximum": maximum},
        st.floats(-(2**53), 2**53),
        st.none() | st.integers(-(2**53), 2**53),
    )
    | st.integers()
    | st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    max_size=30,
)
"""Results and other values."""


class ShareTests(SynchronousTestCase):
    def test_share_is_computed_from_points_or_without_points_from_cases_and_goals(self) -> None:
        for values, share in (
            ([], 0),
            ([score(30, maximum=120)], 0.25),
            ([score(30, maximum=20), goal("a", False)], 1),
            ([score(-1, maximum=20)], 0),
            ([score(30)], 30),
            ([score(30, maximum=0)], 30),
            ([goal("a"), goal("b", False)], 0.5),
            ([{"type": "case", "case": "x", "verdict": one} for one in VERDICTS[:4]], 0.25),
            ([{"type": "case", "case": "x", "verdict": "accepted"}, goal("a", False)], 0.5),
        ):
            summary = ResultSummary()
            for value in values:
                encoded = value if isinstance(value, bytes) else json.dumps(value).encode()
                summary.add_if_result(encoded)
            self.assertEqual(summary.compute_share(), share, values)


class ResultSummaryTests(SynchronousTestCase):
    def test_first_malformed_result_is_described(self) -> None:
        begin = 'a value of the type "{}" does not count as a result: '
        long = "x" * 50
        for value, words in (
            ({**goal("x"), "result": "yes"}, '"result" is "yes"; write true or false'),
            ({**goal("x"), "result": 1}, '"result" is 1; write true or false'),
            ({**goal("x"), "goal": 7}, '"goal" is 7; write a string'),
            ({"type": "goal_result", "goal": "x"}, '"result" is missing'),
            (
                {"type": "case", "case": "1", "verdict": "WA"},
                '"verdict" is "WA"; write one of accepted, wrong_answer, time_limit,',
            ),
            (
                {"type": "case", "case": "1", "verdict": long},
                f'"verdict" is "{long[:39]}...; write',
            ),
            ({"type": "case", "verdict": "accepted"}, '"case" is missing'),
            (
                {"type": "progress", "done": -1, "total": 2},
                '"done" is -1; write a whole number from',
            ),
            ({"type": "progress", "done": 0.5, "total": 2}, '"done" is 0.5; write a whole number'),
            ({"type": "score", "score": "30"}, '"score" is "30"; write a number from'),
        ):
            summary = ResultSummary()
            summary.add_if_result(json.dumps(value).encode())
            summary.add_if_result(b'{"type": "score"}')
            found = summary.uncounted_value
            self.assertTrue(found.startswith(begin.format(value["type"]) + words), found)
            self.assertEqual(ResultSummary.unpack(summary.pack()).uncounted_value, found)
        for other in (
            goal("x"),
            {"type": "score", "score": 1, "name": "part"},
            {"type": "score", "score": 1, "goal": "part"},
            [{"type": "score"}],
            {"inner": {"type": "score"}},
            {"type": "other", "inner": {"type": "score"}},
        ):
            self.assertEqual(describe(json.dumps(other).encode()), "", other)
        wrong = b'{"type": "score", "score": "x"'
        self.assertEqual(describe(wrong + b', "\\ud800": 1}'), "")
        # Python's version decides whether msgspec gives up.
        deep = describe(wrong + b', "deep": ' + b"[" * 5000 + b"]" * 5000 + b"}")
        self.assertIn(deep, ("", describe(wrong + b"}")))

    def test_only_the_ten_verdicts_are_counted(self) -> None:
        cases = [{"type": "case", "case": "", "verdict": one} for one in (*VERDICTS, "ok", None)]
        self.assertEqual(sum_up(*cases), {**EMPTY, "cases": dict.fromkeys(VERDICTS, 1)})
        self.assertEqual(len(VERDICTS), 10)

    def test_score_without_a_fraction_is_an_integer(self) -> None:
        for written, shown in (
            *(("1e3", 1000), ("0.5", 0.5), ("-0.0", 0), ("1e-999", 0), (2**53, 2**53)),
            *((-3, -3), ("1E-7", 1e-7)),
        ):
            summary = sum_up(score(written))
            self.assertEqual(json.dumps(summary and summary["score"]["score"]), json.dumps(shown))
        self.assertEqual(
            sum_up(score(1, maximum="null")), {**EMPTY, "score": {"score": 1, "maximum": None}}
        )

    def test_malformed_result_is_not_counted(self) -> None:
        for value in (
            *(b"1", b"[]", b"{}", b'"type"', b'{"type":"score"}'),
            b'{"type":"sc\\u006fre","score":1}',
            [goal("in a list")],
            {"in": goal("an object")},
            {"type": "file", "of": goal("another type")},
            {"type": ["goal_result"], "goal": "a", "result": True},
            *({"type": "goal_result", "goal": one, "result": True} for one in (1, None, ["a"])),
            *({"type": "goal_result", "goal": "a", "result": one} for one in (1, "yes", None)),
            {"type": "goal_result", "result": True},
            {"type": "case", "case": 1, "verdict": "accepted"},
            {"type": "case", "case": "a"},
            *({"type": "progress", "done": one, "total": 2} for one in (-1, 1.5, "1", 10**30)),
            {"type": "progress", "done": 1},
            *(score(one) for one in ("1e999", 10**400, '"1"', "true", "null", 2**53 + 2, "-1e300")),
            *(score(1, name='"a part"'), score(1, goal='"a"'), score(1, maximum="[]")),
            b'{"type":"file","type":"score","score":1,"x":"\\"type\\":\\"score\\""}',
        ):
            self.assertIsNone(sum_up(value), value)

    def test_result_nested_5000_levels_deep_raises_nothing(self) -> None:
        found = sum_up(score(1, deep="[" * 5000 + "]" * 5000))
        self.assertIn(found, (None, sum_up(score(1))))

    def test_spaces_and_order_of_members_make_no_difference(self) -> None:
        value = b'{ "x":[{"type":"case"}],\t"score" : 3 ,"type"\t: \r"score" }'
        self.assertEqual(sum_up(value), {**EMPTY, "score": {"score": 3, "maximum": None}})

    def test_min_result_bytes_is_the_length_of_the_shortest_result(self) -> None:
        self.assertEqual(MIN_RESULT_BYTES, len(b'{"type":"score","score":1}'))
        shortest = b'{"type":"case","case":"","verdict":"partial"}'
        self.assertIn(TYPE_KEY_JSON, shortest)
        self.assertGreater(len(shortest), MIN_RESULT_BYTES)

    def test_any_goal_name_is_in_the_summary_unchanged(self) -> None:
        names = ["", "\0", "😀", "é" * 1000, '"\\', "\u2028"]
        self.assertEqual(sum_up(*map(goal, names)), {**EMPTY, "goals": dict.fromkeys(names, True)})

    def test_goals_beyond_the_maximum_number_are_counted_as_omitted(self) -> None:
        goals = [goal(str(number)) for number in range(10 * MAX_GOALS)]
        summary = sum_up(*goals, goal("0", False), goals[-1])
        assert summary is not None
        self.assertEqual(len(summary["goals"]), MAX_GOALS)
        self.assertEqual(summary["goals_omitted"], 9 * MAX_GOALS + 1)
        self.assertIs(summary["goals"]["0"], False)

    def test_goals_beyond_the_byte_limit_for_goal_names_are_counted_as_omitted(self) -> None:
        longest = "x" * (MAX_GOAL_NAMES_BYTES - 2 - 3)
        for names, kept in (
            (["x" * (MAX_GOAL_NAMES_BYTES - 1)], []),
            ([longest, "yy", "z", "zz"], [longest, "z"]),
            (["\1" * (MAX_GOAL_NAMES_BYTES // 6 + 1)], []),
        ):
            self.assertEqual(
                sum_up(*map(goal, names)),
                {
                    **EMPTY,
                    "goals": dict.fromkeys(kept, True),
                    "goals_omitted": len(names) - len(kept),
                },
            )

    def test_summary_of_hostile_results_takes_less_than_20_kib(self) -> None:
        names = [f"{number:03}" + "é" * 16 for number in range(2 * MAX_GOALS)]
        values = [json.dumps(goal(name), ensure_ascii=False).encode() for name in names]
        values += [b'{"type":"goal_result","goal":"%b","result":true}' % (b"x" * 16_000)] * 9
        summary = ResultSummary()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for value in values:
                summary.add_if_result(value)
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        self.assertLess(taken, 20 * 1024)

    @given(results)
    def test_summary_equals_one_computed_from_the_decoded_values(self, values: list[Any]) -> None:
        expected: dict[str, Any] = {**EMPTY, "goals": {}, "cases": {}}
        for value in values:
            match value:
                case {"type": "goal_result", "goal": name, "result": reached}:
                    expected["goals"][name] = reached
                case {"type": "case", "verdict": verdict}:
                    expected["cases"][verdict] = expected["cases"].get(verdict, 0) + 1
                case {"type": "progress" | "score" as kind, **members}:
                    expected[kind] = members
        assert sum_up(*values) == (None if expected == EMPTY else expected)


class PackingTests(SynchronousTestCase):
    @given(results, results)
    def test_unpacked_summary_counts_later_values_like_the_original(
        self, before: list[Any], after: list[Any]
    ) -> None:
        first = ResultSummary()
        for value in before:
            first.add_if_result(json.dumps(value).encode())
        second = ResultSummary.unpack(first.pack())
        for value in after:
            first.add_if_result(json.dumps(value).encode())
            second.add_if_result(json.dumps(value).encode())
        assert json.dumps(second.build_json_object()) == json.dumps(first.build_json_object())
        assert second == first

    def test_largest_summary_packs_into_8_kib(self) -> None:
        goals = [goal(f"{number:038}") for number in range(2 * MAX_GOALS)]
        summary = ResultSummary()
        for value in [*goals, *({"type": "case", "case": "", "verdict": v} for v in VERDICTS)]:
            summary.add_if_result(json.dumps(value).encode())
        packed = summary.pack()
        self.assertLess(len(packed), 8 * 1024)
        again = ResultSummary.unpack(packed)
        self.assertEqual(again.build_json_object(), summary.build_json_object())
        for each in (summary, again):
            each.add_if_result(json.dumps(goal("x" * 200)).encode())
        self.assertEqual(again.build_json_object(), summary.build_json_object())
        self.assertEqual(again.pack(), summary.pack())

    def test_invalid_packed_summary_is_refused(self) -> None:
        for packed in (b"", b"\x80", b"\xff" * 9):
            with self.assertRaises(msgspec.DecodeError):
                ResultSummary.unpack(packed)


class VerdictTests(SynchronousTestCase):
    def test_client_and_page_show_the_same_verdict_for_the_same_results(self) -> None:
        for expected, members in (  # as in tests/integration/page_modules/verdict.mjs
            ("finished", None),
            ("finished", {"progress": {"done": 1, "total": 1}}),
            ("finished", points(7)),
            ("accepted", {"cases": {"accepted": 2}}),
            ("accepted", {"goals": {"fast": True}}),
            ("accepted", points(100, 100)),
            ("accepted", {"cases": {"accepted": 1}, "goals": {"fast": True}, **points(5, 5)}),
            ("wrong answer", {"cases": {"accepted": 8, "wrong_answer": 1, "time_limit": 3}}),
            ("time limit", {"cases": {"time_limit": 1, "wrong_answer": 9}, **points(0, 10)}),
            ("judge error", {"cases": {"wrong_answer": 9, "compile_error": 1, "judge_error": 1}}),
            ("compile error", {"cases": {"wrong_answer": 1, "compile_error": 1}, **points(5, 10)}),
            ("partly correct", {"cases": {"accepted": 3, "wrong_answer": 1}, **points(30, 40)}),
            ("partly correct", {"cases": {"accepted": 3, "partial": 1}}),
            ("partly correct", {"goals": {"fast": False, "legal": True}}),
            ("partly correct", {"cases": {"accepted": 3}, **points(1, 2)}),
            ("not accepted", {"cases": {"accepted": 3}, "goals": {"fast": False}}),
            ("not accepted", {"goals": {"fast": False, "legal": False}}),
            ("not accepted", {"cases": {"accepted": 3}, **points(0, 2)}),
            ("incomplete", {"cases": {"accepted": 3, "skipped": 1}}),
            ("incomplete", {"cases": {"skipped": 1}}),
            ("incomplete", {"goals": {"fast": True}, "goals_omitted": 1}),
        ):
            results = None if members is None else {**EMPTY, **members}
            self.assertEqual(judge_evaluation(None, results), expected, members)
            self.assertEqual(judge_evaluation("cancelled", results), "cancelled")
            self.assertEqual(judge_evaluation("exit", results), "evaluation failed")


def points(score: float, maximum: float | None = None) -> dict[str, Any]:
    """Return a score as a summary has it."""
    return {"score": {"score": score, "maximum": maximum}}
