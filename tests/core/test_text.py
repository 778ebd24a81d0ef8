"""`core.text`: cuts between characters, and base names of files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.text import (
    MAX_FILENAME_BYTES,
    find_character_boundary,
    get_base_name,
    measure_complete_characters,
    split_long_lines,
    take_tail,
)
from tests.cases.strategies import file_names, texts

some_bytes = st.one_of(
    texts,
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    st.lists(
        st.sampled_from([b"\x80", b"\xf0\x9f", b"\xe2", "😀".encode(), b"a", b"\n"]), max_size=12
    ).map(b"".join),
)


def decoded(data: bytes) -> str:
    """Decode as the contract, section 4, has it."""
    return data.decode("utf-8", "replace")


class BoundaryTests(SynchronousTestCase):
    """`find_character_boundary`: where a character ends."""

    @given(st.text(min_size=1), st.data())
    def test_last_place(self, text: str, data: st.DataObject) -> None:
        """In UTF-8 it is the last place between two characters that is not after `at`."""
        encoded = ("abc" + text).encode()
        at = data.draw(st.integers(3, len(encoded)))
        places = [len(("abc" + text)[:n].encode()) for n in range(len(text) + 4)]
        assert find_character_boundary(encoded, at) == max(place for place in places if place <= at)

    @given(some_bytes, st.data())
    def test_any_bytes(self, some: bytes, data: st.DataObject) -> None:
        """In any bytes a cut there changes nothing, and is at most 3 before `at`."""
        at = data.draw(st.integers(0, len(some) + 3))
        some = b"abc" + some
        place = find_character_boundary(some, at + 3)
        assert at <= place <= at + 3
        assert decoded(some[:place]) + decoded(some[place:]) == decoded(some)

    def test_first_character(self) -> None:
        """The first character is not cut apart either."""
        for at in range(4):
            self.assertEqual(find_character_boundary("😀".encode(), at), 0)


class CompleteTests(SynchronousTestCase):
    """`measure_complete_characters`: what can be decoded before the next bytes are known."""

    def test_cases(self) -> None:
        """Only a character that may yet be completed waits."""
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
    def test_any_bytes(self, some: bytes, rest: bytes) -> None:
        """Whatever comes next, a cut there changes nothing; at most 3 bytes wait."""
        length = measure_complete_characters(some)
        assert len(some) - 3 <= length <= len(some)
        assert decoded(some[:length]) + decoded(some[length:] + rest) == decoded(some + rest)


class TailTests(SynchronousTestCase):
    """`take_tail`: the end of something long."""

    @given(st.text(), st.integers(0, 20))
    def test_characters(self, text: str, limit: int) -> None:
        """Of UTF-8 it is as many of the last characters as fit."""
        ends = (text[start:].encode() for start in range(len(text) + 1))
        assert take_tail(text.encode(), limit) == next(end for end in ends if len(end) <= limit)

    @given(some_bytes, st.integers(0, 20))
    def test_any_bytes(self, some: bytes, limit: int) -> None:
        """Of any bytes it is the end, where at most 3 are missing, and none if all fit."""
        end = take_tail(some, limit)
        assert some.endswith(end)
        assert len(end) <= limit
        assert len(end) >= (limit - 3 if len(some) > limit else len(some))


class PiecesTests(SynchronousTestCase):
    """`split_long_lines`: no line over a limit."""

    def test_one_piece(self) -> None:
        """A block whose lines are short is one piece, however long it is."""
        block = b"abcd\n" * 100
        self.assertEqual(list(split_long_lines(block, 5)), [block])
        self.assertEqual(list(split_long_lines(b"", 5)), [b""])

    def test_exactly_the_limit(self) -> None:
        """A line of exactly the limit is not cut, one that is longer by a byte is."""
        self.assertEqual(list(split_long_lines(b"abcde\nabcde", 5)), [b"abcde\nabcde"])
        self.assertEqual(list(split_long_lines(b"a\nabcdef\nb", 5)), [b"a\nabcde", b"f\nb"])

    def test_long_line(self) -> None:
        """A line is cut as often as need be, and between characters."""
        self.assertEqual(
            list(split_long_lines("a😀😀😀".encode(), 8)), ["a😀".encode(), "😀😀".encode()]
        )

    @given(some_bytes, st.integers(4, 9))
    def test_any_bytes(self, block: bytes, limit: int) -> None:
        """The pieces are the block, decode as the block, and have no line over the limit."""
        cut = list(split_long_lines(block, limit))
        assert b"".join(cut) == block
        assert "".join(map(decoded, cut)) == decoded(block)
        for piece in cut:
            assert max(map(len, piece.split(b"\n"))) <= limit


class BaseNameTests(SynchronousTestCase):
    """`get_base_name`: the base name of a file that a client names (contract, section 2)."""

    def test_kept(self) -> None:
        """A plain name stays exactly as it is, odd characters included."""
        for name in (
            "a.cpp",
            ".bashrc",
            "a b",
            "...",
            "-rf",
            "ö😀",
            "a\n",
            "~",
            "x" * MAX_FILENAME_BYTES,
        ):
            self.assertEqual(get_base_name(name), name)

    def test_base(self) -> None:
        r"""Only what follows the last `/` or `\` counts."""
        for name in ("/a", "d/a", "../a", "/etc/../a", "C:\\d\\a", "d\\e/a", "d/e\\a", "//a"):
            self.assertEqual(get_base_name(name), "a")

    def test_long_directories(self) -> None:
        """It is the base name that is bounded, not the path before it."""
        self.assertEqual(get_base_name("d" * 1000 + "/a"), "a")

    def test_refused(self) -> None:
        """What names no file is refused; the limit is one of bytes."""
        for name in (
            "", ".", "..", "/", "a/", "a/.", "a\\..", "a\0", "\0", "a\0/..",
            "x" * (MAX_FILENAME_BYTES + 1), "é" * 128, "\ud800",
        ):  # fmt: skip
            self.assertRaises(ValueError, get_base_name, name)

    def test_nul_before_the_base(self) -> None:
        """What is cut off may be anything."""
        self.assertEqual(get_base_name("\0\ud800/a"), "a")

    def test_limit(self) -> None:
        """255 bytes, told along with the name's own length."""
        self.assertEqual(MAX_FILENAME_BYTES, 255)
        with self.assertRaisesRegex(ValueError, "256 bytes; the limit is 255"):
            get_base_name("é" * 128)

    @given(file_names)
    def test_any_name(self, name: str) -> None:
        """Whatever passes can be used as a file's name within one directory."""
        try:
            base = get_base_name(name)
        except ValueError as error:
            assert str(error).isprintable()
            return
        assert name.endswith(base)
        assert base not in ("", ".", "..")
        assert not set(base) & set("/\\\0")
        assert len(base.encode()) <= 255
        assert get_base_name(base) == base
