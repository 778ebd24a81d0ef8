"""Test cases that share one browser, and look at what it has to complain of."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.integration.browser import MISSING, Browser
from tests.integration.harness import DaemonTestCase

PROBLEMS = Path(__file__).resolve().parent.parent.parent / "examples" / "problems"

WITHOUT = f"there is no {', no '.join(MISSING)}" if MISSING else None
"""Why tests with a browser are skipped; None where they are not."""


class BrowserTestCase(DaemonTestCase):
    """Tests that share a daemon and a browser; after each the console must be without errors.

    A test may name in `expected` what its own doings make a browser complain of.
    """

    skip = WITHOUT
    _browser: ClassVar[Browser | None] = None

    async def setUp(self) -> None:
        cls = type(self)
        self.addCleanup(self._quit_after_the_last)
        await super().setUp()
        if cls._browser is None:
            cls._browser = Browser()
        self.browser = cls._browser
        self.expected: tuple[str, ...] = ()
        self.addCleanup(self._check_console)

    async def _check_console(self) -> None:
        found = await self.browser.complaints()
        await self.browser.open("about:blank")  # which ends what the page asks for
        unexpected = [one for one in found if not any(word in one for word in self.expected)]
        self.assertEqual(unexpected, [])

    def _quit_after_the_last(self) -> None:
        cls = type(self)
        if cls._to_run <= {self._testMethodName} and cls._browser is not None:
            cls._browser.quit()
            cls._browser = None
