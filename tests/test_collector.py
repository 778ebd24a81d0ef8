"""`daemon.collector`: what the collector still looks at, and what it does not."""

from __future__ import annotations

import gc
import weakref

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.collector import pass_over_what_is_there


class _Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


class CollectorTests(SynchronousTestCase):
    """Everything is given back to the collector after each test."""

    def setUp(self) -> None:
        self.addCleanup(gc.unfreeze)

    def is_looked_at(self, node: _Node) -> bool:
        """Tell whether the collector looks at an object."""
        return any(each is node for each in gc.get_objects())

    def test_before(self) -> None:
        """What is there is not looked at any more."""
        node = _Node()
        self.assertTrue(self.is_looked_at(node))
        pass_over_what_is_there()
        self.assertFalse(self.is_looked_at(node))

    def test_after(self) -> None:
        """What comes later is, and goes when nobody else refers to it."""
        pass_over_what_is_there()
        node = _Node()
        self.assertTrue(self.is_looked_at(node))
        gone = weakref.ref(node)
        del node
        gc.collect()
        self.assertIsNone(gone())

    def test_garbage(self) -> None:
        """What is garbage already goes first."""
        self.addCleanup(gc.enable)
        gc.disable()
        gone = weakref.ref(_Node())
        self.assertIsNotNone(gone())
        pass_over_what_is_there()
        self.assertIsNone(gone())
