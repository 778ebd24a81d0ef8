"""`core.segi`: what stands between the file markers (docs/evaluators.md)."""

from __future__ import annotations

import codecs
import re
from email.parser import HeaderParser

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.segi import (
    MAX_HEADER_BYTES,
    MAX_PATH_BYTES,
    FileBlock,
    FileBlockError,
    FileReference,
    PrintedFile,
)
from tests.cases.strategies import any_bytes

END = b"~FE"
LIMIT = 100

PARAMETER_PIECES = (
    *("*", "=", "'", "''", "utf-8", "undefined", "idna", "rot13", "%", "ff", "0", "1", "9999", '"'),
    *(";", " ", "\n ", "\\", "=?utf-8?q?", "?=", "é", "\0", ",", "(", ")", "<", "filename"),
)
HEADER_PIECES = (
    "A", "From", ":", ": b", "\n", "\r\n", "\r", " ", "\t", "é", "-", ";", "Content-Type",
)  # fmt: skip


def parse(block: bytes, limit: int = LIMIT) -> PrintedFile | FileReference:
    """Take a block whose end marker is to be added."""
    gathered = FileBlock(END, limit)
    assert gathered.feed(block + b"\n" + END + b"\n") == b""
    return gathered.parse_file()


class FeedTests(SynchronousTestCase):
    def test_what_follows_the_end_markers_line_is_given_back_byte_for_byte(self) -> None:
        for rest in (b"", b"x", b"\n", b"\n~FE\n", b"~FE\n"):
            self.assertEqual(FileBlock(END, LIMIT).feed(b"\nbody\n~FE\n" + rest), rest)

    def test_end_marker_may_stand_on_the_first_line_before_any_header(self) -> None:
        block = FileBlock(END, LIMIT)
        self.assertEqual(block.feed(b"~FE\nrest"), b"rest")
        self.assertRaises(FileBlockError, block.parse_file)

    def test_empty_line_of_the_headers_may_be_the_terminator_before_the_end_marker(self) -> None:
        block = FileBlock(END, LIMIT)
        self.assertEqual(block.feed(b"Content-Type: a/b\n\n~FE\n"), b"")
        self.assertEqual(block.parse_file(), PrintedFile("file", "a/b", b""))

    @given(any_bytes, st.lists(st.integers(1, 9)))
    def test_block_cut_anywhere_has_the_same_end_and_result(
        self, data: bytes, sizes: list[int]
    ) -> None:
        data += b"\n~FE\nrest"
        whole, cut = FileBlock(END, 10), FileBlock(END, 10)
        rest = whole.feed(data)
        assert rest is not None
        for size in sizes:
            if len(data) - size <= len(rest):
                break
            assert cut.feed(data[:size]) is None
            data = data[size:]
        assert cut.feed(data) == rest
        assert outcome(cut) == outcome(whole)

    def test_block_over_the_limit_gives_the_same_error_however_it_is_read(self) -> None:
        for more in range(-2, len(END) + 4):
            size = MAX_HEADER_BYTES + LIMIT + len(b"\n\n") + more
            whole, cut = FileBlock(END, LIMIT), FileBlock(END, LIMIT)
            block = b"x" * size + b"\n" + END + b"\n"
            self.assertEqual(whole.feed(block), b"")
            self.assertIsNone(cut.feed(block[:-1]))
            self.assertEqual(cut.feed(block[-1:]), b"")
            self.assertEqual(outcome(whole), outcome(cut), more)


def outcome(block: FileBlock) -> object:
    """Return what a block says, be it an error; any other exception goes through."""
    try:
        return block.parse_file()
    except FileBlockError as error:
        return str(error)


class HeaderTests(SynchronousTestCase):
    def test_each_header_is_understood_whatever_the_case_of_its_name(self) -> None:
        block = (
            b"content-TYPE: image/svg+xml\n"
            b'CONTENT-disposition: attachment; filename="report.svg"\n'
            b"x-segi-as: Content\n"
            b"X-Other: ignored\n"
            b"\n<svg/>"
        )
        self.assertEqual(parse(block), PrintedFile("report.svg", "image/svg+xml", b"<svg/>"))

    def test_body_is_a_path_with_x_segi_as_path(self) -> None:
        self.assertEqual(
            parse(b"Content-Type: a/b\nX-SEGI-As: path\n\n../out/a b.txt"),
            FileReference("a b.txt", "a/b", "../out/a b.txt"),
        )

    def test_name_in_the_headers_wins_over_that_of_the_path(self) -> None:
        headers = b'X-SEGI-As: path\nContent-Disposition: attachment; filename="b"\n\n'
        self.assertEqual(
            parse(headers + b"dir/a"), FileReference("b", "application/octet-stream", "dir/a")
        )
        # Then the path is whatever names a file for the system, UTF-8 or not.
        wanted = parse(headers + b"dir/\xff\n")
        self.assertEqual(wanted, FileReference("b", "application/octet-stream", "dir/\udcff\n"))

    def test_path_without_a_name_in_the_headers_ends_in_a_valid_name(self) -> None:
        for path in (b"", b"/", b"dir/", b"dir/..", b".", b"a\0b", b"a\xff", b"x" * 300):
            with self.assertRaises(FileBlockError):
                parse(b"X-SEGI-As: path\n\n" + path, 1000)

    def test_any_other_x_segi_as_is_refused_and_shown(self) -> None:
        for kind in ("", "shell", "content, path"):
            with self.assertRaises(FileBlockError) as caught:
                parse(f"X-SEGI-As: {kind}\n\nx".encode())
            self.assertIn(repr(kind), str(caught.exception))

    def test_header_goes_on_in_lines_that_begin_with_white_space(self) -> None:
        block = b'Content-Disposition: attachment;\n filename="a b.txt"\nX-Other:\n\tx\n \n\nx'
        self.assertEqual(parse(block).filename, "a b.txt")
        self.assertEqual(parse(b"Content-Type: a/b;\n \t c=d\n\nx").content_type, "a/b; c=d")

    def test_header_lines_may_end_in_a_carriage_return(self) -> None:
        block = (
            b"Content-Type: a/b\r\n"
            b"Content-Disposition: attachment;\r\n filename=a.txt\r\n"
            b"\r\n\r\nbody\n\nmore\r\n"
        )
        self.assertEqual(parse(block), PrintedFile("a.txt", "a/b", b"\r\nbody\n\nmore\r\n"))
        for empty in (b"\r\n", b"\n"):
            self.assertEqual(parse(empty + b"x").content, b"x")
        self.assertEqual(parse(b"Content-Type: a/b\r\n\r").content, b"")

    def test_line_that_is_no_header_is_refused_and_shown_wherever_it_is(self) -> None:
        good = b"X-SEGI-As: path"
        for line in (
            *(b"nonsense", b": x", b"Content Type: a/b", b"Content-Type : a/b", b"X\xc3\xa9: y"),
            *(b"From me", b"(x): y", b"X\t: y", b"\0: y", b"a: b\rc", b"a: b\r\r", b"\r\r"),
        ):
            shown = repr(line.decode())
            for block in (line, line + b"\n" + good, good + b"\n" + line, b"A: b\n c\n" + line):
                with self.assertRaises(FileBlockError, msg=shown) as caught:
                    parse(block + b"\n\nout.txt")
                self.assertIn(shown, str(caught.exception))

    def test_continuation_without_a_header_is_refused(self) -> None:
        for line in (b" x", b"\tX-SEGI-As: path", b" "):
            with self.assertRaises(FileBlockError) as caught:
                parse(line + b"\nA: b\n\nout.txt")
            self.assertIn(repr(line.decode()), str(caught.exception))

    @given(st.lists(st.sampled_from(HEADER_PIECES)).map("".join))
    def test_headers_that_are_taken_are_all_understood(self, head: str) -> None:
        try:
            parse(head.encode() + b"\n\nbody")
        except FileBlockError:
            return
        # What was taken for the body is whatever follows the first empty line.
        head = re.split("^\r?\n", head + "\n\n", maxsplit=1, flags=re.MULTILINE)[0]
        understood = HeaderParser().parsestr(head)
        assert not understood.defects
        lines = [line for line in head.splitlines() if not line.startswith((" ", "\t"))]
        assert [line.split(":")[0] for line in lines] == understood.keys()
        assert understood.get_payload() == ""

    def test_headers_that_no_empty_line_ends_are_refused(self) -> None:
        for block in (b"Content-Type: a/b", b"Content-Type: a/b\nbody", b"body"):
            with self.assertRaises(FileBlockError):
                parse(block)

    def disposition(self, parameters: str) -> str:
        """Return the name that such parameters give a file, or why they are refused."""
        header = f"Content-Disposition: attachment{parameters}\n\nx"
        try:
            return parse(header.encode()).filename
        except FileBlockError as error:
            return str(error)

    def test_names_are_tokens_or_quoted_strings_among_other_parameters(self) -> None:
        for parameters, name in (
            ("", "file"),
            (";", "file"),
            ("; ;filename=a.txt;", "a.txt"),
            ("\t;\tFILENAME=a.txt \t", "a.txt"),
            (";foo=bar;filename=a.txt ; baz=", None),
            ('; x=";filename=b"; filename="a;b.txt"', "a;b.txt"),
            (r'; filename="a \"b\" \\ \c.txt"', " c.txt"),
            (r'; filename="\"', None),
            ('; filename="', None),
            ('; filename="a"b', None),
            ("; filename=a b", None),
            ("; filename = a", None),
            ("; filename", None),
            ("; filename=ö", None),
            ('; filename="ö"', "ö"),
            (" filename=a", None),
            (", filename=a", None),
        ):
            found = self.disposition(parameters)
            if name is None:
                self.assertIn("RFC 6266", found, parameters)
            else:
                self.assertEqual(found, name, parameters)

    def test_content_disposition_has_a_type(self) -> None:
        for value in ("", "; filename=a", '"attachment"'):
            with self.assertRaises(FileBlockError):
                parse(f"Content-Disposition: {value}\n\nx".encode())

    def test_encoded_name_of_rfc_8187_wins_over_a_plain_one(self) -> None:
        for parameters, name in (
            ("; filename*=utf-8''%C3%B6.txt", "ö.txt"),
            ("; filename*=UTF-8'en'%e2%82%ac%20rates", "€ rates"),
            ("; filename*=iso-8859-1'en'%A3%20rates", "£ rates"),
            ("; filename=b; filename*=UTF-8''a", "a"),
            ("; filename*=UTF-8''a; filename=b", "a"),
            ("; filename*=utf-8''y; filename*0=x", "y"),
            ("; filename*0=x; filename*1=y", "file"),
            ("; filename*=UTF-8''..%2fa", "a"),
        ):
            self.assertEqual(self.disposition(parameters), name, parameters)

    def test_name_that_is_encoded_in_another_way_is_refused_and_shown(self) -> None:
        for value in (
            *("x", "''x", "utf-8'x", "UTF-8''%ff", "UTF-8''%ED%A0%80", "UTF-8''%f", "UTF-8''a*b"),
            *("undefined''x", "idna''x", "punycode''%ff", "hex''x", "utf-7''+2AA-", "utf8''x"),
            *("UTF-8''a'b", "UTF-8'e_n'a", "utf-16''a"),
        ):
            found = self.disposition(f"; filename*={value}")
            self.assertIn("RFC 8187", found, value)
            self.assertIn(repr(value), found, value)

    def test_charsets_are_not_looked_up(self) -> None:
        asked: list[str] = []

        def note(name: str) -> None:
            asked.append(name)

        codecs.register(note)
        self.addCleanup(codecs.unregister, note)
        self.disposition("; filename*=qwertz''x")
        self.disposition('; filename="=?qwertz?q?x?="')
        self.assertEqual(asked, [])

    def test_header_or_a_parameter_that_is_there_twice_is_refused(self) -> None:
        for header in ("Content-Type: a/b", "X-Other: a", "X-SEGI-As: content"):
            block = f"{header}\nA: b\n{header.upper()}\n\nx".encode()
            with self.assertRaises(FileBlockError) as caught:
                parse(block)
            self.assertIn("repeats", str(caught.exception))
        for parameters in ("; filename=a; FileName=a", "; x=y; x=z", "; x*=y; x*=y"):
            self.assertIn("repeats", self.disposition(parameters))

    def test_control_characters_have_no_place_in_headers(self) -> None:
        for code in (*range(9), *range(11, 13), *range(14, 32), 127):
            with self.assertRaises(FileBlockError):
                parse(b"Content-Type: a%cb\n\nx" % code)
        self.assertEqual(parse(b"Content-Type: \t a\tb \n\nx").content_type, "a\tb")

    def test_message_about_a_long_fault_is_short(self) -> None:
        long = "x" * 900
        for head in (
            f"X-SEGI-As: {long}",
            f"{long}",
            f"Content-Disposition: {long} x",
            f"Content-Disposition: a; filename*={long}",
            f"{long[:400]}: a\n{long[:400]}: b",
            f"Content-Disposition: a; {long[:400]}=a; {long[:400]}=b",
        ):
            with self.assertRaises(FileBlockError) as caught:
                parse(f"{head}\n\nx".encode())
            self.assertLess(len(str(caught.exception)), 300)
        with self.assertRaises(FileBlockError) as caught:
            parse(b"X-SEGI-As: path\n\n" + b"a/" * 2000, 2**21)
        self.assertLess(len(str(caught.exception)), 300)

    @given(st.lists(st.sampled_from(PARAMETER_PIECES)).map("".join))
    def test_any_parameter_gives_a_file_or_an_error(self, parameter: str) -> None:
        block = FileBlock(END, 10)
        block.feed(f"Content-Disposition: a; filename{parameter}\n\nx\n~FE\n".encode())
        outcome(block)


class LimitTests(SynchronousTestCase):
    def test_body_of_the_limit_passes_and_one_byte_more_does_not(self) -> None:
        self.assertEqual(len(parse(b"\n" + b"x" * LIMIT).content), LIMIT)
        with self.assertRaises(FileBlockError) as caught:
            parse(b"\n" + b"x" * (LIMIT + 1))
        self.assertIn("100 bytes", str(caught.exception))

    def test_headers_have_a_limit_apart_from_the_body(self) -> None:
        line = b"X-Long: "
        longest = line + b"x" * (MAX_HEADER_BYTES - len(line) - 1)
        self.assertEqual(parse(longest + b"\n\nx").filename, "file")
        with self.assertRaises(FileBlockError):
            parse(longest + b"x\n\nx")

    def test_path_has_at_most_the_bytes_that_linux_allows(self) -> None:
        head = b"X-SEGI-As: path\n\n"
        longest = b"a/" * ((MAX_PATH_BYTES - 2) // 2) + b"bc"
        self.assertEqual(len(parse(head + longest, 10_000).path), MAX_PATH_BYTES)
        with self.assertRaises(FileBlockError) as caught:
            parse(head + b"a" + longest, 10_000)
        self.assertIn("4 KiB", str(caught.exception))
