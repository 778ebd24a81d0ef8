"""What the configuration is made of: tables, and the kinds of values that settings have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tawebeval.core.tokens import NAME

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_WORDS: dict[str, str] = {}  # by what msgspec says, which would show the pattern


def shaped(pattern: str, words: str) -> Meta:
    """Return the constraint that a text matches `pattern` as a whole.

    `words` complete the message "should be ..." about a text that does not.
    """
    whole = rf"^(?:{pattern})\Z"
    _WORDS[f"Expected `str` matching regex {whole!r}"] = words
    return Meta(pattern=whole)


def worded(message: str) -> str:
    """Return msgspec's `message`, in words in place of a pattern."""
    return f"should be {_WORDS[message]}" if message in _WORDS else message


Count = Annotated[int, Meta(ge=1, le=10**9)]
Bytes = Annotated[int, Meta(ge=KIB, le=2**50)]
Host = Annotated[
    str, shaped(r"(\*\.)?[A-Za-z0-9_.:-]+", 'a host such as "example.org", or "*.example.org"')
]
Seconds = Annotated[float, Meta(gt=0, le=10**9)]

# Written plainly, so that what is mounted there is what stands there.
AbsolutePath = Annotated[
    str,
    shaped(
        r"(/(?!\.{1,2}(/|\Z))[^/\0]+)+",
        "an absolute path without '.' or '..', and without a slash at the end",
    ),
]
# A file of a secret: a path, or the name of what systemd hands over. ssh would take more than
# these characters apart.
SecretFile = Annotated[
    str,
    shaped(
        r"(/?[A-Za-z0-9_@+.,:=-]+(/[A-Za-z0-9_@+.,:=-]+)*)?",
        "the path of a file, or a name, of the characters A-Z a-z 0-9 _ @ + . , : = - only",
    ),
]
Share = Annotated[int, Meta(ge=0, le=10**6)]
ByteShare = Annotated[int, Meta(ge=0, le=2**50)]
CallerName = Annotated[
    str,
    shaped(
        NAME.pattern,
        "the name of a caller: up to 64 of A-Z a-z 0-9 . _ @ -, of which the first is a letter or"
        " a digit",
    ),
]
# As browsers write it: in lower case, and without a slash at the end.
Origin = Annotated[
    str,
    shaped(
        r"\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "an origin as browsers write it, such as 'https://judge.example.org', in lower case and"
        " without a slash at the end, or '*'",
    ),
]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Table of the configuration file; unknown keys are errors."""
