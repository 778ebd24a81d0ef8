"""Links: signed capabilities to read one evaluation.

A link is the time at which it expires and a MAC under the daemon's key. The MAC also covers the
evaluation's identifier and its generation: random bytes that the daemon draws for the first link of
an evaluation and forgets at a revocation.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

import attrs

LINK_GENERATION_BYTES = 8

LINK_PATTERN = r"link_[A-Za-z0-9_-]{28}"
"""The pattern of a link."""

_LINK = re.compile(LINK_PATTERN)
_PREFIX = "link_"
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
        return _PREFIX + urlsafe_b64encode(signed).decode()

    def verify_and_read_expiry(self, link: str, identifier: str, generation: bytes) -> int | None:
        """Return when a link expires; None if it is none of this evaluation and generation."""
        if not _LINK.fullmatch(link):
            return None
        signed = urlsafe_b64decode(link.removeprefix(_PREFIX))
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
        if scheme.lower() == "bearer" and credentials.lstrip(" ").lower().startswith(_PREFIX):
            return credentials.strip(" ")
    return None
