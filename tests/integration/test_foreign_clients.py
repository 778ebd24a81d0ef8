"""Clients that nobody here wrote: what browsers have, and Python's requests."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import requests
from twisted.internet.threads import deferToThread

from tests.cases.patience import PATIENCE
from tests.integration.browser_case import BrowserTestCase
from tests.integration.client import Event, joined
from tests.integration.cutting_proxy import CuttingProxy, Place
from tests.integration.harness import CONFIGURATION, DaemonTestCase

COMMAND = (
    "printf 'half of '; sleep 0.1; echo a line; seq 1 500;"
    r""" printf '\n%s\n{"a": [1, null]}\n%s\n' "$EVALUATION_DATA_BEGIN" "$EVALUATION_DATA_END";"""
    " echo ü"
)
PRINTED = [
    "half of a line\n" + "".join(f"{number}\n" for number in range(1, 501)),
    [{"a": [1, None]}],
    "ü\n",
]

EVENT_SOURCE = """
return new Promise((resolve) => {
  const source = new EventSource(arguments[0]);
  const found = [];
  source.onmessage = (message) => found.push(JSON.parse(message.data));
  source.addEventListener("end", () => { source.close(); resolve(found); });
});
"""
FETCH = """
return (async () => {
  const answer = await fetch(arguments[0], { headers: { Accept: "application/jsonl" } });
  const found = [];
  let rest = "";
  for await (const some of answer.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + some).split("\\n");
    rest = lines.pop();
    found.push(...lines.map((line) => JSON.parse(line)));
  }
  return found;
})();
"""
WEB_SOCKET = """
return new Promise((resolve) => {
  const socket = new WebSocket(arguments[0].replace("http", "ws"));
  const found = [];
  socket.onmessage = (message) => found.push(JSON.parse(message.data));
  socket.onclose = (close) => resolve([...found, close.code]);
});
"""
OUR_CLIENT = """
return (async () => {
  const { Client } = await import(arguments[0]);
  const notices = [];
  const client = new Client({ server: arguments[1], notice: (pause) => notices.push(pause) });
  const found = [];
  const pages = client[arguments[2]](arguments[3], { limit: 2048 });
  for await (const page of pages) found.push(...page.data);
  return [found, notices.filter(Boolean).length];
})();
"""


def poll(url: str) -> list[Event]:
    """Return the events, as a client gets them that polls by docs/api.md."""
    events: list[Event] = []
    after: str | None = ""
    with requests.Session() as session:
        session.trust_env = False
        while after is not None:
            answer = session.get(f"{url}/events", params={"after": after}, timeout=PATIENCE)
            answer.raise_for_status()
            page: dict[str, Any] = answer.json()
            events += page["data"]
            after = page["end"]
            time.sleep(int(answer.headers.get("Retry-After", 0)) / 10)
    return events


class RequestsTests(DaemonTestCase):
    """Python's requests."""

    async def test_plain_polling(self) -> None:
        """A form, and pages without waiting, up to the end."""
        files = {"submission[source]": ("solution.py", b"print()")}
        form = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": COMMAND,
        }

        def evaluate() -> str:
            with requests.Session() as session:
                session.trust_env = False
                url = f"{self.daemon.url}/evaluate"
                answer = session.post(url, data=form, files=files, timeout=PATIENCE)
                answer.raise_for_status()
                return str(answer.json()["evaluation_id"])

        identifier = await deferToThread(evaluate)
        self.client.evaluations.append(identifier)
        events = await deferToThread(poll, f"{self.daemon.url}/evaluation/{identifier}")
        self.assertEqual(joined(events), PRINTED)


class BrowserTests(BrowserTestCase):
    """What a browser brings along, on a page of the daemon's own and on another one."""

    configuration: ClassVar[str] = CONFIGURATION + "\n[buffers]\npage = 4096\n"

    async def test_all_ways(self) -> None:
        """EventSource, fetch and WebSocket get every event once, of one and the same evaluation."""
        await self.browser.open(f"{self.daemon.url}/")
        url = f"{self.daemon.url}/evaluation/{await self.begin(COMMAND)}/events"
        for body in (EVENT_SOURCE, FETCH, WEB_SOCKET):
            events = await self.browser.script(body, url)
            if body is WEB_SOCKET:
                self.assertEqual(events.pop(), 1000)
            self.assertEqual(joined(events), PRINTED)

    async def our_client(self, way: str, places: tuple[Place, ...]) -> None:
        """Hold that static/client.js loses nothing on a line that is cut again and again."""
        # A browser tells of each request that fails, and whether its headers were whole.
        self.expected = ("net::ERR_", "CORS policy", "favicon.ico")
        # Most connections bring something, or the pauses would grow. When a connection breaks,
        # Chromium discards what the page has not read yet: hence the delay.
        line = CuttingProxy(
            self.daemon.port, 7, places, longest=2**14, shortest=1000, rude=0.1, delay=0.2
        )
        self.addCleanup(line.stop)
        port = await line.listen()
        # What is shown has another origin than the client, and no policy of ours.
        await self.browser.open(f"http://127.0.0.1:{self.daemon.port}/health")
        events, pauses = await self.browser.script(
            OUR_CLIENT,
            f"http://localhost:{self.daemon.port}/static/client.js",
            f"http://127.0.0.1:{port}/",
            way,
            await self.begin(COMMAND),
        )
        self.assertEqual(joined(events), PRINTED)
        self.assertGreater(pauses, 3)
        self.assertGreater(line.cuts.total(), 3)
        await self.browser.open("about:blank")

    async def test_our_pages(self) -> None:
        """Long polls, which are repeated as they were."""
        await self.our_client("pages", (Place.WITHIN_RESPONSES, Place.AFTER_RESPONSE))

    async def test_our_stream(self) -> None:
        """A stream, which is resumed from the last event that came."""
        await self.our_client("stream", (Place.WITHIN_RESPONSES,))
