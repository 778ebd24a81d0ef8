"""Type checkers find wrong members of the documents of the API."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.cases.patience import LONG_PATIENCE
from tests.integration.test_client_packages import NODE, install_package
from tests.run import ROOT

# The lines that end in "wrong" have an error.
PYTHON = """\
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
TYPESCRIPT = """\
import { Client, Refused, type Status } from "tawebeval-client";

const client = new Client({ server: "http://127.0.0.1:8080/" });
const status: Status = await client.status("x");
const next: number = status.seed + 1;
console.log(status.sed); // wrong
const text: string = status.seed; // wrong
console.log(status.state === "finishd"); // wrong
for await (const summary of client.evaluations()) {
  console.log(summary.results.cases); // wrong
  console.log(summary.results?.cases.accepted, next, text);
}
for await (const { best } of client.standings()) console.log(best.evaluation); // wrong
for await (const event of client.events("x")) console.log(event.payload, event.kind); // wrong
console.log(new Refused(404, {}, 0).problem.message, (await client.makeLink("x")).link);
"""
LIBRARY = Path(sys.prefix, "npm", "typescript")


class TypeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()

    def check(self, name: str, program: str, *command: str | Path) -> None:
        """Hold that a checker finds errors in the lines that are wrong, and in no others."""
        (self.folder / name).write_text(program)
        done = subprocess.run(
            [*command, name], cwd=self.folder, capture_output=True, text=True, timeout=LONG_PATIENCE
        )
        found = re.findall(rf"^{name}[:(](\d+)\b.* error", done.stdout, re.MULTILINE)
        lines = enumerate(program.splitlines(), 1)
        wrong = [number for number, line in lines if line.endswith(" wrong")]
        self.assertEqual(sorted({*map(int, found)}), wrong, done.stdout + done.stderr)

    def test_mypy_finds_wrong_members_of_documents(self) -> None:
        # Not by a path: beside it is a folder named as the package Twisted.
        (self.folder / "tawebeval_client").symlink_to(ROOT / "tawebeval_client")
        self.check("wrong.py", PYTHON, sys.executable, "-m", "mypy", "--strict")

    def test_typescript_finds_wrong_members_of_documents(self) -> None:
        if NODE is None or not (LIBRARY / "tsc.js").exists():
            raise SkipTest("there is no Node.js, or no python3 scripts/bootstrap --npm typescript")
        install_package(self.folder)
        options = ("--strict", "--noEmit", "--target", "es2024", "--module", "nodenext")
        self.check("wrong.mts", TYPESCRIPT, NODE, LIBRARY / "tsc.js", *options)
