"""Identifiers of evaluations, which prove by themselves that they were issued here.

An identifier is random bytes and a MAC of them under the server's key, in lower-case
base32. The MAC is also of the name of the caller that it is issued to: to anybody else it
looks like one that never was. So a server that has forgotten an evaluation, even in a
restart, can still tell "that is over" from "that was never here".
"""

from __future__ import annotations

import hmac
import re
from base64 import b32decode, b32encode
from collections.abc import Callable

import attrs

KEY_BYTES = 32

_RANDOM = 13  # with the MAC 25 bytes, which base32 writes without padding
_MAC = 12
_FORM = re.compile(r"[a-z2-7]{40}")
_PURPOSE = b"tawebeval evaluation "


@attrs.frozen
class Identities:
    """Issues identifiers and recognises its own; `key` is secret, `random` as `os.urandom`."""

    _key: bytes = attrs.field(repr=False)
    _random: Callable[[int], bytes] = attrs.field(repr=False)

    def issue(self, caller: str = "") -> str:
        """Return a new identifier for that caller: 40 characters of `a-z2-7`."""
        drawn = self._random(_RANDOM)
        return b32encode(drawn + self._mac(drawn, caller)).decode().lower()

    def issued(self, identifier: str, caller: str = "") -> bool:
        """Tell whether `identifier` was issued under this key to that caller."""
        if not _FORM.fullmatch(identifier):
            return False
        decoded = b32decode(identifier.upper())
        drawn, mac = decoded[:_RANDOM], decoded[_RANDOM:]
        return hmac.compare_digest(mac, self._mac(drawn, caller))

    def _mac(self, drawn: bytes, caller: str) -> bytes:
        # What is drawn has a fixed length, so there is one way only to take this apart.
        message = _PURPOSE + drawn + caller.encode()
        return hmac.digest(self._key, message, "sha256")[:_MAC]
