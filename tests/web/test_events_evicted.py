"""`web`, `evaluations.reading`: events that have left memory, or are damaged."""

from __future__ import annotations

import errno
import os
from typing import Any

from twisted.internet.defer import Deferred

from tawebeval.core import event_log
from tests.cases.web import END, StreamTestCase
from tests.fakes.streams import FOLLOWERS, LineFollower, SocketFollower
from tests.fakes.world import SlowThreads

LINES = 20


class EvictedEventsTests(StreamTestCase):
    """An evaluation of which only the newest events are in memory, and threads that wait."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(event_log, "MIN_SEGMENT_BYTES", 500)
        self.patch(event_log, "MAX_SEGMENT_BYTES", 500)
        self.service.world.memory.share.total = 0
        self.threads = SlowThreads()
        self.service.registry.context.segment_loader.threads = self.threads
        self.begin()

    def begin(self) -> None:
        self.identifier = self.evaluate()
        for number in range(LINES):
            self.print(b"line %d\n" % number)
        self.events = self.service.registry.records[self.identifier].events

    def wait(self, query: str) -> Deferred[Any]:
        asked = self.ask("GET", f"/evaluation/{self.identifier}/events{query}")
        self.assertNoResult(asked)
        return asked

    def settle(self) -> None:
        """Let the threads do all their work, and streams go on."""
        for _ in range(99):
            self.threads.finish()
            self.turn()

    def damage(self) -> None:
        stdout = self.events.stdout
        assert stdout is not None
        stdout._files.stdout[:1] = b"?"  # type: ignore[attr-defined]

    def test_page_waits_for_a_thread(self) -> None:
        asked = self.wait("")
        self.assertEqual(self.events.waiting_poll_count, 1)
        self.threads.finish()
        page = self.answer(asked).json()
        self.assertEqual(page["data"][0]["payload"], "line 0")
        self.assertEqual(self.events.waiting_poll_count, 0)

    def test_streams_read_on_from_memory(self) -> None:
        for kind in FOLLOWERS:
            follower = self.follow(kind, self.identifier)
            self.print(b"more\n")
            self.settle()
            self.assertEqual(follower.payloads[:2], ["line 0", "\n"])
            self.assertEqual(follower.payloads[-1], "more")
            follower.lose()
            self.finish()
            self.begin()

    def test_client_that_goes_leaves_nothing(self) -> None:
        follower = self.follow(LineFollower, self.identifier)
        follower.lose()
        self.settle()
        self.check_nothing_left(self.identifier)

    def test_damage_is_told_and_ends_the_pages(self) -> None:
        self.damage()
        asked = self.wait("?after=0")
        self.threads.finish()
        page = self.answer(asked).json()
        (event,) = page["data"]
        self.assertEqual((event["payload"]["reason"], page["end"]), ("lost", END))
        page = self.page(self.identifier, f"?after={END}")
        self.assertEqual((page["data"], page["end"]), ([], None))
        self.assertIn(self.identifier, self.service.registry.records)  # it runs on
        self.finish()
        self.page(self.identifier, f"?after={END}")
        self.assertNotIn(self.identifier, self.service.registry.records)

    def test_damage_is_told_and_ends_a_stream(self) -> None:
        for kind in FOLLOWERS:
            self.damage()
            follower = self.follow(kind, self.identifier)
            self.settle()
            self.assertEqual([event["reason"] for event in follower.payloads], ["lost"])
            self.assertTrue(follower.complete)
            self.finish()
            self.begin()

    def test_lack_of_descriptors_is_503_and_cuts_streams(self) -> None:
        def fail(begin: int, end: int) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        assert self.events.stdout is not None
        self.patch(type(self.events.stdout._files), "read_stdout", lambda *_: fail(0, 0))
        asked = self.wait("")
        self.threads.finish()
        answer = self.answer(asked)
        self.assertEqual((answer.status, answer.headers["retry-after"]), (503, "5"))
        for kind in FOLLOWERS:
            follower = self.follow(kind, self.identifier)
            self.settle()
            self.assertFalse(follower.complete)
            if isinstance(follower, SocketFollower):
                self.assertEqual(follower.code, 1013)
            else:
                self.assertTrue(follower.connection.aborted)
            follower.lose()
