"""What another process of the daemon rebuilds: counters, rings and callbacks."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.counters import EvaluationCounters
from tawebeval.core.events import encode_text_events
from tawebeval.core.ring import EventRing
from tawebeval.core.states import EvaluationState
from tawebeval.webhooks.callback import CallbackState


class RestoredTests(SynchronousTestCase):
    """An evaluation of an earlier process."""

    def test_counters(self) -> None:
        """It counts in its state, and not as one that this process has accepted."""
        counters = EvaluationCounters()
        counters.record_restored_evaluation(EvaluationState.RUNNING)
        counters.record_accepted_evaluation()
        self.assertEqual(counters.accepted_count, 1)
        self.assertEqual(counters.counts_by_state[EvaluationState.RUNNING], 1)

    def test_times(self) -> None:
        """Its events keep their times."""
        ring = EventRing()
        ring.append_batch(encode_text_events(b"a"), 5000)
        batch = ring.read_timed_events(0, 1000, str)
        self.assertEqual(json.loads(batch.lines)["time"], "5.0")

    def test_callbacks(self) -> None:
        """A callback is sent again unless it is known how it has ended."""
        open_ones = [state for state in CallbackState if not state.is_final]
        self.assertEqual(open_ones, [CallbackState.WAITING, CallbackState.PENDING])
