"""`core.environment`: what each run sets, and no operator can."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.environment import build_environment, is_reserved_variable
from tawebeval.core.segi import Markers


class ReservedTests(SynchronousTestCase):
    """The names that the configuration refuses."""

    def test_all_that_a_run_sets(self) -> None:
        """A configured variable either reaches the evaluator as it is, or its name is reserved."""
        run = {
            "home": "/home",
            "temporary": "/tmp",
            "seed": 7,
            "submission": {"source": "/source"},
            "markers": Markers.generate(bytes),
        }
        for name in build_environment({}, **run):
            seen = build_environment({name: "configured"}, **run)[name]
            self.assertEqual(seen == "configured", not is_reserved_variable(name), name)
