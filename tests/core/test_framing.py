r"""`core.framing`: batches as streams carry them, byte by byte."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.events import EMPTY_BATCH, EventBatch, encode_data_event, encode_text_events
from tawebeval.core.framing import (
    EVENT_STREAM,
    JSON_LINES,
    WEBSOCKET_MESSAGES,
    encode_server_sent_events,
    encode_websocket_messages,
)
from tests.cases.event_source import EventSource

FIRST = st.integers(0, 10**12)
PAYLOADS = st.lists(
    st.one_of(
        st.text(max_size=300).map(lambda text: encode_text_events(text.encode())),
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=10,
        ).map(lambda value: encode_data_event(json.dumps(value, ensure_ascii=False).encode())),
        st.sampled_from([b"1", b"\r[\r1\r,\r2]\r", b'"%d %s %%"', b'"' + b"x" * 70_000 + b'"']).map(
            encode_data_event
        ),
    ),
    max_size=6,
)


def joined(batches: list[EventBatch]) -> EventBatch:
    """Return batches as one."""
    return sum(batches, EMPTY_BATCH)


def unframe(frames: bytes) -> list[bytes]:
    """Return the messages of a WebSocket server, each a text frame of its own."""
    found = []
    while frames:
        assert frames[0] == 0x81, "no whole text message"
        length, at = frames[1], 2
        assert length < 128, "a server does not mask"
        if length == 126:
            length, at = int.from_bytes(frames[2:4], "big"), 4
            assert length > 125, "the shortest form has to be taken"
        elif length == 127:
            length, at = int.from_bytes(frames[2:10], "big"), 10
            assert length > 65535, "the shortest form has to be taken"
        assert len(frames) >= at + length
        found.append(frames[at : at + length])
        frames = frames[at + length :]
    return found


class ServerSentTests(SynchronousTestCase):
    def test_each_event_has_its_data_and_the_cursor_after_it(self) -> None:
        self.assertEqual(
            encode_server_sent_events(7, encode_data_event(b"1") + encode_data_event(b"2")),
            b'data: {"type":"data","payload":1}\nid: 8\n\n'
            b'data: {"type":"data","payload":2}\nid: 9\n\n',
        )

    def test_carriage_return_between_tokens_becomes_another_space(self) -> None:
        self.assertEqual(
            encode_server_sent_events(0, encode_data_event(b"[1,\r2]\r")),
            b'data: {"type":"data","payload":[1, 2] }\nid: 1\n\n',
        )

    @given(FIRST, PAYLOADS)
    def test_browser_finds_each_event_and_cursor(
        self, first: int, batches: list[EventBatch]
    ) -> None:
        batch = joined(batches)
        source = EventSource()
        source.feed(
            EVENT_STREAM.first_bytes
            + encode_server_sent_events(first, batch)
            + EVENT_STREAM.heartbeat_bytes
        )
        assert [json.loads(event.data) for event in source.events] == [
            json.loads(line) for line in batch.lines.split(b"\n")[:-1]
        ]
        cursors = [str(first + number + 1) for number in range(batch.count)]
        assert [event.last_event_id for event in source.events] == cursors
        assert {event.type for event in source.events} <= {"message"}
        assert source.retry == 2000

    @given(FIRST, PAYLOADS, st.integers(0, 6))
    def test_however_events_are_put_into_batches_the_stream_is_the_same(
        self, first: int, batches: list[EventBatch], at: int
    ) -> None:
        one, other = joined(batches[:at]), joined(batches[at:])
        whole = encode_server_sent_events(first, joined(batches))
        assert whole == encode_server_sent_events(first, one) + encode_server_sent_events(
            first + one.count, other
        )

    def test_end_is_an_event_of_its_own(self) -> None:
        source = EventSource()
        source.feed(EVENT_STREAM.last_bytes)
        (event,) = source.events
        self.assertEqual((event.type, event.data, event.last_event_id), ("end", "null", "end"))

    def test_heartbeat_is_no_event_and_changes_no_cursor(self) -> None:
        source = EventSource()
        source.feed(
            encode_server_sent_events(0, encode_data_event(b"1")) + EVENT_STREAM.heartbeat_bytes * 3
        )
        self.assertEqual((len(source.events), source.last_event_id), (1, "1"))
        self.assertTrue(EVENT_STREAM.heartbeat_bytes)


class MessageTests(SynchronousTestCase):
    def test_three_forms_of_a_header_at_the_borders_between_them(self) -> None:
        overhead = len(encode_data_event(b'""').lines) - 1
        for length, header in (
            (124, b"\x81\x7c"),
            (125, b"\x81\x7d"),
            (126, b"\x81\x7e\x00\x7e"),
            (127, b"\x81\x7e\x00\x7f"),
            (65535, b"\x81\x7e\xff\xff"),
            (65536, b"\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00"),
            (70000, b"\x81\x7f\x00\x00\x00\x00\x00\x01\x11\x70"),
        ):
            batch = encode_data_event(b'"%s"' % (b"x" * (length - overhead)))
            self.assertEqual(encode_websocket_messages(0, batch), header + batch.lines[:-1])

    @given(FIRST, PAYLOADS)
    def test_each_event_is_a_message(self, first: int, batches: list[EventBatch]) -> None:
        batch = joined(batches)
        assert (
            unframe(WEBSOCKET_MESSAGES.encode_events(first, batch)) == batch.lines.split(b"\n")[:-1]
        )


class LineTests(SynchronousTestCase):
    @given(FIRST, PAYLOADS)
    def test_nothing_is_added_and_nothing_is_copied(
        self, first: int, batches: list[EventBatch]
    ) -> None:
        batch = joined(batches)
        assert JSON_LINES.encode_events(first, batch) is batch.lines

    def test_stream_of_lines_has_events_only(self) -> None:
        for framing in (JSON_LINES, WEBSOCKET_MESSAGES):
            self.assertEqual(
                (framing.first_bytes, framing.last_bytes, framing.heartbeat_bytes), (b"", b"", b"")
            )
