"""The page at `/`: a class, shared results, and what a student's browser remembers."""

from __future__ import annotations

import csv
import zipfile
from base64 import b64encode
from io import BytesIO

from tests.integration.browser import DESKTOP
from tests.integration.browser_case import BrowserTestCase
from tests.integration.client import Client
from tests.integration.harness import new_token, until
from tests.integration.unprivileged import give

JUDGE = r"""
data() { printf '\n%s\n%s\n%s\n' "$EVALUATION_DATA_BEGIN" "$1" "$EVALUATION_DATA_END"; }
read points <"$SUBMISSION_FILE_SOURCE"
verdict=accepted; test "$points" = 10 || verdict=wrong_answer
data '{"type":"case","case":"one","verdict":"'$verdict'"}'
data '{"type":"score","score":'$points',"maximum":10}'
echo "judged $points points"
"""
ROWS = """
return [...document.querySelectorAll("#class-rows tr")].map((row) =>
  [...row.cells].slice(0, 4).map((cell) => cell.innerText.trim()))
"""

STANDINGS = """
return [...document.querySelectorAll("#standings-rows tr")].map((row) =>
  [...row.cells].map((cell) => cell.innerText.trim()))
"""
CHOOSE_PROBLEM = """
const choice = document.getElementById("standings-problem");
choice.value = "sums";
choice.dispatchEvent(new Event("change"));
"""
SUBMISSION = ("submission[source]", ("a.txt", "text/plain", BytesIO(b"1\n")))
GIVE_TWICE = """
const input = document.getElementById("class-zip");
const content = Uint8Array.from(atob(arguments[0]), (byte) => byte.charCodeAt(0));
for (let number = 0; number < 2; number++) {
  const transfer = new DataTransfer();
  transfer.items.add(new File([content], "ann.zip"));
  input.files = transfer.files;
  input.dispatchEvent(new Event("change"));
}
"""


class ClassTests(BrowserTestCase):
    """A daemon with tokens of a teacher, and of a student for the only problem."""

    async def setUp(self) -> None:
        self.teacher, line = new_token("teacher")
        self.student, student_line = new_token("ann")
        _, other_line = new_token("bob")
        self.configure_tokens(
            f"{line} supervises=algo1",
            f"{student_line} group=algo1 problems=sums",
            f"{other_line} group=algo1 problems=sums",
            settings="link_days = 3",
        )
        await super().setUp()
        await self.configure_problem(JUDGE)
        self.client = Client(self.daemon.url, self.teacher)
        self.expected = ("400 (Bad Request)", "401 (Unauthorized)", "403 (Forbidden)")
        await self.browser.look(DESKTOP, "light")
        await self.browser.forget(self.daemon.url)

    async def configure_problem(self, judge: str, settings: str = "") -> None:
        self.repository.write("judge.sh", judge)
        self.commit = self.repository.commit()
        await self.daemon.reload(
            f"\n[problems.sums]\nrepository = '{self.repository.url}'\n"
            f"commit = '{self.commit}'\ncommand = 'sh judge.sh'\nfields = ['source']\n"
            f"extensions = ['py', 'txt']\ntitle = 'Sums'\n{settings}\n"
        )

    async def enter(self, token: str, fragment: str) -> None:
        await self.browser.open(f"{self.daemon.url}/{fragment}")
        await self.browser.shows("#token-section", "A token is needed")
        await self.browser.write("#token", token)
        await self.browser.click("#token-submit")
        await self.browser.until("!token.checkVisibility()")

    async def test_submissions_of_a_zip_file_are_evaluated_and_saved_as_csv(self) -> None:
        browser = self.browser
        await self.enter(self.teacher, "#class")
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("x.txt", "1\n")
        await browser.script(GIVE_TWICE, b64encode(buffer.getvalue()).decode())
        await browser.shows("#class-start", "Evaluate 2 submissions")
        names = [row[0] for row in await browser.script(ROWS)]
        self.assertEqual(names, ["ann", "ann (2)"])
        await browser.click("#class-clear")
        with zipfile.ZipFile(self.folder / "hw.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("hw/ann_12_assignsubmission_file_/a.txt", "10\n")
            archive.writestr("hw/=1+1/b.txt", "4\n")
            archive.writestr("hw/bea/x.rs", "1\n")
            archive.writestr("hw/bea/Thumbs.db", "1\n")
            archive.writestr("hw/carl/x.txt", "1\n")
            archive.writestr("hw/carl/y.txt", "2\n")
            archive.writestr("hw/dora/", "")
        give(self.folder / "hw.zip")
        await browser.write("#class-zip", str(self.folder / "hw.zip"))
        await browser.shows("#class-start", "Evaluate 2 submissions")
        await browser.click("#class-start")
        await browser.until("document.getElementById('class-count').innerText.startsWith('2 of 5')")
        await browser.until("document.activeElement.id === 'class-csv'")
        wrong = "2 files, but the problem takes 1 (source)"
        self.assertEqual(
            await browser.script(ROWS),
            [
                ["=1+1", "b.txt", "Partly correct", "4 of 10"],
                ["ann", "a.txt", "Accepted", "10 of 10"],
                ["bea", "x.rs", "x.rs: the problem takes py, txt", ""],
                ["carl", "x.txt, y.txt", wrong, ""],
                ["dora", "", "nothing handed in", ""],
            ],
        )
        rows = await self.save("#class-csv", "sums.csv")
        self.assertEqual([row["student"] for row in rows], ["'=1+1", "ann", "bea", "carl", "dora"])
        self.assertEqual([row["score"] for row in rows], ["4", "10", "", "", ""])
        self.assertEqual(rows[3]["message"], wrong)
        await self.check_reload()
        await self.check_addition()
        await browser.click("#class-rows tr:nth-child(2) a")
        await self.check_share()
        await self.check_history()

    async def save(self, button: str, name: str) -> list[dict[str, str]]:
        """Return the rows of the CSV that a button saves."""
        await self.browser.save_to(self.folder)
        await self.browser.click(button)
        saved = self.folder / name
        await until(saved.exists, "the CSV is saved")
        with open(saved, encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))

    async def test_standings_of_a_group_are_updated_saved_as_csv_and_rerun(self) -> None:
        browser = self.browser
        await self.configure_problem(JUDGE, "closes = 2030-01-01T00:00:00Z")
        student = Client(self.daemon.url, self.student)
        self.addCleanup(student.close)
        for points in (4, 7, 3):
            file = BytesIO(f"{points}\n".encode())
            files = [("submission[source]", ("a.txt", "text/plain", file))]
            answer = await student.request("POST", "/problems/sums/evaluate", files=files)
            await student.ended(answer.json["evaluation_id"])
            if points == 4:
                await self.enter(self.teacher, "#class")
                await browser.shows("#whoami", "teacher")
        await browser.shows("#standings-rows", "3 tries")
        cells = await self.browser.script(STANDINGS)
        self.assertEqual([[row[0], *row[1].split("\n")[:1]] for row in cells], [
            ["ann", "Partly correct 7 of 10"], ["bob", ""],
        ])  # fmt: skip
        rows = await self.save("#standings-csv", "standings.csv")
        self.assertEqual([row["student"] for row in rows], ["ann", "bob"])
        self.assertEqual((rows[0]["score"], rows[0]["submissions"]), ("7", "3"))
        # All were late by the new deadline, and a mended evaluator gives other points.
        late = "closes = 2020-01-01T00:00:00Z\nlate = true"
        await self.configure_problem(JUDGE.replace('"maximum":10', '"maximum":8'), late)
        await self.enter(self.teacher, "#class")
        await browser.shows("#standings-rows", "late")
        await browser.script(CHOOSE_PROBLEM)
        await browser.click("#standings-rerun")
        await browser.shows("#standings-hint", "3 submissions evaluated again.")
        await browser.shows("#standings-rows", "7 of 8")
        await browser.shows("#standings-rows", "3 tries")
        files = [("submission[source]", ("a.txt", "text/plain", BytesIO(b"2\n")))]
        await student.request("POST", "/problems/sums/evaluate", files=files)
        await browser.shows("#standings-rows", "4 tries")
        await browser.shows("#standings-hint", "3 submissions evaluated again.")
        await browser.click("#standings-rows a")
        await browser.shows("#output", "judged 7 points")
        await browser.click("#to-listing")
        await browser.shows("#listing-hint", "No evaluations.")  # of the teacher's own

    async def check_reload(self) -> None:
        """Load the page anew: it has the evaluated students, sorts them and runs them again."""
        browser = self.browser
        student = Client(self.daemon.url, self.student)
        self.addCleanup(student.close)
        # Of the group, and not of the class: it is not the teacher who calls it so.
        fields = [("metadata[student]", (None, BytesIO(b"ann"))), SUBMISSION]
        answer = await student.request("POST", "/problems/sums/evaluate", files=fields)
        await student.ended(answer.json["evaluation_id"])
        await self.enter(self.teacher, "#class")
        rows = [["=1+1", "", "Partly correct", "4 of 10"], ["ann", "", "Accepted", "10 of 10"]]
        await browser.shows("#class-count", "2 of 2 students evaluated")
        self.assertEqual(await browser.script(ROWS), rows)
        await browser.click("#class-table [data-sort=score]")
        self.assertEqual(await browser.script(ROWS), rows[::-1])
        await self.configure_problem(JUDGE.replace('"maximum":10', '"maximum":20'))
        links = "Array.from(document.querySelectorAll('#class-rows a'), (one) => one.hash).join()"
        before = await browser.script(f"return {links}")
        await browser.click("#class-rerun")
        await browser.until("document.activeElement.id === 'class-csv'")
        now = "Partly correct"
        rows = [["=1+1", "", now, "4 of 20"], ["ann", "", now, "10 of 20"]]
        self.assertEqual(await browser.script(ROWS), rows[::-1])  # by the problem as it is now
        self.assertNotEqual(await browser.script(f"return {links}"), before)
        await browser.click("#class-table [data-sort=name]")

    async def check_addition(self) -> None:
        """Add a student's ZIP to the table; the other students keep their verdicts."""
        before = await self.browser.script(ROWS)
        with zipfile.ZipFile(self.folder / "dan.zip", "w") as archive:
            archive.writestr("main.txt", "3\n")
        give(self.folder / "dan.zip")
        await self.browser.write("#class-zip", str(self.folder / "dan.zip"))
        await self.browser.shows("#class-start", "Evaluate 1 submission")
        rows = [*before, ["dan", "main.txt", "", ""]]
        self.assertEqual(await self.browser.script(ROWS), rows)
        with zipfile.ZipFile(self.folder / "ann.zip", "w") as archive:
            archive.writestr("src/", "")
        give(self.folder / "ann.zip")
        await self.browser.write("#class-zip", str(self.folder / "ann.zip"))
        await self.browser.until("document.getElementById('class-hint').textContent === ''")
        self.assertEqual(await self.browser.script(ROWS), rows)  # what she has submitted stays

    async def check_share(self) -> None:
        """Share the open evaluation; the link shows it without a token until it is revoked."""
        browser = self.browser
        await browser.shows("#output", "judged 10 points")
        await browser.until("document.getElementById('about').textContent !== ''")  # moves the rest
        await browser.click("#share summary")
        await browser.click("#share-make")
        await browser.until("document.getElementById('share-link').value !== ''")
        offered = "return Array.from(document.getElementById('share-lifetime'), (one) => one.text)"
        longest = "3 days, the longest here"  # a week was chosen
        self.assertEqual(await browser.script(offered), ["an hour", "a day", longest])
        link = await browser.script("return document.getElementById('share-link').value")
        self.assertIn("#shared/", link)
        await browser.forget(self.daemon.url)
        await browser.open(link)
        await browser.shows("#output", "judged 10 points")
        await browser.shows("#verdict", "Partly correct")
        for selector in ("#token-section", "#share", "#rerun", "#cancel", "#form", "nav"):
            seen = "return document.querySelector(arguments[0]).checkVisibility()"
            self.assertFalse(await browser.script(seen, selector), selector)
        identifier = link.split("/")[-2]
        await self.client.request("DELETE", f"/evaluation/{identifier}/links")
        await browser.open(link)
        await browser.shows("#failure", "unknown, expired or revoked")
        self.assertNotIn(link.rpartition("/")[2], self.daemon.log)

    async def check_history(self) -> None:
        """Hold that a browser remembers what it has submitted with a token for problems."""
        browser = self.browser
        await self.enter(self.student, "#problem/sums")
        (self.folder / "sum.txt").write_text("7\n")
        give(self.folder / "sum.txt")
        await browser.choose_file("#fields li", str(self.folder / "sum.txt"))
        await browser.click("#submit")
        await browser.shows("#output", "judged 7 points")
        await browser.shows("#verdict", "Partly correct")
        await browser.click("#to-listing")
        await browser.shows("#listing", "Sums")
        await browser.shows("#listing .labels", "sum.txt")
        await browser.shows("#listing", "7 of 20")
        before = await browser.script("return document.querySelector('#listing a').hash")
        await browser.click("#listing .again")
        await browser.until("location.hash.startsWith('#evaluation/')")
        self.assertNotEqual(await browser.script("return location.hash"), before)
        await browser.shows("#output", "judged 7 points")
        await browser.click("#to-listing")
        await browser.until("document.querySelectorAll('#listing tr').length === 3")
