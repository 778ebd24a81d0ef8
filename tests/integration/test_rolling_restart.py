"""Three daemons behind two proxies, restarted one after the other under load: nothing is lost.

The environment variables TAWEBEVAL_SUBMITTERS and TAWEBEVAL_STREAMS are the numbers of clients that
submit and that read at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from itertools import count, cycle
from typing import Any
from uuid import uuid4

import attrs
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import TaskStopped, deferLater

from tawebeval.client.twisted_client import TwistedClient
from tawebeval.core.backoff import Backoff
from tests.cases.event_source import EventSource
from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import Client, text
from tests.integration.harness import CONFIGURATION, RepositoryTestCase, until
from tests.integration.keepers import KeptDaemon
from tests.integration.proxies import CheckingHAProxy
from tests.integration.proxy_case import lacking
from tests.integration.resuming_readers import CUTS, insist_on_answer
from tests.integration.test_several import NAMES, make_peers

SUBMITTERS = int(os.environ.get("TAWEBEVAL_SUBMITTERS", "20"))
STREAMS = int(os.environ.get("TAWEBEVAL_STREAMS", "200"))

_COMMAND = "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.2; done; printf end"
_PRINTED = "1\n2\n3\n4\n5\n6\n7\n8\nend"
_LATER = (408, 502, 503, 504)  # 408: this process was slow
_PAUSE = 0.1  # seconds before the next attempt
_CONFIGURATION = (
    # All that are kept are listed at the end; each takes a descriptor.
    CONFIGURATION.replace("running = 4", f"running = 16\nqueued = {SUBMITTERS}\nkept = 1000")
    + f"[http]\nconnections = {2 * (STREAMS + SUBMITTERS)}\nconnections_per_address = 0\n"
    + 'trusted_proxies = ["127.0.0.1"]\n'
)
_BACKOFF = Backoff(max_attempts=10_000, first_delay=0.1, longest_delay=1, longest_retry_after=600)


@attrs.define
class StreamReader:
    """Reader of one stream, which reconnects until the stream says that it is whole."""

    client: Client
    identifier: str
    connections: int = 0
    source: EventSource = attrs.field(factory=EventSource)

    async def read(self) -> None:
        """Read to the end, and compare the events."""
        while not await self.is_whole():
            await deferLater(reactor, _PAUSE)
        events = [json.loads(event.data) for event in self.source.events if event.type != "end"]
        assert text(events) == _PRINTED, (self.identifier, events)

    async def is_whole(self) -> bool:
        """Read a stream from where the last one was cut; tell whether that was the end."""
        headers = {"Accept": "text/event-stream"}
        if self.source.last_event_id:
            headers["Last-Event-ID"] = self.source.last_event_id
        self.source.reconnect()
        with contextlib.suppress(*CUTS):
            url = f"{self.client.url}/evaluation/{self.identifier}/events"
            response = await self.client.http.get(url, headers=headers)
            if response.code in _LATER:
                await response.content()
                return False
            assert response.code in (200, 204), (self.identifier, response.code)
            self.connections += 1
            await response.collect(self.source.feed)
            return response.code == 204 or any(one.type == "end" for one in self.source.events)
        return False


class RollingRestartTests(RepositoryTestCase):
    """Daemons whose evaluations outlive them."""

    skip = lacking(CheckingHAProxy)

    async def setUp(self) -> None:
        await super().setUp()
        self.daemons = {name: KeptDaemon(_CONFIGURATION, name=name) for name in NAMES}
        places = make_peers(self.daemons)
        proxies = [CheckingHAProxy(places, below=False) for _ in range(2)]
        for each in (*self.daemons.values(), *proxies):
            self.addCleanup(each.remove)
        await gatherResults(
            [Deferred.fromCoroutine(each.start_all()) for each in self.daemons.values()]
        )
        for proxy in proxies:
            proxy.start()
            await proxy.ready()
        self.clients = [Client(proxy.url) for proxy in proxies]
        for client in self.clients:
            self.addCleanup(client.close)
        self.forms: dict[str, str] = {}  # identifiers by the key of the form
        self.cuts = 0
        self.lists = 0
        self.are_restarted = False

    async def test_restarts(self) -> None:
        """Each event comes once, each form is evaluated once, and no list lacks an evaluation."""
        began = time.monotonic()
        readers = STREAMS // SUBMITTERS
        load = gatherResults(
            [
                Deferred.fromCoroutine(call)
                for call in (
                    *(self.submit_often(number, readers) for number in range(SUBMITTERS)),
                    self.list_often(),
                )
            ],
            consumeErrors=True,
        )
        for daemon in self.daemons.values():
            await self.wait_for_streams(daemon, load)
            await daemon.restart(signal.SIGTERM)
        self.are_restarted = True
        await load
        self.flushLoggedErrors(TaskStopped)  # treq stops a form twice if the connection is cut
        found = await self.list_all(away=[])
        self.assertEqual(Counter(found.values()), Counter(self.forms.keys()))
        self.assertEqual(found, {identifier: key for key, identifier in self.forms.items()})
        for daemon in self.daemons.values():
            daemon.check_log()
        print(
            f"{len(self.forms)} evaluations by {SUBMITTERS} submitters, {STREAMS} streams at once,"
            f" {self.cuts} of them cut, {self.lists} lists, {time.monotonic() - began:.1f} s"
        )

    async def wait_for_streams(self, daemon: KeptDaemon, load: Deferred[Any]) -> None:
        """Wait until a daemon has streams, which its end then cuts."""
        async with Client(daemon.url) as client:

            async def has_streams() -> bool:
                return load.called or await client.streams() >= STREAMS // 10

            await until(has_streams, "streams are open", LONG_PATIENCE)

    async def submit_often(self, number: int, readers: int) -> None:
        """Submit forms until all daemons are restarted, each when the one before is read."""
        one, other = self.clients[number % 2], self.clients[(number + 1) % 2]
        while not self.are_restarted:
            key = uuid4().hex
            identifier = await self.submit(one, key)
            self.forms[key] = identifier
            streams = [
                StreamReader(client, identifier)
                for _, client in zip(range(readers), cycle((one, other)), strict=False)
            ]
            await gatherResults([Deferred.fromCoroutine(stream.read()) for stream in streams])
            self.cuts += sum(stream.connections - 1 for stream in streams)
            self.assertEqual(await self.submit(other, key), identifier)

    async def submit(self, client: Client, key: str) -> str:
        """Send a form until there is an answer; return the identifier."""
        answer = await insist_on_answer(
            lambda: client.post(
                self.repository.url,
                self.commit,
                _COMMAND,
                headers={"Idempotency-Key": key},
                **{"metadata[form]": key},
            )
        )
        assert answer.code == 200, answer.body
        return str(answer.json["evaluation_id"])

    async def list_often(self) -> None:
        """Read lists until all daemons are restarted."""
        for self.lists in count(1):
            before = set(self.forms.values())
            away: list[str] = []
            found = await self.list_all(away)
            lacking = {one for one in before - set(found) if one.partition("-")[0] not in away}
            self.assertEqual(lacking, set(), f"without {away}")
            if self.are_restarted:
                return
            await deferLater(reactor, _PAUSE)

    async def list_all(self, away: list[str]) -> dict[str, str]:
        """Return the keys of all forms by identifier; add to `away` who does not answer."""
        async with TwistedClient(self.clients[0].url, request_backoff=_BACKOFF) as client:
            listed = client.evaluations(on_away=away.extend)
            return {one["evaluation_id"]: one["metadata"]["form"] async for one in listed}
