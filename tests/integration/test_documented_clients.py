"""The clients that docs/api.md shows in Python and JavaScript do what is said there."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import TestCase

from tests.integration.harness import DaemonTestCase

ROOT = Path(__file__).resolve().parent.parent.parent
WORD_COUNT = ROOT / "examples" / "problems" / "word_count"
SOLUTION = WORD_COUNT / "solutions" / "wrong_order.awk"


NODE = shutil.which("node")

PAGES = [
    ({"begin": None, "end": "0", "data": []}, {}),
    ({"begin": "0", "end": "0", "data": []}, {"Retry-After": "3"}),
    ({"begin": "0", "end": "0", "data": []}, {"Preference-Applied": "wait=25"}),
    ({"begin": "0", "end": "1", "data": [{"type": "text", "payload": "a"}]}, {}),
    ({"begin": "1", "end": None, "data": []}, {}),
]
"""What a server answers that waits only once, with the headers."""

PAUSES = [0.5, 3.0]
"""The seconds for which a client should pause between them."""

IN_NODE = """
const [answers, pauses, keys] = [%s, [], []];
Object.defineProperty(globalThis, "crypto", { value: { getRandomValues: (array) => array } });
globalThis.setTimeout = (work, pause) => { pauses.push(pause / 1000); queueMicrotask(work); };
globalThis.fetch = async (url, { headers = {} }) => {
  if (url.endsWith("/evaluate")) keys.push(headers["Idempotency-Key"]);
  const [body, said] = keys.length ? [{ evaluation_id: "x" }, {}] : answers.shift();
  return new Response(JSON.stringify(body), { headers: said });
};
const { evaluate, events } = await import("./client.mjs");
let text = "";
for await (const event of events("http://server", "x")) text += event.payload;
const id = await evaluate("http://server", new FormData());
console.log(JSON.stringify({ text, pauses, keys, id }));
"""
"""A program that follows, and begins, as on a page without TLS; time does not pass in it."""


def documented(language: str, words: str) -> str:
    """Return the one program of docs/api.md in that language in which there are these words."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    (source,) = (block for block in blocks if words in block)
    return source


class DocumentedClientTests(DaemonTestCase):
    """The programs as they stand in the text, and the problem of which they speak."""

    async def use(self, program: str, file: str) -> str:
        """Return what a program prints that judges the solution, by the client beside it."""
        problem = self.repository.folder / "word_count"
        shutil.copytree(WORD_COUNT, problem)
        evaluator = problem / "evaluator.sh"
        limited = evaluator.read_text()
        evaluator.write_text(limited.replace("time_limit=5 ", "time_limit=300 "))
        self.assertNotEqual(evaluator.read_text(), limited)  # a slow machine is none of its cases
        commit = self.repository.commit()
        arguments = (self.daemon.url, self.repository.url, commit, str(SOLUTION))
        return _lasting(await run_program(program, self.folder / file, *arguments))

    async def test_python(self) -> None:
        """A submission is sent, and its events are shown to the last, as in the text."""
        (self.folder / "client.py").write_text(documented("python", "def evaluate("))
        (self.folder / "use.py").write_text(documented("python", "from client import"))
        shown = await self.use(sys.executable, "use.py")
        expected = documented("console", "python3 use.py").splitlines()[1:]
        self.assertEqual(shown.splitlines(), _lasting("\n".join(expected)).splitlines())

    async def test_javascript(self) -> None:
        """The same, but for how data looks."""
        (self.folder / "client.mjs").write_text(documented("js", "function evaluate("))
        (self.folder / "use.mjs").write_text(documented("js", "client.mjs"))
        shown = (await self.use(str(NODE), "use.mjs")).splitlines()
        expected = _lasting(documented("console", "python3 use.py")).splitlines()[1:]
        for lines in (shown, expected):
            self.assertEqual(len([line for line in lines if line.startswith("DATA")]), 3)
        self.assertEqual(_texts(shown), _texts(expected))

    if NODE is None:
        test_javascript.skip = "there is no Node.js"  # type: ignore[attr-defined]


class PauseTests(TestCase):
    """A server that does not wait is not asked as fast as can be."""

    def test_python(self) -> None:
        """After an empty page there is a pause, unless the server has waited."""
        replies = (_Reply(json.dumps(page), headers) for page, headers in PAGES)
        self.assertEqual(self.follow_in_python(replies), (["a"], PAUSES))

    def test_long_number_in_python(self) -> None:
        """A number that is too long for an int of Python's is taken as any other."""
        digits = "9" * 10_000
        first = '{"begin":null,"end":"end","data":[{"type":"data","payload":[1,-N]}]}'
        pages = (
            first.replace("N", digits),
            '{"begin":"end","end":null,"data":[]}',
        )
        payloads, pauses = self.follow_in_python(_Reply(page, {}) for page in pages)
        self.assertEqual([str(number) for number in payloads[0]], ["1", f"-{digits}"])
        self.assertEqual(pauses, [])

    def follow_in_python(self, replies: Iterator[_Reply]) -> tuple[list[Any], list[float]]:
        """Return the payloads of the events, and the pauses, with these replies of a server."""
        pauses = list[float]()
        self.patch(urllib.request, "urlopen", lambda url, timeout: next(replies))
        self.patch(time, "sleep", pauses.append)
        client: dict[str, Any] = {}
        exec(documented("python", "def evaluate("), client)
        events = list(client["events"]("http://server", "x"))
        return [event["payload"] for event in events], pauses

    async def test_javascript(self) -> None:
        """The same; and a key is made also where a page is not trusted with all of `crypto`."""
        folder = Path(self.mktemp())
        folder.mkdir()
        (folder / "client.mjs").write_text(documented("js", "function evaluate("))
        (folder / "use.mjs").write_text(IN_NODE % json.dumps(PAGES))
        shown = json.loads(await run_program(str(NODE), (folder / "use.mjs").absolute()))
        self.assertEqual((shown["text"], shown["pauses"], shown["id"]), ("a", PAUSES, "x"))
        self.assertEqual(shown["keys"], ["0-0-0-0"])

    if NODE is None:
        test_javascript.skip = "there is no Node.js"  # type: ignore[attr-defined]


class _Reply(io.BytesIO):
    """What `urlopen` returns: a page, with its headers."""

    def __init__(self, page: str, headers: dict[str, str]) -> None:
        super().__init__(page.encode())
        self.headers = Message()
        for name, value in headers.items():
            self.headers[name] = value


async def run_program(program: str, file: Path, *arguments: str) -> str:
    """Return what a program prints that is in a file, which must succeed."""
    output, errors, status = await getProcessOutputAndValue(
        program, [str(file), *arguments], path=str(file.parent), reactor=reactor
    )
    assert status == 0, errors.decode()
    return output.decode()


def _texts(lines: list[str]) -> list[str]:
    """Return the lines without those that show data."""
    return [line for line in lines if not line.startswith("DATA")]


def _lasting(text: str) -> str:
    """Return what each run prints, without times and without words that were drawn."""
    drawn = r"\([0-9.]+ s\)|line [0-9]+: (?:expected|printed): +[0-9]+ [a-z]+"
    return re.sub(drawn, "...", text)
