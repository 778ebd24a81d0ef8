"""Identifiers of evaluations, which prove that this daemon issued them.

An identifier is random bytes and a MAC of them under the daemon's key, in lower-case base32. The
MAC also covers the name of the caller: for any other caller the identifier is unknown. So a daemon
that has forgotten an evaluation, even over a restart, still tells an expired evaluation from one
that never existed.

Where several daemons share an address each has a name, and its identifiers begin with the name, so
that the proxy before the daemons knows which daemon to ask.
"""

from __future__ import annotations

import hmac
import re
from base64 import b32decode, b32encode
from collections.abc import Callable

import attrs

SECRET_KEY_BYTES = 32

_RANDOM = 13  # with the MAC 25 bytes, which base32 writes without padding
_MAC = 12
_FORM = re.compile(r"[a-z2-7]{40}")
_PURPOSE = b"tawebeval evaluation "
_NAME_PURPOSE = b"tawebeval daemon "

DAEMON_NAME_PATTERN = r"[a-z0-9]{1,16}"
"""The pattern of a daemon's name."""

IDENTIFIER_PATTERN = rf"(?:{DAEMON_NAME_PATTERN}-)?{_FORM.pattern}"
"""The pattern of the identifiers of any daemon, with a name or without."""


@attrs.frozen
class IdentifierIssuer:
    """Issuer of identifiers; `key` is secret, `random(n)` returns n random bytes.

    `daemon_name` is the daemon's name, "" for none. Each name has a key of its own.
    """

    _key: bytes = attrs.field(repr=False)
    _random: Callable[[int], bytes] = attrs.field(repr=False)
    daemon_name: str = ""
    _prefix: str = attrs.field(init=False)
    _own_key: bytes = attrs.field(init=False, repr=False)

    @_prefix.default
    def _named(self) -> str:
        return f"{self.daemon_name}-" if self.daemon_name else ""

    @_own_key.default
    def _derived(self) -> bytes:
        if not self.daemon_name:
            return self._key
        return hmac.digest(self._key, _NAME_PURPOSE + self.daemon_name.encode(), "sha256")

    def issue_identifier(self, caller: str = "") -> str:
        """Return a new identifier for a caller: the daemon's name and 40 characters of `a-z2-7`."""
        drawn = self._random(_RANDOM)
        return self._prefix + b32encode(drawn + self._mac(drawn, caller)).decode().lower()

    def is_issued(self, identifier: str, caller: str = "") -> bool:
        """Return whether this daemon issued `identifier` to the caller."""
        own = identifier.removeprefix(self._prefix)
        if len(own) + len(self._prefix) != len(identifier) or not _FORM.fullmatch(own):
            return False
        decoded = b32decode(own.upper())
        drawn, mac = decoded[:_RANDOM], decoded[_RANDOM:]
        return hmac.compare_digest(mac, self._mac(drawn, caller))

    def _mac(self, drawn: bytes, caller: str) -> bytes:
        # The random bytes have a fixed length, so two different messages never have the same bytes.
        message = _PURPOSE + drawn + caller.encode()
        return hmac.digest(self._own_key, message, "sha256")[:_MAC]
