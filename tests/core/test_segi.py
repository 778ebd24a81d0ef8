"""`core.segi`: every rule of the contract, section 4, by tables and by properties."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core import segi
from tawebeval.core.fileblock import MAX_HEADER_BYTES, PrintedFile
from tawebeval.core.segi import MAX_PAYLOAD_BYTES, Markers, SegiParser, StrayMarkerDetector
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
    Stream,
    any_bytes,
    chunkings,
    classify,
    decode,
    join_text,
    parse,
    stdouts,
    streams,
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
    """Ordinary output, in which there is no block."""

    def test_nothing(self) -> None:
        """No output is no event."""
        self.check_end(b"", [])

    def test_example(self) -> None:
        """The contract's own example: nothing stands for the line that is empty."""
        self.check(b"hello\n\nbye", ["hello", "\n", "\n", "bye"])

    def test_finished(self) -> None:
        """Finishing again adds nothing: what was delivered is not delivered once more."""
        parser = SegiParser(MARKERS)
        parser.feed(b"a\nb")
        self.assertEqual(decode(parser.finish()), ["\n", "b"])
        self.assertEqual(decode(parser.finish()), [])

    def test_terminated(self) -> None:
        """The terminator that ends the last line is an event."""
        self.check(b"hello\n", ["hello", "\n"])

    def test_one_terminator(self) -> None:
        """A terminator at the very start is one like any other."""
        self.check(b"\n", ["\n"])

    def test_blank_lines(self) -> None:
        """Blank lines at the start, in the middle and at the end are a terminator each."""
        self.check(b"\n\na\n\n\nb\n\n", ["\n", "\n", "a", "\n", "\n", "\n", "b", "\n", "\n"])

    def test_spaces(self) -> None:
        """White space is text, and stays."""
        self.check(b" \n\t a \n", [" ", "\n", "\t a ", "\n"])

    def test_carriage_return(self) -> None:
        r"""`\r` stays in the text, before `\n` and elsewhere."""
        self.check(b"a\r\n\r\rb\r", ["a\r", "\n", "\r\rb\r"])

    def test_other_separators(self) -> None:
        """What Unicode or Python takes for the end of a line is ordinary text."""
        line = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"
        self.check(line.encode() + b"\n", [line, "\n"])

    def test_delete_character(self) -> None:
        """0x7f, which the fast way of encoding needs for itself, is text like any other."""
        self.check(b"\x7f\n\na\x7fb\n\x7f\x7f", ["\x7f", "\n", "\n", "a\x7fb", "\n", "\x7f\x7f"])

    def test_json_characters(self) -> None:
        """What JSON must escape comes back as it was, even what looks like an event."""
        line = '"\\\0\x1b\t{"type":"text","payload":""}'
        self.check(line.encode() + b"\n\n", [line, "\n", "\n"])

    def test_utf8(self) -> None:
        """Characters of every length survive being cut anywhere."""
        self.check("é€😀\n\ufeff\ufffd😀".encode(), ["é€😀", "\n", "\ufeff\ufffd😀"])

    def test_invalid_utf8(self) -> None:
        """What is not UTF-8 becomes U+FFFD, as Python's own decoder has it."""
        line = b"a\xffb\xc0\xaf\xed\xa0\x80\xf0\x9f\x98c\xe2\x82"
        text = line.decode("utf-8", "replace")
        self.check(line + b"\n" + line, [text, "\n", text])

    def test_character_cut_by_terminator(self) -> None:
        """A character that a terminator breaks off is U+FFFD, and the terminator stands."""
        self.check(b"\xf0\x9f\n\x98\x80\n", ["\ufffd", "\n", "\ufffd\ufffd", "\n"])

    def test_character_cut_by_the_end(self) -> None:
        """A character that the end of stdout breaks off is U+FFFD too."""
        self.check_end(b"a\n\xe2\x82", ["a", "\n", "\ufffd"])


class NearMarkerTests(Tables):
    """What resembles a marker and is none."""

    def test_end_markers(self) -> None:
        """An end marker outside a block is text."""
        self.check(b"~DE\n~FE\na\n~DE", ["~DE", "\n", "~FE", "\n", "a", "\n", "~DE"])

    def test_something_before(self) -> None:
        """A begin marker with anything before it on its line is text."""
        self.check(b"x~DB\n ~FB\n~~DB\n", ["x~DB", "\n", " ~FB", "\n", "~~DB", "\n"])

    def test_something_after(self) -> None:
        r"""A begin marker with anything after it on its line is text, were it only a `\r`."""
        self.check(b"~DBx\n~FB \n~DB\r\n", ["~DBx", "\n", "~FB ", "\n", "~DB\r", "\n"])

    def test_begin_marker_ends_stdout(self) -> None:
        """A begin marker that stdout ends in is text, and so is the terminator before it."""
        for marker in (b"~DB", b"~FB"):
            text = marker.decode()
            self.check_end(marker, [text])
            self.check_end(b"\n" + marker, ["\n", text])
            self.check_end(b"a\n" + marker, ["a", "\n", text])
            self.check_end(b"~DB\n1\n~DE\n" + marker, [b"1", text])
            self.check_end(b"~DB\n1\n~DE\n\n" + marker, [b"1", "\n", text])

    def test_prefixes(self) -> None:
        """The beginning of a marker is text."""
        self.check(b"~\n~D\n~F\n~", ["~", "\n", "~D", "\n", "~F", "\n", "~"])

    def test_marker_after_text_of_its_line_was_delivered(self) -> None:
        """A line whose beginning was flushed long ago does not become a marker."""
        parser = SegiParser(MARKERS)
        events = decode(parser.feed(b"x")) + decode(parser.flush_partial_line())
        events += decode(parser.feed(b"~DB\n1\n~DE\n")) + decode(parser.finish())
        self.assertEqual(join_text(events), ["x~DB\n1\n~DE\n"])

    def test_marker_as_the_rest_of_the_last_line(self) -> None:
        """Not even at the end of stdout is the rest of a flushed line a marker."""
        for rest in (b"~DB", b"y~DB", b"~FB"):
            parser = SegiParser(MARKERS)
            events = decode(parser.feed(b"x")) + decode(parser.flush_partial_line())
            events += decode(parser.feed(rest)) + decode(parser.finish())
            self.assertEqual(join_text(events), ["x" + rest.decode()])

    def test_terminator_after_a_flushed_line(self) -> None:
        """The terminator of a flushed line may be the one that belongs to a block."""
        parser = SegiParser(MARKERS)
        events = decode(parser.feed(b"x")) + decode(parser.flush_partial_line())
        events += decode(parser.feed(b"\n~DB\n1\n~DE\n")) + decode(parser.finish())
        self.assertEqual(events, ["x", b"1"])


class DataBlockTests(Tables):
    """Data blocks that are as they should be."""

    def test_block_between_lines(self) -> None:
        """The terminator before the block belongs to it; the next line follows directly."""
        self.check(b"a\n~DB\n1\n~DE\nb\n", ["a", b"1", "b", "\n"])

    def test_at_the_start(self) -> None:
        """At the very start of stdout a marker needs no terminator before it."""
        self.check(b"~DB\n1\n~DE\n", [b"1"])

    def test_terminator_at_the_start(self) -> None:
        """A terminator that stdout begins with belongs to the block after it."""
        self.check(b"\n~DB\n1\n~DE\n", [b"1"])

    def test_right_after_a_block(self) -> None:
        """Right after a block's end a marker needs no terminator either."""
        self.check(b"~DB\n1\n~DE\n~DB\n2\n~DE\n", [b"1", b"2"])

    def test_terminator_between_blocks(self) -> None:
        """A terminator between two blocks belongs to the second; only one does."""
        self.check(b"~DB\n1\n~DE\n\n~DB\n2\n~DE\n", [b"1", b"2"])
        self.check(b"~DB\n1\n~DE\n\n\n~DB\n2\n~DE\n", [b"1", "\n", b"2"])

    def test_one_terminator_belongs_to_the_block(self) -> None:
        """Of the blank lines before a block only the last terminator is the block's."""
        self.check(b"a\n\n\n~DB\n1\n~DE\n\n\n", ["a", "\n", "\n", b"1", "\n", "\n"])

    def test_empty_block(self) -> None:
        """A block with no line has no event."""
        self.check(b"a\n~DB\n~DE\nb\n", ["a", "b", "\n"])

    def test_several_values(self) -> None:
        """Each line of a block is an event."""
        self.check(b'~DB\n{"a": 1}\nnull\n"x"\n~DE\n', [b'{"a": 1}', b"null", b'"x"'])

    def test_numbers(self) -> None:
        """Numbers stay as the evaluator wrote them, beyond any machine's range too."""
        numbers = [b"1e400", b"1.0", b"12345678901234567890123", b"-0", b"0.10", b"1E+2"]
        self.check(b"~DB\n" + b"\n".join(numbers) + b"\n~DE\n", numbers)

    def test_verbatim(self) -> None:
        """White space and escapes within a value stay; those around it go."""
        value = b'{"b" : [ 1,\t2 ], "a":"\\ud83d\\ude00"}'
        self.check(b"~DB\n\t " + value + b" \r\n~DE\n", [value])

    def test_unicode_in_values(self) -> None:
        """Strings in values may have any character, U+2028 and 0x7f among them."""
        value = '["é😀\u2028\x85\x7f"]'.encode()
        self.check(b"~DB\n" + value + b"\n~DE\n", [value])

    def test_invalid_utf8_in_values(self) -> None:
        """What is not UTF-8 becomes U+FFFD in a value as it does in text."""
        self.check(b'~DB\n"a\xff\xe2\x82"\n~DE\n', ['"a\ufffd\ufffd"'.encode()])

    def test_text_looks_like_a_marker_of_another_kind(self) -> None:
        """Between blocks lines are text again, near markers included."""
        self.check(b"~DB\n1\n~DE\n~DE\n~FE\n", [b"1", "~DE", "\n", "~FE", "\n"])

    def test_value_of_the_greatest_size(self) -> None:
        """A line of exactly the limit passes."""
        value = b'"' + b"x" * (MAX_VALUE - 2) + b'"'
        self.check(b"~DB\n" + value + b"\n~DE\n", [value])


class BrokenDataBlockTests(Tables):
    """Data blocks that are not as they should be: an error, and not a byte of text lost."""

    def check_line(self, line: bytes) -> None:
        """Hold that `line` is refused, and nothing around it touched."""
        stdout = b"a\n~DB\n1\n" + line + b"\n2\n~DE\nb\n"
        self.assertEqual(classify(parse(stdout)), ["a", b"1", ErrorEvent(), b"2", "b", "\n"], line)
        self.assertEqual(parse(stdout, BYTE_BY_BYTE), parse(stdout), line)

    def test_no_json(self) -> None:
        """A line that is no JSON by RFC 8259 is one error; the others are delivered."""
        for line in (
            b"nope", b"{", b"[1,]", b"[1 2]", b"{1:2}", b"01", b"1.", b".5", b"+1", b"-", b"1 2",
            b"0x1", b"'a'", b'"a', b'"\t"', b'"\x00"', b'"\\x"', b'"\\u12g4"', b"\xef\xbb\xbf1",
            b"\xc2\xa01", b"\x0c1", b"True", b'{"a":1', b'"\xff', b"\xff",
        ):  # fmt: skip
            self.check_line(line)

    def test_blank_line(self) -> None:
        """A blank line in a data block is no JSON value."""
        self.check_line(b"")
        self.check_line(b" \t\r")

    def test_not_a_number(self) -> None:
        """NaN and the infinities are no JSON, however common they are."""
        for line in (b"NaN", b"Infinity", b"-Infinity", b"[NaN]", b"nan", b"inf"):
            self.check_line(line)

    def test_lone_surrogates(self) -> None:
        """Half a surrogate pair, which is no character, is refused."""
        for line in (
            *(rb'"\ud800"', rb'"\udc00"', rb'"\ud800\u0041"', rb'"\uD800\ud800"', rb'{"\uDfff":1}'),
            *(rb'["\\\ud83d"]', rb'"\udc00\ud800 \ud83d\ude00"', rb'"\ud800 and more"'),
        ):
            self.check_line(line)
            [event] = parse(b"~DB\n" + line + b"\n~DE\n")
            self.assertIn(b"half of a surrogate pair", event)
            self.assertNotIn(b"not JSON", event)

    def test_surrogates_are_not_to_blame(self) -> None:
        """What is no JSON whatever becomes of its halves is told to be none, and where."""
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

    def test_end_marker_with_something(self) -> None:
        """An end marker counts as a whole line only, and of its own kind only."""
        for line in (b" ~DE", b"~DE ", b"~DE\r", b"x~DE", b"~FE"):
            self.check_line(line)

    def test_deep_nesting(self) -> None:
        """A value nested too deep to be decoded is refused, and nothing crashes."""
        for line in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000):
            stdout = b"a\n~DB\n" + line + b"\n2\n~DE\nb\n"
            events = parse(stdout, [Chunk(2**16)], max_value=2**20)
            self.assertEqual(classify(events), ["a", ErrorEvent(), b"2", "b", "\n"])
            self.assertIn(b"up to 500 levels", events[1])

    def test_deep_nesting_behind_a_surrogate(self) -> None:
        """Nor where something else is wrong before that."""
        line = rb'["\ud800",' + b"[" * 100_000
        [event] = parse(b"~DB\n" + line + b"\n~DE\n", max_value=2**20)
        self.assertIn(b"nested too deeply", event)

    def test_nesting(self) -> None:
        """As many levels as are promised are taken, however far down the stack."""

        def check(frames: int) -> None:
            if frames:
                check(frames - 1)
                return
            for line in (b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500):
                self.assertEqual(parse(b"~DB\n" + line + b"\n~DE\n", max_value=2**20), [line])

        check(300)

    def test_excerpt(self) -> None:
        """The error shows the line, but not at length."""
        [event] = parse(b"~DB\nsome \xff text" + b"x" * 1000 + b"\n~DE\n", max_value=2000)
        self.assertIn("some \ufffd text".encode(), event)
        self.assertLess(len(event), 600)

    def test_over_the_limit(self) -> None:
        """A line over the limit is one error, and what follows it is intact."""
        self.check_line(b'"' + b"x" * (MAX_VALUE - 1) + b'"')
        self.check_line(b"1" * 1000)
        self.check(b"~DB\n" + b"x" * 100 + b"\n~DE\nb\n", [ErrorEvent(), "b", "\n"])

    def test_over_the_limit_at_the_end(self) -> None:
        """A line over the limit that stdout ends in is an error, as is the block's end."""
        self.check_end(b"~DB\n" + b"1" * 100, [ErrorEvent(), ErrorEvent()])

    def test_one_error_a_block(self) -> None:
        """Of several wrong lines the first is reported, whatever is wrong with the others."""
        for wrong in (b"{nonsense", b"1" * 1000):
            lines = b"\n".join((b"1", wrong, b"NaN", b"1" * 1000, b"2"))
            self.check(b"~DB\n" + lines + b"\n~DE\nb\n", [b"1", ErrorEvent(), b"2", "b", "\n"])

    def test_size_is_in_the_message(self) -> None:
        """The error tells the limit."""
        self.assertIn(b" 40 bytes", parse(b"~DB\n" + b"1" * 100 + b"\n~DE\n")[0])

    def test_unterminated(self) -> None:
        """A block that stdout ends in is an error, after the values that it has."""
        self.check_end(b"a\n~DB\n1\n2\n", ["a", b"1", b"2", ErrorEvent()])
        self.check_end(b"a\n~DB\n1\n2", ["a", b"1", b"2", ErrorEvent()])
        self.check_end(b"a\n~DB\n1\n2x", ["a", b"1", ErrorEvent(), ErrorEvent()])

    def test_marker_without_a_terminator(self) -> None:
        """At the end of stdout, too, an end marker needs its terminator; it is no value either."""
        for marker in (b"~DE", b"~DB", b"~FB"):
            self.check_end(b"a\n~DB\n1\n" + marker, ["a", b"1", ErrorEvent()])
            self.check_end(b"~DB\n" + marker, [ErrorEvent()])
        [_, event] = parse(b"~DB\n1\n~DE")
        self.assertIn(b"print the end marker on a line", event)
        self.check_end(b"~DB\n1\n~FE", [b"1", ErrorEvent(), ErrorEvent()])

    def test_begin_marker_ends_stdout(self) -> None:
        """A begin marker that stdout ends in begins a block only with its own terminator."""
        for marker in (b"~DB", b"~FB"):
            self.check_end(marker + b"\n", [ErrorEvent()])
            self.check_end(b"a\n" + marker + b"\n", ["a", ErrorEvent()])
            self.check_end(b"~DB\n1\n~DE\n" + marker + b"\n", [b"1", ErrorEvent()])

    def test_block_in_a_block(self) -> None:
        """A begin marker in a data block breaks that off, and its own block counts."""
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
    """File blocks, as the parser delivers them."""

    def test_file(self) -> None:
        """A file is one data event, with its name, its type and its bytes."""
        block = file_block(
            b"<svg/>\n",
            "Content-Type: image/svg+xml",
            'Content-Disposition: attachment; filename="report.svg"',
            "X-SEGI-As: content",
        )
        file = PrintedFile("report.svg", "image/svg+xml", b"<svg/>\n")
        self.check(b"a\n" + block + b"b\n", ["a", file, "b", "\n"])

    def test_every_byte(self) -> None:
        """A body may have any byte, terminators and other markers among them."""
        content = bytes(range(256)) + b"\n\n~FB\n~DB\n~DE\n~FEx\n ~FE"
        [event] = classify(parse(file_block(content), [Chunk(7)], max_file=1000))
        self.assertEqual(event, PrintedFile("file", "application/octet-stream", content))

    def test_empty(self) -> None:
        """A file may be empty; the terminator before the end marker is not its own."""
        file = PrintedFile("file", "application/octet-stream", b"")
        self.check(b"~FB\n\n~FE\n", [file])
        self.check(b"~FB\n\n\n~FE\n", [file])
        self.check(b"~FB\n~FE\n", [ErrorEvent()])
        self.check(b"~FB\nContent-Type: a/b\n\n~FE\n", [PrintedFile("file", "a/b", b"")])

    def test_blocks_in_a_row(self) -> None:
        """Blocks of both kinds may follow each other, blank line or none between."""
        file = PrintedFile("file", "application/octet-stream", b"x")
        block = file_block(b"x")
        self.check(block + block + b"\n" + block, [file, file, file])
        self.check(block + b"~DB\n1\n~DE\n" + block, [file, b"1", file])
        self.check(b"~DB\n1\n~DE\n" + block + b"\n~DB\n2\n~DE\n", [b"1", file, b"2"])

    def test_end_marker_ends_stdout(self) -> None:
        """At the end of stdout, too, an end marker needs its terminator."""
        self.check_end(file_block(b"x", end=b"\n~FE"), [ErrorEvent()])
        self.check_end(file_block(b"a", "X-SEGI-As: path", end=b"\n~FE"), [ErrorEvent()])

    def test_greatest_size(self) -> None:
        """A body of exactly the limit passes, one byte more does not; text after it is intact."""
        body = b"x" * MAX_FILE
        file = PrintedFile("file", "application/octet-stream", body)
        self.check(b"a\n" + file_block(body) + b"b\n", ["a", file, "b", "\n"])
        self.check(b"a\n" + file_block(body + b"x") + b"b\n", ["a", ErrorEvent(), "b", "\n"])

    def test_far_over_the_limit(self) -> None:
        """Of a file far over the limit every byte is skipped and none of what follows."""
        stdout = b"a\n" + file_block(b"x\n" * 20_000 + b"~DB") + b"b\n~DB\n1\n~DE\n"
        for size in (1, 1000, 10**6):
            events = parse(stdout, [Chunk(size)])
            self.assertEqual(classify(events), ["a", ErrorEvent(), "b", b"1"])

    def test_over_the_limit_says_the_same(self) -> None:
        """The error for a file over the limit does not depend on how stdout was cut."""
        for body in (b"x" * (MAX_FILE + 1), b"x" * (MAX_FILE + MAX_HEADER_BYTES + 100)):
            stdout = file_block(body)
            self.assertEqual(parse(stdout, BYTE_BY_BYTE), parse(stdout))

    def test_broken(self) -> None:
        """A broken block is an error, and the text around it is intact."""
        for block in (b"~FB\nno headers\n~FE\n", file_block(b"x", "X-SEGI-As: shell")):
            self.check(b"a\n" + block + b"b\n", ["a", ErrorEvent(), "b", "\n"])

    def test_unterminated(self) -> None:
        """A file block that stdout ends in is an error."""
        self.check_end(b"a\n~FB\n\nbody\n~FEx\n", ["a", ErrorEvent()])
        self.check_end(b"~FB\n\nbody", [ErrorEvent()])


class WantedFileTests(SynchronousTestCase):
    """A file named by its path: somebody else reads it, and the parser waits."""

    block = file_block(b"out/a.txt", "X-SEGI-As: path", "Content-Type: text/plain")

    def test_wanted(self) -> None:
        """What stands before the block is delivered, and the path told."""
        parser = SegiParser(MARKERS)
        self.assertIs(parser.awaited_file, None)
        self.assertEqual(decode(parser.feed(b"a\n" + self.block)), ["a"])
        assert parser.awaited_file is not None
        self.assertEqual(parser.awaited_file.path, "out/a.txt")
        self.assertEqual(parser.awaited_file.filename, "a.txt")

    def test_supply(self) -> None:
        """The supplied content is the event, and what came meanwhile follows, in order."""
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

    def test_refuse(self) -> None:
        """A refused file is an error with the reason, and what came meanwhile follows."""
        parser = SegiParser(MARKERS)
        parser.feed(self.block + b"b\n")
        events = decode(parser.refuse_file("it is a directory"))
        self.assertIn(b"it is a directory", events[0])
        self.assertEqual(classify(events), [ErrorEvent(), "b"])
        self.assertIs(parser.awaited_file, None)
        self.assertEqual(decode(parser.finish()), ["\n"])

    def test_wanted_after_wanted(self) -> None:
        """The next file is wanted only after the first has been answered."""
        parser = SegiParser(MARKERS)
        parser.feed(self.block + self.block.replace(b"a.txt", b"b.txt") + b"c\n")
        self.assertEqual(
            classify(decode(parser.supply_file(b"1"))),
            [PrintedFile("a.txt", "text/plain", b"1")],
        )
        assert parser.awaited_file is not None
        self.assertEqual(parser.awaited_file.path, "out/b.txt")
        self.assertEqual(classify(decode(parser.refuse_file("no"))), [ErrorEvent(), "c"])

    def test_finish_waits(self) -> None:
        """To finish while a file is wanted is a mistake: what came after it would be misread."""
        parser = SegiParser(MARKERS)
        parser.feed(self.block + b"~DB\n1\n~DE\n")
        self.assertRaises(AssertionError, parser.finish)
        parser.refuse_file("no")
        parser.finish()

    def test_finish_waits_for_turns(self) -> None:
        """So it is while there is something to be parsed."""
        parser = SegiParser(MARKERS)
        parser.feed(b"\n" * 40_000)
        self.assertTrue(parser.has_pending_input)
        self.assertRaises(AssertionError, parser.finish)

    def test_nothing_wanted(self) -> None:
        """To supply what nobody wants is a mistake."""
        self.assertRaises(AssertionError, SegiParser(MARKERS).supply_file, b"")


class FlushTests(SynchronousTestCase):
    """A partial line is delivered on request; what may be a block's is held back."""

    def test_partial_line(self) -> None:
        """A line without its terminator waits for `flush`."""
        parser = SegiParser(MARKERS)
        self.assertEqual(decode(parser.feed(b"a\nprogress 5")), ["a"])
        self.assertTrue(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), ["\n", "progress 5"])
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        self.assertEqual(decode(parser.feed(b"0 %")), [])
        self.assertEqual(decode(parser.flush_partial_line()), ["0 %"])
        self.assertEqual(decode(parser.finish()), [])

    def test_first_line(self) -> None:
        """The first line of stdout can be flushed; the imagined terminator never comes out."""
        parser = SegiParser(MARKERS)
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        parser.feed(b"a")
        self.assertEqual(decode(parser.flush_partial_line()), ["a"])
        parser.feed(b"\n")
        self.assertEqual(decode(parser.finish()), ["\n"])

    def test_after_a_block(self) -> None:
        """The same holds right after a block."""
        parser = SegiParser(MARKERS)
        self.assertEqual(decode(parser.feed(b"~DB\n1\n~DE\na")), [b"1"])
        self.assertEqual(decode(parser.flush_partial_line()), ["a"])
        self.assertEqual(decode(parser.feed(b"\n~DB\n2\n~DE\n")), [b"2"])
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        self.assertEqual(decode(parser.finish()), [])

    def test_terminator_is_held_back(self) -> None:
        """A terminator may belong to a block: no number of flushes delivers it."""
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
        """So is whatever may yet become a begin marker, each byte of it."""
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
        """An end marker can become nothing but text."""
        parser = SegiParser(MARKERS)
        parser.feed(b"~DE")
        self.assertEqual(decode(parser.flush_partial_line()), ["~DE"])

    def test_marker_in_mid_line_is_not_held_back(self) -> None:
        """What follows a flushed beginning of a line can be no marker and waits for nothing."""
        parser = SegiParser(MARKERS)
        parser.feed(b"x")
        parser.flush_partial_line()
        parser.feed(b"~DB")
        self.assertTrue(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), ["~DB"])

    def test_character(self) -> None:
        """A character whose last bytes are missing is not delivered in parts."""
        parser = SegiParser(MARKERS)
        parser.feed("a😀".encode()[:-1])
        self.assertEqual(decode(parser.flush_partial_line()), ["a"])
        self.assertFalse(parser.has_partial_line)
        self.assertEqual(decode(parser.flush_partial_line()), [])
        parser.feed("😀".encode()[-1:])
        self.assertEqual(decode(parser.flush_partial_line()), ["😀"])

    def test_within_blocks(self) -> None:
        """Within a block there is nothing to flush."""
        for stdout in (b"~DB\n", b"~DB\n1", b"~FB\n", b"~FB\n\nbody"):
            parser = SegiParser(MARKERS)
            parser.feed(stdout)
            self.assertFalse(parser.has_partial_line)
            self.assertEqual(decode(parser.flush_partial_line()), [])

    @given(any_bytes)
    def test_partial_and_flush_agree(self, stdout: bytes) -> None:
        """Where `partial` says no, `flush` delivers nothing; after a flush it says no."""
        parser = SegiParser(MARKERS)
        parser.feed(stdout)
        partial = parser.has_partial_line
        events = decode(parser.flush_partial_line())
        if not partial:
            assert events == []
        assert not parser.has_partial_line


class LongLineTests(SynchronousTestCase):
    """Lines over what one event carries; `decode` holds every event to its limit."""

    def check(self, line: bytes) -> None:
        """Hold that a long line comes through between two short ones, however it is cut."""
        expected = ["a\n" + line.decode("utf-8", "replace") + "\nb"]
        stdout = b"a\n" + line + b"\nb"
        for chunking in (
            [],
            [Chunk(1000)],
            [Chunk(4096, flush=True)],
            [Chunk(2**16)],
            [Chunk(21845), Chunk(1, flush=True)],
        ):
            self.assertEqual(join_text(parse(stdout, chunking)), expected)
            at_end = join_text(parse(stdout[2:-2], chunking))
            self.assertEqual(at_end, [line.decode("utf-8", "replace")])

    def test_ascii(self) -> None:
        """100,000 bytes on one line."""
        self.check(b"x" * 100_000)

    def test_multibyte(self) -> None:
        """Characters of two, three and four bytes at every shift are never cut apart."""
        for character in ("é", "€", "😀"):
            for shift in range(4):
                self.check(b"x" * shift + (character * 100_000).encode()[:100_000])

    def test_invalid(self) -> None:
        """Invalid bytes, each of which becomes three, stay under the limit."""
        for byte in (b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xf0"):
            self.check(byte * (100_000 // len(byte)))

    def test_delete_character(self) -> None:
        """The slower way of encoding keeps the limit too."""
        self.check(b"\x7f" + b"\xff" * 100_000)

    def test_near_marker(self) -> None:
        """A marker at the end of a long line is text."""
        self.check(b"x" * 99_999 + b"\xe2" + MARKERS.data_begin)

    def test_delivered_while_it_comes(self) -> None:
        """A long line is not held back until its end: what is kept of it stays small."""
        parser = SegiParser(MARKERS)
        delivered = 0
        for count in range(1, 100):
            delivered += sum(len(event) for event in decode(parser.feed(b"x" * 5000)))
            self.assertLessEqual(5000 * count - delivered, MAX_PAYLOAD_BYTES)

    def test_limit_is_the_contract_s(self) -> None:
        """64 KiB."""
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
    """What is over a limit is not kept."""

    def check(self, start: bytes) -> None:
        """Hold that 4 MB after `start` leave no trace of that order."""

        def feed() -> None:
            parser = SegiParser(MARKERS, max_value=1000, max_file=1000)
            parser.feed(start)
            for _ in range(400):
                parser.feed(chunk)

        chunk = b"x" * 10_000
        self.assertLess(peak_of(feed), 500_000)

    def test_value(self) -> None:
        """A line of a data block over the limit is skipped, not gathered."""
        self.check(b"~DB\n")

    def test_file(self) -> None:
        """A file over the limit is skipped, not gathered."""
        self.check(b"~FB\n\n")

    def test_line(self) -> None:
        """A line of text without an end leaves as it comes."""
        self.check(b"")


class MarkersTests(SynchronousTestCase):
    """The four markers of one run."""

    def test_environment(self) -> None:
        """The evaluator finds them under the names of SEGI."""
        self.assertEqual(
            MARKERS.build_environment(),
            {
                "EVALUATION_DATA_BEGIN": "~DB",
                "EVALUATION_DATA_END": "~DE",
                "EVALUATION_FILE_BEGIN": "~FB",
                "EVALUATION_FILE_END": "~FE",
            },
        )

    def test_fresh(self) -> None:
        """Four markers, all of them new in each run, which no JSON can be mistaken for."""
        drawn = [*Markers.generate(os.urandom).build_environment().values()]
        drawn += Markers.generate(os.urandom).build_environment().values()
        self.assertEqual(len(set(drawn)), 8)
        for marker in drawn:
            events = parse(b"~DB\n" + marker.encode() + b"\n~DE\n", max_value=99)
            self.assertEqual(classify(events), [ErrorEvent()])
            self.assertTrue(re.fullmatch(r"[!-~]+", marker), "one line, in one word")

    def test_randomness(self) -> None:
        """Each has at least 80 bits that `random` gave, and all of them show."""
        asked: list[int] = []

        def random(count: int) -> bytes:
            asked.append(count)
            return bytes([len(asked)]) * count

        markers = Markers.generate(random)
        self.assertEqual(len(asked), 4)
        self.assertGreaterEqual(min(asked) * 8, 80)
        for number, marker in enumerate(markers.build_environment().values(), 1):
            self.assertIn((bytes([number]) * asked[0]).hex(), marker)

    def test_fresh_markers_work(self) -> None:
        """The parser recognises drawn markers as it does short ones."""
        markers = Markers.generate(os.urandom)
        blocks = b"%b\n1\n%b\n" % (markers.data_begin, markers.data_end)
        blocks += b"%b\n\nx\n%b\n" % (markers.file_begin, markers.file_end)
        for chunking in ([], BYTE_BY_BYTE, BYTE_BY_BYTE_FLUSHED):
            events = parse(b"a\n" + blocks + b"b", chunking, markers=markers, max_value=100)
            file = PrintedFile("file", "application/octet-stream", b"x")
            self.assertEqual(classify(events), ["a", b"1", file, "b"])

    def test_default_limits(self) -> None:
        """Without limits of its own a parser takes a megabyte of value and two of file."""
        parser = SegiParser(MARKERS)
        value = b'"' + b"x" * (2**20 - 2) + b'"'
        file = b"x" * 2**21
        parser.feed(b"~DB\n")
        self.assertEqual(decode(parser.feed(value + b"\n~DE\n")), [value])
        events = classify(decode(parser.feed(file_block(file))))
        self.assertEqual(events, [PrintedFile("file", "application/octet-stream", file)])


class StrayMarkersTests(SynchronousTestCase):
    """Markers that the parser delivers as text."""

    MARKERS = Markers.generate(os.urandom)

    def advice(self, output: bytes, *, flush: bool = False) -> list[str]:
        """Return what is advised on the events of an output, byte by byte with `flush`.

        Without `flush` the parser itself has the first advice about a begin marker.
        """
        parser = SegiParser(self.MARKERS)
        chunks = [output[at : at + 1] for at in range(len(output))] if flush else [output]
        lines = b""
        for chunk in chunks:
            lines += parser.feed(chunk).lines
            if flush:
                lines += parser.flush_partial_line().lines
        lines += parser.finish().lines
        detector, found = StrayMarkerDetector(), []
        for line in lines.splitlines():
            event = json.loads(line)
            if event["type"] == "text":
                found.append(detector.check_text_event(event["payload"]))
            else:
                detector.note_non_text_event()
        advice = [each for each in found if each]
        if not flush:
            begins = [each for each in advice if "_BEGIN is" in each]
            self.assertEqual(parser.stray_marker_advice, begins[0] if begins else None)
        return advice

    def test_part_of_a_line(self) -> None:
        """A marker after the delivered beginning of its line is found by the parser."""
        parser = SegiParser(self.MARKERS)
        parser.feed(b"x")
        parser.flush_partial_line()
        parser.feed(self.MARKERS.data_begin + b"\n")
        parser.finish()
        self.assertIn("DATA_BEGIN is not at the start of a line", parser.stray_marker_advice or "")

    def test_advice(self) -> None:
        """Each mistake has its remedy, in however many events its line arrives."""
        begin, end = self.MARKERS.data_begin, self.MARKERS.data_end
        file = self.MARKERS.file_begin
        before = "at the start of a line: the block is shown as text; print a newline before it"
        after = "alone on its line: the block is shown as text; print a newline right after it"
        for output, *expected in (
            (b"x" + begin + b"\n1\n" + end + b"\n", ("DATA_BEGIN", before), ("DATA_END", "_BEGIN")),
            (b"x" * 99 + file + b"\n", ("FILE_BEGIN", before)),
            (begin + b" 1 " + end + b"\n", ("DATA_BEGIN", after)),
            (begin + b"\r\n", ("DATA_BEGIN", after)),
            (begin, ("DATA_BEGIN", after)),
            (end + b"\n", ("DATA_END", "print EVALUATION_DATA_BEGIN before the block")),
            (b"x\n" + begin + b"\n1\n" + end + b"\n",),
            (b"x" + begin[:-1] + b"\n0\n~tawebeval:\n",),
            (b"~tawebeval:data-\n" + begin + b"\n1\n" + end + b"\nbegin:" + begin[-32:],),
        ):
            for flush in (False, True):
                found = self.advice(output, flush=flush)
                self.assertTrue(len(found) >= len(expected), (output, found))
                for advice, (name, step) in zip(found, expected, strict=False):
                    self.assertTrue(advice.startswith(f"EVALUATION_{name} "), advice)
                    self.assertIn(step, advice)
                self.assertEqual(bool(found), bool(expected), (output, found))


def parse_reads(stdout: bytes, reads: set[int], flushes: set[int]) -> list[str | bytes]:
    """Return the events of stdout read up to each of these places, and flushed at some."""
    places = [place for place in sorted(reads | flushes) if 0 < place < len(stdout)]
    sizes = [end - begin for begin, end in zip([0, *places], [*places, len(stdout)], strict=True)]
    return parse(
        stdout, [Chunk(size, at in flushes) for size, at in zip(sizes, [*places, -1], strict=True)]
    )


outputs = st.one_of(any_bytes, stdouts, streams().map(lambda stream: stream.stdout))
places = st.sets(st.integers(1, 80), max_size=8)


class PropertyTests(SynchronousTestCase):
    """What holds of every stdout and of every way in which it may arrive."""

    @given(streams(), chunkings, st.integers(0, 3))
    def test_model(self, stream: Stream, chunking: list[Chunk], late: int) -> None:
        """Text, blocks and errors come out as they were put together, however cut."""
        events = parse(stream.stdout, chunking, late=late)
        assert join_text(classify(events)) == stream.events

    @given(streams(), chunkings)
    def test_text(self, stream: Stream, chunking: list[Chunk]) -> None:
        """The text payloads joined are stdout without the blocks."""
        text = "".join(e for e in parse(stream.stdout, chunking) if isinstance(e, str))
        assert text == "".join(e for e in stream.events if isinstance(e, str))

    @given(st.one_of(any_bytes, streams().map(lambda s: s.stdout)), chunkings, st.integers(0, 3))
    def test_chunking(self, stdout: bytes, chunking: list[Chunk], late: int) -> None:
        """The events do not depend on chunks, flushes or late answers; nothing ever raises."""
        assert join_text(parse(stdout, chunking, late=late)) == join_text(parse(stdout))

    @given(stdouts, chunkings, st.integers(0, 3))
    def test_reference(self, stdout: bytes, chunking: list[Chunk], late: int) -> None:
        """Whatever is printed means what the contract says, however it is cut."""
        check_reference(stdout, chunking, late)

    @given(outputs, places, places)
    def test_events_depend_on_flushes_and_not_on_reads(
        self, stdout: bytes, reads: set[int], flushes: set[int]
    ) -> None:
        """One by one."""
        assert parse_reads(stdout, reads, flushes) == parse_reads(stdout, set(), flushes)

    @given(any_bytes, chunkings)
    def test_invalid_utf8(self, stdout: bytes, chunking: list[Chunk]) -> None:
        """Where there is no block, text is what Python's decoder makes of the whole."""
        stdout = stdout.replace(b"~", b"\xe2")
        assert "".join(map(str, parse(stdout, chunking))) == stdout.decode("utf-8", "replace")


class SmallStepTests(SynchronousTestCase):
    """The same where the parser works in steps of some bytes, and makes a few in a turn."""

    def setUp(self) -> None:
        for name, size in SMALL_STEPS.items():
            self.patch(segi, name, size)

    @given(stdouts, chunkings, st.integers(0, 3))
    def test_reference(self, stdout: bytes, chunking: list[Chunk], late: int) -> None:
        """No step and no turn leaves a trace in the events."""
        check_reference(stdout, chunking, late)

    @given(outputs, places, places)
    def test_events_depend_on_flushes_and_not_on_reads(
        self, stdout: bytes, reads: set[int], flushes: set[int]
    ) -> None:
        """One by one, also of lines that are cut."""
        assert parse_reads(stdout, reads, flushes) == parse_reads(stdout, set(), flushes)
