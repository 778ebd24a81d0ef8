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


class TailTests(SynchronousTestCase):
    @given(st.text(), st.integers(0, 20))
    def test_of_utf_8_it_is_as_many_of_the_last_characters_as_fit(
        self, text: str, limit: int
    ) -> None:
        ends = (text[start:].encode() for start in range(len(text) + 1))
        assert take_tail(text.encode(), limit) == next(end for end in ends if len(end) <= limit)

    @given(some_bytes, st.integers(0, 20))
    def test_tail_is_the_end_of_any_bytes(self, some: bytes, limit: int) -> None:
        end = take_tail(some, limit)
        assert some.endswith(end)
        assert len(end) <= limit
        assert len(end) >= (limit - 3 if len(some) > limit else len(some))


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


class BaseNameTests(SynchronousTestCase):
    def test_plain_name_stays_exactly_as_it_is_odd_characters_included(self) -> None:
        for name in (
            "a.cpp", ".bashrc", "a b", "...", "-rf", "ö😀", "a\n", "~", "x" * MAX_FILENAME_BYTES,
        ):  # fmt: skip
            self.assertEqual(get_base_name(name), name)

    def test_only_what_follows_the_last_slash_or_backslash_counts(self) -> None:
        for directory in ("/", "d/", "../", "/etc/../", "C:\\d\\", "d\\e/", "d/e\\", "//"):
            self.assertEqual(get_base_name(directory + "a"), "a")
        for directory in ("d" * 1000, "\0\ud800"):
            self.assertEqual(get_base_name(directory + "/a"), "a")

    def test_what_names_no_file_is_refused(self) -> None:
        for name in (
            "", ".", "..", "/", "a/", "a/.", "a\\..", "a\0", "\0", "a\0/..",
            "x" * (MAX_FILENAME_BYTES + 1), "é" * 128, "\ud800",
        ):  # fmt: skip
            self.assertRaises(ValueError, get_base_name, name)

    def test_255_bytes_told_along_with_the_names_own_length(self) -> None:
        self.assertEqual(MAX_FILENAME_BYTES, 255)
        with self.assertRaisesRegex(ValueError, "256 bytes; the limit is 255"):
            get_base_name("é" * 128)

    @given(file_names)
    def test_whatever_passes_can_be_used_as_a_files_name_within_one_directory(
        self, name: str
    ) -> None:
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
