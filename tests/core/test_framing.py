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
    """`text/event-stream`."""

    def test_bytes(self) -> None:
        """Each event has its data and the cursor after it."""
        self.assertEqual(
            encode_server_sent_events(7, encode_data_event(b"1") + encode_data_event(b"2")),
            b'data: {"type":"data","payload":1}\nid: 8\n\n'
            b'data: {"type":"data","payload":2}\nid: 9\n\n',
        )

    def test_nothing(self) -> None:
        """No events are no bytes."""
        self.assertEqual(encode_server_sent_events(7, EMPTY_BATCH), b"")

    def test_carriage_return(self) -> None:
        """What would end a line there is a space of JSON, and becomes another one."""
        self.assertEqual(
            encode_server_sent_events(0, encode_data_event(b"[1,\r2]\r")),
            b'data: {"type":"data","payload":[1, 2] }\nid: 1\n\n',
        )

    def test_percent(self) -> None:
        """A percent sign is one, whatever stands after it."""
        for text in (b"%", b"%d", b"%%d", b"100 %s", b"%(x)s"):
            framed = encode_server_sent_events(0, encode_text_events(text))
            self.assertEqual(framed, b"data: %s\nid: 1\n\n" % encode_text_events(text).lines[:-1])

    @given(FIRST, PAYLOADS)
    def test_read_by_a_browser(self, first: int, batches: list[EventBatch]) -> None:
        """A reader as the HTML standard has it finds each event, and each cursor."""
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
    def test_cut_anywhere(self, first: int, batches: list[EventBatch], at: int) -> None:
        """However events are put into batches, the stream is the same."""
        one, other = joined(batches[:at]), joined(batches[at:])
        whole = encode_server_sent_events(first, joined(batches))
        assert whole == encode_server_sent_events(first, one) + encode_server_sent_events(
            first + one.count, other
        )

    def test_end(self) -> None:
        """The end is an event of its own, with the cursor after which there is nothing."""
        source = EventSource()
        source.feed(EVENT_STREAM.last_bytes)
        (event,) = source.events
        self.assertEqual((event.type, event.data, event.last_event_id), ("end", "null", "end"))

    def test_heartbeat(self) -> None:
        """The sign of life is none of a browser's events, and changes no cursor."""
        source = EventSource()
        source.feed(
            encode_server_sent_events(0, encode_data_event(b"1")) + EVENT_STREAM.heartbeat_bytes * 3
        )
        self.assertEqual((len(source.events), source.last_event_id), (1, "1"))
        self.assertTrue(EVENT_STREAM.heartbeat_bytes)


class MessageTests(SynchronousTestCase):
    """Messages of a WebSocket."""

    def test_lengths(self) -> None:
        """The three forms of a header, at the borders between them."""
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

    def test_nothing(self) -> None:
        """No events are no bytes."""
        self.assertEqual(encode_websocket_messages(0, EMPTY_BATCH), b"")

    @given(FIRST, PAYLOADS)
    def test_each_event_is_a_message(self, first: int, batches: list[EventBatch]) -> None:
        """Messages are the events, in order, as they were encoded."""
        batch = joined(batches)
        assert (
            unframe(WEBSOCKET_MESSAGES.encode_events(first, batch)) == batch.lines.split(b"\n")[:-1]
        )


class LineTests(SynchronousTestCase):
    """JSON Lines."""

    @given(FIRST, PAYLOADS)
    def test_as_they_are(self, first: int, batches: list[EventBatch]) -> None:
        """Nothing is added, and nothing is copied."""
        batch = joined(batches)
        assert JSON_LINES.encode_events(first, batch) is batch.lines

    def test_no_words_of_our_own(self) -> None:
        """There are only events: no beginning, no end, no signs of life."""
        for framing in (JSON_LINES, WEBSOCKET_MESSAGES):
            self.assertEqual(
                (framing.first_bytes, framing.last_bytes, framing.heartbeat_bytes), (b"", b"", b"")
            )
