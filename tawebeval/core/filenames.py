"""Base names of files that a stranger named."""

from __future__ import annotations

MAX_BYTES = 255
"""The longest name that Linux file systems take, in bytes of UTF-8."""

_EXCERPT = 80


def base_name(name: str) -> str:
    r"""Return the last component of `name`; both `/` and `\` separate components.

    Raises ValueError for a component that cannot name a file: empty, `.`, `..`, with a NUL, over
    255 bytes, or not encodable as UTF-8 (contract, section 2).
    """
    base = name.replace("\\", "/").rpartition("/")[2]
    if base in ("", ".", ".."):
        raise ValueError(f"{name[-_EXCERPT:]!r} ends in no file name")
    if "\0" in base:
        raise ValueError("a file name cannot contain NUL")
    try:
        length = len(base.encode())
    except UnicodeEncodeError:
        raise ValueError("a file name must be UTF-8") from None
    if length > MAX_BYTES:
        raise ValueError(
            f"a file name cannot be over {MAX_BYTES} bytes long; this one has {length}"
        )
    return base
