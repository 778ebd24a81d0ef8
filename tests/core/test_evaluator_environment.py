"""`core.evaluator_environment`: what each run sets, and no operator can."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.evaluator_environment import (
    add_tools_to_path,
    build_environment,
    is_reserved_variable,
)
from tawebeval.core.segi import Markers


class ReservedTests(SynchronousTestCase):
    """The names that the configuration refuses."""

    def test_all_that_a_run_sets(self) -> None:
        """A configured variable either reaches the evaluator as it is, or its name is reserved."""
        run = {
            "home": "/home",
            "temporary_directory": "/tmp",
            "seed": 7,
            "submission": {"source": "/source"},
            "markers": Markers.generate(bytes),
        }
        for name in build_environment({}, **run):
            seen = build_environment({name: "configured"}, **run)[name]
            self.assertEqual(seen == "configured", not is_reserved_variable(name), name)


class ToolsTests(SynchronousTestCase):
    """The tools for evaluators."""

    def test_path(self) -> None:
        """The tools come after the programs of the operator, or else after those of the system."""
        for given, path in (
            ({"PATH": "/opt/bin"}, "/opt/bin"),
            ({}, "/usr/local/bin:/usr/bin:/bin"),
        ):
            environment = add_tools_to_path({**given, "LANG": "C"}, "/tools")
            self.assertEqual(environment.pop("PATH"), f"{path}:/tools/bin")
            self.assertEqual(environment, {"LANG": "C", "EVALUATION_TOOLS": "/tools"})
