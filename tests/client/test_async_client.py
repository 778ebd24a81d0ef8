"""`client.async_client`: the client for asyncio."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
from twisted.trial.unittest import SynchronousTestCase

from tawebeval_client import AsyncClient, Text, Unavailable
from tawebeval_client import sync_client as values_module
from tawebeval_client.backoff import Backoff
from tawebeval_client.http import HttpRequest
from tests.cases.patience import PATIENCE

ONCE = Backoff(1, 0, 0)
FIELDS: dict[str, Any] = {"repository": "u", "commit": "c" * 40, "evaluator_cmd": "x"}
PAGES = {
    None: b'{"begin":null,"end":"2","data":[{"type":"text","payload":"a"}]}',
    "2": b'{"begin":"2","end":"end","data":[{"type":"text","payload":"b"}]}',
    "end": b'{"begin":"end","end":null,"data":[]}',
}


def answer(request: httpx.Request) -> httpx.Response:
    """Answer a request as a daemon does."""
    if request.method == "POST":
        return httpx.Response(200, json={"evaluation_id": str(len(request.content))})
    if request.url.path.endswith("/events"):
        return httpx.Response(200, content=PAGES[request.url.params.get("after")])
    return httpx.Response(200, json={"state": "running"})


class AsyncClientTests(SynchronousTestCase):
    """`AsyncClient`, in event loops of asyncio."""

    def test_events_are_read_and_forms_with_files_are_sent(self) -> None:
        file = Path(self.mktemp())
        file.write_bytes(b"x" * 300_000)
        client = AsyncClient("http://a", transport=httpx.MockTransport(answer))

        async def main() -> list[Any]:
            async with client:
                large = await client.evaluate({"source": file}, **FIELDS)
                small = await client.evaluate({"source": b"x"}, **FIELDS)
                with self.assertRaises(FileNotFoundError):
                    await client.evaluate({"source": file.with_name("absent")}, **FIELDS)
                events = [event async for event in client.events("x")]
                return [int(large) - int(small) > 299_000, events, await client.status("x")]

        for _ in range(2):
            expected = [True, [Text("a"), Text("b")], {"state": "running"}]
            self.assertEqual(asyncio.run(main()), expected)

    def test_timeout_broken_connection_and_large_response_have_messages(self) -> None:
        async def wait(_: httpx.Request) -> httpx.Response:
            return await asyncio.get_running_loop().create_future()

        def fail(_: httpx.Request) -> httpx.Response:
            raise httpx.ReadError("cut.")

        self.patch(values_module, "MAX_RESPONSE_BODY", 1)
        for handler, words in (
            (wait, "no answer from http://a within 0 seconds"),
            (fail, "the connection to http://a broke: cut"),
            (lambda _: httpx.Response(200, content=b"xx"), "larger than"),
        ):
            client = AsyncClient("http://a", transport=httpx.MockTransport(handler))

            async def main(client: AsyncClient = client) -> Any:
                return await client.exchange(HttpRequest("GET", "http://a/", timeout=0.05))

            self.assertIn(words, asyncio.run(main()).message)

    def test_unusable_proxy_of_the_environment_is_reported(self) -> None:
        self.patch(os, "environ", {**os.environ, "HTTP_PROXY": "other://a", "NO_PROXY": ""})
        client = AsyncClient("http://judge.example.org", request_backoff=ONCE)

        async def main() -> None:
            await client.status("x")

        error = self.assertRaises(Unavailable, asyncio.run, main())
        self.assertIn("HTTP_PROXY", str(error))

    def test_child_process_and_second_event_loop_open_their_own_connections(self) -> None:
        client = AsyncClient("http://a", transport=httpx.MockTransport(answer))

        async def main() -> httpx.AsyncClient:
            await client.status("x")
            return client._get_pool()

        loop = asyncio.new_event_loop()
        self.addCleanup(loop.close)
        pool = loop.run_until_complete(main())
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(int(PATIENCE))
                os._exit(0 if loop.run_until_complete(main()) is not pool else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        self.assertEqual(status, 0)
        self.assertIs(loop.run_until_complete(main()), pool)
        self.assertIsNot(asyncio.run(main()), pool)

    def test_closed_or_unused_client_can_be_closed(self) -> None:
        client = AsyncClient("http://a", transport=httpx.MockTransport(answer))

        async def main() -> Any:
            await client.close()
            await client.status("x")
            await client.close()
            return await client.status("x")

        for _ in range(2):
            self.assertEqual(asyncio.run(main()), {"state": "running"})
