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
    def test_restored_evaluation_does_not_count_as_accepted(self) -> None:
        counters = EvaluationCounters()
        counters.record_restored_evaluation(EvaluationState.RUNNING)
        counters.record_accepted_evaluation()
        self.assertEqual(counters.accepted_count, 1)
        self.assertEqual(counters.counts_by_state[EvaluationState.RUNNING], 1)

    def test_events_of_a_restored_evaluation_keep_their_times(self) -> None:
        ring = EventRing()
        ring.append_batch(encode_text_events(b"a"), 5000)
        batch = ring.read_timed_events(0, 1000, str)
        self.assertEqual(json.loads(batch.lines)["time"], "5.0")

    def test_callback_is_sent_again_unless_it_is_known_how_it_has_ended(self) -> None:
        open_ones = [state for state in CallbackState if not state.is_final]
        self.assertEqual(open_ones, [CallbackState.WAITING, CallbackState.PENDING])
