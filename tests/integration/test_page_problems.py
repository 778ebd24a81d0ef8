"""The page at `/`: problems, environments, reruns and tokens for problems, in a real browser."""

from __future__ import annotations

import shutil
from typing import Any

from selenium.webdriver.common.keys import Keys

from tests.integration.browser import DESKTOP, NARROW, PHONE
from tests.integration.browser_case import TOUR, PageTestCase
from tests.integration.client import Client
from tests.integration.harness import new_token
from tests.integration.test_packages import KATTIS

STATEMENT = """# The NAME

Print *the sum* of **NAME**. <img src=x onerror=console.error(1)>

## Input

1. one line
2. `a` and `b`

| goal | points |
| --- | ---: |
| small | 20 |

```
3 4
```

[good](http://127.0.0.1:1/) [bad](javascript:alert) ![picture](http://127.0.0.1:1/x.png)

![a dot](dot.svg) Print $n^2$, or $$\\href{javascript:alert()}{x} + \\frac{1}{2}$$
"""
DOT = """<svg xmlns="http://www.w3.org/2000/svg" width="30" height="30"><circle r="9"/></svg>"""
SHOWN = """
const place = document.querySelector("#statement-text");
return {
  text: document.querySelector("#statement").innerText,
  headings: [...place.querySelectorAll("h1, h2, h3")].map((one) => one.innerText),
  links: [...place.querySelectorAll("a")].map((one) => [one.text, one.href, one.rel]),
  forbidden: place.querySelectorAll("script, style, [style], a:not([rel])").length,
  formulas: [...place.querySelectorAll("math")].map((one) => one.getAttribute("display")),
  pictures: [...place.querySelectorAll("img")].map((one) => [one.alt, one.naturalWidth]),
};
"""
HOLD = """
window.delayed = [];
const realFetch = window.fetch;
window.fetch = async (...all) => {
  const answer = await realFetch(...all);
  await new Promise((resolve) => delayed.push(resolve));
  return answer;
};
"""
"""Hold all answers back."""
WIDE = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
COLOURED = "return document.querySelectorAll('#fields .tok-keyword').length"
JUDGE_SOURCE = 'basename "$SUBMISSION_FILE_SOURCE"; cat "$SUBMISSION_FILE_SOURCE"'
COMPILER = r"""
source=$SUBMISSION_FILE_SOURCE
send() { printf '\n%s\n%s\n%s\n' "$EVALUATION_DATA_BEGIN" "$1" "$EVALUATION_DATA_END"; }
if grep -q wrong "$source"; then
    message='In main:\nsource.py:2:3: error: bad <b> name\n  2 | wrong'
    send '{"type":"case","case":"a","verdict":"compile_error","message":"'"$message"'"}'
else send '{"type":"case","case":"a","verdict":"accepted"}'; fi
"""
"""A judge that refuses to compile what is wrong, with a place in a file."""
JUDGE = 'cat "$SUBMISSION_FILE_NOTE"; echo; echo seed $TURINGARENA_SEED'


class ProblemPageTestCase(PageTestCase):
    """Tests whose daemon can be given problems and an environment."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.browser.look(DESKTOP, "light")
        await self.browser.forget(self.daemon.url)

    async def reload(self, tables: str) -> None:
        """Let the daemon have these tables in its configuration, until the test ends."""
        self.addCleanup(self.daemon.reload, "")
        await self.daemon.reload(tables)

    def problem(self, name: str, command: str, *more: str) -> str:
        place = f"repository = '{self.repository.url}'\ncommit = '{self.commit}'"
        return "\n".join((f"[problems.{name}]", place, f"command = '''{command}'''", *more, ""))

    async def choose(self, selector: str, value: str) -> None:
        await self.browser.until(
            "document.querySelector(arguments[0]).checkVisibility() &&"
            " [...document.querySelector(arguments[0]).options]"
            ".some((one) => one.value === arguments[1])",
            selector,
            value,
        )
        await self.browser.script(
            "const select = document.querySelector(arguments[0]); select.value = arguments[1];"
            "for (const name of ['input', 'change'])"
            " select.dispatchEvent(new Event(name, { bubbles: true }))",
            selector,
            value,
        )

    async def visit_problems(self) -> None:
        await self.browser.open(self.page_url)
        await self.browser.shows("#problem-list", "sums")

    async def open_problem(self, name: str) -> None:
        await self.browser.script("location.hash = `#problem/${arguments[0]}`", name)
        await self.browser.until(
            "document.querySelector(`#problem-list a[href='#problem/${arguments[0]}']`) &&"
            " !evaluator.checkVisibility() && form.checkVisibility()",
            name,
        )

    async def choices(self, selector: str) -> list[str]:
        texts: list[str] = await self.browser.script(
            "return Array.from(document.querySelector(arguments[0]).options, (one) => one.text)",
            selector,
        )
        return texts

    async def visible(self, selector: str) -> bool:
        found: bool = await self.browser.script(
            "return document.querySelector(arguments[0]).checkVisibility()", selector
        )
        return found

    async def send(self) -> str:
        await self.browser.click("#submit")
        begun = "location.hash.startsWith('#evaluation/') && location.hash.slice(12)"
        identifier: str = await self.browser.until(begun)
        self.client.evaluations.append(identifier)
        return identifier

    async def run_again(self, first: str) -> str:
        """Run the open evaluation again; return the identifier of the new one."""
        await self.browser.click("#rerun")
        other = "identifier.textContent !== arguments[0] && identifier.textContent"
        identifier: str = await self.browser.until(other, first)
        self.client.evaluations.append(identifier)
        return identifier


LOADED = """
return [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter(({ name }) => !name.includes("/evaluations")) // a list is asked for as long as it takes
  .map(({ name, transferSize }) => [new URL(name).pathname, transferSize]);
"""
"""What the page has loaded, and the bytes that came over the network."""


class ProblemPageTests(ProblemPageTestCase):
    async def test_page_loads_few_files_and_a_reload_takes_assets_from_the_cache(self) -> None:
        await self.reload(self.problem("sums", "true", "fields = ['source']"))
        await self.browser.do(
            lambda driver: driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        )
        await self.browser.open(self.page_url)
        await self.browser.shows("#problem-list", "sums")
        loaded = await self.browser.script(LOADED)
        self.assertLessEqual(len(loaded), 12, loaded)
        self.assertLess(sum(size for _, size in loaded), 250_000, loaded)
        await self.browser.do(lambda driver: driver.refresh())
        await self.browser.shows("#problem-list", "sums")
        again = {path for path, size in await self.browser.script(LOADED) if size > 0}
        self.assertEqual(again, {"/", "/problems", "/environments", "/whoami"})

    async def test_form_of_a_problem_has_only_the_file_fields_of_the_problem(self) -> None:
        await self.reload(
            self.problem("notes", JUDGE, "fields = ['source', 'note']", "title = 'Notes & <b>'")
        )
        await self.browser.open(self.page_url)
        await self.browser.shows("#problem-list", "Notes & <b>")
        await self.browser.click("#problem-list a")
        await self.browser.shows("#statement-title", "Notes & <b>")
        for selector in ("#evaluator", "#add-file", "#add-text", "#fields .name"):
            self.assertFalse(await self.visible(selector), selector)
        await self.browser.choose_file("#fields li:first-child", str(TOUR))
        await self.choose("#fields li:last-child .language", "txt")
        await self.browser.write("#fields li:last-child .content", "well noted")
        curl, command = await self.browser.script(
            "return [curl.textContent, tawebeval.textContent]"
        )
        self.assertIn(f"{self.daemon.url}/problems/notes/evaluate", curl)
        self.assertIn("--problem notes", command)
        for words in (curl, command):
            self.assertNotIn("repository", words)
        identifier = await self.send()
        await self.browser.shows("#output", "well noted")
        await self.browser.shows("#state", "finished")
        self.assertEqual((await self.client.status(identifier))["problem"], "notes")
        await self.browser.click("#details summary")
        await self.browser.shows("#details", "Problem\nnotes\n")
        await self.browser.open(f"{self.page_url}#problem/notes")  # which has what was written
        await self.browser.shows("#form-title", "Your solution")
        text = "return document.querySelector('#fields li:last-child textarea').value"
        self.assertEqual(await self.browser.script(text), "well noted")
        other = await self.begin("true")
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "Notes & <b>")
        await self.browser.shows(f"#listing a[href$='{other}']", "")
        await self.choose("#filters [name=problem]", "notes")
        listed = "Array.from(document.querySelectorAll('#listing a'), (one) => one.hash.slice(12))"
        await self.browser.until(f"{listed}.join() === arguments[0]", identifier)

    async def test_statement_page_renders_no_embedded_html_and_ignores_late_answers(
        self,
    ) -> None:
        tables = ""
        for name in ("first", "second"):
            self.repository.write(f"{name}.md", STATEMENT.replace("NAME", name))
        self.repository.write("dot.svg", DOT)
        self.commit = self.repository.commit()
        for name in ("first", "second"):
            title = f"title = 'The {name}'\nstatement = '{name}.md'\nfields = ['source']"
            tables += self.problem(name, JUDGE_SOURCE, title, "limits = { memory = '64M' }")
        await self.reload(tables)
        await self.browser.open(f"{self.page_url}#problem/first")
        await self.browser.shows("#statement-text", "the sum of first")
        await self.browser.until("document.querySelector('#fields .cm-content')")
        shown = await self.browser.script(SHOWN)
        self.assertEqual(shown["headings"], ["Input"])
        self.assertEqual(shown["links"], [["good", "http://127.0.0.1:1/", "noopener noreferrer"]])
        self.assertEqual(shown["forbidden"], 0)
        self.assertEqual(shown["formulas"], [None, "block"])
        self.assertEqual(shown["pictures"], [["a dot", 30]])
        for words in ("<img src=x", "bad", "[image: picture]", "memory 64 MiB"):
            self.assertIn(words, shown["text"])
        await self.browser.look(NARROW, "dark")
        self.assertEqual(await self.browser.violations(), [])
        self.assertFalse(await self.browser.script(WIDE))
        await self.browser.look(DESKTOP, "light")
        await self.browser.script(HOLD)
        for number, name in enumerate(("second", "first", "second", "first"), 1):
            await self.browser.script("location.hash = `#problem/${arguments[0]}`", name)
            await self.browser.until("delayed.length === arguments[0]", number)
        await self.browser.script("delayed.reverse().forEach((go) => go())")
        await self.browser.shows("#statement-text", "the sum of first")
        await self.browser.script("return new Promise((resolve) => setTimeout(resolve, 100))")
        shown = await self.browser.script(SHOWN)
        self.assertEqual(shown["headings"], ["Input"])
        self.assertNotIn("second", shown["text"])

    async def test_page_fetches_the_statement_again_once_the_problem_has_opened(self) -> None:
        self.expected = ("403 (Forbidden)",)
        self.repository.write("statement.md", "Add.")
        self.commit = self.repository.commit()
        problem = self.problem("sums", "true", "statement = 'statement.md'")
        await self.reload(f"{problem}opens = 2099-06-01T12:00:00Z\n")
        await self.visit_problems()
        await self.browser.click("#problem-list a")
        await self.browser.shows("#statement-hint", "opens at Jun 1, 2099")
        await self.daemon.reload(problem)
        await self.browser.click("#to-problems")
        await self.browser.click("#problem-list a")
        await self.browser.shows("#statement-text", "Add.")

    async def test_program_is_written_in_the_editor_and_judged(self) -> None:
        await self.reload(self.problem("sums", JUDGE_SOURCE, "fields = ['source']"))
        await self.browser.look(PHONE, "light")
        await self.browser.open(f"{self.page_url}#problem/sums")
        await self.browser.until("document.querySelector('#fields .cm-content')")
        await self.browser.click("#submit")
        await self.browser.shows("#form-error", "Write your solution")
        await self.browser.write_in_focus("def add(a):\nreturn a")
        await self.browser.until(
            "document.querySelector('#fields .content').value === arguments[0]",
            "def add(a):\n    return a",
        )
        self.assertGreater(await self.browser.script(COLOURED), 0)
        await self.send()
        await self.browser.shows("#output", "source.py")
        await self.browser.shows("#output", "def add(a):\n    return a")
        await self.browser.shows("#state", "finished")
        top = await self.browser.script("return evaluation.getBoundingClientRect().top")
        self.assertLess(abs(top), 120, "the result is not in view")

    async def test_compile_error_is_shown_first_and_marked_in_the_editor(self) -> None:
        self.repository.write("judge.sh", COMPILER)
        self.commit = self.repository.commit()
        await self.reload(self.problem("sums", "sh judge.sh", "fields = ['source']"))
        await self.browser.open(f"{self.page_url}#problem/sums")
        await self.browser.until("document.querySelector('#fields .cm-content')")
        await self.browser.script("document.querySelector('#fields .cm-content').focus()")
        await self.browser.write_in_focus("print()\nwrong")
        identifier = await self.send()
        await self.browser.shows("#compiler", "bad <b> name")
        await self.browser.shows("#verdict", "Compile error")
        order = "return compiler.compareDocumentPosition(cases)"
        self.assertEqual(await self.browser.script(order), 4)  # the cases follow
        marked = (
            "document.querySelectorAll('#fields .cm-lint-marker-error').length === arguments[0]"
        )
        await self.browser.until(marked, 1)
        await self.browser.shows("#about", "source.py")
        await self.browser.shows("#state", "finished")
        self.assertEqual(await self.browser.violations(), [])
        await self.browser.forget(self.daemon.url)  # as on another machine
        await self.browser.open(f"{self.page_url}#evaluation/{identifier}")
        await self.browser.shows("#compiler", "bad <b> name")
        await self.browser.click("#edit")
        text = "document.querySelector('#fields .content').value === arguments[0]"
        await self.browser.until(text, "print()\nwrong")
        await self.browser.until(marked, 1)
        keys = "document.querySelector('#fields .cm-content')"
        await self.browser.until(f"document.activeElement === {keys}")
        await self.browser.write_in_focus(Keys.CONTROL + "a" + Keys.NULL + "print(1)")
        await self.browser.write_in_focus(Keys.CONTROL + Keys.ENTER + Keys.NULL)
        await self.browser.shows("#verdict", "Accepted")
        other = await self.browser.script("return location.hash.slice(12)")
        self.client.evaluations.append(other)
        self.assertNotEqual(other, identifier)
        await self.browser.until(text, "print(1)")
        self.assertFalse(await self.visible("#compiler"))
        await self.browser.shows("#state", "finished")
        await self.browser.click("#to-problems")
        await self.browser.shows("#problem-list", "solved")
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "sums")
        self.assertNotIn("finished", await self.browser.text("#listing"))

    async def test_run_on_an_own_input_is_not_counted_as_a_try(self) -> None:
        for path, text in KATTIS.items():
            self.repository.write(f"sum/{path}", text)
        self.commit = self.repository.commit()
        settings = "directory = 'sum'\nfields = ['source']\nextensions = ['py']\n"
        problems = self.problem("package", "tawebeval-judge", settings, "own_input = true")
        await self.reload(problems + self.problem("plain", "true", settings))
        await self.browser.open(f"{self.page_url}#problem/plain")
        await self.browser.until("document.querySelector('#fields .cm-content')")
        self.assertFalse(await self.visible("#own-input"))
        await self.open_problem("package")
        await self.browser.until("document.querySelector('#fields .cm-content')")
        await self.browser.script("document.querySelector('#fields .cm-content').focus()")
        await self.browser.write_in_focus("print('sum', sum(map(int, input().split())))")
        await self.browser.shows("#statement-hint", "has no statement")  # or what follows moves
        await self.browser.click("#own-input summary")
        await self.browser.write("#own-input-text", "40 2")
        await self.browser.click("#own-input-run")
        await self.browser.shows("#output", "sum 42")
        await self.browser.shows("#state", "finished")
        await self.browser.shows("#about", "does not count")
        self.assertFalse(await self.visible("#goals"))
        identifier = await self.browser.script("return location.hash.slice(12)")
        self.client.evaluations.append(identifier)
        self.assertFalse((await self.client.status(identifier))["counts"])
        await self.browser.write("#own-input-text", "")
        await self.browser.click("#edit")
        await self.browser.until("document.getElementById('own-input-text').value === '40 2'")
        await self.browser.click("#to-problems")
        await self.browser.shows("#problem-list", "package")
        self.assertNotIn("tried", await self.browser.text("#problem-list"))
        await self.open_problem("package")
        await self.send()
        await self.browser.shows("#goals", "accepted")
        await self.browser.click("#to-problems")
        await self.browser.shows("#problem-list", "tried")

    async def test_each_problem_keeps_its_draft(self) -> None:
        fixed = self.problem("fixed", "true", "fields = ['source']")
        tools = ("fields = ['source']", "extensions = ['sh', 'awk', 'bc']")
        await self.reload(
            fixed + self.problem("free", "true") + self.problem("tools", "true", *tools)
        )
        await self.browser.open(f"{self.page_url}#evaluate")
        await self.browser.shows("#form-title", "Evaluate")
        await self.browser.write("#fields .content", str(TOUR))
        for name in ("fixed", "free"):
            await self.open_problem(name)
            await self.browser.shows("#statement-title", name)
            self.assertEqual(await self.visible("#add-file"), name == "free")
            await self.choose("#fields .language", "txt")
            await self.browser.write("#fields .content", f"for {name}")
        written = "document.querySelector('#fields .content').value"
        for name in ("fixed", "free"):
            await self.open_problem(name)
            await self.browser.until(f"{written} === arguments[0]", f"for {name}")
        await self.open_problem("tools")  # which takes no text, the language of the last draft
        self.assertEqual(await self.choices("#fields .language"), ["Shell", "AWK", ".bc"])
        file = "document.querySelector('#fields .file-name').value"
        await self.browser.until(f"{file} === 'source.sh'")
        await self.choose("#fields .language", "awk")
        await self.browser.until(f"{file} === 'source.awk'")
        await self.browser.script("location.hash = '#evaluate'")
        await self.browser.until("evaluator.checkVisibility()")
        chosen = "return document.querySelector('#fields .content').files[0].name"
        self.assertEqual(await self.browser.script(chosen), TOUR.name)
        await self.open_problem("free")
        await self.send()
        await self.browser.shows("#state", "finished")

    async def test_chosen_environment_is_sent_and_shown(self) -> None:
        root = self.folder / "root"
        for program in ("bin/sh", "usr/bin/prlimit"):
            (root / program).parent.mkdir(parents=True)
            shutil.copy("/bin/true", root / program)
        words = f"[environments.bare]\nroot = '{root}'\ndescription = 'nothing to run'\n"
        await self.reload(words)
        await self.visit()
        await self.fill("true")
        await self.choose("#environment", "bare")
        self.assertEqual((await self.choices("#environment"))[1], "bare: nothing to run")
        for command in ("environment=bare", "--environment bare"):
            await self.browser.until("commands.textContent.includes(arguments[0])", command)
        identifier = await self.send()
        await self.browser.shows("#state", "failed")
        self.assertEqual((await self.client.status(identifier))["environment"]["name"], "bare")
        await self.browser.click("#details summary")
        await self.browser.shows("#details", "Environment\nbare\n")
        await self.visit()
        await self.browser.until("environment.value === 'bare'")

    async def test_rerun_opens_a_new_evaluation_with_the_same_seed(self) -> None:
        await self.visit()
        first = await self.submit('echo "seed $TURINGARENA_SEED"')
        await self.browser.shows("#state", "finished")
        second = await self.run_again(first)
        await self.browser.shows("#state", "finished")
        seed = (await self.client.status(first))["seed"]
        await self.browser.shows("#output", f"seed {seed}")
        self.assertEqual(await self.browser.focused(), "evaluation")
        await self.client.follow(second)  # which discards it
        self.expected = ("410 (Gone)",)
        await self.browser.click("#rerun")
        await self.browser.shows("#rerun-error", "read to the end")


class ProblemTokenTests(ProblemPageTestCase):
    async def setUp(self) -> None:
        self.token, line = new_token("students")
        other, other_line = new_token("others")
        self.configure_tokens(f"{line} problems=slow", f"{other_line} problems=none")
        self.other = other
        await super().setUp()
        self.client = Client(self.daemon.url, self.token)
        self.expected = ("401 (Unauthorized)", "403 (Forbidden)")

    async def _give(self, token: str) -> None:
        await self.browser.write("#token", token)
        await self.browser.click("#token-submit")

    async def test_page_shows_a_restricted_token_only_its_problem(self) -> None:
        browser, fields = self.browser, "fields = ['source']"
        await self.reload(
            self.problem("slow", "echo begun; exec sleep 600", fields)
            + self.problem("hidden", "true")
        )
        await browser.open(f"{self.daemon.url}/#evaluations")
        await browser.shows("#token-section", "A token is needed")
        await self._give(self.other)
        await browser.shows("#token-error", "The token permits no problem of this server.")
        store = "localStorage.setItem('tawebeval / token', JSON.stringify(arguments[0]))"
        await browser.script(store, self.other)  # as if its problem had been removed since
        await browser.open(f"{self.daemon.url}/#evaluations")
        await browser.shows("#token-error", "The token permits no problem of this server.")
        await self._give(self.token)
        await browser.until("!token.checkVisibility()")
        await browser.shows("#listing-hint", "No evaluations.")
        self.assertEqual(await browser.focused(), "main")
        await browser.click("#to-problems")
        await browser.shows("#problem-list", "slow")
        self.assertNotIn("hidden", await browser.text("#problem-list"))
        for selector in ("#listing-view", "#to-evaluate"):
            self.assertFalse(await self.visible(selector), selector)
        await browser.click("#problem-list a")
        await browser.choose_file("#fields li", str(TOUR))
        first = await self.send()
        await self.cancel()
        second = await self.run_again(first)
        await self.cancel()
        statuses: list[dict[str, Any]] = [await self.client.status(id_) for id_ in (first, second)]
        self.assertEqual([status["problem"] for status in statuses], ["slow", "slow"])

    async def cancel(self) -> None:
        """Wait for the open evaluation to print, and cancel it."""
        await self.browser.shows("#output", "begun")
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")
