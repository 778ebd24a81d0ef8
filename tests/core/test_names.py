"""`core.names`: the names of files."""

from __future__ import annotations

from hypothesis import given
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.names import MAX_FILENAME_BYTES, get_base_name
from tests.cases.strategies import file_names


class BaseNameTests(SynchronousTestCase):
    def test_plain_name_stays_exactly_as_it_is_odd_characters_included(self) -> None:
        for name in (
            "a.cpp", ".bashrc", "a b", "...", "-rf", "ö😀", "a\n", "~", "x" * MAX_FILENAME_BYTES,
        ):  # fmt: skip
            self.assertEqual(get_base_name(name), name)

    def test_directories_before_a_slash_or_backslash_are_dropped(self) -> None:
        for directory in ("/", "d/", "../", "/etc/../", "C:\\d\\", "d\\e/", "d/e\\", "//"):
            self.assertEqual(get_base_name(directory + "a"), "a")
        for directory in ("d" * 1000, "\0\ud800"):
            self.assertEqual(get_base_name(directory + "/a"), "a")

    def test_name_of_no_file_is_refused(self) -> None:
        for name in (
            "", ".", "..", "/", "a/", "a/.", "a\\..", "a\0", "\0", "a\0/..",
            "x" * (MAX_FILENAME_BYTES + 1), "é" * 128, "\ud800",
        ):  # fmt: skip
            self.assertRaises(ValueError, get_base_name, name)

    def test_error_names_the_limit_of_255_bytes_and_the_length(self) -> None:
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
