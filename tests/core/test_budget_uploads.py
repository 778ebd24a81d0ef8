"""`core.spool`: how many bytes of uploads there may be on the disk."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.budget import Spool
from tawebeval.errors import Busy


class SpoolTests(SynchronousTestCase):
    """Bytes that come and go."""

    def test_limit(self) -> None:
        """As many fit as are allowed and not one more, and that is told with a time."""
        spool = Spool(100)
        spool.take(60)
        spool.take(40)
        error = self.assertRaises(Busy, spool.take, 1)
        self.assertGreater(error.retry_after, 0)
        self.assertEqual(spool.held, 100)
        spool.give_back(10)
        spool.take(10)

    def test_check(self) -> None:
        """What is only announced is looked at, and sets nothing aside."""
        spool = Spool(100)
        for _ in range(3):
            spool.check(100)
        self.assertEqual(spool.held, 0)
        spool.take(1)
        self.assertRaises(Busy, spool.check, 100)
        spool.check(99)

    def test_refused(self) -> None:
        """What does not fit is not counted."""
        spool = Spool(100)
        self.assertRaises(Busy, spool.take, 101)
        spool.take(100)

    def test_crowded(self) -> None:
        """So much is in memory that no form is to gather more."""
        spool = Spool(100)
        self.assertFalse(spool.is_crowded)
        spool.in_memory = 32 * 2**20
        self.assertTrue(spool.is_crowded)

    def test_too_much_back(self) -> None:
        """Nobody gives back what was not taken."""
        spool = Spool(100)
        spool.take(10)
        self.assertRaises(AssertionError, spool.give_back, 11)
        self.assertRaises(AssertionError, spool.give_back, -1)
