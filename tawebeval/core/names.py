"""Names that callers and evaluators choose: of fields, labels, problems and files."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

MAX_FIELD_NAME_LENGTH = 251  # characters; NAME.txt is a file's name
FIELD_NAME_PATTERN = rf"[a-z][a-z0-9_]{{0,{MAX_FIELD_NAME_LENGTH - 1}}}"
"""Regular expression of the names of submission fields."""

PROBLEM_NAME_PATTERN = r"[a-z0-9][a-z0-9_.-]{0,63}"
"""Regular expression of the names of problems."""

LABEL_NAME_PATTERN = r"[a-z0-9_.-]{1,64}"
"""Regular expression of the names of labels."""

MAX_FILENAME_BYTES = 255
"""The longest name that Linux file systems take, in bytes of UTF-8."""

_EXCERPT = 80  # characters of a wrong name, in its error
# RFC 8187, section 3.2.1. Python's codecs are not asked: they keep each unknown name for ever.
_EXTENDED = re.compile(r"([^']*)'[0-9A-Za-z-]*'((?:[!#$&+.^_`|~0-9A-Za-z-]|%[0-9A-Fa-f]{2})*)")
_CHARSETS = {"utf-8": "utf-8", "iso-8859-1": "iso-8859-1"}


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
