"""`client` against the daemon, over connections that are cut at random places."""

from __future__ import annotations

import textwrap
from typing import Any

from tawebeval.client import Data, EvaluationError, Event, Text
from tawebeval.client.twisted_client import TwistedClient
from tawebeval.core.backoff import Backoff
from tests.integration.client import joined, python
from tests.integration.cutting_proxy import CuttingProxy
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.integration.numbered_lines import EVALUATOR, printed

SOON = Backoff(max_attempts=10_000, first_delay_seconds=0.001, max_delay_seconds=0.002)


def wire(event: Event) -> dict[str, Any]:
    """Return an event as it came."""
    if isinstance(event, Text):
        return {"type": "text", "payload": event.text}
    assert isinstance(event, Data), event
    return {"type": "data", "payload": event.payload}


class ClientTests(DaemonTestCase):
    configuration = CONFIGURATION + "\n[buffers]\ntotal = 1_048_576\n"

    def fields(self, command: str) -> dict[str, str]:
        """Return what a client has to know of an evaluation in the test's repository."""
        return {
            "repository": self.repository.url,
            "commit": self.commit,
            "evaluator_cmd": command,
        }

    async def through(self, seed: int, longest: int) -> tuple[TwistedClient, CuttingProxy]:
        """Return a client whose connections are cut."""
        proxy = CuttingProxy(self.daemon.port, seed, longest=longest)
        port = await proxy.listen()
        self.addCleanup(proxy.stop)
        client = TwistedClient(
            f"http://127.0.0.1:{port}", request_backoff=SOON, events_backoff=SOON
        )
        self.addCleanup(client.close)
        return client, proxy

    async def test_cut_connections_lose_and_repeat_no_event(self) -> None:
        source = self.folder / "large.txt"
        source.write_bytes(b"x" * 200_000)
        client, proxy = await self.through(seed=3, longest=100_000)
        identifier = await client.evaluate({"source": source}, **self.fields(EVALUATOR))
        (listed,) = [one async for one in client.evaluations()]
        self.assertEqual(listed["evaluation_id"], identifier)
        found = [wire(event) async for event in client.events(identifier)]
        self.assertEqual(joined(found), printed())
        self.assertGreater(proxy.cuts.total(), 20)

    async def test_client_reads_what_the_daemon_accepts_as_nested(self) -> None:
        depths = [*range(850, 1050, 3), 100_000]  # Python 3.13 goes deeper than 3.11
        program = f"""
            import os
            for depth in {depths}:
                value = "[" * depth + "]" * depth
                print("", os.environ["EVALUATION_DATA_BEGIN"], value, sep="\\n")
                print(os.environ["EVALUATION_DATA_END"])
            """
        async with TwistedClient(self.daemon.url, events_backoff=SOON) as client:
            command = python(textwrap.dedent(program))
            identifier = await client.evaluate({"source": "x"}, **self.fields(command))
            events = [event async for event in client.events(identifier)]
        read = [len(event.written) // 2 for event in events if isinstance(event, Data)]
        refused = [event for event in events if isinstance(event, EvaluationError)]
        self.assertEqual({event.reason for event in refused}, {"protocol"})
        self.assertEqual(read, depths[: len(read)])
        self.assertEqual(len(read) + len(refused), len(depths))
