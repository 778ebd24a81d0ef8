"""Readers on all transports, and of pages, come, stall, break off and come back in any order.

After each step all that can happen has happened. What each of them has read is held against what
was printed: nothing is missing, twice, or in another order.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EventBufferSettings, HttpSettings, LimitSettings
from tawebeval.core import event_log
from tawebeval.web import streams
from tests.cases.settings import with_constants
from tests.cases.web import payload
from tests.fakes.clients import MULTIPART, Service, form, parts
from tests.fakes.streams import FOLLOWERS, Follower

MOST = 60  # lines printed at once


@attrs.define(eq=False)
class Client:
    """One who follows: from `begin`, and with the connection that it has now."""

    begin: int
    follower: Follower | None = None


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        configuration = Configuration(
            buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
            limits=LimitSettings(wall_clock=10**6),
            http=with_constants(HttpSettings, rate_window_seconds=20, min_bytes_per_second=1024)(),
        )
        self.service = Service(self.root, configuration)
        asked = self.ask("POST /evaluate", form(parts()), Content_Type=MULTIPART)
        self.identifier = asked["evaluation_id"]
        self.child = self.service.world.child
        self.record = self.service.registry.records[self.identifier]
        self.printed = 0
        self.ended = False
        self.clients: list[Client] = []
        self.after, self.read = "", 0  # of the reader of pages

    def ask(self, line: str, body: bytes = b"", **headers: str) -> Any:
        connection = self.service.connect()
        connection.request(line, body, **headers)
        answer = connection.answer()
        connection.lose()
        return json.loads(answer.body)

    def turn(self) -> None:
        """Let everything happen; a stream whose events were acknowledged meanwhile is cut."""
        self.service.reactor.pump([0] * 60)
        for client in self.clients:
            follower = client.follower
            if follower is not None and (
                follower.connection.aborted or getattr(follower, "code", None) == 4410
            ):
                client.begin += len(follower.events)
                follower.lose()
                client.follower = None

    def pick(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    @precondition(lambda self: not self.ended)
    @rule(count=st.integers(1, MOST))
    def print(self, count: int) -> None:
        numbers = range(self.printed, self.printed + count)
        self.child.print(b"".join(b"line %d\n" % number for number in numbers))
        self.printed += count
        self.turn()

    @precondition(lambda self: not self.ended and self.printed > 200)
    @rule()
    def end(self) -> None:
        self.child.end()
        self.turn()
        self.ended = True

    @precondition(lambda self: len(self.clients) < 5)
    @rule(kind=st.sampled_from(FOLLOWERS))
    def come(self, kind: type[Follower]) -> None:
        begin = self.record.events.log.begin_cursor
        follower = kind(self.service, self.identifier, f"?after={begin}")
        self.clients.append(Client(begin, follower))
        self.turn()

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 9), then=st.integers(0, MOST))
    def stall(self, number: int, then: int) -> None:
        follower = self.pick(number).follower
        if follower is not None:
            follower.full = True
        if then and not self.ended:
            self.print(then)

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 9), everything=st.booleans())
    def take(self, number: int, everything: bool) -> None:
        follower = self.pick(number).follower
        if follower is not None and not follower.connection.closed:
            if everything:
                follower.take()
            else:
                follower.step()
            self.turn()

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 9), lost=st.integers(0, 30))
    def break_off(self, number: int, lost: int) -> None:
        """Let a connection break, with the last of what was on its way."""
        client = self.pick(number)
        if client.follower is not None:
            begin = client.begin + max(0, len(client.follower.events) - lost)
            client.follower.lose()
            client.begin, client.follower = begin, None
            self.turn()

    @precondition(lambda self: self.clients)
    @rule(number=st.integers(0, 9), kind=st.sampled_from(FOLLOWERS))
    def come_back(self, number: int, kind: type[Follower]) -> None:
        client = self.pick(number)
        if client.follower is not None:
            return
        follower = kind(self.service, self.identifier, f"?after={client.begin}")
        if (
            client.begin < self.record.events.log.begin_cursor
            and b" 410 " in (follower.connection.received[:20])
        ):
            follower.lose()
            self.clients.remove(client)  # the reader of pages has acknowledged more
        else:
            client.follower = follower
            self.turn()

    @rule(count=st.integers(1, 20))
    def ask_for_pages(self, count: int) -> None:
        for _ in range(count):
            if self.after != "end":
                self.ask_for_a_page()

    def ask_for_a_page(self) -> None:
        page = self.ask(f"GET /evaluation/{self.identifier}/events?after={self.after}")
        if "oldest" in page:
            self.after, self.read = page["oldest"], int(page["oldest"])
            return
        found = [event["payload"] for event in page["data"]]
        assert found == [payload(self.read + number) for number in range(len(found))]
        self.after, self.read = page["end"], self.read + len(found)
        self.turn()

    @rule(seconds=st.sampled_from([1, 10, 40]))
    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.service.reactor.advance(1)
        self.turn()

    @invariant()
    def nobody_misses_anything(self) -> None:
        """Everybody has what was printed from where it began, and whoever is quick has all."""
        newest = max(0, 2 * self.printed - (not self.ended))
        for client in self.clients:
            follower = client.follower
            if follower is not None:
                read = follower.payloads
                assert read == [payload(client.begin + number) for number in range(len(read))]
                if not follower.full:
                    assert client.begin + len(read) == newest
                    assert follower.complete == self.ended

    def teardown(self) -> None:
        """In the end everybody who takes what comes gets to the end, and nothing is left."""
        for client in self.clients:
            if client.follower is not None and not client.follower.connection.closed:
                client.follower.take()
        self.turn()
        if not self.ended:
            self.end()
        self.nobody_misses_anything()
        for client in self.clients:
            if client.follower is not None:
                assert client.follower.complete
                client.follower.lose()
                client.follower = None
        assert not self.service.registry.events.subscriptions
        assert not len(self.record.events.change_condition)
        closed = Deferred.fromCoroutine(self.service.registry.drain_and_close())
        self.turn()
        assert closed.called
        shutil.rmtree(self.root)


class InterleavingTests(SynchronousTestCase):
    def test_each_reader_sees_every_event_once_and_in_order(self) -> None:
        self.patch(event_log, "MAX_BATCH_BYTES", 256)
        self.patch(streams, "MAX_STREAM_WRITE_BYTES", 512)
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
        )
