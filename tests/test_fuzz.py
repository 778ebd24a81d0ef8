"""`make fuzz`: each property of its targets exists."""

from __future__ import annotations

from twisted.python.reflect import namedAny
from twisted.trial.unittest import SynchronousTestCase

from tests.fuzz.__main__ import TARGETS


class TargetTests(SynchronousTestCase):
    def test_each_property_exists(self) -> None:
        for names in TARGETS.values():
            for name in names:
                holder, _, method = name.rpartition(".")
                self.assertTrue(hasattr(getattr(namedAny(holder), method), "hypothesis"), name)
