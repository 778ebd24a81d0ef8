"""The secrets of callers, and how a callback is signed with them.

As by the specification of Standard Webhooks 1.0 (https://www.standardwebhooks.com), for which
receivers find libraries in most languages: an HMAC-SHA256 of identifier, time and body.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence

import attrs

from tawebeval.core.tokens import ANYBODY, NAME, entries
from tawebeval.errors import ConfigurationError

_EVERYBODY = "*"  # how a file calls the one caller that there is without tokens
_LINE = re.compile(rf"({NAME.pattern}|\*)[ \t]+whsec_([A-Za-z0-9+/]+={{0,2}})")
_LEAST, _MOST = 24, 64  # bytes, by the specification


@attrs.frozen
class Secrets:
    """The secrets of each caller, of whom some have several: an old one and a new one."""

    _secrets: Mapping[str, Sequence[bytes]] = attrs.field(repr=False, factory=dict)

    def has(self, caller: str) -> bool:
        """Tell whether something can be signed for a caller."""
        return caller in self._secrets

    def sign(self, caller: str, identifier: str, time: int, body: bytes) -> dict[str, str]:
        """Return the headers that prove who sends `body`, and when: one signature by each secret.

        `identifier` stays the same when a message is sent again; `time` is in seconds since the
        epoch. Raises KeyError for a caller without a secret.
        """
        content = f"{identifier}.{time}.".encode() + body
        digests = [hmac.digest(secret, content, "sha256") for secret in self._secrets[caller]]
        return {
            "Webhook-Id": identifier,
            "Webhook-Timestamp": str(time),
            "Webhook-Signature": " ".join(f"v1,{b64encode(one).decode()}" for one in digests),
        }


def parse_secrets(text: str) -> Secrets:
    """Return what a file of secrets says: lines `NAME whsec_BASE64`, the name a caller's or `*`.

    Empty lines do not count, nor do those that begin with `#`. Raises ConfigurationError with
    the number of the line, of which it shows nothing.
    """
    found: dict[str, list[bytes]] = {}
    for number, line in entries(text):
        match = _LINE.fullmatch(line)
        try:
            secret = b64decode(match[2]) if match else b""
        except NotBase64:
            secret = b""
        if match is None or not _LEAST <= len(secret) <= _MOST:
            raise ConfigurationError(
                f"line {number}: should be NAME whsec_BASE64, of {_LEAST} to {_MOST} random bytes"
            )
        caller = ANYBODY if match[1] == _EVERYBODY else match[1]
        found.setdefault(caller, []).append(secret)
    if not found:
        raise ConfigurationError("there is no secret in it, so nobody could have callbacks")
    return Secrets(found)
