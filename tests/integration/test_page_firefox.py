"""The page at `/` in Firefox: from the choice of a problem to its verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread
from websockets.sync.client import ClientConnection, connect

from tests.cases.patience import LONG_PATIENCE, PATIENCE
from tests.integration.harness import CONFIGURATION, Daemon, RepositoryTestCase

FIREFOX = shutil.which("firefox-esr")

_SWITCHES = ("--headless", "--no-remote", "--remote-debugging-port", "0")
_PREFERENCES = {
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
}
# Firefox's own, now and then, for a script that WebDriver runs before those of the page.
_PRELOAD_ERROR = 'Error: Permission denied to access property "length"'
_COMPLAIN = "addEventListener('securitypolicyviolation', (one) => console.error(one.blockedURI))"


class Firefox:
    """One browser with one window, and a profile of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tawebeval-firefox-"))
        self._numbers = count(1)
        self.complaints: list[str] = []
        """Errors of the page's scripts, and what its policy has blocked."""

    async def start(self) -> None:
        """Start it; raises AssertionError if it does not answer."""
        await deferToThread(self._start)

    def _start(self) -> None:
        profile = self._folder / "profile"
        profile.mkdir()
        lines = (
            f"user_pref({json.dumps([name, value])[1:-1]});" for name, value in _PREFERENCES.items()
        )
        (profile / "user.js").write_text("\n".join(lines))
        assert FIREFOX is not None
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [FIREFOX, *_SWITCHES, "--profile", str(profile), "about:blank"],
                env={**os.environ, "HOME": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        server = profile / "WebDriverBiDiServer.json"
        deadline = time.monotonic() + LONG_PATIENCE
        while not server.exists() or not server.read_text():
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.1)
        address = json.loads(server.read_text())
        url = f"ws://{address['ws_host']}:{address['ws_port']}/session"
        self._connection: ClientConnection = connect(url, max_size=None)
        self._send("session.new", capabilities={})
        self._send("session.subscribe", events=["log.entryAdded"])
        self._send("script.addPreloadScript", functionDeclaration=f"() => {{ {_COMPLAIN} }}")
        self._context = self._send("browsingContext.getTree")["contexts"][0]["context"]

    async def quit(self) -> None:
        await deferToThread(self._quit)

    def _quit(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        self._connection.send(json.dumps(command))
        while True:
            answer = json.loads(self._connection.recv(timeout=LONG_PATIENCE))
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                self.complaints += {answer["params"]["text"]} - {_PRELOAD_ERROR}
            if answer.get("id") == number:
                assert answer["type"] == "success", answer
                return answer["result"]

    async def open(self, url: str) -> None:
        """Load a page, and wait until it is loaded."""
        await deferToThread(
            self._send, "browsingContext.navigate", context=self._context, url=url, wait="complete"
        )
        await self.evaluate(_COMPLAIN)  # again, for `_PRELOAD_ERROR`

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, as JSON can have it."""
        found = await deferToThread(
            self._send,
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then((one) => JSON.stringify(one ?? null))",
            target={"context": self._context},
            awaitPromise=True,
        )
        assert found["type"] == "success", found
        return json.loads(found["result"]["value"])

    async def until(self, expression: str) -> Any:
        """Wait for an expression to be true in the page, and return its value."""
        deadline = time.monotonic() + PATIENCE
        while not (value := await self.evaluate(expression)):
            if time.monotonic() > deadline:
                shown = await self.evaluate("document.body.innerText")
                raise AssertionError(f"{expression}; shown is: {shown}")
            await deferToThread(time.sleep, 0.05)
        return value

    async def click(self, selector: str) -> None:
        """Click on the middle of an element with a mouse, once the page does not move it."""
        element = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"{element} !== null")
        await self.evaluate(f"{element}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        middle = (
            f"[{element}.getBoundingClientRect()]"
            ".map((box) => [box.left + box.width / 2, box.top + box.height / 2].map(Math.round))[0]"
        )
        place = None
        while (found := await self.evaluate(middle)) != place:
            place = found
            await deferToThread(time.sleep, 0.1)
        x, y = place
        press = [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")]
        await self._perform("pointer", {"type": "pointerMove", "x": x, "y": y}, *press)

    async def type(self, text: str) -> None:
        """Press the keys of a text where the focus is."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        await self._perform("key", *actions)

    async def _perform(self, kind: str, *actions: dict[str, Any]) -> None:
        device = {"type": kind, "id": kind, "actions": actions}
        await deferToThread(
            self._send, "input.performActions", context=self._context, actions=[device]
        )


ENTER = "\ue007"  # the key, in WebDriver
JUDGE = """
import json, os
source = open(os.environ["SUBMISSION_FILE_SOURCE"]).read()
verdict = "accepted" if source == "print(1)\\n" else "wrong_answer"
print("\\n" + os.environ["EVALUATION_DATA_BEGIN"])
print(json.dumps({"type": "case", "case": "one", "verdict": verdict}))
print(os.environ["EVALUATION_DATA_END"])
"""


class FirefoxTests(RepositoryTestCase):
    skip = None if FIREFOX else "there is no firefox-esr"

    async def setUp(self) -> None:
        await super().setUp()
        self.repository.write("judge.py", JUDGE)
        (self.folder / "one.md").write_text("Print **one**.")
        problem = (
            f"[problems.one]\nrepository = '{self.repository.url}'\n"
            f"commit = '{self.repository.commit()}'\ncommand = 'python3 judge.py'\n"
            f"fields = ['source']\nstatement = '{self.folder}/one.md'\n"
        )
        self.daemon = Daemon(CONFIGURATION + problem)
        self.addCleanup(self.daemon.remove)
        self.daemon.start()
        self.browser = Firefox()
        self.addCleanup(self.browser.quit)
        await self.browser.start()
        await self.daemon.ready()

    async def test_firefox_submits_from_the_editor_and_shows_the_verdict(self) -> None:
        browser = self.browser
        await browser.open(f"{self.daemon.url}/")
        await browser.click("#problem-list a")
        await browser.until("document.querySelector('#statement-text strong')?.innerText === 'one'")
        await browser.click("#fields .cm-content")
        await browser.type(f"print(1){ENTER}")
        written = "document.querySelector('#fields .content').value"
        await browser.until(f"{written}.length >= 9")
        self.assertEqual(await browser.evaluate(written), "print(1)\n")
        await browser.click("#submit")
        await browser.until("document.querySelector('#state').innerText === 'finished'")
        row = "document.querySelector('#cases tbody tr').innerText.split(/\\s+/)"
        self.assertEqual((await browser.evaluate(row))[:2], ["one", "accepted"])
        self.assertEqual(browser.complaints, [])
        await self.daemon.stop()
