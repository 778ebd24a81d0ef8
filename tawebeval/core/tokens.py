"""Tokens of callers, and links to one evaluation.

A line of the file is `CALLER_NAME sha256:HEX [read] [rate=N] [problems=NAME,...]`: a caller's name,
the SHA-256 of its token, and what restricts the token. A fast hash is right here: slow, salted
hashes protect passwords that people choose. A token has 256 random bits and cannot be guessed, and
a slow hash would have to be computed for every request.

A link is a signed capability to read one evaluation: the time at which it expires and a MAC under
the daemon's key. The MAC also covers the evaluation's identifier and its generation: random bytes
that the daemon draws for the first link of an evaluation and forgets at a revocation.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence, Set
from hashlib import sha256

import attrs

from tawebeval.core.names import PROBLEM_NAME_PATTERN
from tawebeval.errors import ConfigurationError, Unauthorized

ANONYMOUS_CALLER = ""
"""The name of the only caller of a daemon without tokens; no file can contain this name."""

TOKEN_BYTES = 32

_PREFIX = "tawebeval_"  # shows the purpose of a token that somebody finds
CALLER_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE = re.compile(
    rf"({CALLER_NAME_PATTERN.pattern})[ \t]+sha256:([0-9A-Fa-f]{{64}})"
    r"(?:[ \t]+(read))?(?:[ \t]+rate=([1-9][0-9]{0,5}))?"
    rf"(?:[ \t]+problems=({PROBLEM_NAME_PATTERN}(?:,{PROBLEM_NAME_PATTERN})*))?"
)
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)


@attrs.frozen
class Token:
    """A token of the caller with the name `caller`, without its secret.

    `requests_per_minute` is its own limit of requests; None: it shares that of its caller.
    `permitted_problems` are the names of the only problems that it may submit for; None: it is not
    restricted to problems.
    """

    digest: bytes = attrs.field(repr=False)
    caller: str
    is_read_only: bool = False
    requests_per_minute: int | None = None
    permitted_problems: frozenset[str] | None = None


@attrs.frozen
class TokenHashes:
    """The tokens of a file."""

    _tokens: Sequence[Token] = attrs.field(repr=False)

    @property
    def caller_names(self) -> Set[str]:
        """The names of the callers."""
        return {token.caller for token in self._tokens}

    def find_token(self, authorization: Sequence[bytes]) -> Token:
        """Return the token of a request; `authorization` has the values of these headers.

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
        found = [one for one in self._tokens if hmac.compare_digest(one.digest, digest)]
        if not found:
            raise Unauthorized("unknown or removed token; ask the operator for a new one")
        return found[0]


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
    tokens: dict[bytes, Token] = {}
    for number, line in read_uncommented_lines(text):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ConfigurationError(
                f"line {number}: expected NAME sha256:HEX [read] [rate=N] [problems=NAME,...], as"
                " `tawebeval token new NAME` prints it"
            )
        digest = bytes.fromhex(found[2])
        if digest in tokens:
            raise ConfigurationError(
                f"line {number}: the token repeats that of an earlier line; remove one of them"
            )
        rate = int(found[4]) if found[4] else None
        problems = frozenset(found[5].split(",")) if found[5] else None
        tokens[digest] = Token(digest, found[1], found[3] is not None, rate, problems)
    if not tokens:
        raise ConfigurationError("the file has no token; add one with `tawebeval token new NAME`")
    return TokenHashes(tuple(tokens.values()))


def generate_token(
    caller: str,
    random: Callable[[int], bytes],
    *,
    is_read_only: bool = False,
    requests_per_minute: int | None = None,
    problems: Sequence[str] = (),
) -> tuple[str, str]:
    """Return a new token, and the line of the file that makes it a token of `caller`.

    `random(n)` returns n random bytes; for the others see `Token`; no `problems` do not restrict
    the token. Raises ConfigurationError for an invalid name.
    """
    if not CALLER_NAME_PATTERN.fullmatch(caller):
        raise ConfigurationError(
            f"{caller[:80]!r} cannot be a caller's name; allowed: 1 to 64 of the characters A-Z a-z"
            " 0-9 . _ @ -, the first a letter or digit"
        )
    for problem in problems:
        if not re.fullmatch(PROBLEM_NAME_PATTERN, problem):
            raise ConfigurationError(
                f"{problem[:80]!r} cannot be a problem's name; allowed: 1 to 64 of the characters"
                " a-z 0-9 _ . -, the first a letter or digit"
            )
    drawn = urlsafe_b64encode(random(TOKEN_BYTES)).decode().rstrip("=")
    token = _PREFIX + drawn
    line = f"{caller} sha256:{sha256(token.encode()).hexdigest()}"
    line += " read" if is_read_only else ""
    line += f" rate={requests_per_minute}" if requests_per_minute else ""
    return token, line + (f" problems={','.join(problems)}" if problems else "")


LINK_GENERATION_BYTES = 8

LINK_PATTERN = r"link_[A-Za-z0-9_-]{28}"
"""The pattern of a link."""

_LINK = re.compile(LINK_PATTERN)
_LINK_PREFIX = "link_"
_EXPIRY = 5  # bytes; with the MAC 21, which base64 writes without padding
_MAC = 16
_PURPOSE = b"tawebeval link "


@attrs.frozen
class LinkSigner:
    """Signer of links; `key` is the daemon's secret key."""

    _key: bytes = attrs.field(repr=False)

    def sign_link(self, identifier: str, generation: bytes, expires: int) -> str:
        """Return the link to an evaluation; `expires` is in seconds since the epoch."""
        expiry = expires.to_bytes(_EXPIRY, "big")
        signed = expiry + self._mac(identifier, generation, expiry)
        return _LINK_PREFIX + urlsafe_b64encode(signed).decode()

    def verify_and_read_expiry(self, link: str, identifier: str, generation: bytes) -> int | None:
        """Return when a link expires; None if it is none of this evaluation and generation."""
        if not _LINK.fullmatch(link):
            return None
        signed = urlsafe_b64decode(link.removeprefix(_LINK_PREFIX))
        expiry, mac = signed[:_EXPIRY], signed[_EXPIRY:]
        if not hmac.compare_digest(mac, self._mac(identifier, generation, expiry)):
            return None
        return int.from_bytes(expiry, "big")

    def _mac(self, identifier: str, generation: bytes, expiry: bytes) -> bytes:
        # The parts before the identifier have fixed lengths.
        message = _PURPOSE + expiry + generation + identifier.encode()
        return hmac.digest(self._key, message, "sha256")[:_MAC]


def find_bearer_link(authorization: Sequence[bytes]) -> str | None:
    """Return what has the prefix of a link in headers `Authorization`; None for other headers."""
    for value in authorization:
        scheme, _, credentials = value.decode("latin-1").partition(" ")
        if scheme.lower() == "bearer" and credentials.lstrip(" ").lower().startswith(_LINK_PREFIX):
            return credentials.strip(" ")
    return None
