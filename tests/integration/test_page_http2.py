"""The page, and readers in it, in a real browser that speaks HTTP/2 with a proxy."""

from __future__ import annotations

from tests.integration.browser import DESKTOP, Browser
from tests.integration.browser_case import WITHOUT, PageTestCase, start_browser
from tests.integration.client import failure
from tests.integration.harness import until
from tests.integration.proxies import (
    WAITING,
    Caddy,
    HAProxy,
    Nginx,
    Proxy,
    answered,
    lacking,
    settings,
)

READ = """
const [identifier] = arguments, url = `evaluation/${identifier}/events`;
window.read = { socket: [], sent: [], lines: "" };
const socket = new WebSocket(new URL(url, location.href.replace("http", "ws")));
socket.onmessage = ({ data }) => read.socket.push(JSON.parse(data));
socket.onclose = ({ code }) => (read.closed = code);
const source = new EventSource(url);
source.onmessage = ({ data }) => read.sent.push(JSON.parse(data));
source.addEventListener("end", () => (read.ended = true, source.close()));
window.leaving = new AbortController();
fetch(url, { headers: { Accept: "application/jsonl" }, signal: leaving.signal }).then(
  async ({ body }) => {
    for await (const piece of body.pipeThrough(new TextDecoderStream())) read.lines += piece;
  }).catch(() => (read.left = true));
"""
"""Follows an evaluation in three ways."""

REFUSED = """
const body = new FormData();
body.append("submission[Not]", "x");
body.append("submission[a]", new Blob([new ArrayBuffer(5_000_000)]));
return fetch("evaluate", { method: "POST", body }).then(async (answer) =>
  [answer.status, await answer.json()]);
"""
"""Sends a form that is refused before the most of it is sent."""


class PageHttp2Tests(PageTestCase):
    """One daemon and one browser, with one proxy after another between them."""

    configuration = settings()
    proxy: Proxy

    def get_browser(self) -> Browser:
        return start_browser("--ignore-certificate-errors", handshakes=True)

    @property
    def page_url(self) -> str:
        return f"{self.proxy.tls_url}/"

    async def put_before(self, proxy_type: type[Proxy]) -> None:
        """Put a proxy before the daemon, and open the page there."""
        self.proxy = proxy_type(f"127.0.0.1:{self.daemon.port}", below=False)
        self.addCleanup(self.proxy.remove)
        self.proxy.start()
        await self.proxy.ready()
        await self.browser.look(DESKTOP, "light")
        await self.visit()

    async def check(self, proxy_type: type[Proxy]) -> None:
        """Hold that everything works that the page does, and what other pages might."""
        await self.put_before(proxy_type)
        await self.tour()
        await self.check_tour()
        await self.check_readers()
        await self.check_refused()
        spoken = await self.browser.script(
            "return performance.getEntries().map((entry) => entry.nextHopProtocol).filter(Boolean)"
        )
        self.assertEqual(set(spoken), {"h2"})

    async def check_readers(self) -> None:
        """Hold that an event is there before the next one, and who leaves has left."""
        browser = self.browser
        identifier = await self.begin(WAITING)
        await browser.script(READ, identifier)
        await browser.until("read.socket.length && read.sent.length && read.lines")
        self.assertEqual(answered(self.daemon, identifier), [])
        await browser.script("leaving.abort()")
        await until(lambda: len(answered(self.daemon, identifier)) == 1, "one has left")
        await self.client.cancel(identifier)
        await browser.until("read.closed && read.ended && read.left")
        read = await browser.script("return read")
        self.assertEqual(read["closed"], 1000)
        failure(read["socket"], "cancelled")
        failure(read["sent"], "cancelled")

    async def check_refused(self) -> None:
        """Hold that a page can read why its form is refused while it is sent."""
        self.expected = ("400 (",)
        status, problem = await self.browser.script(REFUSED)
        self.assertEqual((status, problem["status"]), (400, 400))
        self.assertEqual(problem["field"], "submission[Not]")

    async def test_page_submits_and_reads_over_http_2_behind_each_proxy(self) -> None:
        # HAProxy has WebSockets in streams of HTTP/2 (RFC 8441), the others on connections of 1.1.
        for proxy_type, handshake in ((Nginx, 101), (HAProxy, 200), (Caddy, 101)):
            await self.check(proxy_type)
            self.assertEqual(await self.browser.handshakes(), [handshake])
            await self.browser.open("about:blank")
            await self.proxy.stop()

    test_page_submits_and_reads_over_http_2_behind_each_proxy.skip = (  # type: ignore[attr-defined]
        WITHOUT or lacking(Nginx) or lacking(HAProxy) or lacking(Caddy)
    )
