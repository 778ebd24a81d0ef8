"""Tokens of callers: the file of their hashes, and the caller of a request.

A line of the file is `CALLER_NAME sha256:HEX`: a caller's name and the SHA-256 of its token. A fast
hash is right here: slow, salted hashes protect passwords that people choose. A token has 256 random
bits and cannot be guessed, and a slow hash would have to be computed for every request.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import attrs

from tawebeval.errors import ConfigurationError, Unauthorized

ANONYMOUS = ""
"""The name of the only caller of a daemon without tokens; no file can contain this name."""

TOKEN_BYTES = 32

_PREFIX = "tawebeval_"  # shows the purpose of a token that somebody finds
CALLER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE = re.compile(rf"({CALLER_NAME.pattern})[ \t]+sha256:([0-9A-Fa-f]{{64}})")
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)


@attrs.frozen
class TokenHashes:
    """Callers by the SHA-256 of their tokens."""

    _callers: Sequence[tuple[bytes, str]] = attrs.field(repr=False)

    def authenticate_caller(self, authorization: Sequence[bytes]) -> str:
        """Return the caller's name; `authorization` has the values of the request's headers.

        The comparison takes constant time. Raises Unauthorized, without a part of the value.
        """
        if not authorization:
            raise Unauthorized("a token is required: send the header `Authorization: Bearer TOKEN`")
        bearer = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
        if bearer is None:
            raise Unauthorized(
                "malformed header Authorization; send one `Authorization: Bearer TOKEN`"
            )
        digest = sha256(bearer[1]).digest()
        names = [name for known, name in self._callers if hmac.compare_digest(known, digest)]
        if not names:
            raise Unauthorized("unknown or removed token; ask the operator for a new one")
        return names[0]


def read_uncommented_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the content of each line, without comments and empty lines."""
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            yield number, line


def parse_tokens(text: str) -> TokenHashes:
    """Return the tokens of a file; a caller may have several, to replace one by another.

    Empty lines and lines that begin with `#` are skipped. Raises ConfigurationError with the number
    of the line, but not its content, which may be a token put there by mistake.
    """
    callers: dict[bytes, str] = {}
    for number, line in read_uncommented_lines(text):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ConfigurationError(
                f"line {number}: expected NAME sha256:HEX, as `tawebeval token new NAME` prints it"
            )
        digest = bytes.fromhex(found[2])
        if digest in callers:
            raise ConfigurationError(
                f"line {number}: the token repeats that of an earlier line; remove one of them"
            )
        callers[digest] = found[1]
    if not callers:
        raise ConfigurationError("the file has no token; add one with `tawebeval token new NAME`")
    return TokenHashes(tuple(callers.items()))


def generate_token(name: str, random: Callable[[int], bytes]) -> tuple[str, str]:
    """Return a new token, and the line of the file that makes it a token of the caller `name`.

    `random(n)` returns n random bytes. Raises ConfigurationError for an invalid name.
    """
    if not CALLER_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:80]!r} cannot be a caller's name; allowed: 1 to 64 of the characters A-Z a-z"
            " 0-9 . _ @ -, the first a letter or digit"
        )
    drawn = urlsafe_b64encode(random(TOKEN_BYTES)).decode().rstrip("=")
    token = _PREFIX + drawn
    return token, f"{name} sha256:{sha256(token.encode()).hexdigest()}"
