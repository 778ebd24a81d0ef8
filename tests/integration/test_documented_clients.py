"""The programs of docs/clients.md, run as printed there."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, ClassVar

from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import TestCase

from tests.integration.browser_case import BrowserTestCase
from tests.integration.client import Event, joined
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.integration.repositories import ENVIRONMENT, git
from tests.integration.unprivileged import give

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text("utf-8")

NODE = shutil.which("node")
WITHOUT_NODE = None if NODE else "there is no Node.js"
WITH_SOCKETS = "--experimental-websocket"
WITHOUT_SOCKETS = (
    None
    if NODE and subprocess.run([NODE, WITH_SOCKETS, "-e", "0"], stderr=DEVNULL).returncode == 0
    else "there is no Node.js 20"
)
WITHOUT_JQ = None if shutil.which("jq") else "there is no jq"

SHORTEST_RESPONSE = 150
"""Bytes: fewer than any response has."""

COMMAND = "printf 'half of '; sleep 0.1; echo a line; seq 1 500; sleep 0.1; echo ü"
PRINTED = ["half of a line\n" + "".join(f"{number}\n" for number in range(1, 501)) + "ü\n"]

PAGES = [
    ({"begin": None, "end": "0", "data": []}, {}),
    ({"begin": "0", "end": "0", "data": []}, {"Retry-After": "3"}),
    ({"begin": "0", "end": "0", "data": []}, {"Preference-Applied": "wait=25"}),
    ({"begin": "0", "end": "1", "data": [{"type": "text", "payload": "a"}]}, {}),
    ({"begin": "1", "end": None, "data": []}, {}),
]
"""Pages of a server that holds only one request, with their headers."""

PAUSES = [0.5, 3.0]
"""Seconds for which a client should pause between them."""

GIVEN_UP = "http://server/evaluation/x/events?wait=25&after=1"
"""The URL in the message of a client that gives up after the first page: with ID and cursor."""

LEAST_PAUSES = 600
"""Seconds for which a client repeats a request for events."""

LISTING = """
import { Client } from "./client.mjs";
const parts = %s;
const asked = [];
globalThis.fetch = async (url) => {
  asked.push(url.searchParams.get("after"));
  const part = parts.shift();
  return new Response(JSON.stringify(part ?? {}), { status: part ? 200 : 400 });
};
const found = [];
const client = new Client({ server: "http://server/" });
const away = (names) => found.push(...names);
for await (const one of client.evaluations({ away })) found.push(one.evaluation_id);
console.log(JSON.stringify([...asked, ...found]));
"""
FAILING_NODE = """
const pages = [{ evaluation_id: "x" }, { end: "1", data: [] }];
let seconds = 0;
globalThis.setTimeout = (work, pause) => { seconds += pause / 1000; queueMicrotask(work); };
globalThis.fetch = async () => {
  if (pages.length === 0) throw new Error("down");
  return new Response(JSON.stringify(pages.shift()), { headers: { "Preference-Applied": "wait" } });
};
try {
  await import("./follow.mjs");
} catch (error) {
  console.log(JSON.stringify([error.message, seconds]));
}
"""
"""A program that follows a server that answers two requests, while no time passes."""

FAILING_CURL = """#!/bin/sh
case $* in
*after=1*) exit 7 ;;
*after=*) echo '{"end": "1", "data": []}' >answer.json ;;
*) echo '{"evaluation_id": "x"}' >answer.json ;;
esac
printf 200
"""
"""A `curl` that fails after the first page."""

IN_NODE = """
const [pages, pauses] = [%s, []];
globalThis.setTimeout = (work, pause) => { pauses.push(pause / 1000); queueMicrotask(work); };
globalThis.fetch = async (url, { headers }) => {
  const [body, said] = url.endsWith("/evaluate") ? [{ evaluation_id: "x" }, {}] : pages.shift();
  return new Response(JSON.stringify(body), { headers: said });
};
await import("./follow.mjs");
console.log("", JSON.stringify(pauses));
"""
"""A program that follows as printed, while no time passes."""

HURRY = """
const { setTimeout: later } = globalThis;
globalThis.setTimeout = (work, pause, ...rest) => later(work, pause / 100, ...rest);
"""
JSON_LINES = """
for await (const event of jsonLines(process.argv[2])) console.log(JSON.stringify(event));
"""
WEB_SOCKET = """
webSocket(process.argv[2], (event) => console.log(JSON.stringify(event)), () => process.exit());
"""
REFUSED = """
let messages = 0;
console.error = (message) => {
  console.log(message);
  if (++messages === 2) process.exit();
};
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
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (source,) = (block for block in blocks if words in block)
    return source


class ProgramTests(DaemonTestCase):
    """Each program shows the events of the evaluator that the page sets up."""

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
        proxy = CuttingProxy(self.daemon.port, 1, places, longest=SHORTEST_RESPONSE, rude=0)
        self.addCleanup(proxy.stop)
        await self.show(program, name, source, await proxy.listen())
        self.assertGreater(proxy.cuts[Place.WITHIN_RESPONSES], 1)

    async def test_curl(self) -> None:
        """The shell script."""
        await self.show("sh", "follow.sh", documented("sh", "request()"))

    test_curl.skip = WITHOUT_JQ  # type: ignore[attr-defined]

    async def test_python(self) -> None:
        """The program for the standard library, also on a line that is cut."""
        source = documented("python", "import decimal")
        await self.show(sys.executable, "follow.py", source)
        await self.show_cut(sys.executable, "follow.py", source)

    async def test_blocking(self) -> None:
        """The program with `Client`."""
        await self.show(sys.executable, "use.py", documented("python", "with Client("))

    async def test_asyncio(self) -> None:
        """The program with `AsyncClient`."""
        await self.show(sys.executable, "use.py", documented("python", "asyncio.run("))

    async def test_twisted(self) -> None:
        """The program with `TwistedClient`."""
        await self.show(sys.executable, "use.py", documented("python", "react(main"))

    async def test_node(self) -> None:
        """The program for Node.js, also on a line that is cut."""
        source = documented("js", "node:crypto")
        await self.show(str(NODE), "follow.mjs", source)
        await self.show_cut(str(NODE), "follow.mjs", source)

    test_node.skip = WITHOUT_NODE  # type: ignore[attr-defined]

    async def test_json_lines(self) -> None:
        """The stream in Node.js is resumed until every event is there."""
        program = HURRY + documented("js", "jsonLines") + JSON_LINES
        (self.folder / "lines.mjs").write_text(program)
        proxy = CuttingProxy(self.daemon.port, 7, (Place.WITHIN_RESPONSES,), 2**14, 1000, rude=0)
        self.addCleanup(proxy.stop)
        identifier = await self.begin(COMMAND)
        url = f"http://127.0.0.1:{await proxy.listen()}/evaluation/{identifier}/events"
        printed = await run_program(str(NODE), self.folder / "lines.mjs", url)
        self.assertEqual(joined([json.loads(line) for line in printed.splitlines()]), PRINTED)
        self.assertGreater(proxy.cuts.total(), 1)

    test_json_lines.skip = WITHOUT_NODE  # type: ignore[attr-defined]

    async def test_refused_web_socket(self) -> None:
        """A WebSocket that the daemon refuses is said to be so at each attempt."""
        program = HURRY + documented("js", "webSocket(") + REFUSED + WEB_SOCKET
        (self.folder / "socket.mjs").write_text(program)
        url, script = f"{self.daemon.url}/nothing", self.folder / "socket.mjs"
        printed = await run_program(str(NODE), script, url, option=WITH_SOCKETS)
        address = self.daemon.url.replace("http", "ws")
        said = f"WebSocket connection lost, or refused: {address}/nothing?skip=0"
        self.assertEqual(printed.splitlines(), [said, said])

    test_refused_web_socket.skip = WITHOUT_SOCKETS  # type: ignore[attr-defined]


class BrowserTests(BrowserTestCase):
    """The programs for a web page."""

    configuration: ClassVar[str] = CONFIGURATION

    async def stream(self, name: str, longest: int, shortest: int) -> None:
        """Hold that a stream is resumed until every event is there."""
        self.expected = ("net::ERR_", "WebSocket connection")
        proxy = CuttingProxy(
            self.daemon.port, 7, (Place.WITHIN_RESPONSES,), longest, shortest, rude=0
        )
        self.addCleanup(proxy.stop)
        await self.browser.open(f"{self.daemon.url}/health")
        url = (
            f"http://127.0.0.1:{await proxy.listen()}/evaluation/{await self.begin(COMMAND)}/events"
        )
        program = HURRY + documented("js", f"function {name}(") + IN_BROWSER % name
        events: list[Event] = await self.browser.script(program, url)
        self.assertEqual(joined(events), PRINTED)
        self.assertGreater(proxy.cuts.total(), 1)

    async def test_event_source(self) -> None:
        """Server-sent events. The browser pauses for two seconds after each cut."""
        await self.stream("eventSource", 2**14, 2**13)

    async def test_web_socket(self) -> None:
        """WebSocket, with acknowledgements."""
        await self.stream("webSocket", 2**14, 1000)

    async def test_client(self) -> None:
        """`client.js` sends a form, and shows the events."""
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


class PauseTests(TestCase):
    """A client pauses between requests that a server does not hold."""

    def test_python(self) -> None:
        """The program pauses after an empty page, unless the server has held the request."""
        replies = (_Reply(json.dumps(page), headers) for page, headers in PAGES)
        self.assertEqual(self.follow_in_python(replies), (["a"], PAUSES))

    def test_long_number_in_python(self) -> None:
        """The program accepts a number with more digits than `int` does."""
        digits = "9" * 10_000
        first = '{"begin":null,"end":"end","data":[{"type":"data","payload":[1,-N]}]}'
        pages = (first.replace("N", digits), '{"begin":"end","end":null,"data":[]}')
        payloads, pauses = self.follow_in_python(_Reply(page, {}) for page in pages)
        self.assertEqual([str(number) for number in payloads[0]], ["1", f"-{digits}"])
        self.assertEqual(pauses, [])

    def follow_in_python(self, replies: Iterator[_Reply]) -> tuple[list[Any], list[float]]:
        """Return the payloads of the events, and the pauses, with these replies of a server."""
        pauses = list[float]()
        self.patch(urllib.request, "urlopen", lambda request, timeout: next(replies))
        self.patch(time, "sleep", pauses.append)
        program: dict[str, Any] = {"__name__": "follow"}
        exec(documented("python", "import decimal"), program)
        events = list(program["events"]("http://server", "x"))
        return [event["payload"] for event in events], pauses

    async def test_node(self) -> None:
        """The program for Node.js does the same."""
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        (folder / "follow.mjs").write_text(documented("js", "node:crypto"))
        (folder / "solution.txt").touch()
        (folder / "test.mjs").write_text(IN_NODE % json.dumps(PAGES))
        arguments = ("http://server", "file:///repository", "0" * 40, "solution.txt")
        printed = await run_program(str(NODE), folder / "test.mjs", *arguments)
        self.assertEqual(printed, f"a {json.dumps(PAUSES).replace('3.0', '3').replace(' ', '')}\n")

    test_node.skip = WITHOUT_NODE  # type: ignore[attr-defined]


class ListTests(TestCase):
    """`client.js` reads the list of evaluations."""

    async def test_begun_again(self) -> None:
        """A list that a restart cuts begins again; daemons that are away are named at its end."""
        script = Path(self.mktemp()).absolute().with_suffix(".mjs")
        client = Path(__file__).parents[2] / "tawebeval" / "web" / "static" / "client.js"
        module = script.with_name("client.mjs")
        shutil.copyfile(client, module)
        parts = [
            {"end": "x", "data": [{"evaluation_id": "a-1"}]},
            None,
            {"end": "y", "data": [{"evaluation_id": "a-1"}, {"evaluation_id": "b-1"}]},
            {"end": None, "data": [{"evaluation_id": "a-2"}], "away": ["b", "c"]},
        ]
        script.write_text(LISTING % json.dumps(parts))
        found = json.loads(await run_program(str(NODE), script))
        self.assertEqual(found, ["", "x", "", "y", "a-1", "b-1", "a-2", "b", "c"])

    test_begun_again.skip = WITHOUT_NODE  # type: ignore[attr-defined]


class GiveUpTests(TestCase):
    """A client repeats a request for events for ten minutes, then prints ID and cursor."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        (self.folder / "solution.txt").touch()

    def test_python(self) -> None:
        """The program for the standard library."""
        pauses = list[float]()
        replies = [_Reply('{"end": "1", "data": []}', {"Preference-Applied": "wait"})]

        def answer(request: object, timeout: float) -> _Reply:
            if not replies:
                raise OSError
            return replies.pop()

        self.patch(urllib.request, "urlopen", answer)
        self.patch(time, "sleep", pauses.append)
        program: dict[str, Any] = {"__name__": "follow"}
        exec(documented("python", "import decimal"), program)
        error = self.assertRaises(RuntimeError, list, program["events"]("http://server", "x"))
        self.assertTrue(str(error).startswith(f"{GIVEN_UP}: "), str(error))
        self.assertGreater(sum(pauses), LEAST_PAUSES)

    async def test_node(self) -> None:
        """The program for Node.js."""
        (self.folder / "follow.mjs").write_text(documented("js", "node:crypto"))
        (self.folder / "test.mjs").write_text(FAILING_NODE)
        arguments = ("http://server", "file:///repository", "0" * 40, "solution.txt")
        message, seconds = json.loads(
            await run_program(str(NODE), self.folder / "test.mjs", *arguments)
        )
        self.assertTrue(message.startswith(f"{GIVEN_UP}: "), message)
        self.assertGreater(seconds, LEAST_PAUSES)

    test_node.skip = WITHOUT_NODE  # type: ignore[attr-defined]

    def test_curl(self) -> None:
        """The shell script."""
        (self.folder / "follow.sh").write_text(documented("sh", "request()"))
        for name, text in (("curl", FAILING_CURL), ("sleep", '#!/bin/sh\necho "$1" >>pauses\n')):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        arguments = ("http://server", "file:///repository", "0" * 40, "solution.txt")
        done = subprocess.run(
            ["sh", "follow.sh", *arguments],
            cwd=self.folder,
            env={"PATH": f"{self.folder}:{os.environ.get('PATH', os.defpath)}"},
            capture_output=True,
            text=True,
        )
        self.assertEqual((done.returncode, done.stderr), (1, f"gave up: {GIVEN_UP}\n"))
        pauses = (self.folder / "pauses").read_text().split()
        self.assertGreaterEqual(sum(map(int, pauses)), LEAST_PAUSES)

    test_curl.skip = WITHOUT_JQ  # type: ignore[attr-defined]


class _Reply(io.BytesIO):
    """A page with its headers, as `urlopen` returns it."""

    def __init__(self, page: str, headers: dict[str, str]) -> None:
        super().__init__(page.encode())
        self.headers = Message()
        for name, value in headers.items():
            self.headers[name] = value


async def run_program(program: str, file: Path, *arguments: str, option: str = "") -> str:
    """Return what a program prints, which must succeed; it runs in the folder of its file."""
    options = [option] if option else []
    environment = {"PATH": os.environ.get("PATH", os.defpath)}
    output, errors, status = await getProcessOutputAndValue(
        program, [*options, str(file), *arguments], environment, str(file.parent), reactor
    )
    assert status == 0, errors.decode()
    return output.decode()


def _lines(printed: str) -> list[str]:
    """Return the lines of an output, without spaces in the JSON of data."""
    return [
        line.replace('": ', '":') if line.startswith("DATA") else line
        for line in printed.splitlines()
    ]
