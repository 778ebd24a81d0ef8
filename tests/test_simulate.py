"""The simulation of a contest (`benchmarks.simulate`), with a few clients."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from benchmarks.simulate import Scenario, Simulation

SMALL = Scenario(
    "small",
    nodes=4,
    forms={"many": 20, **{f"caller{number}": 1 for number in range(60)}},
    settings={"evaluations": {"queued": 20}, "callers": {"queued": 5}},
    seconds=100,
)


class OutcomeTests(SynchronousTestCase):
    def test_refused_clients_retry_and_are_all_served(self) -> None:
        outcome = Simulation(SMALL, seed=1).run()
        self.assertEqual((len(outcome.all_waits), outcome.given_up.total()), (80, 0))
        self.assertGreater(outcome.refusals["evaluations.queued"], 5)
        self.assertGreater(outcome.refusals["callers.queued"], 0)
        self.assertLess(outcome.refusals.total(), 300)
        self.assertEqual(outcome.most_waiting, 20)
        assert outcome.first_refusal is not None
        self.assertIn(outcome.first_refusal[0], outcome.refusals)
        # 80 of 10 s each on 4 nodes.
        self.assertLess(outcome.ended_at, 400)
