"""Where UTF-8 may be cut, so that the parts decode to what the whole does."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterator

_CONTINUING = bytes(range(0x80, 0xC0))  # the bytes of a character but its first


def boundary(data: bytes, at: int) -> int:
    """Return the last place not after `at` that lies between two characters of `data`.

    Where the bytes are no UTF-8 every place is as good as any other; the result is at
    most 3 less than `at`.
    """
    for place in range(at, max(at - 4, -1), -1):
        if place >= len(data) or data[place] & 0xC0 != 0x80:
            return place
    return at


def complete(data: bytes) -> int:
    """Return the number of bytes of `data` before a character that has begun but not ended."""
    # Only a character that begins in the last three bytes can be incomplete.
    before = max(len(data) - 3, 0)
    return before + utf_8_decode(data[before:], "replace", False)[1]


def tail(data: bytes, limit: int) -> bytes:
    """Return the last bytes of `data`, at most `limit`, without the rest of a character there.

    Where the bytes are no UTF-8 up to 3 may be missing that are no such rest.
    """
    if len(data) <= limit:
        return data
    kept = data[len(data) - limit :]
    return kept[:3].lstrip(_CONTINUING) + kept[3:]


def pieces(block: bytes, limit: int) -> Iterator[bytes]:
    r"""Cut `block` so that no line in any piece is over `limit` bytes; mostly into one piece."""
    start = line = 0  # where the next piece, and the line looked at, begin
    while len(block) - line > limit:
        end = block.rfind(b"\n", line, line + limit + 1)
        if end >= 0:
            line = end + 1
            continue
        cut = boundary(block, line + limit)
        yield block[start:cut]
        start = line = cut
    yield block[start:]
