"""What another process of the daemon rebuilds: counters, rings, results and callbacks."""

from __future__ import annotations

import json

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.counters import EvaluationCounters
from tawebeval.core.events import EventBatch, encode_text_events, list_data_payloads
from tawebeval.core.results import MAX_RESULT_BYTES, ResultSummary
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import Markers, SegiParser, add_results_to_summary
from tawebeval.core.states import EvaluationState
from tawebeval.webhooks.callback import CallbackState
from tests.fakes.world import straw


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

    def test_results(self) -> None:
        """Its results are those that the parser has found, by the events alone."""
        markers = Markers.generate(straw())
        values = [
            {"type": "case", "case": "one", "verdict": "accepted"},
            {"type": "goal_result", "goal": "fast", "result": True},
            {"type": "goal_result", "goal": "x" * MAX_RESULT_BYTES, "result": True},
            {"other": 1},
        ]
        parser = SegiParser(markers)
        lines = [b"text", markers.data_begin, *(json.dumps(value).encode() for value in values)]
        batch = parser.feed(b"\n".join([*lines, markers.data_end, b""]))
        self.assertEqual([json.loads(value) for value in list_data_payloads(batch)], values)
        results = ResultSummary()
        add_results_to_summary(results, batch)
        add_results_to_summary(results, EventBatch(0, b""))
        self.assertEqual(results.build_json_object(), parser.result_summary.build_json_object())

    def test_callbacks(self) -> None:
        """A callback is sent again unless it is known how it has ended."""
        open_ones = [state for state in CallbackState if not state.is_final]
        self.assertEqual(open_ones, [CallbackState.WAITING, CallbackState.PENDING])
