"""The page of a daemon with tokens, and the reference at `/docs`, in a real browser."""

from __future__ import annotations

from tests.cases.described import operations
from tests.integration.browser import DESKTOP
from tests.integration.browser_case import PROBLEMS, BrowserTestCase
from tests.integration.client import Client
from tests.integration.harness import CONFIGURATION, new_token

TOUR = PROBLEMS / "knights_tour" / "solutions" / "right_closed.txt"
STORED = "return Object.values(localStorage).join()"


class TokenTests(BrowserTestCase):
    async def setUp(self) -> None:
        self.token, line = new_token("alice")
        self.configure_tokens(line)
        await super().setUp()
        self.client = Client(self.daemon.url, self.token)
        self.expected = ("401 (Unauthorized)",)
        await self.browser.look(DESKTOP, "light")

    async def test_page_asks_for_a_token_and_stores_it_only_on_request(self) -> None:
        browser = self.browser
        await browser.open(f"{self.daemon.url}/")
        await browser.shows("#token-section", "A token is needed")
        await browser.until("document.activeElement === token")
        self.assertFalse(await browser.script("return form.checkVisibility()"))
        await browser.click("#token-submit")
        await browser.shows("#token-error", "Enter the token.")
        await self._give("tawebeval_nobodys")  # found out before it is used for anything
        await browser.shows("#token-error", "does not accept this token")
        self.assertEqual(await browser.focused(), "token")
        await self._give("\u20ac")
        await browser.shows("#token-error", "cannot contain")
        await self._give(self.token)
        await browser.until("!token.checkVisibility()")
        self.assertEqual(await browser.focused(), "submit")
        await browser.write('[name="repository[url]"]', self.repository.url)
        await browser.write('[name="commit_oid"]', self.commit)
        await browser.write('[name="evaluator_cmd"]', "echo well done")
        await browser.write("#fields .content", str(TOUR))
        await browser.click("#submit")
        await browser.shows("#output", "well done")
        await browser.shows("#state", "finished")
        self.assertNotIn(self.token, await browser.script(STORED))
        self.assertNotIn(self.token, await browser.script("return document.body.innerText"))
        await self._check_reopened()
        self.assertEqual(len((await self.client.get("/evaluations")).json["data"]), 1)
        self.assertNotIn(self.token, self.daemon.log)

    async def _give(self, token: str) -> None:
        await self.browser.write("#token", token)
        await self.browser.click("#token-form button")

    async def _check_reopened(self) -> None:
        """Hold that a link asks for the token, with a wrong one again, and then opens."""
        browser = self.browser
        link = await browser.script("return location.href")
        await browser.open(link)
        await browser.shows("#token-section", "A token is needed")
        await self._give("tawebeval_nobodys")
        await browser.shows("#token-error", "does not accept this token")
        await browser.click("#token-remember")
        await self._give(self.token)
        await browser.shows("#output", "well done")
        self.assertEqual(await browser.focused(), "evaluation")
        self.assertIn(self.token, await browser.script(STORED))
        await browser.open(link)  # which needs nobody to enter it again
        await browser.shows("#output", "well done")
        await browser.click("#to-listing")
        await browser.shows("#listing", "finished")
        await browser.click("#forget")
        await browser.shows("#token-section", "A token is needed")
        self.assertEqual(await browser.script(STORED), "")
        self.assertEqual(await browser.script("return listing.childElementCount"), 0)


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

    async def test_reference_is_accessible_in_light_and_dark_mode(self) -> None:
        await self.browser.click("[id$='-evaluate'] button")
        await self.browser.until("document.querySelector('[id$=-evaluate] .parameters')")
        for scheme in ("light", "dark"):
            await self.browser.look(DESKTOP, scheme)
            dark = "document.documentElement.matches('.dark-mode')"
            await self.browser.until(f"{dark} === {str(scheme == 'dark').lower()}")
            # Until colours have changed: buttons take 0.3 s.
            await self.browser.until("document.getAnimations().length === 0")
            self.assertEqual(await self.browser.violations(), [], scheme)
