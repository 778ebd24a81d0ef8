"""The simulation of a contest (`benchmarks.simulate`), with a few clients, and its page."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from benchmarks import simulate
from benchmarks.simulate import DOCUMENT, FAIRNESS, RUSH, Outcome, Scenario, Simulation

SMALL = Scenario(
    "small",
    nodes=4,
    forms={"many": 20, **{f"caller{number}": 1 for number in range(60)}},
    settings={"evaluations": {"queued": 20}, "callers": {"queued": 5}},
    seconds=100,
)


class OutcomeTests(SynchronousTestCase):
    """What becomes of the clients."""

    def test_refused_clients_come_back_and_are_served(self) -> None:
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


class PageTests(SynchronousTestCase):
    """The tables of docs/scale.md."""

    def test_page_has_the_tables_of_the_program(self) -> None:
        rush = simulate.make_rush_table({one.name: Outcome() for one in RUSH})
        fairness = simulate.make_fairness_table(Outcome())
        counts = (3, 4)
        costs = simulate.make_costs_table(
            {count: simulate.measure_costs(count) for count in counts}
        )
        costs[0] = (costs[0][0], *(f"{count:,}" for count in (100, 10_000)), "")
        found = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in simulate.find_tables(DOCUMENT.read_text("utf-8")).splitlines()
            if line.startswith("| ") and not line.startswith("| ---")
        ]
        names = [row[0] for table in (rush, fairness, costs) for row in table]
        self.assertEqual([row[0] for row in found], names)
        for table in (rush, fairness, costs):
            self.assertIn(list(table[0]), found)
        self.assertEqual(FAIRNESS.forms["many"], 500)
