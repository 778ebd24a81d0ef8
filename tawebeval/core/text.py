"""Text in UTF-8: cuts between characters, and names of files.

The parts of a text that these functions cut decode to the same text as the whole, also where
bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

MAX_FILENAME_BYTES = 255
"""The longest name that Linux file systems take, in bytes of UTF-8."""

_CONTINUING = bytes(range(0x80, 0xC0))  # the bytes of a character but its first
_EXCERPT = 80  # characters of a wrong name, in its error
# RFC 8187, section 3.2.1. Python's codecs are not asked: they keep each unknown name for ever.
_EXTENDED = re.compile(r"([^']*)'[0-9A-Za-z-]*'((?:[!#$&+.^_`|~0-9A-Za-z-]|%[0-9A-Fa-f]{2})*)")
_CHARSETS = {"utf-8": "utf-8", "iso-8859-1": "iso-8859-1"}


def find_character_boundary(data: bytes, at: int) -> int:
    """Return the last place between two characters of `data` that is not after `at`.

    The result is at most 3 less than `at`, also if `data` is not UTF-8.
    """
    for place in range(at, max(at - 4, -1), -1):
        if place >= len(data) or data[place] & 0xC0 != 0x80:
            return place
    return at


def measure_complete_characters(data: bytes) -> int:
    """Return the size in bytes of `data` without an incomplete character at its end."""
    # Only a character that begins in the last three bytes can be incomplete.
    before = max(len(data) - 3, 0)
    return before + utf_8_decode(data[before:], "replace", False)[1]


def take_tail(data: bytes, max_bytes: int) -> bytes:
    """Return the last bytes of `data`, at most `max_bytes`, beginning with a whole character.

    If `data` is not UTF-8 the result may be up to 3 bytes shorter than `max_bytes`.
    """
    if len(data) <= max_bytes:
        return data
    kept = data[len(data) - max_bytes :]
    return kept[:3].lstrip(_CONTINUING) + kept[3:]


def split_long_lines(block: bytes, max_line_bytes: int) -> Iterator[bytes]:
    """Cut `block`, usually into one piece, so that no line of a piece is over `max_line_bytes`."""
    start = line = 0  # beginnings of the next piece and of the next line
    while len(block) - line > max_line_bytes:
        end = block.rfind(b"\n", line, line + max_line_bytes + 1)
        if end >= 0:
            line = end + 1
            continue
        cut = find_character_boundary(block, line + max_line_bytes)
        yield block[start:cut]
        start = line = cut
    yield block[start:]


def get_base_name(name: str) -> str:
    r"""Return the last component of `name`; both `/` and `\` separate components.

    Raises ValueError for a component that cannot name a file: empty, `.`, `..`, with a NUL, over
    255 bytes, or not encodable as UTF-8 (docs/api.md).
    """
    base = name.replace("\\", "/").rpartition("/")[2]
    if base in ("", ".", ".."):
        raise ValueError(f"{name[-_EXCERPT:]!r} has no file name at its end")
    if "\0" in base:
        raise ValueError("a file name cannot contain NUL")
    try:
        length = len(base.encode())
    except UnicodeEncodeError:
        raise ValueError("a file name must be UTF-8") from None
    if length > MAX_FILENAME_BYTES:
        raise ValueError(f"the file name has {length} bytes; the limit is {MAX_FILENAME_BYTES}")
    return base


def decode_extended_filename(value: str) -> str:
    """Return the name in a parameter `filename*` (RFC 8187). Raises ValueError."""
    parts = _EXTENDED.fullmatch(value)
    charset = _CHARSETS.get(parts[1].lower()) if parts else None
    try:
        if parts and charset:
            return unquote_to_bytes(parts[2]).decode(charset)
    except UnicodeDecodeError:
        pass
    raise ValueError(
        f"malformed filename* {value[:_EXCERPT]!r}; write UTF-8''NAME or ISO-8859-1''NAME, with"
        " %XX for bytes other than letters and digits (RFC 8187)"
    )
