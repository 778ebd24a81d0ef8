"""Values of data blocks: the check that a line is JSON, and messages about lines that are not."""

from __future__ import annotations

import msgspec

NESTING = 500
"""The levels of arrays and objects that a value may have wherever it is checked.

The parser takes more, how many depends on the version of Python and on what is on the stack.
"""

REFUSED = (msgspec.DecodeError, RecursionError)
"""What `check` raises."""

_EXPLAINED = 256 * 1024  # bytes of a value that is checked once more, to say what is wrong

check = msgspec.json.Decoder(msgspec.Raw).decode
"""Raise one of REFUSED unless the bytes, which have to be UTF-8, are one JSON value."""


def fault(value: bytes, error: Exception) -> str:
    """Return a message about a value for which `check` raised `error`."""
    if not isinstance(error, RecursionError) and len(value) <= _EXPLAINED:
        # Half a surrogate pair is JSON by its grammar, and the parser has strange words for it.
        # As escapes of other characters, in the same places, halves and pairs are like any.
        try:
            check(value.replace(rb"\ud", rb"\u0").replace(rb"\uD", rb"\u0"))
        except REFUSED as other:
            error = other
        else:
            return (
                r"a line of a data block has half of a surrogate pair, \ud800 to \udfff, which is"
                " no character: escape both halves, or write the character itself"
            )
    if isinstance(error, RecursionError):
        return (
            "a line of a data block is nested too deeply: keep to"
            f" {NESTING} levels of arrays and objects"
        )
    return f"a line of a data block is not JSON: {error}"
