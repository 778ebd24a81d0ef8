"""The page at `/`, in a real browser, against the real daemon."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from typing import Any

from twisted.internet import reactor
from twisted.web.proxy import ReverseProxyResource
from twisted.web.resource import Resource
from twisted.web.server import Site

from tests.cases.patience import PATIENCE
from tests.integration.browser import DESKTOP
from tests.integration.browser_case import TOUR, PageTestCase
from tests.integration.cutting_proxy import CuttingProxy
from tests.integration.harness import until

STRANGE = r"""
import os
data, end = os.environ["EVALUATION_DATA_BEGIN"], os.environ["EVALUATION_DATA_END"]
file, over = os.environ["EVALUATION_FILE_BEGIN"], os.environ["EVALUATION_FILE_END"]
bad = "<img src=x onerror=console.error(1)>"
print(bad, "\n" + data, '{"%s": ["%s", 2.50, 12345678901234567890]}' % (bad, bad), sep="\n")
print('{"type": "goal_result", "goal": "%s", "result": true}' % bad)
print('{"type": "score", "score": 7.50, "max_score": 10}', "{", end, "\n" + file, sep="\n")
print("Content-Type: " + "text/html", "Content-Disposition: attachment; "
      'filename="..%2f\u202efdp.<b>.exe"', "", bad, over, sep="\n")
raise SystemExit(3)
"""
COUNTING = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done"


class PageTests(PageTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        await self.browser.look(DESKTOP, "light")
        await self.browser.forget(self.daemon.url)
        await self.visit()

    # An evaluation

    async def test_example_is_judged_and_its_files_can_be_saved(self) -> None:
        identifier = await self.tour()
        await self.check_tour()
        await self.browser.save_to(self.folder)
        table = self.folder / "tour.csv"
        await self.browser.click(".files a[download='tour.csv']")
        # The browser reserves the name by an empty file.
        await until(lambda: table.exists() and table.stat().st_size > 0, "the file is saved")
        self.assertEqual(len(table.read_text().splitlines()), 65)
        await self.browser.open(f"{self.daemon.url}/#evaluation/{identifier}")
        await self.browser.shows("#state", "finished")
        await self.check_tour()

    async def test_partial_line_is_shown_and_cancel_ends_the_run(self) -> None:
        identifier = await self.submit("printf 'half of a line'; exec sleep 600")
        await self.browser.shows("#output", "half of a line")
        await self.browser.shows("#state", "running")
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")
        await self.browser.shows("#failure", "cancelled")
        self.assertEqual((await self.client.status(identifier))["state"], "cancelled")
        self.assertFalse(await self.browser.script("return cancel.checkVisibility()"))
        self.assertEqual(await self.browser.focused(), "evaluation")

    async def test_place_in_the_queue_is_shown(self) -> None:
        for _ in range(5):  # of which one waits
            await self.begin("exec sleep 600")
        identifier = await self.submit("echo never")
        await self.browser.shows("#state", "queued")
        await self.browser.shows("#facts", "1\u00a0evaluation\u00a0ahead")
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")
        self.assertEqual((await self.client.status(identifier))["running"], None)

    async def test_lost_connection_is_shown_and_resumed(self) -> None:
        line = CuttingProxy(self.daemon.port)
        port = line.listen()
        await self.browser.open(f"http://127.0.0.1:{port}/")
        self.expected = ("net::ERR_",)  # a browser tells of each request that fails
        await self.submit(COUNTING)
        await self.browser.shows("#output", "line 5\n")
        line.stop()
        await self.browser.shows("#connection", "Reconnecting")
        seen = (await self.browser.text("#output")).count("\n")
        line = CuttingProxy(self.daemon.port)
        self.addCleanup(line.stop)
        line.listen(port)
        await self.browser.shows("#output", f"line {seen + 20}\n")
        self.assertFalse(await self.browser.script("return connection.checkVisibility()"))
        await self.browser.click("#cancel")
        await self.browser.shows("#state", "cancelled")
        lines = (await self.browser.text("#output")).split("\n")
        self.assertEqual(lines, [f"line {number + 1}" for number in range(len(lines))])
        await self.browser.open("about:blank")  # before the line is cut for good

    async def test_output_is_shown_as_text_whatever_it_is(self) -> None:
        self.repository.write("strange.py", STRANGE)
        self.commit = self.repository.commit()
        await self.submit("python3 strange.py")
        await self.browser.shows("#state", "failed")
        bad = "<img src=x onerror=console.error(1)>"
        self.assertEqual(await self.browser.text("#output"), bad)
        data = await self.browser.text("#data .data")
        for shown in (bad, "2.50", "12345678901234567890", "protocol"):
            self.assertIn(shown, data)
        self.assertEqual(
            await self.rows("#goals tbody tr"), [[bad, "reached", ""], ["score", "", "7.50 of 10"]]
        )
        name = "return document.querySelector('.files a').download"
        self.assertEqual(await self.browser.script(name), "%2ffdp.b.exe")
        await self.browser.shows("#failure", "exited with status 3")

    async def test_evaluation_error_printed_by_the_evaluator_is_shown_as_data(self) -> None:
        forged = '{"type":"evaluation_error","reason":"exit","message":"made up"}'
        for after, wanted in (("echo on", 1), ("true", 1), ("exit 3", 1)):
            await self.visit()
            await self.send_data(forged, after=after)
            await self.browser.shows("#state", "failed" if after == "exit 3" else "finished")
            found = "return document.querySelectorAll('#data .data > li').length"
            self.assertEqual(await self.browser.script(found), wanted, after)
            failure = await self.browser.text("#failure")
            self.assertEqual("status 3" in failure, after == "exit 3", after)
            self.assertNotIn("made up", failure)

    async def send_data(self, *values: str, after: str = "true") -> None:
        """Submit an evaluator that sends these values, and then runs a command."""
        lines = "\n".join(values)
        self.repository.write("values", f"{lines}\n")
        self.commit = self.repository.commit()
        await self.submit(
            'echo; echo "$EVALUATION_DATA_BEGIN"; cat values; echo "$EVALUATION_DATA_END"; ' + after
        )

    async def test_end_is_announced_once_with_its_reason(self) -> None:
        await self.browser.script(
            """
            window.said = [];
            new MutationObserver(() => said.push(announcement.textContent))
              .observe(announcement, { childList: true, characterData: true, subtree: true });
            """
        )
        goal = '{"type":"goal_result","goal":"a","result":true}'
        await self.send_data(goal, after="exit 3")
        await self.browser.shows("#state", "failed")
        said = await self.browser.until("said.some((text) => text.includes('failed')) && said")
        self.assertRegex(said[-1], "^Evaluation failed, 1 of 1 goal reached, .*status 3")
        self.assertEqual([text for text in said[:-1] if "status 3" in text], [])

    async def test_newest_lines_of_a_flood_are_shown(self) -> None:
        identifier = await self.submit("seq 1 300000")
        await self.browser.shows("#state", "finished")
        shown, note, nodes = await self.browser.script(
            "return [output.textContent, dropped.innerText, output.childNodes.length]"
        )
        lines = shown.split("\n")
        self.assertEqual(lines[-2:], ["300000", ""])
        self.assertLessEqual(len(lines), 10_001)
        self.assertLess(nodes, 200)
        gone = int("".join(filter(str.isdigit, note)))
        self.assertEqual(gone + len(lines) - 1, 300_000)
        await self.client.page(identifier, "1000")  # the events before are discarded
        self.expected = ("410 (Gone)",)
        await self.browser.open(f"{self.daemon.url}/#evaluation/{identifier}")
        await self.browser.shows("#output", "300000")
        await self.browser.shows("#dropped", "The server has discarded a part")

    async def test_page_behind_a_path_prefix_shows_events_and_the_list(self) -> None:
        root = Resource()
        root.putChild(b"judge", ReverseProxyResource("127.0.0.1", self.daemon.port, b""))
        site = Site(root)
        listening: Any = reactor.listenTCP(0, site, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        line = CuttingProxy(listening.getHost().port)
        self.addCleanup(line.stop)  # so that no connection is left
        base = f"http://127.0.0.1:{line.listen()}/judge/"
        identifier = await self.begin("echo here")
        await self.browser.open(f"{base}#evaluation/{identifier}")
        await self.browser.shows("#output", "here")
        await self.browser.shows("#state", "finished")
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "finished")
        await self.browser.shows("#listing-hint", "evaluation")
        self.assertIn(f"{base}evaluate", await self.browser.script("return curl.textContent"))
        await self.browser.open("about:blank")

    # The form

    async def test_shown_curl_command_sends_the_same_form(self) -> None:
        await self.fill("""echo "it's $SUBMISSION_FILE_SOURCE"; cat "$SUBMISSION_FILE_NOTE" """)
        await self.browser.click("#add-text")
        await self.browser.write("#fields li:nth-child(2) .name", "note")
        await self.browser.write("#fields li:nth-child(2) .content", "a 'quoted'\nnote; $HOME")
        await self.browser.click("#commands summary")
        shutil.copy(TOUR, self.folder / TOUR.name)
        command = (await self.browser.text("#curl")).replace("curl ", "curl -sS --noproxy '*' ", 1)
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE
        )
        self.assertEqual(done.stderr, "")
        identifier = json.loads(done.stdout)["evaluation_id"]
        events = await self.client.follow(identifier)
        printed = "".join(event["payload"] for event in events)
        self.assertRegex(printed, rf"\Ait's /.*/{TOUR.name}\na 'quoted'\nnote; \$HOME\Z")
        words = shlex.split((await self.browser.text("#tawebeval")).replace("\\\n", ""))
        self.assertEqual(words[:4], ["tawebeval", "evaluate", "--server", f"{self.daemon.url}/"])
        self.assertIn(f"source:{TOUR.name}", words)
        self.assertIn("note=a 'quoted'\nnote; $HOME", words)

    async def test_dropped_files_become_fields(self) -> None:
        await self.browser.script(
            """
            const dataTransfer = new DataTransfer();
            for (const name of ["first.py", "second.py"]) {
              dataTransfer.items.add(new File(["print()"], name));
            }
            for (const type of ["dragenter", "dragover", "drop"]) {
              const event = new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer });
              evaluation.dispatchEvent(event);
            }
            """
        )
        fields = await self.browser.script(
            "return [...document.querySelectorAll('#fields li')].map((row) =>"
            " [row.querySelector('.name').value, row.querySelector('.content').files[0].name])"
        )
        self.assertEqual(fields, [["source", "first.py"], ["source_2", "second.py"]])

    async def test_link_fills_in_the_form(self) -> None:
        await self.fill("old", "old_directory")
        await self.browser.script(
            "location.hash = '#evaluate?repository=http://h/&command=a+b&limits[cpu]=7'"
        )
        values = "Object.fromEntries(new FormData(form))"
        await self.browser.until(f"{values}.evaluator_cmd === 'a b'")
        found = await self.browser.script(f"return {values}")
        self.assertEqual(found["repository[url]"], "http://h/")
        self.assertEqual((found["commit_oid"], found["directory"]), ("", ""))
        self.assertTrue(await self.browser.script("return form['limits[cpu]'].checkVisibility()"))
        await self.browser.click("#submit")
        await self.browser.shows("#form-error", "Commit is missing.")
        await self.browser.write("[name=commit_oid]", "12")
        await self.browser.click("#submit")
        await self.browser.shows("#form-error", "Commit: 40 hexadecimal digits.")
        self.assertIn(
            "#evaluate?repository%5Burl%5D=http%3A%2F%2Fh%2F&commit_oid=12&evaluator_cmd=a+b",
            await self.browser.script("return link.textContent"),
        )

    # The operator's view

    async def entries(self) -> dict[str, Any]:
        """Return the state of each evaluation that is listed, by identifier."""
        rows = await self.browser.script(
            "return [...document.querySelectorAll('#listing tr')].map((row) =>"
            " [row.querySelector('a').hash.slice(12), row.querySelector('.state').innerText])"
        )
        return dict(rows)

    async def test_list_opens_and_cancels_evaluations(self) -> None:
        first, second = [await self.begin("echo here; exec sleep 600") for _ in range(2)]
        await self.browser.click("#to-listing")
        await self.browser.shows("#listing", "running")
        self.assertEqual(await self.browser.text("[aria-current='page']"), "Evaluations")
        listed = list(await self.entries())
        self.assertLess(listed.index(second), listed.index(first))
        await self.browser.click(f"#listing tr:has(a[href$='{second}']) button")
        await self.browser.until(f"announcement.textContent.includes('{second[:10]} is cancelled')")
        gone = f"document.querySelector(`#listing tr:has(a[href$='{second}']) .state`).innerText"
        await self.browser.until(f"{gone} === 'cancelled'")
        self.assertEqual((await self.client.status(second))["state"], "cancelled")
        link = "return document.activeElement.hash"
        self.assertEqual(await self.browser.script(link), f"#evaluation/{second}")
        await self.browser.click(f"#listing a[href$='{first}']")
        await self.browser.shows("#output", "here")
        await self.browser.shows("#state", "running")
