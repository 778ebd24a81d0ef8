"""Tokens of callers, and links to one evaluation.

A line of the file is `CALLER_NAME sha256:HEX [read] [shared] [rate=N] [group=NAME]
[supervises=NAME,...] [problems=NAME,...]`: a caller's name, the SHA-256 of its token, and what the
token permits. A fast hash is right here: slow, salted hashes protect passwords that people choose.
A token has 256 random bits and cannot be guessed, and a slow hash would have to be computed for
every request.

A caller is a member of the groups of its tokens. A token that supervises a group also permits to
read, cancel, share and rerun the evaluations of the group's members.

A link is a signed capability to read one evaluation: the time at which it expires and a MAC under
the daemon's key. The MAC also covers the evaluation's identifier and its generation: random bytes
that the daemon draws for the first link of an evaluation and forgets at a revocation.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from hashlib import sha256
from typing import Any

import attrs

from tawebeval.errors import ConfigurationError, Unauthorized

ANONYMOUS_CALLER = ""
"""The name of the only caller of a daemon without tokens; no file can contain this name."""

TOKEN_BYTES = 32

MAX_SUPERVISED_CALLERS = 1000
"""Callers that a token may supervise: to find the owner of an identifier takes 2 µs for each."""

_PREFIX = "tawebeval_"  # shows the purpose of a token that somebody finds
CALLER_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
PROBLEM_NAME_PATTERN = r"[a-z0-9][a-z0-9_.-]{0,63}"
_NAME = CALLER_NAME_PATTERN.pattern  # also of a group
_LINE = re.compile(
    rf"(?P<caller>{_NAME})[ \t]+sha256:(?P<digest>[0-9A-Fa-f]{{64}})"
    r"(?P<read>[ \t]+read)?(?P<shared>[ \t]+shared)?(?:[ \t]+rate=(?P<rate>[1-9][0-9]{0,5}))?"
    rf"(?:[ \t]+group=(?P<group>{_NAME}))?"
    rf"(?:[ \t]+supervises=(?P<supervises>{_NAME}(?:,{_NAME})*))?"
    rf"(?:[ \t]+problems=(?P<problems>{PROBLEM_NAME_PATTERN}(?:,{PROBLEM_NAME_PATTERN})*))?"
)
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)


@attrs.frozen
class Token:
    """A token of the caller with the name `caller`, without its secret.

    `requests_per_minute` is its own limit of requests; None: it shares that of its caller.
    `permitted_problems` are the names of the only problems that it may submit for; None: it is not
    restricted to problems. Many people use a token that `is_shared`: it lists no evaluations.
    """

    digest: bytes = attrs.field(repr=False)
    caller: str
    is_read_only: bool = False
    requests_per_minute: int | None = None
    permitted_problems: frozenset[str] | None = None
    is_shared: bool = False
    group: str | None = None
    supervised_groups: frozenset[str] = frozenset()

    @property
    def file_line(self) -> str:
        """The line of the file."""
        words = [self.caller, f"sha256:{self.digest.hex()}"]
        words += ["read"] * self.is_read_only + ["shared"] * self.is_shared
        words += [f"rate={self.requests_per_minute}"] if self.requests_per_minute else []
        words += [f"group={self.group}"] if self.group else []
        for key, names in (
            ("supervises", self.supervised_groups),
            ("problems", self.permitted_problems),
        ):
            words += [f"{key}={','.join(sorted(names))}"] if names else []
        return " ".join(words)


ANONYMOUS_TOKEN = Token(b"", ANONYMOUS_CALLER)
"""The token of requests without one."""


@attrs.frozen
class TokenTable:
    """The tokens of a file."""

    tokens: Sequence[Token] = attrs.field(repr=False)
    _known: Set[Token] = attrs.field(init=False, repr=False)
    # Names of callers by those of groups; under None those of all callers.
    _members: Mapping[str | None, Set[str]] = attrs.field(init=False, repr=False)

    @_known.default
    def _collect_tokens(self) -> Set[Token]:
        return frozenset(self.tokens)

    @_members.default
    def _collect_members(self) -> Mapping[str | None, Set[str]]:
        members: dict[str | None, set[str]] = {None: set()}
        for token in self.tokens:
            members[None].add(token.caller)
            if token.group is not None:
                members.setdefault(token.group, set()).add(token.caller)
        return members

    @property
    def caller_names(self) -> Set[str]:
        """The names of the callers."""
        return self._members[None]

    def find_supervised_members(self, token: Token) -> dict[str, Set[str]]:
        """Return the names of the members of each group that a token supervises."""
        return {name: self._members.get(name, frozenset()) for name in token.supervised_groups}

    def find_permitted_callers(self, token: Token) -> Set[str]:
        """Return the names of the callers whose evaluations a token permits."""
        return frozenset((token.caller,)).union(*self.find_supervised_members(token).values())

    def has_access(self, token: Token, owner: str) -> bool:
        """Return whether a token is in the file as it was, and permits evaluations of `owner`."""
        return token in self._known and owner in self.find_permitted_callers(token)

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
        found = [one for one in self.tokens if hmac.compare_digest(one.digest, digest)]
        if not found:
            raise Unauthorized("unknown or removed token; ask the operator for a new one")
        return found[0]


def read_uncommented_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the content of each line, without comments and empty lines."""
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            yield number, line


def parse_tokens(text: str) -> TokenTable:
    """Return the tokens of a file; a caller may have several, to replace one by another.

    Empty lines and lines that begin with `#` are skipped. Raises ConfigurationError with the number
    of the line, but not its content, which may be a token put there by mistake.
    """
    tokens: dict[bytes, Token] = {}
    for number, line in read_uncommented_lines(text):
        token = _parse_line(line)
        if token is None:
            raise ConfigurationError(
                f"line {number}: expected NAME sha256:HEX [read] [shared] [rate=N] [group=NAME]"
                " [supervises=NAME,...] [problems=NAME,...], as `tawebeval token add NAME` writes"
                " it"
            )
        if token.digest in tokens:
            raise ConfigurationError(
                f"line {number}: the token repeats that of an earlier line; remove one of them"
            )
        tokens[token.digest] = token
    if not tokens:
        raise ConfigurationError("the file has no token; add one with `tawebeval token add NAME`")
    found = TokenTable(tuple(tokens.values()))
    for token in found.tokens:
        count = len(found.find_permitted_callers(token))
        if count > MAX_SUPERVISED_CALLERS:
            raise ConfigurationError(
                f"{token.caller} supervises {count} callers; the limit is {MAX_SUPERVISED_CALLERS};"
                " divide the group"
            )
    return found


def _parse_line(line: str) -> Token | None:
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    groups, problems = found["supervises"], found["problems"]
    return Token(
        bytes.fromhex(found["digest"]),
        found["caller"],
        is_read_only=found["read"] is not None,
        requests_per_minute=int(found["rate"]) if found["rate"] else None,
        permitted_problems=frozenset(problems.split(",")) if problems else None,
        is_shared=found["shared"] is not None,
        group=found["group"],
        supervised_groups=frozenset(groups.split(",")) if groups else frozenset(),
    )


def remove_token_lines(text: str, caller: str, digest_prefix: str) -> str:
    """Return the text of a file without the tokens of a caller; other lines stay as they are.

    Only tokens go whose SHA-256 begins with the hexadecimal digits `digest_prefix`. Raises:
    ConfigurationError, if the file has no such token, or no other.
    """
    kept = []
    for line in text.split("\n"):
        token = _parse_line(line.strip())
        if not (token and token.caller == caller and token.digest.hex().startswith(digest_prefix)):
            kept.append(line)
    remaining = "\n".join(kept)
    if remaining == text:
        raise ConfigurationError(
            f"no such token of {caller!r}", "list the tokens with `tawebeval token list`"
        )
    if not any(True for _ in read_uncommented_lines(remaining)):
        raise ConfigurationError(
            "this would remove the last token, and the daemon does not read a file without one",
            "add another token first; to lock out all callers, stop the daemon",
        )
    return remaining


def generate_token(
    caller: str,
    random: Callable[[int], bytes],
    *,
    group: str | None = None,
    supervised_groups: Collection[str] = (),
    problems: Collection[str] = (),
    **restrictions: Any,
) -> tuple[str, str]:
    """Return a new token, and the line of the file that makes it a token of `caller`.

    `random(n)` returns n random bytes; for the others see `Token`; no `problems` do not restrict
    the token. Raises ConfigurationError for an invalid name.
    """
    callers_and_groups = (caller, *([] if group is None else [group]), *supervised_groups)
    for name, pattern, kind, allowed in (
        *((one, _NAME, "caller or group", "A-Z a-z 0-9 . _ @ -") for one in callers_and_groups),
        *((one, PROBLEM_NAME_PATTERN, "problem", "a-z 0-9 _ . -") for one in problems),
    ):
        if not re.fullmatch(pattern, name):
            raise ConfigurationError(
                f"{name[:80]!r} cannot be the name of a {kind}; allowed: 1 to 64 of the characters"
                f" {allowed}, the first a letter or digit"
            )
    drawn = urlsafe_b64encode(random(TOKEN_BYTES)).decode().rstrip("=")
    token = _PREFIX + drawn
    made = Token(
        sha256(token.encode()).digest(),
        caller,
        permitted_problems=frozenset(problems) or None,
        group=group,
        supervised_groups=frozenset(supervised_groups),
        **restrictions,
    )
    return token, made.file_line


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
