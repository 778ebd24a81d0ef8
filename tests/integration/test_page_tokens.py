"""The page at `/` of a daemon with tokens, in a real browser."""

from __future__ import annotations

from tests.integration.browser import DESKTOP
from tests.integration.browser_case import PROBLEMS, BrowserTestCase
from tests.integration.client import Client
from tests.integration.harness import new_token

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

    async def test_token_is_asked_for_used_and_kept_on_request(self) -> None:
        browser = self.browser
        await browser.open(f"{self.daemon.url}/")
        await browser.shows("#token-section", "A token is needed")
        await browser.until("document.activeElement === token")
        self.assertFalse(await browser.script("return form.checkVisibility()"))
        await browser.click("#token-submit")
        await browser.shows("#token-error", "Enter the token.")
        self.assertEqual(await browser.violations(), [])
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
