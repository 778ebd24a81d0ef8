"""The words of the daemon's messages, for tests that wait until the log has them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import tawebeval

_SEAM = re.compile(r"""["']\s*\n\s*[fr]*["']""")  # between the parts of a long string
_PHRASE = re.compile(r"(?<![^\s(])[a-z]+(?: [a-z]+)+(?![^\s;:,.)])")


@cache
def _read_source() -> str:
    files = Path(tawebeval.__file__).parent.rglob("*.py")
    return "\n".join(_SEAM.sub("", file.read_text(encoding="utf-8")) for file in files)


def check_words(words: str) -> None:
    """Fail if the source has no message with these words: the test would wait for them in vain.

    Phrases of two or more words are compared, not names, numbers and single words.
    """
    for phrase in _PHRASE.findall(words):
        assert phrase in _read_source(), f"no message has {phrase!r}; has a message changed?"
