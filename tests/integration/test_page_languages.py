"""The page in other languages: each text of each state is translated, and has room."""

from __future__ import annotations

import functools
import json
import os
import shutil
import zipfile
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path

import tawebeval
from tests.integration.browser import DESKTOP, LOOKS
from tests.integration.browser_case import BrowserTestCase
from tests.integration.client import Client
from tests.integration.harness import new_token
from tests.integration.unprivileged import give, temporary_folder

PACKAGE = Path(tawebeval.__file__).parent
JUDGE = r"""
data() { printf '\n%s\n%s\n%s\n' "$EVALUATION_DATA_BEGIN" "$1" "$EVALUATION_DATA_END"; }
data '{"type":"case","case":"1","verdict":"compile_error","message":"source.py:1: bad"}'
data '{"type":"case","case":"2","verdict":"accepted","time":0.5,"memory":2000,'\
'"input":"1","expected":"2","printed":"3","message":"no"}'
data '{"type":"case","case":"3","verdict":"skipped","points":3}'
data '{"type":"progress","done":1,"total":3}'
data '{"type":"goal_result","goal":"1","result":true}'
data '{"type":"score","goal":"2","score":1,"maximum":2}'
data '{"type":"score","score":3,"maximum":10}'
data '{"type":"file","filename":"a.txt","content_type":"text/plain","content_base64":"YQ=="}'
data '{"x":[1,2],"y":{"z":1}}'
seq 20000
test "$(cat "$SUBMISSION_FILE_SOURCE")" != wait || exec sleep 600
"""
UNTRANSLATED = r"""
const [words] = arguments;
const DATA =
  "[translate=no], pre, code, dd, .lines, .cm-editor, .branch, .file, #statement-text, th .hint";
const isSeen = (one) => (one.closest("select") ?? one).checkVisibility() && !one.closest(DATA);
const strip = (text) => {
  text = text.replace(/\b[a-z2-7]{40}\b/gu, "");  // before words, which may stand in one
  for (let former; text !== former; ) text = (former = text).replace(/⟦[^⟦⟧]*⟧/gu, "");
  for (const word of words) text = text.replaceAll(word, "");
  return text.replace(/\bvor \d+ \p{L}+|\b[KM]?i?B\b/gu, "");
};
const texts = [document.title];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  if (isSeen(walker.currentNode.parentElement)) texts.push(walker.currentNode.data);
}
for (const name of ["alt", "aria-label", "placeholder", "title"]) {
  const found = [...document.querySelectorAll(`[${name}]`)].filter(isSeen);
  texts.push(...found.map((one) => one.getAttribute(name)));
}
return texts.filter((text) => /\p{L}/u.test(strip(text)));
"""
"""Return the texts that can be seen and have letters outside of a message's brackets."""
WORDS = (
    *("the problem 'later' opens at", "a.txt", "text/plain", "source.py", "dan"),
    *("tawebeval", "Sums", "Later", "sums", "late", "ann", "bea", "carl", "teacher", "algo1"),
    *("source", ".py", ".txt", ".rs", "txt", "py", "English", "Deutsch", "italiano", "stderr"),
    *("Python", "C++", "Java", "Script", "Go", "Rust", "Shell", "AWK", "file://", "main", "C"),
)
"""What is no message: names of the test, and of languages."""
WIDE = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
BROKEN = """
return [...document.querySelectorAll("tbody :is(.result, .score, .state)")].filter((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return new Set(Array.from(range.getClientRects(), (line) => line.bottom)).size > 1;
}).map((cell) => cell.innerText);
"""
"""What stands in a table on more than one line, and should not."""

CHOOSE = """
const [selector, value] = arguments, select = document.querySelector(selector);
select.value = value;
select.dispatchEvent(new Event("change", { bubbles: true }));
"""


@functools.cache
def make_package() -> str:
    """Return a directory with a package that has a language more: one file is all it takes."""
    folder = temporary_folder("tawebeval-")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "tawebeval", ignore=skipped, copy_function=os.symlink)
    messages = folder / "tawebeval" / "web" / "messages"
    texts = json.loads((messages / "it.json").read_text())
    (messages / "de.json").write_text(
        json.dumps({text: f"⟦{found}⟧" for text, found in texts.items()})
    )
    give(folder)
    return str(folder)


class LanguageTests(BrowserTestCase):
    """A daemon with a language that puts brackets around each Italian message."""

    async def setUp(self) -> None:
        type(self).environment = {"PYTHONPATH": make_package()}
        self.token, line = new_token("teacher")
        self.student_token, student_line = new_token("ann")
        self.configure_tokens(f"{line} supervises=algo1", f"{student_line} group=algo1")
        await super().setUp()
        self.repository.write("judge.sh", JUDGE)
        self.repository.write("sums.md", "Add.")
        self.commit = self.repository.commit()
        place = f"repository = '{self.repository.url}'\ncommit = '{self.commit}'\n"
        common = f"{place}command = 'sh judge.sh'\nfields = ['source']\nextensions = ['py', 'txt']"
        await self.daemon.reload(
            f"[problems.sums]\n{common}\ntitle = 'Sums'\nstatement = 'sums.md'\n"
            "closes = 2020-06-01T12:00:00Z\nlate = true\nown_input = true\n"
            f"[problems.later]\n{common}\ntitle = 'Later'\nopens = 2090-06-01T12:00:00Z\n"
        )
        self.client = Client(self.daemon.url, self.token)
        self.student = Client(self.daemon.url, self.student_token)
        self.addCleanup(self.student.close)
        self.expected = ("401 (Unauthorized)", "403 (Forbidden)", "410 (Gone)")
        await self.browser.look(DESKTOP, "light")
        await self.browser.forget(self.daemon.url)

    async def go(self, fragment: str, selector: str) -> None:
        await self.browser.script("location.hash = arguments[0]", fragment)
        await self.browser.until(
            "document.querySelector(arguments[0])?.checkVisibility()", selector
        )

    async def submit(self, client: Client, text: str) -> str:
        file = ("submission[source]", ("source.py", "text/plain", BytesIO(text.encode())))
        answer = await client.request("POST", "/problems/sums/evaluate", files=[file])
        identifier: str = answer.json["evaluation_id"]
        self.client.evaluations.append(identifier)
        return identifier

    async def visit_states(self, look: Callable[[str], Awaitable[None]]) -> None:
        """Have a `look` at all states of the page, each with a name, in that language."""
        browser = self.browser
        await browser.open(f"{self.daemon.url}/")
        await browser.until("document.activeElement === token")
        self.assertEqual(await browser.script("return document.documentElement.lang"), "en")
        await browser.script(CHOOSE, "#language", "de")
        await browser.until("document.documentElement.lang === 'de'")
        await browser.until("document.activeElement === token")
        await browser.click("#token-submit")
        await look("token")
        await browser.write("#token", self.student_token)
        await browser.click("#token-remember")
        await browser.click("#token-submit")
        await browser.until("!token.checkVisibility()")
        await self.go("#problems", "#problem-list a")
        await look("problems")
        await self.go("#problem/later", "#opening:not(:empty)")
        disabled = "return document.getElementById('submit').ariaDisabled"
        self.assertEqual(await browser.script(disabled), "true")
        for place in ("#opening", "#nothing"):
            await browser.shows(place, "2090")
        await browser.shows("#statement-hint", "2090")
        await look("closed")
        store = "localStorage.setItem('tawebeval / token', JSON.stringify(arguments[0]))"
        await browser.script(store, self.token)
        await browser.open(f"{self.daemon.url}/#problem/later")
        await browser.until("document.querySelector('#fields .cm-content')")
        self.assertEqual(await browser.script(disabled), None)  # for a teacher
        await self.go("#problem/sums", "#statement-text p")
        await browser.shows("#statement-text", "Add.")
        await browser.click("#submit")
        await browser.shows("#form-error", "")
        for closed in ("#commands", "#own-input"):
            await browser.click(f"{closed} summary")
        await look("problem")
        await self.go("#evaluate", "#evaluator")
        await browser.script(
            "for (const one of document.querySelectorAll('.more')) one.open = true"
        )
        await browser.click("#add-label")
        await browser.click("#submit")
        await look("evaluate")
        waiting = await self.submit(self.client, "wait")
        ended = await self.submit(self.student, "print()")
        await self.student.ended(ended)
        await self.go(f"#evaluation/{ended}", "#rerun")
        await browser.script(
            "for (const one of evaluation.querySelectorAll('details')) one.open = 1"
        )
        await browser.until("document.querySelector('#cases .open')")
        await browser.script("document.querySelector('#cases .open').click()")
        await browser.click("#share-make")
        await browser.shows("#share-hint", "20")
        await look("evaluation")
        link = await browser.script("return document.getElementById('share-link').value")
        await self.go(f"#evaluation/{waiting}", "#cancel")
        await browser.shows("#output", "20000")
        await look("running")
        await self.go("#evaluations", "#listing tr")
        await look("listing")
        await self.go("#class", "#standings-rows .verdict")
        parts = "return Array.from(document.querySelectorAll('#class-view h2'), (one) => one.id)"
        self.assertEqual(await browser.script(parts), ["standings-title", "batch-title"])
        names = "return [...arguments].map((id) => document.getElementById(id).textContent)"
        standings, batch = await browser.script(names, "standings-csv", "class-csv")
        self.assertNotEqual(standings, batch)
        await browser.click("#standings-rerun")
        await look("standings")
        with zipfile.ZipFile(self.folder / "hw.zip", "w") as archive:
            for path in ("ann/a.py", "bea/x.rs", "carl/x.txt", "carl/y.txt", "dan/"):
                archive.writestr(f"hw/{path}", "" if path.endswith("/") else "1\n")
        give(self.folder / "hw.zip")
        await browser.script(CHOOSE, "#class-problem", "sums")
        await browser.write("#class-zip", str(self.folder / "hw.zip"))
        await browser.until("document.getElementById('class-start').checkVisibility()")
        await browser.click("#class-start")
        await browser.until("document.activeElement.id === 'class-csv'")
        await look("class")
        await browser.open(link)
        await browser.until("document.querySelector('#goals').checkVisibility()")
        await look("shared")

    async def test_each_page_state_is_translated_accessible_and_fits_its_width(self) -> None:
        async def look(name: str) -> None:
            self.assertEqual(await self.browser.script(UNTRANSLATED, WORDS), [], name)
            for way, (size, scheme) in LOOKS.items():
                await self.browser.look(size, scheme)
                self.assertEqual(await self.browser.violations(), [], f"{name} {way}")
                self.assertFalse(await self.browser.script(WIDE), f"{name} {way}: too wide")
                self.assertEqual(await self.browser.script(BROKEN), [], f"{name} {way}: broken")
            await self.browser.look(DESKTOP, "light")

        await self.visit_states(look)

    async def test_page_uses_the_language_of_the_browser_until_one_is_chosen(self) -> None:
        browser = self.browser
        await self.accept_languages("fr-FR,it-CH,de")
        self.addCleanup(self.accept_languages, "en-US")
        await browser.open(f"{self.daemon.url}/")
        await browser.shows("#token-title", "Serve un token")
        self.assertEqual(await browser.script("return document.documentElement.lang"), "it")
        await browser.script(CHOOSE, "#language", "en")
        await browser.shows("#token-title", "A token is needed")
        await browser.open(f"{self.daemon.url}/")
        await browser.shows("#token-title", "A token is needed")

    async def test_change_of_language_keeps_the_token_and_a_reload_drops_it(self) -> None:
        browser = self.browser
        await browser.open(f"{self.daemon.url}/")
        await browser.write("#token", self.student_token)
        await browser.click("#token-submit")
        await browser.until("!document.querySelector('#forget').hidden")
        await browser.script(CHOOSE, "#language", "it")
        await browser.shows("#forget", "Dimentica il token")
        self.assertIsNone(await browser.script("return history.state"))
        await browser.script("location.reload()")
        await browser.shows("#token-title", "Serve un token")

    async def accept_languages(self, languages: str) -> None:
        agent = await self.browser.script("return navigator.userAgent")
        options = {"userAgent": agent, "acceptLanguage": languages}
        command = "Emulation.setUserAgentOverride"
        await self.browser.do(lambda driver: driver.execute_cdp_cmd(command, options))
