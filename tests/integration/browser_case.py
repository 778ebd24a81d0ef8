"""Test cases that share one browser, and look at what it has to complain of."""

from __future__ import annotations

import atexit
import functools
import shutil
from pathlib import Path

from tests.integration.browser import MISSING, Browser
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.integration.unprivileged import temporary_folder

PROBLEMS = Path(__file__).resolve().parent.parent.parent / "examples" / "problems"
TOUR = PROBLEMS / "knights_tour" / "solutions" / "right_open.txt"

WITHOUT = f"there is no {', no '.join(MISSING)}" if MISSING else None
"""Why tests with a browser are skipped; None where they are not."""


@functools.cache
def start_browser(*switches: str, handshakes: bool = False) -> Browser:
    """Return the browser with these switches that all tests of a process share."""
    browser = Browser(*switches, handshakes=handshakes)
    atexit.register(browser.quit)
    return browser


class BrowserTestCase(DaemonTestCase):
    """Tests that share a daemon and a browser; after each the console must be without errors.

    A test may name in `expected` what its own doings make a browser complain of.
    """

    skip = WITHOUT

    async def setUp(self) -> None:
        await super().setUp()
        self.browser = self.get_browser()
        self.expected: tuple[str, ...] = ()
        self.addCleanup(self._check_console)

    def get_browser(self) -> Browser:
        return start_browser()

    def configure_tokens(self, *lines: str, settings: str = "") -> None:
        """Let the daemon that is started next know tokens, by their lines."""
        folder = temporary_folder()
        self.addCleanup(shutil.rmtree, folder)
        (folder / "tokens").write_text("\n".join(lines))
        callers = f"\n[callers]\ntokens = '{folder}/tokens'\n{settings}\n"
        type(self).configuration = CONFIGURATION + callers

    async def _check_console(self) -> None:
        found = await self.browser.complaints()
        await self.browser.open("about:blank")  # which ends what the page asks for
        unexpected = [one for one in found if not any(word in one for word in self.expected)]
        self.assertEqual(unexpected, [])


class PageTestCase(BrowserTestCase):
    """Tests of the page, as somebody uses it who has a repository and a file."""

    @property
    def page_url(self) -> str:
        return f"{self.daemon.url}/"

    async def visit(self) -> None:
        """Open the page, and wait for its form: a test's script could come before the page's."""
        await self.browser.open(self.page_url)
        await self.browser.until("document.querySelector('#fields .content')?.checkVisibility()")

    async def fill(self, command: str, directory: str = "", field: str = "source") -> None:
        values = {
            "[name='repository[url]']": self.repository.url,
            "[name='commit_oid']": self.commit,
            "[name='directory']": directory,
            "[name='evaluator_cmd']": command,
            "#fields .name": field,
        }
        await self.browser.script(
            """
            for (const [selector, value] of Object.entries(arguments[0])) {
              const input = form.querySelector(selector);
              input.value = value;
              input.dispatchEvent(new Event("input", { bubbles: true }));
            }
            """,
            values,
        )
        await self.browser.write("#fields .content", str(TOUR))

    async def submit(self, command: str, directory: str = "", field: str = "source") -> str:
        """Send the form; return the identifier, which is in the link then."""
        await self.fill(command, directory, field)
        await self.browser.click("#submit")
        begun = "location.hash.startsWith('#evaluation/') && location.hash.slice(12)"
        identifier: str = await self.browser.until(begun)
        self.client.evaluations.append(identifier)
        return identifier

    async def tour(self) -> str:
        """Have a tour of the example problem judged to its end."""
        shutil.copytree(PROBLEMS, self.repository.folder, dirs_exist_ok=True)
        self.commit = self.repository.commit()
        identifier = await self.submit("python3 tour_evaluator.py", "knights_tour", "tour")
        await self.browser.shows("#state", "finished")
        return identifier

    async def rows(self, selector: str) -> list[list[str]]:
        """Return what stands in the cells of a table that can be seen."""
        found: list[list[str]] = await self.browser.script(
            """
            return [...document.querySelectorAll(arguments[0])].map((row) =>
              [...row.cells].filter((cell) => cell.checkVisibility()).map((cell) => cell.innerText))
            """,
            selector,
        )
        return found

    async def check_tour(self) -> None:
        self.assertEqual(
            await self.rows("#goals tbody tr"),
            [["legal", "reached"], ["complete", "reached"], ["closed", "not reached"]],
        )
        self.assertEqual(
            await self.browser.text("#output"), "following the knight ... ok, 64 of 64 squares"
        )
        self.assertTrue(
            await self.browser.until("document.querySelector('.files img')?.naturalWidth > 0"),
            "the drawing is not shown",
        )
        self.assertIn("ran", await self.browser.text("#facts"))
