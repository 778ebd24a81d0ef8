"""`core.filenames`: the base name of what a stranger calls a file (contract, section 2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.core.text import MAX_BYTES, base_name

NAMES = st.one_of(
    st.text(),
    st.text("/\\.\0aé\ud800"),
    st.integers(120, 260).map(lambda count: "é" * count),
    st.integers(250, 260).map(lambda count: "dir/" + "x" * count),
)


class BaseNameTests(SynchronousTestCase):
    """What passes, and as what."""

    def test_kept(self) -> None:
        """A plain name stays exactly as it is, odd characters included."""
        for name in ("a.cpp", ".bashrc", "a b", "...", "-rf", "ö😀", "a\n", "~", "x" * MAX_BYTES):
            self.assertEqual(base_name(name), name)

    def test_base(self) -> None:
        r"""Only what follows the last `/` or `\` counts."""
        for name in ("/a", "d/a", "../a", "/etc/../a", "C:\\d\\a", "d\\e/a", "d/e\\a", "//a"):
            self.assertEqual(base_name(name), "a")

    def test_long_directories(self) -> None:
        """It is the base name that is bounded, not the path before it."""
        self.assertEqual(base_name("d" * 1000 + "/a"), "a")

    def test_refused(self) -> None:
        """What names no file is refused; the limit is one of bytes."""
        for name in (
            "", ".", "..", "/", "a/", "a/.", "a\\..", "a\0", "\0", "a\0/..",
            "x" * (MAX_BYTES + 1), "é" * 128, "\ud800",
        ):  # fmt: skip
            self.assertRaises(ValueError, base_name, name)

    def test_nul_before_the_base(self) -> None:
        """What is cut off may be anything."""
        self.assertEqual(base_name("\0\ud800/a"), "a")

    def test_limit(self) -> None:
        """255 bytes, told along with the name's own length."""
        self.assertEqual(MAX_BYTES, 255)
        with self.assertRaisesRegex(ValueError, "255 .* 256"):
            base_name("é" * 128)

    @given(NAMES)
    def test_any_name(self, name: str) -> None:
        """Whatever passes can be used as a file's name within one directory."""
        try:
            base = base_name(name)
        except ValueError as error:
            assert str(error).isprintable()
            return
        assert name.endswith(base)
        assert base not in ("", ".", "..")
        assert not set(base) & set("/\\\0")
        assert len(base.encode()) <= 255
        assert base_name(base) == base
