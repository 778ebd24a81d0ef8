"""Cursors of pages, streams and lists: whatever is asked for, and in whatever order."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EventBufferSettings, LongPollSettings
from tawebeval.web.server.messages import MAX_BYTES_PER_HEADER
from tests.cases.settings import with_constants
from tests.cases.web import END, payload
from tests.fakes.clients import MULTIPART, Answer, Service, form, parts
from tests.fakes.streams import Follower, LineFollower, SocketFollower, SourceFollower

CONFIGURATION = Configuration(
    buffers=with_constants(EventBufferSettings, max_page_bytes=1024)(),
    polls=LongPollSettings(wait=0),
)

PLACES = st.one_of(
    st.tuples(st.sampled_from(["begin_cursor", "end_cursor"]), st.integers(-2, 2)),
    st.integers(-2, 30).map(str),
    st.sampled_from(["", END]),
)
STRANGE = st.text(max_size=4) | st.sampled_from(
    [
        *("00", "01", "+1", "-0", "-1", "1.0", "1e0", "0x1", "1_0", "1,2", "1+1", "٣", "²", "é"),
        *("\ufffd", "END", "null", "None"),
        *("1 ", " 1", "1\n", "\n1", "\0", "end ", "end\0", "9" * 18, "9" * 19, "9" * 5000),
        *(str(2**63), str(2**64), "0" * 200),
    ]
)
CURSORS = st.one_of(st.none(), PLACES, PLACES, PLACES, STRANGE)
KINDS = st.sampled_from(["page", "page", "head", "older", "lines", "source", "socket", "last"])
STEPS = st.lists(
    st.one_of(
        st.tuples(KINDS, CURSORS, st.none() | st.integers(0, 12)),
        st.tuples(KINDS, CURSORS, st.none()),
        st.tuples(st.just("list"), STRANGE | st.sampled_from(["1", "2", "0"]), st.none()),
        st.sampled_from(["print", "print", "end", "second"]),
    ),
    min_size=1,
    max_size=24,
)

STREAMS = {
    "lines": LineFollower,
    "source": SourceFollower,
    "last": SourceFollower,
    "socket": SocketFollower,
}
_NUMBER = re.compile("0|[1-9][0-9]{0,17}", re.ASCII)


class World:
    """An evaluation, and the clients that ask for its events."""

    def __init__(self, root: Path) -> None:
        self.service = Service(root, CONFIGURATION)
        asked = self.ask("POST /evaluate", form(parts()), Content_Type=MULTIPART)
        self.identifier = asked.json()["evaluation_id"]
        self.record = self.service.registry.records[self.identifier]
        self.printed = 0
        self.ended = self.gone = False

    def ask(self, line: str, body: bytes = b"", **headers: str) -> Answer:
        connection = self.service.connect()
        connection.request(line, body, **headers)
        answer = connection.answer(line.partition(" ")[0])
        connection.lose()
        return answer

    def take(self, step: Any) -> None:
        """Let something happen, and hold it against what has to."""
        child = self.service.world.child
        if step == "second":
            self.service.reactor.advance(1)
        elif self.ended and isinstance(step, str):
            return
        elif step == "print":
            child.print(b"".join(b"line %d\n" % (self.printed + n) for n in range(3)))
            self.printed += 3
        elif step == "end":
            self.ended = True
            child.paused = False
            child.end()
        else:
            self.ask_for(*step)
        self.service.world.turn()

    def expected(self, after: str, skip: int) -> int | None:
        """Return the status of an answer, or 0 for one with the events from `self.begin` on.

        None stands for the answer after the very end.
        """
        ring = self.record.events.event_log
        if after not in ("", END) and not _NUMBER.fullmatch(after):
            return 400
        if after == END and (self.gone or ring.has_ended):
            return None
        if self.gone:
            return 410
        self.begin = skip + (ring.end_cursor + 1 if after == END else int(after or 0))
        if self.begin > ring.end_cursor:
            return 400
        return 410 if self.begin < ring.begin_cursor else 0

    def ask_for(self, kind: str, after: str | tuple[str, int] | None, skip: int | None) -> None:
        """Ask, and hold the answer against what it has to be."""
        if isinstance(after, tuple):
            name, distance = after
            after = str(getattr(self.record.events.event_log, name) + distance)
        if kind == "list":
            return self.ask_for_list(after or "")
        after = after or ""
        query = f"?after={quote(after)}" if after else ""
        if kind in STREAMS:
            return self.ask_for_stream(kind, after, query, skip or 0)
        path = f"/evaluation/{self.identifier}/events{query}"
        if kind == "older":
            path = f"/evaluation_events?evaluation={self.identifier}{query.replace('?', '&')}"
        answer = self.ask(f"{'HEAD' if kind == 'head' else 'GET'} {path}")
        expected = self.expected(after, 0)
        assert answer.status == (expected or 200), answer
        if kind == "head" or answer.status != 200:
            return None
        page = answer.json()
        assert page["begin"] == (after or None)
        ring = self.record.events.event_log
        if expected is None:
            self.gone = True
            assert (page["end"], page["data"]) == (None, [])
            return None
        self.check_events(page["data"])
        end = self.begin + len(page["data"])
        assert page["data"] or self.begin == ring.end_cursor
        assert page["end"] == (END if ring.has_ended and end == ring.end_cursor else str(end))
        assert ring.begin_cursor >= self.begin
        return None

    def ask_for_stream(self, kind: str, after: str, query: str, skip: int) -> None:
        headers = {}
        if kind == "last" and after.isprintable():
            after, skip, query = after.strip(" \t"), skip if not after else 0, "?"
            headers["Last-Event-ID"] = after.encode().decode("latin-1")
        query = f"{query or '?'}&skip={skip}" if skip else query
        expected = self.expected(after, skip)
        if len(headers.get("Last-Event-ID", "")) > MAX_BYTES_PER_HEADER:
            expected = 431
        follower: Follower = STREAMS[kind](self.service, self.identifier, query, **headers)
        over = 204 if STREAMS[kind] is SourceFollower else 200
        status = int(follower.connection.received.split()[1])
        if expected:
            assert status == expected, follower.connection.received
        elif kind != "socket":
            assert status == (over if expected is None else 200), follower.connection.received
        if not expected and status in (101, 200):
            self.check_events(follower.events if expected == 0 else [])
            ring = self.record.events.event_log
            assert expected is None or len(follower.events) == ring.end_cursor - self.begin
            assert follower.complete == (expected is None or ring.has_ended)
        self.gone = self.gone or expected is None
        follower.lose()

    def ask_for_list(self, after: str) -> None:
        """Hold that a list begins after its own cursors, and after no other."""
        answer = self.ask(f"GET /evaluations?after={quote(after)}")
        assert answer.status == (200 if after in ("", "1") else 400), answer

    def check_events(self, events: Sequence[Any]) -> None:
        """Hold that events are those from the place that was asked for."""
        found = [event["payload"] for event in events]
        assert found == [payload(self.begin + number) for number in range(len(found))]


class CursorTests(SynchronousTestCase):
    @settings(max_examples=settings().max_examples // 4)  # each takes long
    @given(STEPS)
    def test_any_cursor_leads_to_its_place_or_is_refused(self, steps: Sequence[Any]) -> None:
        root = Path(tempfile.mkdtemp(prefix="tawebeval-test-")).resolve()
        try:
            world = World(root)
            for step in steps:
                world.take(step)
            world.service.close()
        finally:
            shutil.rmtree(root)
            logged = self.flushLoggedErrors()
        assert not logged, logged
