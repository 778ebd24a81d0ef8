"""docs/integrate.md: the site and its commands, as printed there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.cases.documented import find_block, find_blocks, run_script
from tests.integration.browser_case import WITHOUT, start_browser
from tests.integration.harness import COMMAND, RepositoryTestCase, until
from tests.integration.ports import free_port, listens
from tests.integration.repositories import ENVIRONMENT
from tests.integration.unprivileged import give
from tests.run import ROOT

PAGE = ROOT / "docs" / "integrate.md"
EXAMPLES = ROOT / "examples"
SERVE = "tawebeval serve --config tawebeval.toml"
EXPORT = "export PATH=/opt/tawebeval/bin:$PATH"
SERVER, SITE = "http://127.0.0.1:8080", "http://127.0.0.1:8000"
SOLUTION = EXAMPLES / "problems" / "inversions" / "solutions" / "right_merge.py"
WRITE = """
const [source] = document.getElementsByName("source");
source.value = arguments[0];
source.form.requestSubmit();
"""


class SiteTests(RepositoryTestCase):
    async def setUp(self) -> None:
        await super().setUp()
        ignored = shutil.ignore_patterns("__pycache__")  # where others may be writing
        shutil.copytree(EXAMPLES, self.folder / "examples", ignore=ignored)
        programs = self.folder / "bin"
        programs.mkdir()
        (programs / "tawebeval").symlink_to(COMMAND)
        self.environment = {
            **ENVIRONMENT,
            "PATH": f"{programs}:{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        }
        export, *setup, serve = find_block(PAGE, "sh", "mkdir site").splitlines()
        self.assertEqual((export, serve), (EXPORT, SERVE))
        await deferToThread(run_script, "\n".join(setup), self.folder, self.environment)
        self.site = self.folder / "site"
        for path in (self.site, *self.site.rglob("*")):
            give(path)
        await self.start_own((self.site / "tawebeval.toml").read_text())
        self.url = f"http://127.0.0.1:{free_port()}"
        self.start_site()
        port = int(self.url.rpartition(":")[2])
        await until(lambda: listens(port), "the site listens")

    def start_site(self) -> None:
        export, *lines = find_block(PAGE, "sh", "judge_site.py").splitlines()
        self.assertEqual((export, lines[-1]), (EXPORT, "python3 judge_site.py 8000"))
        port = self.url.rpartition(":")[2]
        lines[-1] = f"exec {lines[-1].replace('8000', port)}"
        site = subprocess.Popen(
            ["bash", "-ec", self.replace_urls("\n".join(lines))],
            cwd=self.site,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "errors").open("wb"),
        )
        self.addCleanup(site.wait)
        self.addCleanup(site.terminate)

    def replace_urls(self, script: str) -> str:
        return script.replace(SERVER, self.daemon.url).replace(SITE, self.url)

    async def test_browser_follows_and_gets_the_result_of_the_callback(self) -> None:
        if WITHOUT:
            raise SkipTest(WITHOUT)
        browser = start_browser()
        await browser.open(self.url)
        await browser.until("!document.querySelector('button').disabled")
        await browser.script(WRITE, SOLUTION.read_text())
        await browser.shows("p[role]", "points")
        shown = f"{await browser.text('pre')}\n{await browser.text('p[role]')}\n"
        self.assertEqual(shown, find_block(PAGE, "text", "large 3"))
        self.assertEqual(await browser.complaints(), [])
        await browser.open("about:blank")

    async def test_forged_callback_is_refused(self) -> None:
        command, answer = find_block(PAGE, "console", "curl").splitlines()
        script = self.replace_urls(command.removeprefix("$ "))
        printed = await deferToThread(run_script, script, self.site, self.environment)
        self.assertEqual(printed, f"{answer}\n")
        self.assertNotIn("Traceback", (self.folder / "errors").read_text())


class ExcerptTests(SynchronousTestCase):
    def test_excerpts_in_the_docs_are_parts_of_the_example_programs(self) -> None:
        programs = [EXAMPLES / "integrations" / f"judge_site.{kind}" for kind in ("py", "html")]
        text = re.sub(r"(?m)^ +", "", "".join(path.read_text("utf-8") for path in programs))
        excerpts = [*find_blocks(PAGE, "python"), *find_blocks(PAGE, "js")]
        self.assertEqual(len(excerpts), 2)
        for excerpt in excerpts:
            self.assertIn(re.sub(r"(?m)^ +", "", excerpt), text)
