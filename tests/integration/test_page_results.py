"""The page at `/`: results as they come, and what a request chooses, in a real browser."""

from __future__ import annotations

import json
from typing import Any

from tawebeval.core.limits import LIMIT_UNITS
from tawebeval.core.states import SHOWN_STATES
from tests.integration.browser import DESKTOP, PHONE
from tests.integration.browser_case import PageTestCase

DATA = """
begin() { printf '\\n%s\\n' "$EVALUATION_DATA_BEGIN"; }
end() { printf '%s\\n' "$EVALUATION_DATA_END"; }
"""
CASES = [
    {"case": "sample", "verdict": "accepted", "points": 10, "time": 0.0123, "memory": 3 * 2**20},
    {
        "case": "<b>large</b>",
        "verdict": "wrong_answer",
        "message": "line 2 differs",
        "expected": "1\n2",
        "printed": "1\n3",
    },
    {"case": "slow", "verdict": "time_limit", "time": 2.004, "memory": None},
    {"case": "more", "verdict": "skipped", "group": "hidden"},
]


class PageResultTests(PageTestCase):
    """Cases, progress and score on the page, and the fields for limits and labels."""

    async def setUp(self) -> None:
        await super().setUp()
        await self.browser.look(DESKTOP, "light")
        await self.browser.forget(self.daemon.url)
        await self.visit()

    async def send(self, values: list[dict[str, Any]], after: str = "true") -> str:
        """Submit an evaluator that sends these values, and then runs a command."""
        self.repository.write("values", "".join(f"{json.dumps(each)}\n" for each in values))
        self.repository.write("judge.sh", f"{DATA}begin; cat values; end; {after}\n")
        self.commit = self.repository.commit()
        return await self.submit("sh judge.sh")

    async def test_cases(self) -> None:
        """Cases are a table while the evaluation runs; the summary is above it, with a bar."""
        cases = [{"type": "case", **each} for each in CASES]
        progress = {"type": "progress", "done": 4, "total": 9}
        score = {"type": "score", "score": 10, "maximum": 90}
        identifier = await self.send([*cases, progress, score], "exec sleep 600")
        await self.browser.shows("#cases", "slow")
        rows = await self.rows("#cases tbody tr")
        self.assertEqual(
            [[cell.split("\n")[0] for cell in row] for row in rows],
            [
                ["sample", "accepted", "10", "0.012 s", "3.0 MiB"],
                ["<b>large</b>", "wrong answer", "", "", ""],
                ["slow", "time limit", "", "2.004 s", ""],
                ["more", "skipped", "", "", ""],
            ],
        )
        self.assertIn("line 2 differs", rows[1][0])
        await self.browser.click("#cases tbody tr:nth-child(2) details:last-child summary")
        await self.browser.shows("#cases tbody details:last-child pre", "1\n3")
        # The table has no place for the group.
        await self.browser.shows("#data", "hidden")
        data = "return document.querySelectorAll('#data .data > li').length"
        self.assertEqual(await self.browser.script(data), 1)
        await self.browser.shows(
            "#summary",
            "score 10 of 90 · 1 of 4 cases accepted (1 wrong answer, 1 time limit, 1 skipped)",
        )
        await self.browser.shows("#progress", "4 of 9")
        bar = "const bar = progress.firstElementChild; return [bar.value, bar.max]"
        self.assertEqual(await self.browser.script(bar), [4, 9])
        for size, scheme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")):
            await self.browser.look(size, scheme)
            await self.browser.shows("#cases tbody tr", "sample")
            await self.browser.photograph(f"cases-{size[0]}-{scheme}")
            self.assertEqual(await self.browser.violations(), [])
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")
        self.assertFalse(await self.browser.script("return progress.checkVisibility()"))
        await self.browser.shows("#summary", "score 10 of 90")
        self.assertEqual((await self.client.status(identifier))["state"], "cancelled")

    async def test_very_many_cases(self) -> None:
        """Of very many cases the newest are rows, and all are counted."""
        verdicts = ("accepted", "wrong_answer")
        await self.send(
            [
                {"type": "case", "case": f"case {n}", "verdict": verdicts[n % 2], "message": "m"}
                for n in range(20_000)
            ]
        )
        await self.browser.shows("#state", "finished")
        await self.browser.shows("#summary", "10,000 of 20,000 cases accepted (10,000 wrong answer")
        rows = await self.browser.script(
            "return Array.from(cases.querySelectorAll('tbody th'), (head) => head.textContent)"
        )
        self.assertEqual(rows, [f"case {n}m" for n in range(19_500, 20_000)])
        await self.browser.shows("#cases .hint", "The first 19,500 cases are no longer shown.")
        self.assertFalse(await self.browser.script("return data.checkVisibility()"))
        place = "const place = document.querySelector('#cases .scroll');"
        bottom = "return place.scrollHeight - place.scrollTop - place.clientHeight < 8"
        self.assertTrue(await self.browser.script(place + bottom), "it does not follow")

    async def test_strange_cases(self) -> None:
        """What is like a case and is none is data; long texts are cut, and are data, too."""
        await self.send(
            [
                {"type": "case", "case": "unknown", "verdict": "toString"},
                {"type": "case", "case": 7, "verdict": "accepted"},
                {"type": "case", "case": "long", "verdict": "accepted", "message": "m" * 100_000},
                {"type": "case", "case": "odd", "verdict": "partial", "time": True},
                {"type": "progress", "done": "1", "total": 2},
            ]
        )
        await self.browser.shows("#state", "finished")
        heads = "return Array.from(cases.querySelectorAll('tbody th'), (head) => head.textContent)"
        self.assertEqual(await self.browser.script(heads), ["long" + "m" * 2000, "odd"])
        data = "return document.querySelectorAll('#data .data > li').length"
        self.assertEqual(await self.browser.script(data), 5)

    # What a request chooses

    async def test_limits_and_labels(self) -> None:
        """They are sent, shown in the details and the list, and remembered."""
        names = "return Array.from(document.querySelectorAll('[name^=limits]'), (one) => one.name)"
        offered = await self.browser.script(names)
        self.assertEqual(sorted(offered), sorted(f"limits[{name}]" for name in LIMIT_UNITS))
        await self.browser.click(".more:has([name^=limits]) > summary")
        await self.browser.write("[name='limits[memory]']", "64M")
        await self.browser.write("[name='limits[wall_clock]']", "9.5")
        await self.browser.click(".more:has(#labels) > summary")
        for number, (name, value) in enumerate((("contest", "finals"), ("user", "ann <b>")), 1):
            await self.browser.click("#add-label")
            await self.browser.write(f"#labels li:nth-child({number}) .label-name", name)
            await self.browser.write(f"#labels li:nth-child({number}) .label-value", value)
        self.assertEqual(await self.browser.violations(), [])
        await self.browser.photograph("form")
        score = [{"type": "score", "score": 7.5, "maximum": 10}]
        identifier = await self.send(score)
        await self.browser.shows("#state", "finished")
        status = await self.client.status(identifier)
        self.assertEqual(status["metadata"], {"contest": "finals", "user": "ann <b>"})
        self.assertEqual(status["limits"]["memory"], 64 * 2**20)
        await self.browser.click("#details summary")
        for shown in ("memory = 64.0 MiB", "wall_clock = 9.5 s", "user = ann <b>"):
            await self.browser.shows("#details", shown)
        self.assertEqual(await self.browser.violations(), [])
        command = await self.browser.script("return [curl.textContent, tawebeval.textContent]")
        self.assertIn("limits[memory]=64M", command[0])
        for option in ("--limit memory=64M", "--label contest=finals", "--label 'user=ann <b>'"):
            self.assertIn(option, command[1])
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "contest = finals, user = ann <b>")
        await self.browser.shows("#listing", "score 7.5 of 10")
        self.assertEqual(await self.browser.violations(), [])
        await self.visit()
        values = (
            "return Array.from(document.querySelectorAll('.more[open] input'), (one) => one.value)"
            ".filter(Boolean)"
        )
        self.assertEqual(
            await self.browser.script(values),
            ["9.5", "64M", "contest", "finals", "user", "ann <b>"],
        )
        await self.browser.click("#labels li:first-child .remove")
        self.assertEqual(await self.browser.focused(), "add-label")

    async def test_filters(self) -> None:
        """The list has the evaluations of a state, a time and a label; the fields say which."""
        options = "return Array.from(filters.elements.state.options, (one) => one.value)"
        self.assertEqual(await self.browser.script(options), ["", *SHOWN_STATES])
        fields = {"metadata[contest]": "finals = 1"}
        marked, other = await self.begin("true", **fields), await self.begin("exec sleep 600")
        await self.browser.click("#to-listing")
        await self.browser.shows(f"#listing a[href$='{marked}']", "")
        listed = "Array.from(document.querySelectorAll('#listing a'), (one) => one.hash.slice(12))"
        for name, value, expected in (
            ("label", "contest=finals = 1", [marked]),
            ("state", "running", []),
            ("label", "", [other]),
            ("since", "3600", [other]),
        ):
            await self.browser.script(
                "const input = filters.elements[arguments[0]]; input.value = arguments[1];"
                "input.dispatchEvent(new Event('change', { bubbles: true }))",
                name,
                value,
            )
            await self.browser.until(f"{listed}.join() === arguments[0]", ",".join(expected))
        self.assertEqual(await self.browser.violations(), [])
        await self.browser.photograph("filters")

    async def test_refused_values(self) -> None:
        """What the server says of a limit or a label is below its field, which has the focus."""
        self.expected = ("400 (Bad Request)", "413 (Request Entity Too Large)")
        await self.fill("true")
        for selector, field, words in (
            ("[name='limits[memory]']", "9P", "limits[memory]: '9P' is not a size"),
            ("#labels .label-value", "ü" * 200, "metadata[long]"),
        ):
            await self.browser.script(
                "for (const more of document.querySelectorAll('.more')) more.open = true"
            )
            if "labels" in selector:
                await self.browser.click("#add-label")
                await self.browser.write("#labels .label-name", "long")
            await self.browser.write(selector, field)
            await self.browser.script(
                "for (const more of document.querySelectorAll('.more')) more.open = false"
            )
            await self.browser.click("#submit")
            await self.browser.shows("#form-error", words)
            found = await self.browser.script(
                "const input = document.activeElement; return [input.matches(arguments[0]),"
                " input.ariaInvalid, input.getAttribute('aria-describedby'),"
                " document.getElementById('form-error').getBoundingClientRect().top"
                " - input.getBoundingClientRect().bottom < 60]",
                selector,
            )
            self.assertEqual(found, [True, "true", "form-error", True])
            self.assertEqual(await self.browser.violations(), [])
            await self.browser.write(selector, "")
            if "labels" in selector:
                await self.browser.click("#labels .remove")

    async def test_incomplete_label(self) -> None:
        """A label without a name is not sent: its part of the form opens, and it has the focus."""
        await self.fill("true")
        await self.browser.click(".more:has(#labels) > summary")
        await self.browser.click("#add-label")
        await self.browser.click(".more:has(#labels) > summary")
        await self.browser.click("#submit")
        await self.browser.until("document.activeElement.matches('.label-name')")
        self.assertEqual(await self.browser.script("return location.hash"), "")
