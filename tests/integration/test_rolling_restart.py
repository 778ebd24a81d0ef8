"""Three daemons behind two proxies, restarted one after the other under load: nothing is lost.

The environment variables TAWEBEVAL_SUBMITTERS and TAWEBEVAL_STREAMS are the numbers of clients that
submit and that read at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import TaskStopped, deferLater
from twisted.python.failure import Failure

from tawebeval.client.twisted_client import TwistedClient
from tawebeval.core.backoff import Backoff
from tests.cases.patience import LONG_PATIENCE
from tests.integration.client import Client
from tests.integration.harness import CONFIGURATION, RepositoryTestCase, until
from tests.integration.proxies import NAMES, CheckingHAProxy, make_peers
from tests.integration.proxy_case import lacking
from tests.integration.resuming_readers import insist_on_answer
from tests.integration.starters import KeptDaemon
from tests.run import ROOT

SUBMITTERS = int(os.environ.get("TAWEBEVAL_SUBMITTERS", "20"))
STREAMS = int(os.environ.get("TAWEBEVAL_STREAMS", "200"))

# With more streams there is not more to send in a second, but for what follows a restart.
_COMMAND = f"for n in 1 2 3 4 5 6 7 8; do echo $n; sleep {STREAMS / 500}; done; printf end"
_PRINTED = "1\n2\n3\n4\n5\n6\n7\n8\nend"
_PAUSE = 0.1  # seconds before the next attempt
_CONFIGURATION = (
    # All that are kept are listed at the end; each takes a descriptor.
    CONFIGURATION.replace("running = 4", f"running = 16\nqueued = {SUBMITTERS}\nkept = 1000")
    + f"[http]\nconnections = {2 * (STREAMS + SUBMITTERS)}\nconnections_per_address = 0\n"
    + 'trusted_proxies = ["127.0.0.1"]\n'
)
_BACKOFF = Backoff(
    max_attempts=10_000, first_delay_seconds=0.1, max_delay_seconds=1, max_retry_after_seconds=600
)


class ReadStreams(NamedTuple):
    """What the readers of one evaluation read: the different texts, and how often they were cut."""

    identifier: str
    texts: list[str]
    cuts: int


class StreamReaders(ProcessProtocol):
    """The process of `tests.integration.stream_readers`, whose readers ask these ports."""

    def __init__(self, ports: Iterable[int]) -> None:
        self._reading: dict[str, Deferred[ReadStreams]] = {}
        self._rest = b""
        self._ended: Deferred[None] = Deferred()
        command = [sys.executable, "-m", "tests.integration.stream_readers", *map(str, ports)]
        processes: Any = reactor
        descriptors = {0: "w", 1: "r", 2: 2}
        processes.spawnProcess(
            self, sys.executable, command, env=None, path=str(ROOT), childFDs=descriptors
        )

    def read(self, identifier: str, readers: int) -> Deferred[ReadStreams]:
        """Let so many readers read the events of an evaluation to the end."""
        assert self.transport is not None
        self.transport.write(f"{identifier} {readers}\n".encode())
        return self._reading.setdefault(identifier, Deferred())

    def outReceived(self, data: bytes) -> None:
        """Take what was read."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            found = ReadStreams(*json.loads(line))
            self._reading.pop(found.identifier).callback(found)

    def processEnded(self, reason: Failure) -> None:
        """Tell all who wait."""
        for each in self._reading.values():
            each.errback(reason)
        self._ended.callback(None)

    async def stop(self) -> None:
        if not self._ended.called:
            assert self.transport is not None
            self.transport.signalProcess("KILL")
        await self._ended


class RollingRestartTests(RepositoryTestCase):
    skip = lacking(CheckingHAProxy)

    async def setUp(self) -> None:
        await super().setUp()
        self.daemons = {name: KeptDaemon(_CONFIGURATION, name=name) for name in NAMES}
        places = make_peers(self.daemons)
        proxies = [CheckingHAProxy(places, below=False) for _ in range(2)]
        removed: list[KeptDaemon | CheckingHAProxy] = [*self.daemons.values(), *proxies]
        for each in removed:
            self.addCleanup(each.remove)
        await gatherResults(
            [Deferred.fromCoroutine(each.start_all()) for each in self.daemons.values()]
        )
        for proxy in proxies:
            proxy.start()
            await proxy.ready()
        self.readers = StreamReaders(proxy.port for proxy in proxies)
        self.addCleanup(self.readers.stop)
        self.clients = [Client(proxy.url) for proxy in proxies]
        for client in self.clients:
            self.addCleanup(client.close)
        self.forms: dict[str, str] = {}  # identifiers by the key of the form
        self.cuts = 0
        self.lists = 0
        self.are_restarted = False

    async def test_rolling_restart_loses_and_repeats_nothing(self) -> None:
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
            found = await self.readers.read(identifier, readers)
            self.assertEqual(found.texts, [_PRINTED], identifier)
            self.cuts += found.cuts
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
            listed = client.evaluations(on_unreachable_daemons=away.extend)
            return {one["evaluation_id"]: one["metadata"]["form"] async for one in listed}
