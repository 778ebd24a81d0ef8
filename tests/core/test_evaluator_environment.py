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
    def test_all_that_a_run_sets(self) -> None:
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
    def test_tools_come_after_the_operators_programs(self) -> None:
        for given, path in (
            ({"PATH": "/opt/bin"}, "/opt/bin"),
            ({}, "/usr/local/bin:/usr/bin:/bin"),
        ):
            environment = add_tools_to_path({**given, "LANG": "C"}, "/tools")
            self.assertEqual(environment.pop("PATH"), f"{path}:/tools/bin")
            self.assertEqual(environment, {"LANG": "C", "EVALUATION_TOOLS": "/tools"})
