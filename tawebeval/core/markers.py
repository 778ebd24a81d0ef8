"""The secret lines by which an evaluator sets its blocks apart from ordinary text."""

from __future__ import annotations

from collections.abc import Callable

import attrs

MARKER_START = b"~"
"""The first byte of each: it is seldom in text, and where it is absent, so are markers."""


@attrs.frozen
class Markers:
    """The four secret lines that delimit the blocks of one run."""

    data_begin: bytes
    data_end: bytes
    file_begin: bytes
    file_end: bytes

    @classmethod
    def fresh(cls, random: Callable[[int], bytes]) -> Markers:
        """Draw markers of 128 bits each; `random(n)` gives n random bytes, as `os.urandom` does."""

        def marker(name: bytes) -> bytes:
            return b"%stawebeval:%s:%s" % (MARKER_START, name, random(16).hex().encode())

        return cls(*map(marker, (b"data-begin", b"data-end", b"file-begin", b"file-end")))

    @property
    def begins(self) -> tuple[bytes, bytes]:
        """Those with which blocks begin, of data and of a file."""
        return self.data_begin, self.file_begin

    @property
    def in_values(self) -> tuple[bytes, bytes, bytes]:
        """Those that are looked for in data blocks: what ends one, and what begins another."""
        return self.data_end, self.data_begin, self.file_begin

    def environment(self) -> dict[str, str]:
        """Return the environment variables that tell the markers to the evaluator."""
        values = (marker.decode() for marker in attrs.astuple(self))
        return dict(zip(VARIABLES, values, strict=True))


VARIABLES = tuple(f"EVALUATION_{field.name.upper()}" for field in attrs.fields(Markers))
"""Names of the environment variables that tell the markers, in the order of the fields."""
