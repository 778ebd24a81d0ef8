"""`core.segi`: every rule of docs/evaluators.md, by tables and by properties."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import segi
from tawebeval.core.segi import (
    MAX_PAYLOAD_BYTES,
    Markers,
    PrintedFile,
    SegiParser,
    add_tools_to_path,
    build_environment,
    find_character_boundary,
    is_reserved_variable,
    measure_complete_characters,
    split_long_lines,
)
from tests.cases.reference_segi import check_reference
from tests.cases.strategies import (
    BYTE_BY_BYTE,
    BYTE_BY_BYTE_FLUSHED,
    MARKERS,
    MAX_FILE,
    MAX_VALUE,
    SMALL_STEPS,
    Chunk,
    ErrorEvent,
    Event,
    any_bytes,
    chunkings,
    classify,
    decode,
    join_text,
    parse,
    stdouts,
    texts,
)


class Tables(SynchronousTestCase):
    """Two ways to hold a piece of stdout against the events that it means."""

    def check_end(self, stdout: bytes, events: Sequence[Event]) -> None:
        """Hold the whole of stdout, end included, against `events`, however it is cut."""
        self.assertEqual(classify(parse(stdout)), list(events), "fed whole")
        self.assertEqual(classify(parse(stdout, BYTE_BY_BYTE)), list(events), "byte by byte")
        for size in range(1, len(stdout)):
            halves = [Chunk(size), Chunk(len(stdout))]
            self.assertEqual(classify(parse(stdout, halves)), list(events), f"cut after {size}")
        flushed = parse(stdout, BYTE_BY_BYTE_FLUSHED)
        self.assertEqual(
            join_text(classify(flushed)), join_text(events), "flushed after every byte"
        )

    def check(self, stdout: bytes, events: Sequence[Event]) -> None:
        """Do the same, and once more with bytes that follow."""
        self.check_end(stdout, events)
        if stdout.endswith(b"\n"):
            self.check_end(stdout + b"tail", [*events, "tail"])
        else:
            self.check_end(stdout + b"\ntail", [*events, "\n", "tail"])


class TextTests(Tables):
    def test_lines_and_terminators_are_text(self) -> None:
        separators = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"
        escaped = '"\\\0\x1b\t{"type":"text","payload":""}'
        invalid = b"a\xffb\xc0\xaf\xed\xa0\x80\xf0\x9f\x98c\xe2\x82"
        replaced = invalid.decode("utf-8", "replace")
        for stdout, events in (
            (b"hello\n\nbye", ["hello", "\n", "\n", "bye"]),  # the contract's example
            (b"hello\n", ["hello", "\n"]),
            (b"\n", ["\n"]),
            (b"\n\na\n\n\nb\n\n", ["\n", "\n", "a", "\n", "\n", "\n", "b", "\n", "\n"]),
            (b" \n\t a \n", [" ", "\n", "\t a ", "\n"]),
            (b"a\r\n\r\rb\r", ["a\r", "\n", "\r\rb\r"]),
            (separators.encode() + b"\n", [separators, "\n"]),
            # The fast way of encoding needs 0x7f for itself.
            (b"\x7f\n\na\x7fb\n\x7f\x7f", ["\x7f", "\n", "\n", "a\x7fb", "\n", "\x7f\x7f"]),
            (escaped.encode() + b"\n\n", [escaped, "\n", "\n"]),
            ("é€😀\n\ufeff\ufffd😀".encode(), ["é€😀", "\n", "\ufeff\ufffd😀"]),
            (invalid + b"\n" + invalid, [replaced, "\n", replaced]),
            (b"\xf0\x9f\n\x98\x80\n", ["\ufffd", "\n", "\ufffd\ufffd", "\n"]),
        ):
            self.check(stdout, events)
        self.check_end(b"", [])
        self.check_end(b"a\n\xe2\x82", ["a", "\n", "\ufffd"])

    def test_finishing_again_adds_nothing(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(b"a\nb")
        self.assertEqual(decode(parser.finish()), ["\n", "b"])
        self.assertEqual(decode(parser.finish()), [])


class NearMarkerTests(Tables):
    def test_text_near_a_marker_is_text(self) -> None:
        for stdout, events in (
            (b"~DE\n~FE\na\n~DE", ["~DE", "\n", "~FE", "\n", "a", "\n", "~DE"]),
            (b"x~DB\n ~FB\n~~DB\n", ["x~DB", "\n", " ~FB", "\n", "~~DB", "\n"]),
            (b"~DBx\n~FB \n~DB\r\n", ["~DBx", "\n", "~FB ", "\n", "~DB\r", "\n"]),
            (b"~\n~D\n~F\n~", ["~", "\n", "~D", "\n", "~F", "\n", "~"]),
        ):
            self.check(stdout, events)

    def test_begin_marker_ends_stdout(self) -> None:
        for marker in (b"~DB", b"~FB"):
            text = marker.decode()
            self.check_end(marker, [text])
            self.check_end(b"\n" + marker, ["\n", text])
            self.check_end(b"a\n" + marker, ["a", "\n", text])
            self.check_end(b"~DB\n1\n~DE\n" + marker, [b"1", text])
            self.check_end(b"~DB\n1\n~DE\n\n" + marker, [b"1", "\n", text])


class DataBlockTests(Tables):
    def test_one_terminator_before_a_block_belongs_to_it(self) -> None:
        for stdout, events in (
            (b"a\n~DB\n1\n~DE\nb\n", ["a", b"1", "b", "\n"]),
            (b"~DB\n1\n~DE\n", [b"1"]),
            (b"\n~DB\n1\n~DE\n", [b"1"]),
            (b"~DB\n1\n~DE\n~DB\n2\n~DE\n", [b"1", b"2"]),
            (b"~DB\n1\n~DE\n\n~DB\n2\n~DE\n", [b"1", b"2"]),
            (b"~DB\n1\n~DE\n\n\n~DB\n2\n~DE\n", [b"1", "\n", b"2"]),
            (b"a\n\n\n~DB\n1\n~DE\n\n\n", ["a", "\n", "\n", b"1", "\n", "\n"]),
            (b"a\n~DB\n~DE\nb\n", ["a", "b", "\n"]),
            (b"~DB\n1\n~DE\n~DE\n~FE\n", [b"1", "~DE", "\n", "~FE", "\n"]),
        ):
            self.check(stdout, events)

    def test_each_line_is_a_value_as_it_was_written(self) -> None:
        greatest = b'"' + b"x" * (MAX_VALUE - 2) + b'"'
        for values in (
            (b'{"a": 1}', b"null", b'"x"'),
            (b"1e400", b"1.0", b"12345678901234567890123", b"-0", b"0.10", b"1E+2"),
            ('["é😀\u2028\x85\x7f"]'.encode(), greatest),
        ):
            self.check(b"~DB\n" + b"\n".join(values) + b"\n~DE\n", values)
        value = b'{"b" : [ 1,\t2 ], "a":"\\ud83d\\ude00"}'
        self.check(b"~DB\n\t " + value + b" \r\n~DE\n", [value])
        self.check(b'~DB\n"a\xff\xe2\x82"\n~DE\n', ['"a\ufffd\ufffd"'.encode()])


class BrokenDataBlockTests(Tables):
    def check_line(self, line: bytes) -> None:
        """Hold that `line` is refused, and nothing around it touched."""
        stdout = b"a\n~DB\n1\n" + line + b"\n2\n~DE\nb\n"
        self.assertEqual(classify(parse(stdout)), ["a", b"1", ErrorEvent(), b"2", "b", "\n"], line)
        self.assertEqual(parse(stdout, BYTE_BY_BYTE), parse(stdout), line)

    def test_line_that_is_no_json_by_rfc_8259_is_one_error(self) -> None:
        for line in (
            b"nope", b"{", b"[1,]", b"[1 2]", b"{1:2}", b"01", b"1.", b".5", b"+1", b"-", b"1 2",
            b"0x1", b"'a'", b'"a', b'"\t"', b'"\x00"', b'"\\x"', b'"\\u12g4"', b"\xef\xbb\xbf1",
            b"\xc2\xa01", b"\x0c1", b"True", b'{"a":1', b'"\xff', b"\xff",
        ):  # fmt: skip
            self.check_line(line)

    def test_blank_line_in_a_data_block_is_no_json_value(self) -> None:
        self.check_line(b"")
        self.check_line(b" \t\r")

    def test_nan_and_the_infinities_are_no_json_however_common_they_are(self) -> None:
        for line in (b"NaN", b"Infinity", b"-Infinity", b"[NaN]", b"nan", b"inf"):
            self.check_line(line)

    def test_half_a_surrogate_pair_which_is_no_character_is_refused(self) -> None:
        for line in (
            *(rb'"\ud800"', rb'"\udc00"', rb'"\ud800\u0041"', rb'"\uD800\ud800"', rb'{"\uDfff":1}'),
            *(rb'["\\\ud83d"]', rb'"\udc00\ud800 \ud83d\ude00"', rb'"\ud800 and more"'),
        ):
            self.check_line(line)
            [event] = parse(b"~DB\n" + line + b"\n~DE\n")
            self.assertIn(b"half of a surrogate pair", event)
            self.assertNotIn(b"not JSON", event)

    def test_malformed_json_is_not_blamed_on_surrogates(self) -> None:
        for line, why in (
            (rb'"\ud800', b"truncated"),
            (rb'x"\ud800"', b"byte 0"),
            (rb'["\ud800",]', b"byte 10"),
            (rb'["\ud83d\ude00" 1]', b"byte 16"),
            (rb'"\\ud800" 1', b"trailing"),
        ):
            [event] = parse(b"~DB\n" + line + b"\n~DE\n")
            self.assertIn(b"is not JSON", event)
            self.assertIn(why, event, line)

    def test_end_marker_is_a_whole_line_of_its_own_kind(self) -> None:
        for line in (b" ~DE", b"~DE ", b"~DE\r", b"x~DE", b"~FE"):
            self.check_line(line)

    def test_value_nested_too_deep_to_be_decoded_is_refused_and_nothing_crashes(self) -> None:
        for line in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000):
            stdout = b"a\n~DB\n" + line + b"\n2\n~DE\nb\n"
            events = parse(stdout, [Chunk(2**16)], max_value=2**20)
            self.assertEqual(classify(events), ["a", ErrorEvent(), b"2", "b", "\n"])
            self.assertIn(b"up to 500 levels", events[1])

    def test_deep_nesting_after_a_surrogate_is_refused(self) -> None:
        line = rb'["\ud800",' + b"[" * 100_000
        [event] = parse(b"~DB\n" + line + b"\n~DE\n", max_value=2**20)
        self.assertIn(b"nested too deeply", event)

    def test_promised_levels_of_nesting_are_accepted_at_any_stack_depth(self) -> None:
        def check(frames: int) -> None:
            if frames:
                check(frames - 1)
                return
            for line in (b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500):
                self.assertEqual(parse(b"~DB\n" + line + b"\n~DE\n", max_value=2**20), [line])

        check(300)

    def test_error_shows_the_line_but_not_at_length(self) -> None:
        [event] = parse(b"~DB\nsome \xff text" + b"x" * 1000 + b"\n~DE\n", max_value=2000)
        self.assertIn("some \ufffd text".encode(), event)
        self.assertLess(len(event), 600)

    def test_line_over_the_limit_is_one_error(self) -> None:
        self.check_line(b'"' + b"x" * (MAX_VALUE - 1) + b'"')
        self.check_line(b"1" * 1000)
        self.check(b"~DB\n" + b"x" * 100 + b"\n~DE\nb\n", [ErrorEvent(), "b", "\n"])
        self.assertIn(b" 40 bytes", parse(b"~DB\n" + b"1" * 100 + b"\n~DE\n")[0])

    def test_last_line_over_the_limit_is_an_error_beside_the_missing_end(self) -> None:
        self.check_end(b"~DB\n" + b"1" * 100, [ErrorEvent(), ErrorEvent()])

    def test_first_wrong_line_of_a_block_is_reported(self) -> None:
        for wrong in (b"{nonsense", b"1" * 1000):
            lines = b"\n".join((b"1", wrong, b"NaN", b"1" * 1000, b"2"))
            self.check(b"~DB\n" + lines + b"\n~DE\nb\n", [b"1", ErrorEvent(), b"2", "b", "\n"])

    def test_block_without_an_end_marker_is_an_error_after_its_values(self) -> None:
        self.check_end(b"a\n~DB\n1\n2\n", ["a", b"1", b"2", ErrorEvent()])
        self.check_end(b"a\n~DB\n1\n2", ["a", b"1", b"2", ErrorEvent()])
        self.check_end(b"a\n~DB\n1\n2x", ["a", b"1", ErrorEvent(), ErrorEvent()])

    def test_end_marker_needs_a_terminator_at_the_end_of_stdout(self) -> None:
        for marker in (b"~DE", b"~DB", b"~FB"):
            self.check_end(b"a\n~DB\n1\n" + marker, ["a", b"1", ErrorEvent()])
            self.check_end(b"~DB\n" + marker, [ErrorEvent()])
        [_, event] = parse(b"~DB\n1\n~DE")
        self.assertIn(b"print the end marker on a line", event)
        self.check_end(b"~DB\n1\n~FE", [b"1", ErrorEvent(), ErrorEvent()])

    def test_begin_marker_with_a_terminator_at_the_end_of_stdout_is_an_error(self) -> None:
        for marker in (b"~DB", b"~FB"):
            self.check_end(marker + b"\n", [ErrorEvent()])
            self.check_end(b"a\n" + marker + b"\n", ["a", ErrorEvent()])
            self.check_end(b"~DB\n1\n~DE\n" + marker + b"\n", [b"1", ErrorEvent()])

    def test_begin_marker_in_a_block_begins_another_block(self) -> None:
        self.check(b"~DB\n1\n~DB\n2\n~DE\nb", [b"1", ErrorEvent(), b"2", "b"])
        file = b"X-SEGI-As: content\n\nbody\n~FE\n"
        body = PrintedFile("file", "application/octet-stream", b"body")
        self.check(b"a\n~DB\n~FB\n" + file, ["a", ErrorEvent(), body])


def file_block(
    body: bytes, *headers: str, begin: bytes = b"~FB\n", end: bytes = b"\n~FE\n"
) -> bytes:
    """Print a file block as an evaluator would."""
    return begin + "".join(f"{line}\n" for line in headers).encode() + b"\n" + body + end


class FileBlockTests(Tables):
    def test_file_is_one_event_with_name_type_and_bytes(self) -> None:
        block = file_block(
            b"<svg/>\n",
            "Content-Type: image/svg+xml",
            'Content-Disposition: attachment; filename="report.svg"',
            "X-SEGI-As: content",
        )
        file = PrintedFile("report.svg", "image/svg+xml", b"<svg/>\n")
        self.check(b"a\n" + block + b"b\n", ["a", file, "b", "\n"])

    def test_body_may_have_any_byte_terminators_and_other_markers_among_them(self) -> None:
        content = bytes(range(256)) + b"\n\n~FB\n~DB\n~DE\n~FEx\n ~FE"
        [event] = classify(parse(file_block(content), [Chunk(7)], max_file=1000))
        self.assertEqual(event, PrintedFile("file", "application/octet-stream", content))

    def test_file_may_be_empty(self) -> None:
        file = PrintedFile("file", "application/octet-stream", b"")
        self.check(b"~FB\n\n~FE\n", [file])
        self.check(b"~FB\n\n\n~FE\n", [file])
        self.check(b"~FB\n~FE\n", [ErrorEvent()])
        self.check(b"~FB\nContent-Type: a/b\n\n~FE\n", [PrintedFile("file", "a/b", b"")])

    def test_end_marker_needs_a_terminator_at_the_end_of_stdout(self) -> None:
        self.check_end(file_block(b"x", end=b"\n~FE"), [ErrorEvent()])
        self.check_end(file_block(b"a", "X-SEGI-As: path", end=b"\n~FE"), [ErrorEvent()])

    def test_body_of_exactly_the_limit_passes_one_byte_more_does_not(self) -> None:
        body = b"x" * MAX_FILE
        file = PrintedFile("file", "application/octet-stream", body)
        self.check(b"a\n" + file_block(body) + b"b\n", ["a", file, "b", "\n"])
        self.check(b"a\n" + file_block(body + b"x") + b"b\n", ["a", ErrorEvent(), "b", "\n"])

    def test_file_far_over_the_limit_is_skipped_to_its_end(self) -> None:
        stdout = b"a\n" + file_block(b"x\n" * 20_000 + b"~DB") + b"b\n~DB\n1\n~DE\n"
        for size in (1, 1000, 10**6):
            events = parse(stdout, [Chunk(size)])
            self.assertEqual(classify(events), ["a", ErrorEvent(), "b", b"1"])

    def test_broken_block_is_an_error_and_the_text_around_it_is_intact(self) -> None:
        for block in (b"~FB\nno headers\n~FE\n", file_block(b"x", "X-SEGI-As: shell")):
            self.check(b"a\n" + block + b"b\n", ["a", ErrorEvent(), "b", "\n"])

    def test_file_block_that_stdout_ends_in_is_an_error(self) -> None:
        self.check_end(b"a\n~FB\n\nbody\n~FEx\n", ["a", ErrorEvent()])
        self.check_end(b"~FB\n\nbody", [ErrorEvent()])


class WantedFileTests(SynchronousTestCase):
    block = file_block(b"out/a.txt", "X-SEGI-As: path", "Content-Type: text/plain")

    def test_what_stands_before_the_block_is_delivered_and_the_path_told(self) -> None:
        parser = SegiParser(MARKERS)
        self.assertIs(parser.awaited_file, None)
        self.assertEqual(decode(parser.feed(b"a\n" + self.block)), ["a"])
        assert parser.awaited_file is not None
        self.assertEqual(parser.awaited_file.path, "out/a.txt")
        self.assertEqual(parser.awaited_file.filename, "a.txt")

    def test_supplied_content_is_the_event_and_what_came_meanwhile_follows_in_order(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(self.block + b"b\n~DB\n1")
        self.assertEqual(decode(parser.feed(b"\n~DE\nc")), [])
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        file = PrintedFile("a.txt", "text/plain", b"content")
        self.assertEqual(classify(decode(parser.supply_file(b"content"))), [file, "b", b"1"])
        self.assertIs(parser.awaited_file, None)
        self.assertEqual(decode(parser.flush_partial_line()), ["c"])
        self.assertEqual(decode(parser.finish()), [])

    def test_refused_file_is_an_error_with_the_reason(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(self.block + b"b\n")
        events = decode(parser.refuse_file("it is a directory"))
        self.assertIn(b"it is a directory", events[0])
        self.assertEqual(classify(events), [ErrorEvent(), "b"])
        self.assertIs(parser.awaited_file, None)
        self.assertEqual(decode(parser.finish()), ["\n"])


class FlushTests(SynchronousTestCase):
    def test_line_without_its_terminator_waits_for_flush(self) -> None:
        parser = SegiParser(MARKERS)
        self.assertEqual(decode(parser.feed(b"a\nprogress 5")), ["a"])
        self.assertTrue(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), ["\n", "progress 5"])
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        self.assertEqual(decode(parser.feed(b"0 %")), [])
        self.assertEqual(decode(parser.flush_partial_line()), ["0 %"])
        self.assertEqual(decode(parser.finish()), [])

    def test_terminator_is_held_back(self) -> None:
        parser = SegiParser(MARKERS)
        self.assertEqual(decode(parser.feed(b"a\n")), ["a"])
        for _ in range(1000):
            self.assertFalse(parser.has_partial_line)
            self.assertEqual(decode(parser.flush_partial_line()), [])
        self.assertEqual(decode(parser.feed(b"\n")), ["\n"])
        self.assertEqual(decode(parser.flush_partial_line()), [])
        self.assertEqual(decode(parser.feed(b"~DB\n1\n~DE\n")), [b"1"])
        self.assertEqual(decode(parser.finish()), [])

    def test_beginning_of_a_marker_is_held_back(self) -> None:
        for marker in (MARKERS.data_begin, MARKERS.file_begin):
            for start in (b"", b"a\n"):
                parser = SegiParser(MARKERS)
                parser.feed(start)
                for byte in marker:
                    self.assertEqual(decode(parser.feed(bytes([byte]))), [])
                    self.assertFalse(parser.has_partial_line)
                    self.assertEqual(decode(parser.flush_partial_line()), [])
                expected = ["\n"] if start else []
                self.assertEqual(decode(parser.feed(b"x")), [])
                self.assertTrue(parser.has_partial_line)
                self.assertEqual(
                    decode(parser.flush_partial_line()), [*expected, marker.decode() + "x"]
                )

    def test_end_markers_are_not_held_back(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(b"~DE")
        self.assertEqual(decode(parser.flush_partial_line()), ["~DE"])

    def test_marker_in_mid_line_is_not_held_back(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(b"x")
        parser.flush_partial_line()
        parser.feed(b"~DB")
        self.assertTrue(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), ["~DB"])

    def test_character_whose_last_bytes_are_missing_is_not_delivered_in_parts(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed("a😀".encode()[:-1])
        self.assertEqual(decode(parser.flush_partial_line()), ["a"])
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        parser.feed("😀".encode()[-1:])
        self.assertEqual(decode(parser.flush_partial_line()), ["😀"])

    def test_flush_within_a_block_delivers_nothing(self) -> None:
        for stdout in (b"~DB\n", b"~DB\n1", b"~FB\n", b"~FB\n\nbody"):
            parser = SegiParser(MARKERS)
            parser.feed(stdout)
            self.assertFalse(parser.has_partial_line)
            self.assertEqual(decode(parser.flush_partial_line()), [])

    @given(any_bytes)
    def test_has_partial_line_tells_whether_a_flush_delivers(self, stdout: bytes) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(stdout)
        partial = parser.has_partial_line
        events = decode(parser.flush_partial_line())
        if not partial:
            assert events == []
        assert not parser.has_partial_line


class LongLineTests(SynchronousTestCase):
    def check(self, line: bytes) -> None:
        """Hold that a long line comes through between two short ones, however it is cut."""
        expected = ["a\n" + line.decode("utf-8", "replace") + "\nb"]
        stdout = b"a\n" + line + b"\nb"
        cut = [[Chunk(1000)], [Chunk(4096, flush=True)], [Chunk(2**16)]]
        for chunking in ([], *cut, [Chunk(21845), Chunk(1, flush=True)]):
            self.assertEqual(join_text(parse(stdout, chunking)), expected)
            at_end = join_text(parse(stdout[2:-2], chunking))
            self.assertEqual(at_end, [line.decode("utf-8", "replace")])

    def test_long_lines_of_any_bytes_come_through(self) -> None:
        for character in ("é", "€", "😀"):
            for shift in range(4):
                self.check(b"x" * shift + (character * 100_000).encode()[:100_000])
        for byte in (b"x", b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xf0"):
            self.check(byte * (100_000 // len(byte)))
        self.check(b"\x7f" + b"\xff" * 100_000)  # the slower way of encoding
        self.check(b"x" * 99_999 + b"\xe2" + MARKERS.data_begin)

    def test_long_line_is_delivered_while_it_comes(self) -> None:
        parser = SegiParser(MARKERS)
        delivered = 0
        for count in range(1, 100):
            delivered += sum(len(event) for event in decode(parser.feed(b"x" * 5000)))
            self.assertLessEqual(5000 * count - delivered, MAX_PAYLOAD_BYTES)

    def test_long_line_is_cut_at_64_kib(self) -> None:
        self.assertEqual(MAX_PAYLOAD_BYTES, 65536)


def peak_of(action: Callable[[], object]) -> int:
    """Return how many bytes more were in use at the worst moment of `action`."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class MemoryTests(SynchronousTestCase):
    def test_input_over_a_limit_is_not_kept(self) -> None:
        def feed(start: bytes) -> None:
            parser = SegiParser(MARKERS, max_value=1000, max_file=1000)
            parser.feed(start)
            for _ in range(400):
                parser.feed(chunk)

        chunk = b"x" * 10_000
        for start in (b"~DB\n", b"~FB\n\n", b""):
            self.assertLess(peak_of(partial(feed, start)), 500_000)


class MarkersTests(SynchronousTestCase):
    def test_markers_are_in_the_variables_of_segi(self) -> None:
        self.assertEqual(
            MARKERS.build_environment(),
            {
                "EVALUATION_DATA_BEGIN": "~DB",
                "EVALUATION_DATA_END": "~DE",
                "EVALUATION_FILE_BEGIN": "~FB",
                "EVALUATION_FILE_END": "~FE",
            },
        )

    def test_each_run_has_new_markers_that_are_no_json(self) -> None:
        drawn = [*Markers.generate(os.urandom).build_environment().values()]
        drawn += Markers.generate(os.urandom).build_environment().values()
        self.assertEqual(len(set(drawn)), 8)
        for marker in drawn:
            events = parse(b"~DB\n" + marker.encode() + b"\n~DE\n", max_value=99)
            self.assertEqual(classify(events), [ErrorEvent()])
            self.assertTrue(re.fullmatch(r"[!-~]+", marker), "one line, in one word")

    def test_each_marker_has_80_random_bits(self) -> None:
        asked: list[int] = []

        def random(count: int) -> bytes:
            asked.append(count)
            return bytes([len(asked)]) * count

        markers = Markers.generate(random)
        self.assertEqual(len(asked), 4)
        self.assertGreaterEqual(min(asked) * 8, 80)
        for number, marker in enumerate(markers.build_environment().values(), 1):
            self.assertIn((bytes([number]) * asked[0]).hex(), marker)

    def test_parser_recognises_drawn_markers_as_it_does_short_ones(self) -> None:
        markers = Markers.generate(os.urandom)
        blocks = b"%b\n1\n%b\n" % (markers.data_begin, markers.data_end)
        blocks += b"%b\n\nx\n%b\n" % (markers.file_begin, markers.file_end)
        for chunking in ([], BYTE_BY_BYTE, BYTE_BY_BYTE_FLUSHED):
            events = parse(b"a\n" + blocks + b"b", chunking, markers=markers, max_value=100)
            file = PrintedFile("file", "application/octet-stream", b"x")
            self.assertEqual(classify(events), ["a", b"1", file, "b"])

    def test_default_limits_are_1_mib_of_value_and_2_mib_of_file(self) -> None:
        parser = SegiParser(MARKERS)
        value = b'"' + b"x" * (2**20 - 2) + b'"'
        file = b"x" * 2**21
        parser.feed(b"~DB\n")
        self.assertEqual(decode(parser.feed(value + b"\n~DE\n")), [value])
        events = classify(decode(parser.feed(file_block(file))))
        self.assertEqual(events, [PrintedFile("file", "application/octet-stream", file)])


def parse_reads(stdout: bytes, reads: set[int], flushes: set[int]) -> list[str | bytes]:
    """Return the events of stdout read up to each of these places, and flushed at some."""
    places = [place for place in sorted(reads | flushes) if 0 < place < len(stdout)]
    sizes = [end - begin for begin, end in zip([0, *places], [*places, len(stdout)], strict=True)]
    return parse(
        stdout, [Chunk(size, at in flushes) for size, at in zip(sizes, [*places, -1], strict=True)]
    )


outputs = st.one_of(any_bytes, stdouts)
places = st.sets(st.integers(1, 80), max_size=8)


class PropertyTests(SynchronousTestCase):
    @given(stdouts, chunkings, st.integers(0, 3))
    def test_events_equal_the_reference_however_stdout_is_cut(
        self, stdout: bytes, chunking: list[Chunk], late: int
    ) -> None:
        check_reference(stdout, chunking, late)


class SmallStepTests(SynchronousTestCase):
    def setUp(self) -> None:
        for name, size in SMALL_STEPS.items():
            self.patch(segi, name, size)

    @given(stdouts, chunkings, st.integers(0, 3))
    def test_events_do_not_depend_on_steps_and_turns(
        self, stdout: bytes, chunking: list[Chunk], late: int
    ) -> None:
        check_reference(stdout, chunking, late)

    @given(outputs, places, places)
    def test_events_depend_on_flushes_and_not_on_reads(
        self, stdout: bytes, reads: set[int], flushes: set[int]
    ) -> None:
        assert parse_reads(stdout, reads, flushes) == parse_reads(stdout, set(), flushes)


class ReservedTests(SynchronousTestCase):
    def test_variables_that_a_run_sets_are_reserved(self) -> None:
        run = {
            "home": "/home",
            "temporary_directory": "/tmp",
            "seed": 7,
            "submission": {"source": "/source"},
            "markers": Markers.generate(bytes),
        }
        for name in build_environment({}, **run):
            seen = build_environment({name: "configured"}, **run)[name]
            self.assertEqual(seen == "configured", not is_reserved_variable(name), name)


class ToolsTests(SynchronousTestCase):
    def test_tools_come_after_the_operators_programs(self) -> None:
        for configured, path in (
            ({"PATH": "/opt/bin"}, "/opt/bin"),
            ({}, "/usr/local/bin:/usr/bin:/bin"),
        ):
            environment = add_tools_to_path({**configured, "LANG": "C"}, "/tools")
            self.assertEqual(environment.pop("PATH"), f"{path}:/tools/bin")
            self.assertEqual(environment, {"LANG": "C", "EVALUATION_TOOLS": "/tools"})


some_bytes = st.one_of(
    texts,
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    st.lists(
        st.sampled_from([b"\x80", b"\xf0\x9f", b"\xe2", "😀".encode(), b"a", b"\n"]), max_size=12
    ).map(b"".join),
)


def decoded(data: bytes) -> str:
    """Decode as docs/evaluators.md has it."""
    return data.decode("utf-8", "replace")


class BoundaryTests(SynchronousTestCase):
    @given(st.text(min_size=1), st.data())
    def test_boundary_is_the_last_one_between_characters(
        self, text: str, data: st.DataObject
    ) -> None:
        encoded = ("abc" + text).encode()
        at = data.draw(st.integers(3, len(encoded)))
        places = [len(("abc" + text)[:n].encode()) for n in range(len(text) + 4)]
        assert find_character_boundary(encoded, at) == max(place for place in places if place <= at)

    @given(some_bytes, st.data())
    def test_cut_at_a_boundary_changes_nothing(self, some: bytes, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(some) + 3))
        some = b"abc" + some
        place = find_character_boundary(some, at + 3)
        assert at <= place <= at + 3
        assert decoded(some[:place]) + decoded(some[place:]) == decoded(some)


class CompleteTests(SynchronousTestCase):
    def test_only_a_character_that_may_yet_be_completed_waits(self) -> None:
        for data, length in (
            (b"", 0),
            (b"a", 1),
            (b"a\xc3", 1),
            (b"a\xe2\x82", 1),
            (b"\xf0\x9f\x98", 0),
            ("a😀".encode(), 5),
            (b"a\xff", 2),
            (b"a\x80", 2),
            (b"\xf0\x9f\x98\n", 4),
        ):
            self.assertEqual(measure_complete_characters(data), length, data)

    @given(some_bytes, st.binary(max_size=4))
    def test_cut_where_a_character_is_complete_changes_nothing(
        self, some: bytes, rest: bytes
    ) -> None:
        length = measure_complete_characters(some)
        assert len(some) - 3 <= length <= len(some)
        assert decoded(some[:length]) + decoded(some[length:] + rest) == decoded(some + rest)


class PiecesTests(SynchronousTestCase):
    def test_block_whose_lines_are_short_is_one_piece_however_long_it_is(self) -> None:
        block = b"abcd\n" * 100
        self.assertEqual(list(split_long_lines(block, 5)), [block])
        self.assertEqual(list(split_long_lines(b"", 5)), [b""])

    def test_line_of_exactly_the_limit_is_not_cut(self) -> None:
        self.assertEqual(list(split_long_lines(b"abcde\nabcde", 5)), [b"abcde\nabcde"])
        self.assertEqual(list(split_long_lines(b"a\nabcdef\nb", 5)), [b"a\nabcde", b"f\nb"])

    @given(some_bytes, st.integers(4, 9))
    def test_pieces_are_the_block_within_the_limit(self, block: bytes, limit: int) -> None:
        cut = list(split_long_lines(block, limit))
        assert b"".join(cut) == block
        assert "".join(map(decoded, cut)) == decoded(block)
        for piece in cut:
            assert max(map(len, piece.split(b"\n"))) <= limit
