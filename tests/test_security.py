"""docs/security.md: each budget has a test, and each test that the page names exists."""

from __future__ import annotations

import re

from twisted.trial.unittest import SynchronousTestCase

from tests.run import ROOT

DOCUMENT = (ROOT / "docs" / "security.md").read_text("utf-8")
PATHS = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
STEMS = {path.rpartition("/")[2].removesuffix(".py") for path in PATHS}
NAME = re.compile(r"`([\w/]*\btest_\w+)(?:\.py)?`")


class SecurityTests(SynchronousTestCase):
    def test_named_test_modules_exist(self) -> None:
        names = NAME.findall(DOCUMENT)
        self.assertGreater(len(names), 50)
        for name in names:
            self.assertTrue(name in STEMS or f"{name}.py" in PATHS, name)

    def test_each_budget_has_a_test(self) -> None:
        section = DOCUMENT.split("\n## Budgets\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.endswith(" |")]
        budgets = [row for row in rows if not row.startswith(("| resource |", "| --- |"))]
        self.assertGreater(len(budgets), 30)
        for row in budgets:
            *_, held, tests = row.removesuffix(" |").split(" | ")
            self.assertTrue(held.startswith("not held") or NAME.search(tests), row)
