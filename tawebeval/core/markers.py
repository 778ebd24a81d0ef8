"""Markers: the secret lines that separate blocks from text in an evaluator's stdout."""

from __future__ import annotations

from collections.abc import Callable

import attrs

MARKER_START = b"~"
"""The first byte of each: it is seldom in text, and where it is absent, so are markers."""


@attrs.frozen
class Markers:
    """The four markers of one run."""

    data_begin: bytes
    data_end: bytes
    file_begin: bytes
    file_end: bytes

    @classmethod
    def fresh(cls, random: Callable[[int], bytes]) -> Markers:
        """Draw markers of 128 bits each; `random(n)` returns n random bytes."""

        def marker(name: bytes) -> bytes:
            return b"%stawebeval:%s:%s" % (MARKER_START, name, random(16).hex().encode())

        return cls(*map(marker, (b"data-begin", b"data-end", b"file-begin", b"file-end")))

    @property
    def begins(self) -> tuple[bytes, bytes]:
        """Begin markers of a data block and of a file block."""
        return self.data_begin, self.file_begin

    @property
    def in_values(self) -> tuple[bytes, bytes, bytes]:
        """Markers to look for in a data block: its end marker and the begin markers."""
        return self.data_end, self.data_begin, self.file_begin

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give the markers to the evaluator."""
        values = (marker.decode() for marker in attrs.astuple(self))
        return dict(zip(VARIABLES, values, strict=True))


VARIABLES = tuple(f"EVALUATION_{field.name.upper()}" for field in attrs.fields(Markers))
"""Names of the environment variables that tell the markers, in the order of the fields."""
