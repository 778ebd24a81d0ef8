"""The page at `/`: problems, environments, reruns and tokens for problems, in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

from tests.integration.browser import DESKTOP, PHONE
from tests.integration.browser_case import TOUR, PageTestCase
from tests.integration.client import Client
from tests.integration.harness import CONFIGURATION, new_token
from tests.integration.unprivileged import temporary_folder

JUDGE = 'cat "$SUBMISSION_FILE_NOTE"; echo; echo seed $TURINGARENA_SEED'


class ProblemPageTestCase(PageTestCase):
    """Tests whose daemon can be given problems and an environment."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.browser.look(DESKTOP, "light")
        await self.browser.forget(self.daemon.url)

    async def reload(self, tables: str) -> None:
        """Let the daemon have these tables in its configuration, until the test ends."""
        before = (self.daemon.folder / "tawebeval.toml").read_text()
        self.addCleanup(self.configure, before)
        await self.configure(before + tables)

    async def configure(self, configuration: str) -> None:
        """Let the daemon read another configuration."""
        times = self.daemon.log.count("the configuration: reloaded from")
        (self.daemon.folder / "tawebeval.toml").write_text(configuration)
        os.kill(self.daemon.pid, signal.SIGHUP)
        await self.daemon.logged("the configuration: reloaded from", times + 1)

    def problem(self, name: str, command: str, *more: str) -> str:
        """Return the table of a problem in the test's repository."""
        place = f"repository = '{self.repository.url}'\ncommit = '{self.commit}'"
        return "\n".join((f"[problems.{name}]", place, f"command = '''{command}'''", *more, ""))

    async def choose(self, selector: str, value: str) -> None:
        """Choose an option, as soon as it is offered."""
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

    async def choices(self, selector: str) -> list[str]:
        """Return the texts of a choice."""
        texts: list[str] = await self.browser.script(
            "return Array.from(document.querySelector(arguments[0]).options, (one) => one.text)",
            selector,
        )
        return texts

    async def visible(self, selector: str) -> bool:
        """Tell whether an element can be seen."""
        found: bool = await self.browser.script(
            "return document.querySelector(arguments[0]).checkVisibility()", selector
        )
        return found

    async def send(self) -> str:
        """Send the form as it is; return the identifier."""
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


class ProblemPageTests(ProblemPageTestCase):
    """A daemon without tokens."""

    async def test_nothing_to_choose(self) -> None:
        """Without problems, and with the default environment alone, nothing is to be chosen."""
        await self.visit()
        await self.browser.until("environment.options.length === 1")
        for selector in ("#problem", "#environment", "#filters [name=problem]"):
            self.assertFalse(await self.visible(selector), selector)

    async def test_problem(self) -> None:
        """Only the expected files are asked for; the list and the details name the problem."""
        await self.reload(
            self.problem("notes", JUDGE, "fields = ['source', 'note']", "title = 'Notes & <b>'")
        )
        await self.visit()
        await self.choose("#problem", "notes")
        self.assertEqual(await self.choices("#problem"), ["Own evaluator", "Notes & <b>"])
        for selector in ("#evaluator", "#add-file", "#add-text", "#fields .name"):
            self.assertFalse(await self.visible(selector), selector)
        await self.browser.write("#fields li:first-child .content", str(TOUR))
        await self.browser.click("#fields li:last-child .swap")
        await self.browser.until("document.activeElement.matches('textarea')")
        await self.browser.write("#fields li:last-child .content", "well noted")
        for look in (DESKTOP, PHONE):
            await self.browser.look(look, "light")
            self.assertEqual(await self.browser.violations(), [])
            await self.browser.photograph(f"problem-{look[0]}")
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
        await self.visit()  # which begins as the last one did
        await self.browser.until("problem.value === 'notes'")
        text = "return document.querySelector('#fields li:last-child textarea').value"
        self.assertEqual(await self.browser.script(text), "well noted")
        other = await self.begin("true")
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "notes")
        await self.browser.shows(f"#listing a[href$='{other}']", "")
        await self.choose("#filters [name=problem]", "notes")
        listed = "Array.from(document.querySelectorAll('#listing a'), (one) => one.hash.slice(12))"
        await self.browser.until(f"{listed}.join() === arguments[0]", identifier)
        self.assertEqual(await self.browser.violations(), [])

    async def test_other_problem(self) -> None:
        """A file stays where the field has the same name; own rows return with own evaluators."""
        fixed = self.problem("fixed", "true", "fields = ['source']")
        await self.reload(fixed + self.problem("free", "true"))
        await self.visit()
        await self.browser.write("#fields .content", str(TOUR))
        await self.browser.click("#add-text")
        await self.browser.write("#fields li:last-child .name", "more")
        await self.browser.write("#fields li:last-child .content", "text")
        shown = (
            "return Array.from(document.querySelectorAll('#fields li'), (row) =>"
            " [row.querySelector('.name').value, row.querySelector('.content').files?.[0].name])"
        )
        source, more = ["source", TOUR.name], ["more", None]
        for name, rows in (("fixed", [source]), ("free", [source, more]), ("", [source, more])):
            await self.choose("#problem", name)
            self.assertEqual(await self.browser.script(shown), rows)
            self.assertEqual(await self.visible("#add-file"), name != "fixed")
            self.assertEqual(await self.visible("#evaluator"), name == "")
        await self.choose("#problem", "free")
        await self.send()
        await self.browser.shows("#state", "finished")

    async def test_environment(self) -> None:
        """A chosen environment is sent, and named by the details and the commands."""
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
        self.assertEqual(await self.browser.violations(), [])
        for command in ("environment=bare", "--environment bare"):
            await self.browser.until("commands.textContent.includes(arguments[0])", command)
        identifier = await self.send()
        await self.browser.shows("#state", "failed")
        self.assertEqual((await self.client.status(identifier))["environment"]["name"], "bare")
        await self.browser.click("#details summary")
        await self.browser.shows("#details", "Environment\nbare\n")
        await self.visit()
        await self.browser.until("environment.value === 'bare'")

    async def test_rerun(self) -> None:
        """Run again opens an evaluation with the same seed; what is gone is told at the button."""
        await self.visit()
        first = await self.submit('echo "seed $TURINGARENA_SEED"; sleep 1')
        await self.browser.shows("#output", "seed")
        self.assertFalse(await self.visible("#rerun"))
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
        self.assertEqual(await self.browser.violations(), [])
        await self.browser.photograph("rerun-gone")


class ProblemTokenTests(ProblemPageTestCase):
    """A caller whose token is restricted to a problem."""

    async def setUp(self) -> None:
        folder = temporary_folder()
        self.addCleanup(shutil.rmtree, folder)
        self.token, line = new_token("students")
        other, other_line = new_token("others")
        (folder / "tokens").write_text(f"{line} problems=slow\n{other_line} problems=none\n")
        self.other = other
        type(self).configuration = f"{CONFIGURATION}\n[callers]\ntokens = '{folder}/tokens'\n"
        await super().setUp()
        self.client = Client(self.daemon.url, self.token)
        self.expected = ("401 (Unauthorized)", "403 (Forbidden)")

    async def _give(self, token: str) -> None:
        await self.browser.write("#token", token)
        await self.browser.click("#token-submit")

    async def test_problems_alone(self) -> None:
        """There is neither a list nor an own evaluator; all else is as with other tokens."""
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
        await browser.until("!token.checkVisibility() && problem.checkVisibility()")
        self.assertEqual(await self.choices("#problem"), ["slow"])
        for selector in ("#to-listing", "#listing-view", "#evaluator"):
            self.assertFalse(await self.visible(selector), selector)
        self.assertEqual(await browser.focused(), "submit")
        self.assertEqual(await browser.violations(), [])
        await browser.photograph("problems-alone")
        await browser.write("#fields .content", str(TOUR))
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
