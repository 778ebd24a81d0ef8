"""`daemon.process_setup`: descriptors that epoll may not watch are waited for all the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.epollreactor import EPollReactor
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon import process_setup
from tawebeval.daemon.process_setup import FallbackPoller, add_poll_fallback
from tests.fakes.epoll import LimitedEpoll

IN, OUT, HUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP
MANY = 100
NO_TIME = 0.0
EVENTS = {"register": (IN,), "modify": (OUT,), "unregister": ()}
_STEPS = st.lists(
    st.tuples(
        st.sampled_from([*EVENTS, "write", "read", "limit"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


class PollerTestCase(SynchronousTestCase):
    """A poller by an epoll with a limit."""

    def limited(self, most: int) -> FallbackPoller:
        """Return a poller whose epoll may watch so many descriptors."""
        self.epoll = LimitedEpoll(most)
        self.addCleanup(self.epoll.close)
        return FallbackPoller(cast("select.epoll", self.epoll))

    def pipe(self) -> tuple[int, int]:
        """Return the ends of a pipe."""
        ends = os.pipe()
        for end in ends:
            self.addCleanup(os.close, end)
        return ends


class PollerTests(PollerTestCase):
    """Within the limit, at it, and beyond."""

    def test_descriptors_within_and_beyond_the_limit_are_ready_together(self) -> None:
        poller = self.limited(2)
        pipes = [os.pipe() for _ in range(4)]
        for reading, _ in pipes:
            self.addCleanup(os.close, reading)
            poller.register(reading, IN)
        self.assertEqual(poller.poll(NO_TIME, MANY), [])
        for count, (reading, writing) in enumerate(pipes):
            os.write(writing, b"x")
            self.assertEqual(len(poller.poll(NO_TIME, MANY)), count + 1)
            self.assertIn((reading, IN), poller.poll(NO_TIME, MANY))
        for _, writing in pipes:
            os.close(writing)
        ended = [(reading, IN | HUP) for reading, _ in pipes]
        self.assertCountEqual(poller.poll(NO_TIME, MANY), ended)

    @given(_STEPS)
    def test_poller_acts_as_an_epoll_without_limit(self, steps: list[tuple[str, int]]) -> None:
        with contextlib.ExitStack() as opened:
            limited, reference = LimitedEpoll(0), select.epoll()
            opened.callback(limited.close)
            opened.callback(reference.close)
            both = (FallbackPoller(cast("select.epoll", limited)), reference)
            pairs = [socket.socketpair() for _ in range(6)]
            for one in itertools.chain(*pairs):
                one.setblocking(False)
                opened.callback(one.close)
            watched: set[int] = set()
            for step, number in steps:
                near, far = pairs[number]
                if step == "limit":
                    limited.most = number
                elif step == "write":
                    far.send(b"x")
                elif step == "read":
                    with contextlib.suppress(BlockingIOError):
                        near.recv(1)
                elif (step == "register") != (number in watched):
                    for each in both:
                        getattr(each, step)(near.fileno(), *EVENTS[step])
                    if step != "modify":
                        watched ^= {number}
                found, expected = (each.poll(NO_TIME, MANY) for each in both)
                self.assertCountEqual(found, expected)

    def test_poller_waits_for_descriptors_beyond_the_limit(self) -> None:
        poller = self.limited(0)
        reading, writing = self.pipe()
        poller.register(reading, IN)
        self.assertEqual(poller.poll(0.001, MANY), [])
        os.write(writing, b"x")
        self.assertEqual(poller.poll(-1, MANY), [(reading, IN)])

    def test_other_errors_are_raised_to_the_reactor(self) -> None:
        poller = self.limited(5)
        with open(__file__, encoding="utf-8") as file:
            self.assertRaises(PermissionError, poller.register, file.fileno(), IN)
        self.assertRaises(FileNotFoundError, poller.modify, self.pipe()[0], IN)

    def test_one_warning_for_several_descriptors_names_the_setting(self) -> None:
        poller = self.limited(0)
        with capturedLogs() as events:
            for _ in range(2):
                poller.register(self.pipe()[0], IN)
        self.assertEqual(len(events), 1)
        self.assertIn("fs.epoll.max_user_watches", formatEvent(events[0]))


class ReactorTests(PollerTestCase):
    """Twisted's reactor with it."""

    def replace(self, epoll: select.epoll) -> FallbackPoller:
        """Return a poller in place of that of `epoll`, which may watch nothing."""
        self.addCleanup(epoll.close)
        return self.limited(0)

    def test_reactor_beyond_the_limit_starts_and_stops_reading(self) -> None:
        reactor = EPollReactor()
        for each in reactor.getReaders():
            self.addCleanup(each.connectionLost, None)
        self.patch(process_setup, "FallbackPoller", self.replace)
        add_poll_fallback(reactor)
        reading, writing = self.pipe()
        reader = Reader(reading)
        reactor.addReader(reader)
        os.write(writing, b"hello")
        for _ in range(2):
            reactor.doPoll(0)
        self.assertEqual(reader.found, [b"hello"])
        reactor.removeReader(reader)
        os.write(writing, b"more")
        reactor.doPoll(0)
        self.assertEqual(reader.found, [b"hello"])

    def test_reactor_without_epoll_is_left_alone(self) -> None:
        clock = Clock()
        add_poll_fallback(clock)
        self.assertFalse(hasattr(clock, "_poller"))


class Reader:
    """What a reactor reads from; `found` is what it has read."""

    def __init__(self, descriptor: int) -> None:
        self.found: list[bytes] = []
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def doRead(self) -> None:
        """Read what there is."""
        self.found.append(os.read(self._descriptor, MANY))

    def logPrefix(self) -> str:
        """Return how log lines call this."""
        return "Reader"
