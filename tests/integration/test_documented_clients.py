"""The programs of docs/clients.md, run as printed there or as it links to them; their types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SynchronousTestCase

from tests.cases.documented import find_block, find_blocks
from tests.cases.patience import LONG_PATIENCE
from tests.integration.browser_case import BrowserTestCase
from tests.integration.client import Event, joined
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.integration.repositories import ENVIRONMENT, git
from tests.integration.unprivileged import give
from tests.run import ROOT

NODE = shutil.which("node")
LACKING = " and ".join(name for name in ("node", "jq") if shutil.which(name) is None)
WITHOUT = f"there is no {LACKING}" if LACKING else None

FOLLOW_SH, FOLLOW_PY, FOLLOW_MJS, STREAMS = (
    (ROOT / "examples" / "integrations" / name).read_text()
    for name in ("follow.sh", "follow.py", "follow.mjs", "streams.js")
)

SHORTEST_RESPONSE = 150
"""Bytes: fewer than any response has."""

COMMAND = "printf 'half of '; sleep 0.1; echo a line; seq 1 500; sleep 0.1; echo ü"
PRINTED = ["half of a line\n" + "".join(f"{number}\n" for number in range(1, 501)) + "ü\n"]

HURRY = """
const { setTimeout: later } = globalThis;
globalThis.setTimeout = (work, pause, ...rest) => later(work, pause / 100, ...rest);
"""
JSON_LINES = """
for await (const event of jsonLines(process.argv[2])) console.log(JSON.stringify(event));
"""
IN_BROWSER = """
return new Promise((resolve) => {
  const found = [];
  %s(arguments[0], (event) => found.push(event), () => resolve(found));
});
"""
FORM = """
document.body.innerHTML = "<form></form><pre></pre>";
for (const [name, value] of Object.entries(arguments[0])) {
  const input = Object.assign(document.createElement("input"), { name, value });
  document.querySelector("form").append(input);
}
const script = Object.assign(document.createElement("script"), { type: "module" });
script.textContent = arguments[1];
document.body.append(script);
"""


def documented(language: str, words: str) -> str:
    """Return the one block of the page in that language that contains these words."""
    return find_block(ROOT / "docs" / "clients.md", language, words)


class ProgramTests(DaemonTestCase):
    skip = WITHOUT
    configuration: ClassVar[str] = re.findall(
        r"printf '(.*)' >tawebeval.toml", documented("sh", "git init")
    )[0].replace("\\n", "\n")

    async def setUp(self) -> None:
        await super().setUp()
        *setup, serve = documented("sh", "git init").splitlines()
        self.assertEqual(serve, "tawebeval serve --config tawebeval.toml")
        environment = {**ENVIRONMENT, "HOME": str(self.folder)}
        subprocess.run(
            ["sh", "-ec", "\n".join(setup)], cwd=self.folder, env=environment, check=True
        )
        for owned in ("problems", "problems/.git"):  # git serves others' only over the network
            give(self.folder / owned)

    async def show(self, program: str, name: str, source: str, port: int | None = None) -> None:
        """Run a program, and hold that it prints the expected output."""
        (self.folder / name).write_text(source)
        commit = git(self.folder / "problems", "rev-parse", "HEAD")
        base = self.daemon.url if port is None else f"http://127.0.0.1:{port}"
        arguments = (base, f"file://{self.folder}/problems", commit, "solution.txt")
        printed = await run_program(program, self.folder / name, *arguments)
        self.assertEqual(_lines(printed), _lines(documented("text", "line: one")))

    async def show_cut(self, program: str, name: str, source: str) -> None:
        """Do the same on a line that cuts every first attempt to send the form or get a page."""
        places = (Place.WITHIN_RESPONSES, Place.AFTER_RESPONSE)
        proxy = CuttingProxy(self.daemon.port, 1, places, longest=SHORTEST_RESPONSE)
        self.addCleanup(proxy.stop)
        await self.show(program, name, source, proxy.listen())
        self.assertGreater(proxy.cuts[Place.WITHIN_RESPONSES], 1)

    async def test_programs_print_the_documented_lines(self) -> None:
        for program, name, source in (
            ("sh", "follow.sh", FOLLOW_SH),
            (sys.executable, "follow.py", FOLLOW_PY),
            (sys.executable, "program.py", documented("python", "with Client(")),
            (str(NODE), "follow.mjs", FOLLOW_MJS),
        ):
            await self.show(program, name, source)

    async def test_documented_programs_continue_after_cut_requests(self) -> None:
        await self.show_cut(sys.executable, "follow.py", FOLLOW_PY)
        await self.show_cut(str(NODE), "follow.mjs", FOLLOW_MJS)

    async def test_node_resumes_json_lines(self) -> None:
        program = HURRY + STREAMS + JSON_LINES
        (self.folder / "lines.mjs").write_text(program)
        proxy = CuttingProxy(self.daemon.port, 7, (Place.WITHIN_RESPONSES,), 2**14, 1000)
        self.addCleanup(proxy.stop)
        identifier = await self.begin(COMMAND)
        url = f"http://127.0.0.1:{proxy.listen()}/evaluation/{identifier}/events"
        printed = await run_program(str(NODE), self.folder / "lines.mjs", url)
        self.assertEqual(joined([json.loads(line) for line in printed.splitlines()]), PRINTED)
        self.assertGreater(proxy.cuts.total(), 1)


class BrowserTests(BrowserTestCase):
    configuration: ClassVar[str] = CONFIGURATION

    async def stream(self, name: str, longest: int, shortest: int) -> None:
        """Hold that a stream is resumed until every event is there."""
        self.expected = ("favicon.ico", "net::ERR_", "WebSocket connection")
        proxy = CuttingProxy(self.daemon.port, 7, (Place.WITHIN_RESPONSES,), longest, shortest)
        self.addCleanup(proxy.stop)
        await self.browser.open(f"{self.daemon.url}/health")
        url = f"http://127.0.0.1:{proxy.listen()}/evaluation/{await self.begin(COMMAND)}/events"
        program = HURRY + STREAMS + IN_BROWSER % name
        events: list[Event] = await self.browser.script(program, url)
        self.assertEqual(joined(events), PRINTED)
        self.assertGreater(proxy.cuts.total(), 1)

    async def test_browser_resumes_server_sent_events(self) -> None:
        await self.stream("eventSource", 2**14, 2**13)

    async def test_browser_resumes_a_web_socket(self) -> None:
        await self.stream("webSocket", 2**14, 1000)

    async def test_browser_submits_and_shows_the_events(self) -> None:
        self.expected = ("favicon.ico",)
        await self.browser.open(f"{self.daemon.url}/health")
        fields = {
            "submission[source]": "one",
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": 'cat "$SUBMISSION_FILE_SOURCE"',
        }
        program = documented("js", "client.js").replace("http://127.0.0.1:8080", self.daemon.url)
        await self.browser.script(FORM, fields, program)
        await self.browser.shows("pre", "one")


async def run_program(program: str, file: Path, *arguments: str) -> str:
    """Return what a program prints, which must succeed; it runs in the folder of its file."""
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    output, errors, status = await getProcessOutputAndValue(
        program, [str(file), *arguments], environment, str(file.parent), reactor
    )
    assert status == 0, errors.decode()
    return output.decode()


def _lines(printed: str) -> list[str]:
    """Return the lines of an output, without spaces in the JSON of data."""
    return [
        line.replace('": ', '":') if line.startswith("DATA") else line
        for line in printed.splitlines()
    ]


DOCUMENTS = ("README.md", "docs/clients.md", "tawebeval_client/README.md")
INTEGRATIONS = ROOT / "examples" / "integrations"

# Django has no types.
MYPY_SETTINGS = """\
[tool.mypy]
strict = true

[[tool.mypy.overrides]]
module = "django.*"
ignore_missing_imports = true

[[tool.mypy.overrides]]
module = "django_view"
disallow_subclassing_any = false
disallow_untyped_decorators = false
"""

# The lines that end in "wrong" have an error.
WRONG = """\
from tawebeval_client import AsyncClient, Client

client = Client("http://127.0.0.1:8080")
print(client.status("x")["seed"] + 1)
print(client.status("x")["sed"])  # wrong
print(client.status("x")["seed"] + "1")  # wrong
for summary in client.evaluations(state="failed"):
    print(summary["results"]["cases"])  # wrong
    print(summary["results"] and summary["results"]["cases"].get("accepted"))
for standing in client.standings():
    print(standing["best"]["evaluation"])  # wrong
print(client.problem("p")["limits"]["memory"], client.whoami()["supervises"]["a"][0])
print([problem["statement"] for problem in client.problems()])  # wrong
outcome = client.run({}, repository="r", commit="c", evaluator_cmd="e", limits={"cpu": 1})
print(outcome.verdict.upper(), outcome.results and outcome.results["goals"]["a"])
print(client.run({}, repository="r", comit="c", evaluator_cmd="e"))  # wrong
print(client.run_problem("p", {"source": "x"}).verdict)
print(client.run_problem("p", {"source": 1}))  # wrong


async def main(client: AsyncClient) -> None:
    print((await client.run_problem("p", {})).verdict)
    print((await client.run_problem("p", {})).verdct)  # wrong
    print((await client.status("x"))["limits"]["cpus"])  # wrong
"""


class TypeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        (self.folder / "pyproject.toml").write_text(MYPY_SETTINGS)
        # Not by a path: beside it is a folder named as the package Twisted.
        (self.folder / "tawebeval_client").symlink_to(ROOT / "tawebeval_client")
        for document in DOCUMENTS:
            name = document.replace("/", "_").removesuffix(".md").lower()
            for number, block in enumerate(find_blocks(ROOT / document, "python")):
                (self.folder / f"{name}_{number}.py").write_text(block)
        for path in INTEGRATIONS.glob("*.py"):
            (self.folder / path.name).write_text(path.read_text())
        self.programs = sorted(path.name for path in self.folder.glob("*.py"))
        self.assertGreaterEqual(len(self.programs), 5)
        (self.folder / "wrong.py").write_text(WRONG)

    def test_mypy_finds_wrong_members_of_documents_and_none_in_documented_python(self) -> None:
        options = ("--config-file", "pyproject.toml", "--no-error-summary")
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, "wrong.py", *self.programs],
            cwd=self.folder,
            env={"PATH": os.defpath, "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=LONG_PATIENCE,
        )
        found = re.findall(r"^(\S+):(\d+)\b.* error", done.stdout, re.MULTILINE)
        lines = enumerate(WRONG.splitlines(), 1)
        wrong = {("wrong.py", str(number)) for number, line in lines if line.endswith(" wrong")}
        self.assertEqual({*found}, wrong, done)
