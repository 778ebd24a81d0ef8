"""The page at `/`: results as they come, and what a request chooses, in a real browser."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from tawebeval.core.evaluations import CLIENT_VISIBLE_STATES
from tawebeval.core.form import LIMIT_UNITS
from tests.integration.browser import DESKTOP, PHONE
from tests.integration.browser_case import TOUR, PageTestCase
from tests.integration.harness import CONFIGURATION

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
        "input": "3 4",
        "expected": "1\n2",
        "printed": "1\n3\n<i>",
    },
    {"case": "slow", "verdict": "time_limit", "time": 2.004, "memory": None},
    {"case": "more", "verdict": "skipped", "group": "hidden"},
]


class PageResultTests(PageTestCase):
    # An evaluation is on the page until its test has looked at all of it.
    configuration = f"{CONFIGURATION}[limits]\nwall_clock = 3_000\n"

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

    async def test_cases_are_shown_while_the_evaluation_runs(self) -> None:
        cases = [{"type": "case", **each} for each in CASES]
        progress = {"type": "progress", "done": 4, "total": 9}
        score = {"type": "score", "score": 10, "maximum": 90}
        identifier = await self.send([*cases, progress, score], "exec sleep 3000")
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
        await self.browser.click("#cases tbody tr:nth-child(2) button.open")
        await self.browser.until("document.querySelector('.diff mark') !== null")
        self.assertEqual(
            await self.rows(".diff tbody tr"),
            [["1", "", "1"], ["2", "≠", "3"], ["", "+", "<i>"]],
        )
        await self.browser.shows("#cases tr.more", "3 4")
        # The table has no place for the group.
        await self.browser.shows("#data", "hidden")
        data = "return document.querySelectorAll('#data .data > li').length"
        self.assertEqual(await self.browser.script(data), 1)
        await self.browser.shows("#verdict", "Wrong answer so far")
        await self.browser.shows("#score", "10 of 90")
        await self.browser.shows(
            "#summary", "1 of 4 cases accepted (1 wrong answer, 1 time limit, 1 skipped)"
        )
        await self.browser.shows("#progress", "4 of 9")
        bar = "const bar = progress.firstElementChild; return [bar.value, bar.max]"
        self.assertEqual(await self.browser.script(bar), [4, 9])
        plots = "return [...document.querySelectorAll('.plot rect')].map((bar) => bar.textContent)"
        self.assertEqual(
            await self.browser.script(plots),
            [
                *("1: 0.012 s", "2: 0.000 s", "3: 2.004 s", "4: 0.000 s"),
                *("1: 3.0 MiB", "2: 0 B", "3: 0 B", "4: 0 B"),
            ],
        )
        await self.browser.click("#details > summary")
        await self.browser.shows("#details", "Waiting")
        wide = (
            "const place = document.querySelector('#cases .scroll');"
            "return place.scrollWidth - place.clientWidth"
        )
        for size, scheme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")):
            await self.browser.look(size, scheme)
            await self.browser.shows("#cases tbody tr", "sample")
            self.assertEqual(await self.browser.script(wide), 0)
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")
        self.assertFalse(await self.browser.script("return progress.checkVisibility()"))
        await self.browser.shows("#verdict", "Cancelled")
        await self.browser.shows("#score", "10 of 90")
        await self.browser.shows("#details", "Running")
        self.assertEqual((await self.client.status(identifier))["state"], "cancelled")

    async def test_all_of_22000_cases_are_counted_and_the_last_200_shown(self) -> None:
        await self.browser.script(
            "const [body] = document.querySelector('#cases table').tBodies; window.most = 0;"
            "new MutationObserver(() => { most = Math.max(most, body.rows.length) })"
            ".observe(body, { childList: true })"
        )
        verdicts = ("accepted", "wrong_answer")
        await self.send(
            [
                {
                    "type": "case",
                    "case": f"case {n}",
                    "verdict": verdicts[n % 2],
                    "time": n,
                    "expected": "e" * 250,
                }
                for n in range(22_000)
            ]
        )
        await self.browser.shows("#state", "finished")
        await self.browser.shows("#summary", "11,000 of 22,000 cases accepted (11,000 wrong answer")
        heads = "return Array.from(cases.querySelectorAll('tbody th'), (head) => head.textContent)"
        last = [f"case {n}" for n in range(21_800, 22_000)]
        self.assertEqual(await self.browser.script(heads), last)
        self.assertEqual(await self.browser.script("return most"), len(last))
        await self.browser.shows("#cases .hint", "The first 1,000 cases are no longer kept.")
        await self.browser.shows("#cases-shown", "20,801\u201321,000 of 21,000 cases")
        opened = "return document.querySelectorAll('#cases button.open').length"
        self.assertEqual(await self.browser.script(opened), 200)
        bars = "return document.querySelectorAll('#time-plot rect').length"
        self.assertEqual(await self.browser.script(bars), 120)
        self.assertFalse(await self.browser.script("return data.checkVisibility()"))
        place = "const place = document.querySelector('#cases .scroll');"
        bottom = "return place.scrollHeight - place.scrollTop - place.clientHeight < 8"
        self.assertTrue(await self.browser.script(place + bottom), "it does not follow")
        await self.browser.click("#cases-earlier")
        await self.browser.shows("#cases-shown", "20,601\u201320,800 of 21,000 cases")
        await self.browser.script(
            "const select = document.getElementById('cases-filter'); select.value = 'others';"
            "select.dispatchEvent(new Event('change'))"
        )
        await self.browser.shows("#cases-shown", "1\u2013200 of 10,500 cases")
        first = [f"case {1001 + 2 * n}" for n in range(200)]
        self.assertEqual(await self.browser.script(heads), first)
        self.assertEqual(await self.browser.script(opened), 0, "their texts are still kept")

    async def test_output_has_colours_links_and_a_search(self) -> None:
        begin = "$EVALUATION_FILE_BEGIN"
        header = 'Content-Disposition: attachment; filename="notes.html"'
        self.repository.write(
            "judge.sh",
            "printf '\\033[1;31mred\\033[0m plain \\033]0;title\\007\\033[2J<b>\\n'\n"
            f"printf '\\n%s\\n%s\\n\\n%s\\n%s\\n' \"{begin}\" '{header}' '<b>ü</b>'"
            ' "$EVALUATION_FILE_END"\n'
            'for n in $(seq 300); do echo "/x/right_open.txt:$n:1: error"; done\n'
            "printf '\\033[31mx\\033[32my%.0s' $(seq 3000)\n"
            # As many as the search counts, however slow the browser is.
            'for i in $(seq 199); do echo "Needle $i."; sleep 0.05; done; exec sleep 3000\n',
        )
        self.commit = self.repository.commit()
        files = [("a", TOUR.name, b"\xff\0"), ("tour", TOUR.name, TOUR.read_bytes())]
        identifier = await self.begin("sh judge.sh", files=files)
        await self.browser.open(f"{self.page_url}#evaluation/{identifier}")
        await self.browser.shows("#output", "red plain <b>\n")
        await self.browser.shows("#output", "Needle 1.")
        styled = "return [...output.querySelectorAll('.bold.fg-1')].map((one) => one.innerText)"
        self.assertEqual(await self.browser.script(styled), ["red"])
        await self.browser.write("#search", "needle 2")
        await self.browser.shows("#search-count", "1 of ")
        current = (
            "return [...CSS.highlights.get('current')].map((range) => range.toString() +"
            " range.endContainer.data.slice(range.endOffset).split('\\n')[0]).join()"
        )
        await self.browser.shows("#search-count", "1 of 11")  # 2, and 20 to 29
        self.assertEqual(await self.browser.script(current), "Needle 2.")
        await self.browser.click("#search-next")
        await self.browser.click("#search-next")
        self.assertEqual(await self.browser.script(current), "Needle 21.")
        await self.browser.shows("#output", "Needle 40.")
        self.assertEqual(await self.browser.script(current), "Needle 21.")
        await self.browser.click("#search-previous")
        await self.browser.shows("#search-count", "2 of 11")
        await self.browser.click(".files summary")
        await self.browser.shows(".files pre", "<b>ü</b>")
        await self.browser.shows("#source", "right_open.txt")
        links = "return [...output.querySelectorAll('a')].map((link) => link.textContent)"
        found = await self.browser.script(links)
        self.assertEqual(found, [f"right_open.txt:{n}:1" for n in range(1, 201)])
        await self.browser.script("output.querySelectorAll('a')[2].click()")
        line = "return [document.activeElement.textContent, document.activeElement.className]"
        self.assertEqual(
            await self.browser.script(line), [TOUR.read_text().splitlines()[2], "marked"]
        )
        styled = "return output.querySelectorAll('[class]').length"
        self.assertEqual(await self.browser.script(styled), 5000)
        await self.browser.write("#search", "X")
        await self.browser.shows("#search-count", "1 of 1,000+")
        await self.browser.write("#search", "nothing like it")
        await self.browser.shows("#search-count", "No match")
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")

    # What a request chooses

    async def test_page_sends_shows_and_remembers_limits_and_labels(self) -> None:
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
        score = [{"type": "score", "score": 7.5, "maximum": 10}]
        identifier = await self.send(score)
        await self.browser.shows("#state", "finished")
        status = await self.client.status(identifier)
        self.assertEqual(status["metadata"], {"contest": "finals", "user": "ann <b>"})
        self.assertEqual(status["limits"]["memory"], 64 * 2**20)
        await self.browser.click("#details summary")
        for shown in ("memory = 64.0 MiB", "wall_clock = 9.5 s", "user = ann <b>"):
            await self.browser.shows("#details", shown)
        command = await self.browser.script("return [curl.textContent, tawebeval.textContent]")
        self.assertIn("limits[memory]=64M", command[0])
        for option in ("--limit memory=64M", "--label contest=finals", "--label 'user=ann <b>'"):
            self.assertIn(option, command[1])
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "contest = finals, user = ann <b>")
        await self.browser.shows("#listing", "7.5 of 10")
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

    async def test_list_is_filtered_by_state_time_and_label(self) -> None:
        options = "return Array.from(filters.elements.state.options, (one) => one.value)"
        self.assertEqual(await self.browser.script(options), ["", *CLIENT_VISIBLE_STATES])
        fields = {"metadata[contest]": "finals = 1"}
        marked, other = await self.begin("true", **fields), await self.begin("exec sleep 3000")
        await self.browser.click("#to-listing")
        await self.browser.shows(f"#listing a[href$='{marked}']", "")
        listed = "Array.from(document.querySelectorAll('#listing a'), (one) => one.hash.slice(12))"
        for name, value, expected in (
            ("label", "contest=finals = 1", [marked]),
            ("state", "running", []),
            ("label", "contest", []),
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
            wrong = "Label: write name=value, such as student=ann." if value == "contest" else ""
            said = await self.browser.script(
                "return document.querySelector('#filter-error').innerText"
            )
            self.assertEqual(said, wrong)

    async def test_refused_value_is_reported_below_its_field(self) -> None:
        phrase = HTTPStatus(413).phrase  # which is another one in Python 3.13
        self.expected = ("400 (Bad Request)", f"413 ({phrase})")
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
            await self.browser.write(selector, "")
            if "labels" in selector:
                await self.browser.click("#labels .remove")
