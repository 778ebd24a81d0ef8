"""`core.segi`: headers of file blocks, of any bytes, against the reference parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from tests.cases.reference_segi import check_reference
from tests.cases.strategies import Chunk, chunkings, mutated, odd_file_blocks

PIECES = (
    *(b":", b";", b"=", b'"', b"\\", b"'", b"%", b"%41", b"%ff", b"%0", b"*", b"/", b"\\/", b","),
    *(
        b"\n",
        b"\r",
        b"\r\n",
        b"\n ",
        b"\n\t",
        b"\n\n",
        b" ",
        b"\t",
        b"\0",
        b"\x7f",
        b"\x85",
        b"\xff",
    ),
    *(
        b"filename=",
        b"; filename*=",
        b"filename*=utf-8''",
        b"utf-8'x'",
        b"ISO-8859-1''",
        b"..",
        b"x",
    ),
    *(b"X-SEGI-As: path\n", b"Content-Type: ", b"content-disposition: a", b"x-segi-as", b"path"),
    *(b"\xc3\xa9", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"x" * 250, b"x" * 1000, b"~FE\n", b"~FB\n"),
)


class FileHeaderTests(SynchronousTestCase):
    @given(mutated(odd_file_blocks(), PIECES), chunkings, st.integers(0, 3))
    def test_block_means_what_the_reference_says(
        self, stdout: bytes, chunking: list[Chunk], late: int
    ) -> None:
        check_reference(stdout, chunking, late)
