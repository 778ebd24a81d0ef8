"""`core.segi`: every rule of docs/evaluators.md, by tables and by properties."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import segi
from tawebeval.core.segi import (
    MAX_TEXT_PAYLOAD_BYTES,
    Markers,
    PrintedFile,
    SegiParser,
    add_tools_to_path,
    build_evaluator_environment,
    is_reserved_variable,
    split_long_lines,
)
from tests.cases import reference_segi
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
    read_file,
    stdouts,
)


class Tables(SynchronousTestCase):
    """Ways to hold pieces of stdout against the reference."""

    def check_end(self, *outputs: bytes) -> None:
        """Hold the events of each whole stdout, end included, however it is cut."""
        for stdout in outputs:
            events: list[Event] = []
            for event in reference_segi.parse_events(
                stdout, MARKERS, max_value=MAX_VALUE, max_file=MAX_FILE, files=read_file
            ):
                events += re.findall("[^\n]+|\n", event) if isinstance(event, str) else [event]
            self.assertEqual(classify(parse(stdout)), events, stdout)
            self.assertEqual(classify(parse(stdout, BYTE_BY_BYTE)), events, stdout)
            for size in range(1, len(stdout)):
                halves = [Chunk(size), Chunk(len(stdout))]
                self.assertEqual(classify(parse(stdout, halves)), events, (stdout, size))
            flushed = parse(stdout, BYTE_BY_BYTE_FLUSHED)
            self.assertEqual(join_text(classify(flushed)), join_text(events), stdout)

    def check(self, *outputs: bytes) -> None:
        """Do the same, and once more with bytes that follow."""
        for stdout in outputs:
            self.check_end(stdout, stdout + b"\n" * (not stdout.endswith(b"\n")) + b"tail")


class ExampleTests(Tables):
    def test_stdout_becomes_the_documented_events(self) -> None:
        value = b'{"b" : [ 1,\t2 ], "a":"\\ud83d\\ude00"}'
        file = PrintedFile("report.svg", "image/svg+xml", b"<svg/>\n")
        block = file_block(
            b"<svg/>\n",
            "Content-Type: image/svg+xml",
            'Content-Disposition: attachment; filename="report.svg"',
            "X-SEGI-As: content",
        )
        for stdout, events in (
            (b"", []),
            (b"hello\n\nbye", ["hello", "\n", "\n", "bye"]),
            (b"\n\na\r\n\r", ["\n", "\n", "a\r", "\n", "\r"]),
            (b"a\xf0\x9f\n\x98\x80", ["a\ufffd", "\n", "\ufffd\ufffd"]),
            (b"a\n~DB\n1\n1e400\n~DE\nb\n", ["a", b"1", b"1e400", "b", "\n"]),
            (b"~DB\n\t " + value + b" \r\n~DE\n\n", [value, "\n"]),
            (b"a\n~DB\n1\nx\nx\n2\n~DE\n", ["a", b"1", ErrorEvent(), b"2"]),
            (b"~DB\n1\n~DB\n2\n~DE\nb", [b"1", ErrorEvent(), b"2", "b"]),
            (b"a\n" + block + b"b\n", ["a", file, "b", "\n"]),
            (b"a\n~DB", ["a", "\n", "~DB"]),
            (b"a\n~DB\n1", ["a", b"1", ErrorEvent()]),
        ):
            self.assertEqual(classify(parse(stdout)), events, stdout)
            self.check_end(stdout)


class TextTests(Tables):
    def test_stdout_without_markers_becomes_the_text_events_of_the_reference(self) -> None:
        invalid = b"a\xffb\xc0\xaf\xed\xa0\x80\xf0\x9f\x98c\xe2\x82"
        self.check(
            b"\n\na\n\n\nb\n\n",
            b" \n\t a \n",
            b"a\r\n\r\rb\r",
            "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\n".encode(),
            b"\x7f\n\na\x7fb\n\x7f\x7f",  # which the fast way of encoding needs for itself
            b'"\\\0\x1b\t{"type":"text","payload":""}\n\n',
            "é€😀\n\ufeff\ufffd😀".encode(),
            invalid + b"\n" + invalid,
        )
        self.check_end(b"a\n\xe2\x82")

    def test_marker_that_is_not_alone_on_its_line_is_text(self) -> None:
        self.check(
            b"~DE\n~FE\na\n~DE",
            b"x~DB\n ~FB\n~~DB\n",
            b"~DBx\n~FB \n~DB\r\n",
            b"~\n~D\n~F\n~",
        )

    def test_begin_marker_that_ends_stdout_is_text(self) -> None:
        for marker in (b"~DB", b"~FB"):
            for before in (b"", b"\n", b"a\n", b"~DB\n1\n~DE\n", b"~DB\n1\n~DE\n\n"):
                self.check_end(before + marker)

    def test_finishing_the_parser_again_adds_no_event(self) -> None:
        parser = SegiParser(MARKERS)
        parser.feed(b"a\nb")
        self.assertEqual(decode(parser.finish()), ["\n", "b"])
        self.assertEqual(decode(parser.finish()), [])


class DataBlockTests(Tables):
    def test_one_terminator_before_a_block_belongs_to_it(self) -> None:
        block = b"~DB\n1\n~DE\n"
        self.check(
            b"\n" + block,
            block + block,
            block + b"\n" + block,
            block + b"\n\n" + block,
            b"a\n\n\n" + block + b"\n\n",
            block + b"~DE\n~FE\n",
        )
        self.assertEqual(classify(parse(b"a\n~DB\n~DE\nb\n")), ["a", "b", "\n"])

    def test_each_line_of_a_data_block_is_a_value_unchanged(self) -> None:
        for values in (
            (b'{"a": 1}', b"null", b'"x"', b'"a\xff\xe2\x82"'),
            (b"1e400", b"1.0", b"12345678901234567890123", b"-0", b"0.10", b"1E+2"),
            ('["é😀\u2028\x85\x7f"]'.encode(), b'"' + b"x" * (MAX_VALUE - 2) + b'"'),
        ):
            self.check(b"~DB\n" + b"\n".join(values) + b"\n~DE\n")

    def test_line_that_is_no_json_by_rfc_8259_is_one_error(self) -> None:
        for line in (
            b"nope", b"{", b"[1,]", b"[1 2]", b"{1:2}", b"01", b"1.", b".5", b"+1", b"-", b"1 2",
            b"0x1", b"'a'", b'"a', b'"\t"', b'"\x00"', b'"\\x"', b'"\\u12g4"', b"\xef\xbb\xbf1",
            b"\xc2\xa01", b"\x0c1", b"True", b'{"a":1', b'"\xff', b"\xff", b"", b" \t\r",
            b"NaN", b"Infinity", b"-Infinity", b"[NaN]", b"nan", b"inf",
            b" ~DE", b"~DE ", b"~DE\r", b"x~DE", b"~FE",
            b'"' + b"x" * (MAX_VALUE - 1) + b'"', b"1" * 1000,
            *SURROGATES,
        ):  # fmt: skip
            stdout = b"a\n~DB\n1\n" + line + b"\n2\n~DE\nb\n"
            expected = ["a", b"1", ErrorEvent(), b"2", "b", "\n"]
            self.assertEqual(classify(parse(stdout)), expected, line)
            self.assertEqual(parse(stdout, BYTE_BY_BYTE), parse(stdout), line)

    def test_error_of_a_data_line_names_its_first_fault(self) -> None:
        for lines, word in (
            (SURROGATES, b"half of a surrogate pair"),
            ([rb'"\ud800', rb'["\ud800",]', rb'["\ud83d\ude00" 1]'], b"is not JSON"),
            ([rb'["\ud800",' + b"[" * 100_000], b"nested too deeply; up to 500 levels"),
            ([b"[" * 100_000 + b"]" * 100_000], b"nested too deeply; up to 500 levels"),
            ([b'{"a":' * 50_000 + b"1" + b"}" * 50_000], b"nested too deeply; up to 500 levels"),
            ([b"1" * (2**20 + 1)], b" 1 MiB"),
            ([b"some \xff text" + b"x" * 1000], "some \ufffd text".encode()),
        ):
            for line in lines:
                [event] = parse(b"~DB\n" + line + b"\n~DE\n", [Chunk(2**16)], max_value=2**20)
                self.assertIn(word, event)
                self.assertLess(len(event), 700)

    def test_500_levels_of_nesting_are_accepted_at_a_deep_stack(self) -> None:
        def check(frames: int) -> None:
            if frames:
                check(frames - 1)
                return
            for line in (b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500):
                self.assertEqual(parse(b"~DB\n" + line + b"\n~DE\n", max_value=2**20), [line])

        check(300)

    def test_first_wrong_line_of_a_block_is_reported(self) -> None:
        for wrong in (b"{nonsense", b"1" * 1000, b"x" * 100):
            self.check(b"~DB\n1\n" + wrong + b"\nNaN\n" + b"1" * 1000 + b"\n2\n~DE\nb\n")

    def test_data_block_without_its_end_line_is_an_error_after_its_values(self) -> None:
        begin = b"a\n~DB\n1\n"
        self.check_end(begin, begin + b"2", begin + b"2x", begin + b"1" * 100, begin + b"~FE")
        for marker in (b"~DE", b"~DB", b"~FB"):  # an end marker needs its terminator
            self.check_end(begin + marker, b"~DB\n" + marker)
        [_, event] = parse(b"~DB\n1\n~DE")
        self.assertIn(b"print the end marker on a line", event)
        for marker in (b"~DB\n", b"~FB\n"):
            self.check_end(marker, b"a\n" + marker, b"~DB\n1\n~DE\n" + marker)

    def test_begin_marker_in_a_block_begins_another_block(self) -> None:
        self.check(b"~DB\n1\n~DB\n2\n~DE\nb", b"a\n~DB\n~FB\nX-SEGI-As: content\n\nbody\n~FE\n")


SURROGATES = (
    *(rb'"\ud800"', rb'"\udc00"', rb'"\ud800\u0041"', rb'"\uD800\ud800"', rb'{"\uDfff":1}'),
    *(rb'["\\\ud83d"]', rb'"\udc00\ud800 \ud83d\ude00"', rb'"\ud800 and more"'),
)


def file_block(
    body: bytes, *headers: str, begin: bytes = b"~FB\n", end: bytes = b"\n~FE\n"
) -> bytes:
    """Print a file block as an evaluator would."""
    return begin + "".join(f"{line}\n" for line in headers).encode() + b"\n" + body + end


class FileBlockTests(Tables):
    def test_file_block_is_a_file_or_an_error_and_text_around_it_is_kept(self) -> None:
        body = b"x" * MAX_FILE
        for block in (
            file_block(b"<svg/>\n", 'Content-Disposition: attachment; filename="report.svg"'),
            file_block(b""),
            b"~FB\n\n~FE\n",
            b"~FB\n~FE\n",
            b"~FB\nContent-Type: a/b\n\n~FE\n",
            file_block(body),
            file_block(body + b"x"),
            b"~FB\nno headers\n~FE\n",
            file_block(b"x", "X-SEGI-As: shell"),
        ):
            self.check(b"a\n" + block + b"b\n")

    def test_file_body_may_contain_any_byte_even_terminators_and_other_markers(self) -> None:
        content = bytes(range(256)) + b"\n\n~FB\n~DB\n~DE\n~FEx\n ~FE"
        [event] = classify(parse(file_block(content), [Chunk(7)], max_file=1000))
        self.assertEqual(event, PrintedFile("file", "application/octet-stream", content))

    def test_file_over_the_limit_is_one_error_and_later_events_are_parsed(self) -> None:
        stdout = b"a\n" + file_block(b"x\n" * 20_000 + b"~DB") + b"b\n~DB\n1\n~DE\n"
        for size in (1, 1000, 10**6):
            events = parse(stdout, [Chunk(size)])
            self.assertEqual(classify(events), ["a", ErrorEvent(), "b", b"1"])

    def test_file_block_without_its_end_line_is_an_error(self) -> None:
        path = file_block(b"a", "X-SEGI-As: path", end=b"\n~FE")
        self.check_end(b"a\n~FB\n\nbody\n~FEx\n", b"~FB\n\nbody", path)


class WantedFileTests(SynchronousTestCase):
    block = file_block(b"out/a.txt", "X-SEGI-As: path", "Content-Type: text/plain")

    def test_supplied_content_becomes_the_file_event_before_later_events(self) -> None:
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
    def flush_after_each(self, *chunks: bytes) -> list[list[str | bytes]]:
        """Return the events of each chunk and of the flush after it."""
        parser = SegiParser(MARKERS)
        found = []
        for chunk in chunks:
            events = decode(parser.feed(chunk))
            is_partial = parser.has_partial_line
            flushed = decode(parser.flush_partial_line())
            self.assertEqual((is_partial, parser.has_partial_line), (flushed != [], False), chunk)
            found.append(events + flushed)
        return found

    def test_flush_delivers_only_what_cannot_become_a_marker_or_a_character(self) -> None:
        emoji = "😀".encode()
        for chunks, events in (
            ([b"a\nprogress 5", b"", b"0 %"], [["a", "\n", "progress 5"], [], ["0 %"]]),
            ([b"a\n", b"", b"\n", b"~DB\n1\n~DE\n"], [["a"], [], ["\n"], [b"1"]]),
            ([b"~", b"D", b"B", b"x"], [[], [], [], ["~DBx"]]),
            ([b"a\n~", b"F", b"B", b"x"], [["a"], [], [], ["\n", "~FBx"]]),
            ([b"~DE"], [["~DE"]]),
            ([b"x", b"~DB"], [["x"], ["~DB"]]),
            ([b"a" + emoji[:-1], b"", emoji[-1:]], [["a"], [], ["😀"]]),
            ([b"~DB\n", b"1"], [[], []]),
            ([b"~FB\n", b"\nbody"], [[], []]),
        ):
            self.assertEqual(self.flush_after_each(*chunks), events)

    @given(st.lists(any_bytes, max_size=3))
    def test_flush_without_a_partial_line_delivers_nothing(self, chunks: list[bytes]) -> None:
        parser = SegiParser(MARKERS)
        for chunk in chunks:
            parser.feed(chunk)
            is_partial = parser.has_partial_line
            assert is_partial or decode(parser.flush_partial_line()) == []
            parser.flush_partial_line()
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

    def test_long_lines_of_any_bytes_become_the_events_of_the_reference(self) -> None:
        for character in ("é", "€", "😀"):
            for shift in range(4):
                self.check(b"x" * shift + (character * 100_000).encode()[:100_000])
        for byte in (b"x", b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xf0"):
            self.check(byte * (100_000 // len(byte)))
        self.check(b"\x7f" + b"\xff" * 100_000)  # the slower way of encoding
        self.check(b"x" * 99_999 + b"\xe2" + MARKERS.data_begin)
        self.assertEqual(MAX_TEXT_PAYLOAD_BYTES, 65536)
        # Or a step in a long line would come to no end.
        self.assertLess(segi._PIECE, min(segi._BLOCK, segi._SHORT, segi._NEAR))

    def test_line_of_exactly_the_limit_is_not_cut(self) -> None:
        self.assertEqual(list(split_long_lines(b"abcde\nabcde", 5)), [b"abcde\nabcde"])
        self.assertEqual(list(split_long_lines(b"a\nabcdef\nb", 5)), [b"a\nabcde", b"f\nb"])

    def test_long_line_is_delivered_before_its_end(self) -> None:
        parser = SegiParser(MARKERS)
        delivered = 0
        for count in range(1, 100):
            delivered += sum(len(event) for event in decode(parser.feed(b"x" * 5000)))
            self.assertLessEqual(5000 * count - delivered, MAX_TEXT_PAYLOAD_BYTES)


def peak_of(action: Callable[[], object]) -> int:
    """Return how many bytes more were in use at the worst moment of `action`."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class MemoryTests(SynchronousTestCase):
    def test_value_or_file_over_its_limit_takes_under_500_kb_of_memory(self) -> None:
        def feed(start: bytes) -> None:
            parser = SegiParser(MARKERS, max_value=1000, max_file=1000)
            parser.feed(start)
            for _ in range(400):
                parser.feed(chunk)

        chunk = b"x" * 10_000
        for start in (b"~DB\n", b"~FB\n\n", b""):
            self.assertLess(peak_of(partial(feed, start)), 500_000)


class MarkersTests(SynchronousTestCase):
    def test_each_run_has_new_markers_that_are_no_json(self) -> None:
        drawn = [*Markers.generate(os.urandom).build_variables().values()]
        drawn += Markers.generate(os.urandom).build_variables().values()
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
        for number, marker in enumerate(markers.build_variables().values(), 1):
            self.assertIn((bytes([number]) * asked[0]).hex(), marker)

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
    def test_small_steps_produce_the_events_of_the_reference(
        self, stdout: bytes, chunking: list[Chunk], late: int
    ) -> None:
        check_reference(stdout, chunking, late)

    @given(outputs, places, places)
    def test_sizes_of_reads_do_not_change_the_events(
        self, stdout: bytes, reads: set[int], flushes: set[int]
    ) -> None:
        assert parse_reads(stdout, reads, flushes) == parse_reads(stdout, set(), flushes)


class ReservedTests(SynchronousTestCase):
    def test_variables_that_a_run_overrides_are_reserved(self) -> None:
        run = {
            "home": "/home",
            "temporary_directory": "/tmp",
            "seed": 7,
            "submission": {"source": "/source"},
            "markers": Markers.generate(bytes),
        }
        for name in build_evaluator_environment({}, **run):
            seen = build_evaluator_environment({name: "configured"}, **run)[name]
            self.assertEqual(seen == "configured", not is_reserved_variable(name), name)


class ToolsTests(SynchronousTestCase):
    def test_tools_are_at_the_end_of_path(self) -> None:
        for configured, path in (
            ({"PATH": "/opt/bin"}, "/opt/bin"),
            ({}, "/usr/local/bin:/usr/bin:/bin"),
        ):
            environment = add_tools_to_path({**configured, "LANG": "C"}, "/tools")
            self.assertEqual(environment.pop("PATH"), f"{path}:/tools/bin")
            self.assertEqual(environment, {"LANG": "C", "EVALUATION_TOOLS": "/tools"})
