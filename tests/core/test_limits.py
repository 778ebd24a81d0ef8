"""`core.limits`: the values of limits that a request chooses."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.limits import LIMIT_UNITS, LimitRange, parse_limits
from tawebeval.errors import InvalidField

MIB = 1024**2


class LimitTests(SynchronousTestCase):
    def parse(self, name: str, value: str, least: float = 0, most: float = 2**40) -> float:
        return parse_limits({name: value}, {name: LimitRange(least, most)})[name]

    def check_refused(
        self, name: str, value: str, words: str, least: float = 0, most: float = 2**40
    ) -> InvalidField:
        """Hold that a value is refused with these words, and the field named."""
        error = self.assertRaises(InvalidField, self.parse, name, value, least, most)
        self.assertEqual(error.detail, f"limits[{name}]: {words}")
        self.assertEqual(error.extra_members["field"], f"limits[{name}]")
        return error

    def test_each_unit_has_its_syntax(self) -> None:
        for name, value, number in (
            ("wall_clock", "10", 10),
            ("wall_clock", "0.25", 0.25),
            ("cpu", "3", 3),
            ("processes", "64", 64),
            ("memory", "65536", 65536),
            ("memory", "64k", 65536),
            ("file_size", "7B", 7),
            ("disk", "1.5GiB", 1536 * MIB),
            ("output", "2MB", 2 * MIB),
            ("stderr", "1T", 2**40),
        ):
            found = self.parse(name, value)
            self.assertEqual(found, number)
            self.assertIs(type(found), float if name == "wall_clock" else int)

    def test_empty_value_chooses_nothing(self) -> None:
        self.assertEqual(parse_limits(dict.fromkeys(LIMIT_UNITS, ""), {}), {})

    def test_refusal_of_any_other_text_says_what_is_expected(self) -> None:
        for name, values, words in (
            (
                "wall_clock",
                ("-1", "1e3", "ten", "inf", "nan", " 1", "1.", ".5", "9" * 11, "\u0661"),
                "a number of seconds, such as 10 or 2.5",
            ),
            ("cpu", ("2.5", "+1"), "a whole number of seconds, such as 10"),
            ("processes", ("1K", "0x10"), "a whole number, such as 100"),
            (
                "memory",
                ("1 M", "M", "1MM", "1P", "1x", "1_0", "\n"),
                "a size: bytes, or a number with K, M, G or T (of 1024), such as 65536 or 256M",
            ),
        ):
            for value in values:
                self.check_refused(name, value, f"{value!r} is not {words}")

    def test_below_the_minimum_and_at_0_the_refusal_names_the_minimum(self) -> None:
        error = self.check_refused(
            "memory", "1M", "'1M' is below the minimum, 16 MiB", least=16 * MIB
        )
        self.assertEqual(error.extra_members["limit"], 16 * MIB)
        self.check_refused("wall_clock", "0", "'0' is not above 0")
        self.check_refused("memory", "0.1", "'0.1' is not above 0")
        self.assertEqual(self.parse("memory", "16M", least=16 * MIB), 16 * MIB)

    def test_above_the_maximum_the_refusal_names_both_numbers_and_the_setting(self) -> None:
        error = self.check_refused(
            "memory", "2G", "2 GiB is over the maximum, 1 GiB (limits.maximum.memory)", most=2**30
        )
        self.assertEqual(error.extra_members["limit"], 2**30)
        self.check_refused(
            "wall_clock", "10.5", "10.5 s is over the maximum, 10 s (limits.maximum.wall_clock)",
            most=10,
        )  # fmt: skip
        self.check_refused(
            "processes", "1000001",
            "1000001 is over the maximum, 1000000 (limits.maximum.processes)", most=10**6,
        )  # fmt: skip
        self.assertEqual(self.parse("memory", "1G", most=2**30), 2**30)
