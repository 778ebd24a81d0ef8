"""`core.segi`: what stands between the file markers (docs/evaluators.md)."""

from __future__ import annotations

import codecs
import contextlib

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.segi import (
    MAX_FILE_HEADERS_BYTES,
    MAX_PATH_BYTES,
    FileBlockCollector,
    FileBlockError,
    FileReference,
    PrintedFile,
)
from tests.cases.reference_segi import check_reference
from tests.cases.strategies import any_bytes

END = b"~FE"
LIMIT = 100

PARAMETER_PIECES = (
    *("*", "=", "'", "''", "utf-8", "undefined", "idna", "rot13", "%", "ff", "0", "1", "9999", '"'),
    *(";", " ", "\n ", "\\", "=?utf-8?q?", "?=", "é", "\0", ",", "(", ")", "<", "filename"),
)


def parse(block: bytes, limit: int = LIMIT) -> PrintedFile | FileReference:
    """Take a block whose end marker is to be added."""
    gathered = FileBlockCollector(END, limit)
    assert gathered.feed(block + b"\n" + END + b"\n") == b""
    return gathered.parse_file()


class FeedTests(SynchronousTestCase):
    def test_feed_returns_the_bytes_after_the_line_of_the_end_marker(self) -> None:
        for rest in (b"", b"x", b"\n", b"\n~FE\n", b"~FE\n"):
            self.assertEqual(FileBlockCollector(END, LIMIT).feed(b"\nbody\n~FE\n" + rest), rest)

    @given(any_bytes, st.lists(st.integers(1, 9)))
    def test_block_cut_anywhere_has_the_same_end_and_result(
        self, data: bytes, sizes: list[int]
    ) -> None:
        data += b"\n~FE\nrest"
        whole, cut = FileBlockCollector(END, 10), FileBlockCollector(END, 10)
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
            size = MAX_FILE_HEADERS_BYTES + LIMIT + len(b"\n\n") + more
            whole, cut = FileBlockCollector(END, LIMIT), FileBlockCollector(END, LIMIT)
            block = b"x" * size + b"\n" + END + b"\n"
            self.assertEqual(whole.feed(block), b"")
            self.assertIsNone(cut.feed(block[:-1]))
            self.assertEqual(cut.feed(block[-1:]), b"")
            self.assertEqual(outcome(whole), outcome(cut), more)


def outcome(block: FileBlockCollector) -> object:
    """Return what a block says, be it an error; any other exception goes through."""
    try:
        return block.parse_file()
    except FileBlockError as error:
        return str(error)


class HeaderTests(SynchronousTestCase):
    def test_file_name_in_the_headers_wins_over_the_name_in_the_path(self) -> None:
        headers = b'X-SEGI-As: path\nContent-Disposition: attachment; filename="b"\n\n'
        self.assertEqual(
            parse(headers + b"dir/a"), FileReference("b", "application/octet-stream", "dir/a")
        )
        # Then the path is whatever names a file for the system, UTF-8 or not.
        wanted = parse(headers + b"dir/\xff\n")
        self.assertEqual(wanted, FileReference("b", "application/octet-stream", "dir/\udcff\n"))

    def test_charsets_of_parameters_are_not_passed_to_codecs(self) -> None:
        asked: list[str] = []
        note = asked.append
        codecs.register(note)
        self.addCleanup(codecs.unregister, note)
        for name in ("*=qwertz''x", '="=?qwertz?q?x?="'):
            with contextlib.suppress(FileBlockError):
                parse(f"Content-Disposition: a; filename{name}\n\nx".encode())
        self.assertEqual(asked, [])

    def test_error_quotes_the_malformed_header_shortened(self) -> None:
        long = "x" * 900
        for head, shown in (
            ("nonsense", "'nonsense'"),
            (" x\nA: b", "' x'"),
            ("X-SEGI-As: shell", "'shell'"),
            ("A: b\na: c", "repeats the header 'a'"),
            ("Content-Disposition: a; x=y; X=z", "repeats 'x'"),
            ("Content-Disposition: a; filename=a b", "RFC 6266"),
            ("Content-Disposition: a; filename*=x''y", "\"x''y\""),
            (f"X-SEGI-As: {long}", "'xxx"),
            (long, "'xxx"),
            (f"Content-Disposition: {long} x", "'xxx"),
            (f"Content-Disposition: a; filename*={long}", "'xxx"),
            (f"{long[:400]}: a\n{long[:400]}: b", "'xxx"),
            (f"Content-Disposition: a; {long[:400]}=a; {long[:400]}=b", "'xxx"),
            ("X-SEGI-As: path\n\n" + "a/" * 2000, ""),
        ):
            with self.assertRaises(FileBlockError) as caught:
                parse((head if "\n\n" in head else f"{head}\n\nx").encode(), 2**21)
            self.assertIn(shown, str(caught.exception), head[:80])
            self.assertLess(len(str(caught.exception)), 300)


class ReferenceTests(SynchronousTestCase):
    """Blocks beside a parser that follows the documents word by word."""

    def check(self, *blocks: bytes) -> None:
        for block in blocks:
            check_reference(b"~FB\n" + block + b"\n~FE\n", [], 0)

    def check_headers(self, *heads: str) -> None:
        self.check(*(f"{head}\n\nx".encode() for head in heads))

    def test_headers_end_in_an_empty_line_and_may_have_carriage_returns(self) -> None:
        self.check(
            b"",
            b"\n",
            b"body",
            b"Content-Type: a/b",
            b"Content-Type: a/b\n",
            b"Content-Type: a/b\nbody",
            b"Content-Type: a/b\r\n\r",
            b"\r\nx",
            b"Content-Type: a/b\r\nX-Other:\r\n x\r\n\r\n\r\nbody\n\nmore\r\n",
        )

    def test_header_is_a_name_and_a_value_which_may_be_folded(self) -> None:
        good = "X-SEGI-As: path"
        for line in (
            *("nonsense", ": x", "Content Type: a/b", "Content-Type : a/b", "Xé: y", "From me"),
            *("(x): y", "X\t: y", "\0: y", "a: b\rc", "a: b\r\r", "\r\r", " x", "\tX: y", " "),
            *(f"Content-Type: a{chr(code)}b" for code in (*range(32), 127)),
        ):
            self.check_headers(line, f"{line}\n{good}", f"{good}\n{line}", f"A: b\n c\n{line}")
        self.check_headers(
            "Content-Type: a/b;\n \t c=d",
            "Content-Type: \t a\tb ",
            'Content-Disposition: attachment;\n filename="a b.txt"\nX-Other:\n\tx\n ',
            *(f"{name}: a\nA: b\n{name.upper()}: a" for name in ("Content-Type", "X-Other")),
        )

    def test_name_is_a_token_or_a_quoted_string_among_other_parameters(self) -> None:
        for parameters in (
            *("", ";", "; ;filename=a.txt;", "\t;\tFILENAME=a.txt \t"),
            ";foo=bar;filename=a.txt ; baz=",
            '; x=";filename=b"; filename="a;b.txt"',
            r'; filename="a \"b\" \\ \c.txt"',
            *(r'; filename="\"', '; filename="', '; filename="a"b', "; filename=a b"),
            *("; filename = a", "; filename", "; filename=ö", '; filename="ö"', " filename=a"),
            *(", filename=a", "; filename=a; FileName=a", "; x=y; x=z", "; x*=y; x*=y"),
            *('; filename="=?qwertz?q?x?="', "; filename=..", '; filename="a/"'),
        ):
            self.check_headers(f"Content-Disposition: attachment{parameters}")
        for value in ("", "; filename=a", '"attachment"'):
            self.check_headers(f"Content-Disposition: {value}")

    def test_encoded_name_of_rfc_8187_wins_over_a_plain_one(self) -> None:
        for value in (
            *("utf-8''%C3%B6.txt", "UTF-8'en'%e2%82%ac%20rates", "iso-8859-1'en'%A3%20rates"),
            *("UTF-8''a; filename=b", "utf-8''y; filename*0=x", "UTF-8''..%2fa", "x", "''x"),
            *("utf-8'x", "UTF-8''%ff", "UTF-8''%ED%A0%80", "UTF-8''%f", "UTF-8''a*b", "idna''x"),
            *("undefined''x", "punycode''%ff", "hex''x", "utf-7''+2AA-", "utf8''x", "UTF-8''a'b"),
            *("UTF-8'e_n'a", "utf-16''a", "qwertz''x"),
        ):
            self.check_headers(
                f"Content-Disposition: a; filename*={value}",
                f"Content-Disposition: a; filename=b; filename*={value}",
            )
        self.check_headers("Content-Disposition: a; filename*0=x; filename*1=y")

    def test_path_in_the_body_gives_the_file_name_of_the_reference(self) -> None:
        for path in (b"", b"/", b"dir/", b"dir/..", b".", b"a\0b", b"a\xff", b"x" * 300, b"d/a"):
            self.check(b"X-SEGI-As: path\n\n" + path)
        self.check_headers("X-SEGI-As: ", "X-SEGI-As: content, path", "X-SEGI-As: Path ")

    @given(st.lists(st.sampled_from(PARAMETER_PIECES)).map("".join))
    def test_any_filename_parameter_is_parsed_like_the_reference(self, parameter: str) -> None:
        self.check_headers(f"Content-Disposition: a; filename{parameter}")


class LimitTests(SynchronousTestCase):
    def test_body_of_exactly_the_limit_passes_and_one_byte_more_does_not(self) -> None:
        self.assertEqual(len(parse(b"\n" + b"x" * LIMIT).content), LIMIT)
        with self.assertRaises(FileBlockError) as caught:
            parse(b"\n" + b"x" * (LIMIT + 1))
        self.assertIn("100 bytes", str(caught.exception))

    def test_headers_have_a_limit_apart_from_the_body(self) -> None:
        line = b"X-Long: "
        longest = line + b"x" * (MAX_FILE_HEADERS_BYTES - len(line) - 1)
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
