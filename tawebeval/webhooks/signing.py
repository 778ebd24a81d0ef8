"""Signatures by Standard Webhooks 1.0 (https://www.standardwebhooks.com), and the file of secrets.

A signature is the HMAC-SHA256 of identifier, time and body.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tawebeval.core.tokens import ANONYMOUS_CALLER, CALLER_NAME_PATTERN, read_uncommented_lines
from tawebeval.errors import ConfigurationError
from tawebeval.linux.privileges import (
    parse_text_file,
    warn_of_file_readable_by_others,
)

_EVERYBODY = "*"  # the anonymous caller's name in the file
_LINE = re.compile(rf"({CALLER_NAME_PATTERN.pattern}|\*)[ \t]+whsec_([A-Za-z0-9+/]+={{0,2}})")
_LEAST, _MOST = 24, 64  # bytes, by the specification

SECRETS_SETTING = "callbacks.secrets"
SECRETS_CREDENTIAL = "callback-secrets"
"""The name of systemd's credential that has the secrets if the setting is empty."""


@attrs.frozen
class SigningSecrets:
    """Secrets by caller. A caller has several while a new secret replaces an old one."""

    _secrets: Mapping[str, Sequence[bytes]] = attrs.field(repr=False, factory=dict)

    def has_secret(self, caller: str) -> bool:
        """Return whether the caller has a secret."""
        return caller in self._secrets

    def sign_body(self, caller: str, identifier: str, time: int, body: bytes) -> dict[str, str]:
        """Return the headers of an attempt to send `body`, with one signature for each secret.

        `identifier` is the same for all attempts; `time` is that of this one, in seconds since
        the epoch. Raises: KeyError for a caller without a secret.
        """
        content = f"{identifier}.{time}.".encode() + body
        digests = [hmac.digest(secret, content, "sha256") for secret in self._secrets[caller]]
        return {
            "Webhook-Id": identifier,
            "Webhook-Timestamp": str(time),
            "Webhook-Signature": " ".join(f"v1,{b64encode(one).decode()}" for one in digests),
        }


def parse_secrets(text: str) -> SigningSecrets:
    """Parse a secrets file: lines `CALLER_NAME whsec_BASE64`; `*` is the anonymous caller.

    Empty lines and lines that begin with `#` are skipped. Raises: ConfigurationError, with the
    number of the line and nothing of its content.
    """
    found: dict[str, list[bytes]] = {}
    for number, line in read_uncommented_lines(text):
        match = _LINE.fullmatch(line)
        try:
            secret = b64decode(match[2]) if match else b""
        except NotBase64:
            secret = b""
        if match is None or not _LEAST <= len(secret) <= _MOST:
            raise ConfigurationError(
                f"line {number}: expected NAME whsec_BASE64, of {_LEAST} to {_MOST} random bytes"
            )
        caller = ANONYMOUS_CALLER if match[1] == _EVERYBODY else match[1]
        found.setdefault(caller, []).append(secret)
    if not found:
        raise ConfigurationError("the file has no secret; add a line NAME whsec_BASE64")
    return SigningSecrets(found)


def read_signing_secrets(path: Path) -> SigningSecrets:
    """Read the secrets in a file. Blocks.

    Log a warning if every user can read the file. Raises: ConfigurationError, which names the
    setting, the file and the line.
    """
    try:
        found = parse_text_file(path, parse_secrets)
        mode = path.stat().st_mode
    except (ConfigurationError, OSError) as error:
        raise ConfigurationError(f"{SECRETS_SETTING}: {error}") from None
    warn_of_file_readable_by_others(path, mode, SECRETS_SETTING)
    return found
