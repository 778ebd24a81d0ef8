"""`make fuzz`: what it runs, prints and returns."""

from __future__ import annotations

import contextlib
import io
import os
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.python.reflect import namedAny
from twisted.trial.unittest import SynchronousTestCase

from tests.fuzz import __main__ as fuzz


class Broken(SynchronousTestCase):
    """Properties to be tried, of which one does not hold; trial runs neither."""

    numbers: ClassVar[list[int]] = []

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # it is tried twice
    @given(st.integers(0, 9))
    def sound(self, number: int) -> None:
        """Hold."""
        self.numbers.append(number)

    @given(st.integers(0, 9))
    def broken(self, number: int) -> None:
        """Hold of small numbers only."""
        assert number < 7


class FuzzTests(SynchronousTestCase):
    """The runner."""

    def setUp(self) -> None:
        self.patch(fuzz, "TARGETS", {"a": ("x",), "b": ("y", "z")})
        self.patch(os, "environ", {**os.environ, "FUZZ_SECONDS": "8"})

    def try_property(self, name: str, seconds: float, seeds: str = "") -> fuzz.Outcome:
        """Try one of ours, each execution of which takes a second."""
        ticks = count()
        clock = SimpleNamespace(monotonic=lambda: next(ticks), process_time=lambda: 1.5)
        self.patch(fuzz, "time", clock)
        with contextlib.redirect_stdout(io.StringIO()):
            return fuzz.try_property(f"tests.test_fuzz.Broken.{name}", seconds, seeds)

    def test_property_is_tried_until_it_fails_or_the_time_is_over(self) -> None:
        outcome = self.try_property("sound", 8)
        self.assertEqual(outcome.findings, [])
        self.assertEqual(outcome.executions, 7)
        outcome = self.try_property("broken", 60)
        (finding,) = outcome.findings
        self.assertIn("tests.test_fuzz.Broken.broken", finding)
        self.assertIn("number=7", finding)

    def test_untried_property_is_a_finding(self) -> None:
        (finding,) = self.try_property("sound", 0).findings
        self.assertIn("never tried", finding)


class TargetTests(SynchronousTestCase):
    """The table of targets."""

    def test_each_property_exists(self) -> None:
        for names in fuzz.TARGETS.values():
            for name in names:
                holder, _, method = name.rpartition(".")
                self.assertTrue(hasattr(getattr(namedAny(holder), method), "hypothesis"), name)
