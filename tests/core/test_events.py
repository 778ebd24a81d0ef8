"""`core.events`: events as JSON Lines, encoded once."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.events import (
    EMPTY_BATCH,
    EventBatch,
    compute_base64_size,
    encode_data_event,
    encode_error_event,
    encode_file_event,
    encode_text_events,
    has_blank_line,
    split_batch,
)
from tawebeval.core.fileblock import PrintedFile
from tests.cases.strategies import ErrorEvent, classify, decode, texts


def text_events(block: bytes) -> list[str]:
    """Return the text events of a block: the rule of the contract, section 4, word by word."""
    events = []
    for index, line in enumerate(block.split(b"\n")):
        if index:
            events.append("\n")
        if line:
            events.append(line.decode("utf-8", "replace"))
    return events


class TextTests(SynchronousTestCase):
    def check(self, block: bytes, events: list[str]) -> None:
        """Hold a block against its events, and the rule above against both."""
        self.assertEqual(decode(encode_text_events(block)), events)
        self.assertEqual(text_events(block), events)

    def test_nothing(self) -> None:
        self.check(b"", [])
        self.assertEqual(encode_text_events(b""), EMPTY_BATCH)

    def test_event_has_the_exact_form_of_the_wire(self) -> None:
        lines = b'{"type":"text","payload":"a"}\n{"type":"text","payload":"\\n"}\n'
        self.assertEqual(encode_text_events(b"a\n"), EventBatch(2, lines))

    def test_each_line_and_each_terminator_is_an_event(self) -> None:
        quoted = '{"type":"text","payload":""}'
        for block, events in (
            ("a", ["a"]),
            ("a\nb", ["a", "\n", "b"]),
            ("\na\n", ["\n", "a", "\n"]),
            ("\n\n\n", ["\n", "\n", "\n"]),
            ("\n\na\n\n\nb\n\n", [*"\n\na\n\n\nb\n\n"]),
            ("\x7f", ["\x7f"]),
            ("\n\x7f\n\na\x7f\n", ["\n", "\x7f", "\n", "\n", "a\x7f", "\n"]),
            (f"{quoted}\n{quoted}", [quoted, "\n", quoted]),
            ('"}\n', ['"}', "\n"]),
        ):
            self.check(block.encode(), events)

    @given(st.lists(st.sampled_from((1, 2, 50, 500, 5000)), max_size=30), st.integers(0, 30))
    def test_blank_line_is_found_among_lines_of_any_length(
        self, lengths: list[int], place: int
    ) -> None:
        lines = [b"x" * length for length in lengths]
        self.assertFalse(has_blank_line(b"\n".join(lines)))
        lines[place:place] = [b"x", b"", b"x"]
        self.assertTrue(has_blank_line(b"\n".join(lines)))

    def test_blank_lines_between_long_ones(self) -> None:
        long = "x" * 5000
        for count in (1, 2, 3):
            blank = ["\n"] * count
            self.check(("\n" * count + long).encode(), [*blank, long])
            self.check((long + "\n" * count).encode(), [long, *blank])
            self.check((long + "\n" * count + long).encode(), [long, *blank, long])
            several = f"a\n{long}\nb\n{long}" + "\n" * count + "c"
            self.check(several.encode(), ["a", "\n", long, "\n", "b", "\n", long, *blank, "c"])

    def test_text_with_every_stand_in_is_exact(self) -> None:
        everything = "\x7f" + "".join(map(chr, range(0xFDD0, 0xFDF0)))
        for end in range(len(everything) + 1):
            line = everything[:end]
            events = ["a", "\n", "\n", *([line] if line else []), "\n", "é\ufffd"]
            self.check(b"a\n\n" + line.encode() + b"\n\xc3\xa9\xff", events)

    def test_text_with_every_rare_stand_in_is_exact(self) -> None:
        everything = "\x7f" + "".join(map(chr, (*range(0xFDD0, 0xFDF0), *range(0x10000, 0x11000))))
        self.check(f"a\n{everything}\n\nb".encode(), ["a", "\n", everything, "\n", "\n", "b"])

    @given(st.one_of(texts, st.binary(max_size=30)))
    def test_any_bytes_at_all_are_encoded_by_the_same_rule_counted_right(
        self, block: bytes
    ) -> None:
        assert decode(encode_text_events(block)) == text_events(block)


class DataTests(SynchronousTestCase):
    def test_value_stands_in_its_event_exactly_as_it_was_written(self) -> None:
        self.assertEqual(
            encode_data_event(b'{"a" : 1.0}'),
            EventBatch(1, b'{"type":"data","payload":{"a" : 1.0}}\n'),
        )

    @given(st.text(), st.text(), st.binary())
    def test_file_comes_back_with_its_name_its_type_and_every_byte(
        self, filename: str, content_type: str, content: bytes
    ) -> None:
        batch = encode_file_event(filename, content_type, content)
        self.assertEqual(classify(decode(batch)), [PrintedFile(filename, content_type, content)])

    @given(st.binary())
    def test_size_of_a_files_event_is_known_before_it_is_made(self, content: bytes) -> None:
        [payload] = decode(encode_file_event("", "", content))
        [nothing] = decode(encode_file_event("", "", b""))
        assert len(payload) - len(nothing) == compute_base64_size(len(content))

    def test_members_of_a_files_event_are_those_of_the_contract_section_4(self) -> None:
        [payload] = decode(encode_file_event("a", "b", b"\xff\xfe"))
        self.assertEqual(
            json.loads(payload),
            {"type": "file", "filename": "a", "content_type": "b", "content_base64": "//4="},
        )

    def test_members_of_an_error_are_those_of_the_contract_section_5(self) -> None:
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

    def test_error_may_have_no_further_members(self) -> None:
        self.assertEqual(classify(decode(encode_error_event("lost", "gone"))), [ErrorEvent("lost")])


class BatchTests(SynchronousTestCase):
    def test_two_batches_together_are_the_events_of_both_in_order(self) -> None:
        batch = encode_text_events(b"a\n") + encode_data_event(b"1")
        self.assertEqual(batch.count, 3)
        self.assertEqual(decode(batch), ["a", "\n", b"1"])
        self.assertEqual(EMPTY_BATCH + batch + EMPTY_BATCH, batch)

    def test_parts_of_a_split_batch_are_its_events_in_order(self) -> None:
        batch = encode_text_events(b"a\n")
        for count in range(batch.count + 1):
            first, others = split_batch(batch, count)
            self.assertEqual((first.count, first + others), (count, batch))
