"""The page at `/` in Firefox: from the choice of a problem to its verdict."""

from __future__ import annotations

from tests.integration.firefox import FIREFOX, Firefox
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase

ENTER = "\ue007"  # the key, in WebDriver
JUDGE = """
import json, os
source = open(os.environ["SUBMISSION_FILE_SOURCE"]).read()
verdict = "accepted" if source == "print(1)\\n" else "wrong_answer"
print("\\n" + os.environ["EVALUATION_DATA_BEGIN"])
print(json.dumps({"type": "case", "case": "one", "verdict": verdict}))
print(os.environ["EVALUATION_DATA_END"])
"""


class FirefoxTests(RepositoryTestCase):
    """What all browsers do alike is tested in Chromium."""

    skip = None if FIREFOX else "there is no firefox-esr"

    async def setUp(self) -> None:
        await super().setUp()
        self.repository.write("judge.py", JUDGE)
        (self.folder / "one.md").write_text("Print **one**.")
        problem = (
            f"[problems.one]\nrepository = '{self.repository.url}'\n"
            f"commit = '{self.repository.commit()}'\ncommand = 'python3 judge.py'\n"
            f"fields = ['source']\nstatement = '{self.folder}/one.md'\n"
        )
        self.daemon = Daemon(CONFIGURATION + problem)
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        self.browser = Firefox()
        self.addCleanup(self.browser.quit)
        await self.browser.start()
        await self.daemon.ready()

    async def test_problem(self) -> None:
        """A problem is chosen, a program is typed into the editor, and its verdict is shown."""
        browser = self.browser
        await browser.open(f"{self.daemon.url}/")
        await browser.click("#problem-list a")
        await browser.until("document.querySelector('#statement-text strong')?.innerText === 'one'")
        await browser.click("#fields .cm-content")
        await browser.type(f"print(1){ENTER}")
        written = "document.querySelector('#fields .content').value"
        await browser.until(f"{written}.length >= 9")
        self.assertEqual(await browser.evaluate(written), "print(1)\n")
        await browser.click("#submit")
        await browser.until("document.querySelector('#state').innerText === 'finished'")
        row = "document.querySelector('#cases tbody tr').innerText.split(/\\s+/)"
        self.assertEqual((await browser.evaluate(row))[:2], ["one", "accepted"])
        self.assertEqual(browser.complaints, [])
        await self.daemon.stop()
