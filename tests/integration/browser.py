"""A real browser: Debian's Chromium, driven through ChromeDriver, with a profile of its own.

Selenium blocks while the browser works. So it runs in a thread, and the reactor goes on: what
the page talks to may be in this very process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import (
    StaleElementReferenceException,
    TimeoutException,
    WebDriverException,
)
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from twisted.internet.threads import deferToThread

from tests.cases.patience import LONG_PATIENCE, PATIENCE

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
AXE = Path(sys.prefix, "npm", "axe-core", "axe.min.js")
"""The checker of accessibility, where scripts/bootstrap puts it."""

MISSING = [
    what
    for what, there in (
        ("chromium", CHROMIUM),
        ("chromedriver (Debian's chromium-driver)", CHROMEDRIVER),
        ("axe-core (python3 scripts/bootstrap --npm axe-core)", AXE.exists()),
    )
    if not there
]
"""What a browser's tests need and do not have."""

DESKTOP = (1360, 900, False)
PHONE = (390, 844, True)
NARROW = (320, 640, True)
LOOKS = {
    "desktop, light": (DESKTOP, "light"),
    "phone, dark": (PHONE, "dark"),
    "narrow, light": (NARROW, "light"),
}
"""Each size and each scheme: no rule of the style is of one size in one scheme."""

_SWITCHES = (
    "--headless=new",
    "--no-sandbox",  # root cannot have it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--lang=en-US",
)

_Result = TypeVar("_Result")


class Browser:
    """One browser with one window, which may be given further switches.

    What goes over the network is noted if `handshakes` are to be told.
    """

    def __init__(self, *switches: str, handshakes: bool = False) -> None:
        self._folder = tempfile.mkdtemp(prefix="tawebeval-browser-")
        options = ChromeOptions()
        assert CHROMIUM and CHROMEDRIVER
        options.binary_location = CHROMIUM
        for switch in (*_SWITCHES, *switches, f"--user-data-dir={self._folder}/profile"):
            options.add_argument(switch)
        noted = {"browser": "ALL", **({"performance": "ALL"} if handshakes else {})}
        options.set_capability("goog:loggingPrefs", noted)
        service = ChromeService(CHROMEDRIVER, env={**os.environ, "HOME": self._folder})
        try:
            self._driver = Chrome(options, service)
            # axe looks at thousands of elements in one script.
            self._driver.set_script_timeout(LONG_PATIENCE)
            self._driver.command_executor.client_config.timeout = LONG_PATIENCE
        except WebDriverException:
            self._remove()
            raise

    def quit(self) -> None:
        self._driver.quit()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def do(self, work: Callable[[Chrome], _Result]) -> _Result:
        result: _Result = await deferToThread(work, self._driver)
        return result

    async def open(self, url: str) -> None:
        """Load a page anew, also where only the fragment is another one."""

        def load(driver: Chrome) -> None:
            driver.get("about:blank")
            driver.get(url)

        await self.do(load)

    async def forget(self, origin: str) -> None:
        options = {"origin": origin, "storageTypes": "local_storage"}
        await self.do(lambda driver: driver.execute_cdp_cmd("Storage.clearDataForOrigin", options))

    async def script(self, body: str, *arguments: Any) -> Any:
        """Return what the body of a function returns in the page; it may be a promise."""
        return await self.do(lambda driver: driver.execute_script(body, *arguments))

    async def until(self, expression: str, *arguments: Any) -> Any:
        """Wait for an expression to be true in the page, and return its value."""

        def wait(driver: Chrome) -> Any:
            body = f"return {expression}"
            waiting = WebDriverWait(driver, PATIENCE, 0.05)
            try:
                return waiting.until(lambda _: driver.execute_script(body, *arguments))
            except TimeoutException:
                shown = driver.execute_script("return document.body.innerText")
                raise AssertionError(f"{expression}, {arguments}; shown is: {shown}") from None

        return await self.do(wait)

    async def text(self, selector: str) -> str:
        """Return the text of an element, as far as it can be seen."""
        return await self.do(lambda driver: driver.find_element(By.CSS_SELECTOR, selector).text)

    async def shows(self, selector: str, text: str) -> None:
        """Wait until a text is in what can be seen of an element."""
        element = f"document.querySelector({json.dumps(selector)})"
        # Of what is hidden, innerText is all of the text.
        found = f"{element}?.checkVisibility() && {element}.innerText.includes(arguments[0])"
        await self.until(found, text)

    async def focused(self) -> str:
        """Return the identifier of the element that has the focus; empty for the whole page."""
        # What is no longer seen loses the focus when the page is drawn again.
        drawn = "requestAnimationFrame(() => setTimeout(resolve))"
        identifier: str = await self.script(
            f"return new Promise((resolve) => {drawn}).then(() => document.activeElement.id)"
        )
        return identifier

    async def click(self, selector: str) -> None:
        """Click on an element, which must be where a mouse can reach it."""

        def click(driver: Chrome) -> None:
            try:
                driver.find_element(By.CSS_SELECTOR, selector).click()
            except StaleElementReferenceException:  # replaced since it was found
                driver.find_element(By.CSS_SELECTOR, selector).click()

        await self.do(click)

    async def write(self, selector: str, text: str) -> None:
        """Write into a field in place of what is there; of one for files it is a path."""

        def write(driver: Chrome) -> None:
            field = driver.find_element(By.CSS_SELECTOR, selector)
            if field.get_attribute("type") != "file":
                field.clear()
            field.send_keys(text)

        await self.do(write)

    async def choose_file(self, row: str, path: str) -> None:
        """Press the button that opens the chooser of a problem's form, and choose a file in it."""
        # The button moves when the statement and the editor have been loaded.
        hint = "document.getElementById('statement-hint').textContent"
        await self.until(f"!{hint}.startsWith('Loading')")
        await self.until(f"document.querySelector('{row} .code-editor').checkVisibility()")
        await self.script(
            "addEventListener('click', (event) => {"
            " if (event.target.type !== 'file') return;"
            " event.preventDefault(); window.hasOpened = true; })"
        )
        await self.click(f"{row} .swap")
        await self.until("window.hasOpened")
        await self.write(f"{row} input[type=file]", path)
        shown = "document.querySelector(arguments[0])?.checkVisibility()"
        await self.until(shown, f"{row} .content[type=file]")

    async def write_in_focus(self, text: str) -> None:
        await self.do(lambda driver: driver.switch_to.active_element.send_keys(text))

    async def look(self, size: tuple[int, int, bool], scheme: str) -> None:
        """Be so large, a phone or not, with `light` or `dark` colours."""
        width, height, phone = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}

        def emulate(driver: Chrome) -> None:
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

        await self.do(emulate)

    async def save_to(self, folder: Path) -> None:
        options = {"behavior": "allow", "downloadPath": str(folder)}
        command = "Browser.setDownloadBehavior"
        await self.do(lambda driver: driver.execute_cdp_cmd(command, options))

    async def photograph(self, name: str, folder: Path) -> None:
        options = {"format": "png", "captureBeyondViewport": True}
        found = await self.do(
            lambda driver: driver.execute_cdp_cmd("Page.captureScreenshot", options)
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(b64decode(found["data"]))

    async def violations(self) -> list[str]:
        """Return what axe finds wrong with the page as it is."""
        if not await self.script("return 'axe' in window"):
            await self.script(AXE.read_text())
        options = "{ resultTypes: ['violations'] }"  # all else takes most of the time
        found = await self.script(f"return axe.run({options}).then((found) => found.violations)")
        return [
            f"{one['id']}: {one['help']}: {[node['html'] for node in one['nodes']]}"
            for one in found
        ]

    async def complaints(self) -> list[str]:
        entries = await self.do(lambda driver: driver.get_log("browser"))
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    async def handshakes(self) -> list[int]:
        """Return the statuses that WebSockets have been answered with since the last time."""
        entries = await self.do(lambda driver: driver.get_log("performance"))
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            message["params"]["response"]["status"]
            for message in messages
            if message["method"] == "Network.webSocketHandshakeResponseReceived"
        ]
