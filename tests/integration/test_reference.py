"""The API reference at `/docs`, in a real browser, against the real daemon."""

from __future__ import annotations

from tests.cases.described import operations
from tests.integration.browser import DESKTOP
from tests.integration.browser_case import BrowserTestCase
from tests.integration.harness import CONFIGURATION

SHOWN = """
return Array.from(document.querySelectorAll(".opblock"), (block) =>
  [block.querySelector(".opblock-summary-method").innerText.toLowerCase(),
   block.querySelector("[data-path]").dataset.path].join(" "));
"""


class ReferenceTests(BrowserTestCase):
    configuration = CONFIGURATION

    async def setUp(self) -> None:
        await super().setUp()
        await self.browser.open(f"{self.daemon.url}/docs")
        await self.browser.until("document.querySelector('.opblock')")

    async def test_reference_shows_each_operation_of_the_description(self) -> None:
        described = [f"{method.lower()} {path}" for method, path, _ in operations()]
        self.assertEqual(sorted(await self.browser.script(SHOWN)), sorted(described))

    async def test_reference_sends_a_request_to_the_daemon(self) -> None:
        for button in ("button", ".try-out button", "button.execute"):
            selector = f"[id$='-readHealth'] {button}"
            await self.browser.until(f'document.querySelector("{selector}")')
            await self.browser.click(selector)
        await self.browser.shows("[id$='-readHealth'] .live-responses-table", "200")

    async def test_reference_is_accessible_in_each_look(self) -> None:
        await self.browser.click("[id$='-evaluate'] button")
        await self.browser.until("document.querySelector('[id$=-evaluate] .parameters')")
        for scheme in ("light", "dark"):
            await self.browser.look(DESKTOP, scheme)
            dark = "document.documentElement.matches('.dark-mode')"
            await self.browser.until(f"{dark} === {str(scheme == 'dark').lower()}")
            # Until colours have changed: buttons take 0.3 s.
            await self.browser.until("document.getAnimations().length === 0")
            self.assertEqual(await self.browser.violations(), [], scheme)
