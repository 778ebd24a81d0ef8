"""`core.events`: events as JSON Lines, encoded once, and framed for streams."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.events import (
    EMPTY_BATCH,
    EVENT_STREAM_FRAMING,
    JSON_LINES_FRAMING,
    WEBSOCKET_FRAMING,
    EventBatch,
    compute_base64_size,
    encode_data_event,
    encode_error_event,
    encode_file_event,
    encode_server_sent_events,
    encode_text_events,
    encode_websocket_messages,
    has_blank_line,
)
from tawebeval.core.segi import PrintedFile
from tests.cases.event_source import EventSource
from tests.cases.strategies import classify, decode, texts


def text_events(block: bytes) -> list[str]:
    """Return the text events of a block: the rule of docs/evaluators.md, word by word."""
    events = []
    for index, line in enumerate(block.split(b"\n")):
        if index:
            events.append("\n")
        if line:
            events.append(line.decode("utf-8", "replace"))
    return events


class TextTests(SynchronousTestCase):
    def check(self, *blocks: str) -> None:
        """Hold the events of blocks against the rule above."""
        for block in blocks:
            self.assertEqual(
                decode(encode_text_events(block.encode())), text_events(block.encode())
            )

    def test_event_has_the_exact_form_of_the_wire(self) -> None:
        lines = b'{"type":"text","payload":"a"}\n{"type":"text","payload":"\\n"}\n'
        self.assertEqual(encode_text_events(b"a\n"), EventBatch(2, lines))

    def test_text_with_the_placeholder_characters_of_terminators_is_encoded_exactly(self) -> None:
        codes = (*range(0xFDD0, 0xFDF0), *range(0x10000, 0x11000))
        self.check("a\n\x7f" + "".join(map(chr, codes)) + "\n\nb")

    def test_blank_line_is_found_wherever_it_stands_among_long_and_short_lines(self) -> None:
        for size in (1, 100, 5000):
            lines = [b"a" * size] * 20
            self.assertFalse(has_blank_line(b"\n".join(lines)))
            for place in range(1, 20):
                blank = [*lines[:place], b"", *lines[place:]]
                self.assertTrue(has_blank_line(b"\n".join(blank)))

    @given(st.one_of(texts, st.binary(max_size=30)))
    def test_any_bytes_become_the_text_events_of_the_reference(self, block: bytes) -> None:
        assert decode(encode_text_events(block)) == text_events(block)


class DataTests(SynchronousTestCase):
    @given(st.text(), st.text(), st.binary())
    def test_encoded_file_event_decodes_to_the_same_name_type_and_content(
        self, filename: str, content_type: str, content: bytes
    ) -> None:
        batch = encode_file_event(filename, content_type, content)
        self.assertEqual(classify(decode(batch)), [PrintedFile(filename, content_type, content)])

    @given(st.binary())
    def test_computed_base64_size_equals_the_encoded_content(self, content: bytes) -> None:
        [payload] = decode(encode_file_event("", "", content))
        [nothing] = decode(encode_file_event("", "", b""))
        assert len(payload) - len(nothing) == compute_base64_size(len(content))

    def test_file_and_error_have_the_documented_members(self) -> None:
        [payload] = decode(encode_file_event("a", "b", b"\xff\xfe"))
        self.assertEqual(
            json.loads(payload),
            {"type": "file", "filename": "a", "content_type": "b", "content_base64": "//4="},
        )
        [payload] = decode(encode_error_event("exit", "it failed\n", {"status": 1, "stderr": "é"}))
        self.assertEqual(
            json.loads(payload),
            {
                "type": "evaluation_error",
                "reason": "exit",
                "message": "it failed\n",
                "status": 1,
                "stderr": "é",
            },
        )


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
    @given(FIRST, PAYLOADS)
    def test_browser_finds_each_event_and_cursor(
        self, first: int, batches: list[EventBatch]
    ) -> None:
        batch = joined(batches)
        source = EventSource()
        source.feed(
            EVENT_STREAM_FRAMING.first_bytes
            + encode_server_sent_events(first, batch)
            + EVENT_STREAM_FRAMING.heartbeat_bytes
        )
        assert [json.loads(event.data) for event in source.events] == [
            json.loads(line) for line in batch.lines.split(b"\n")[:-1]
        ]
        cursors = [str(first + number + 1) for number in range(batch.count)]
        assert [event.last_event_id for event in source.events] == cursors
        assert {event.type for event in source.events} <= {"message"}
        assert source.retry == 2000

    def test_stream_ends_with_an_end_event(self) -> None:
        source = EventSource()
        source.feed(EVENT_STREAM_FRAMING.last_bytes)
        (event,) = source.events
        self.assertEqual((event.type, event.data, event.last_event_id), ("end", "null", "end"))


class MessageTests(SynchronousTestCase):
    def test_websocket_header_encodes_the_length_in_1_3_or_9_bytes(self) -> None:
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
            unframe(WEBSOCKET_FRAMING.encode_events(first, batch)) == batch.lines.split(b"\n")[:-1]
        )
        assert JSON_LINES_FRAMING.encode_events(first, batch) == batch.lines
