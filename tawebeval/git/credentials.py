"""Credentials for private repositories: their servers and callers, and how git and ssh get them.

A credential is for the protocol, host and port of a URL that `core.hosts` has parsed and checked.
What was fetched with a credential is kept apart by the credential's identity, a MAC of all its
parts, so that it is reached with that credential alone.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64encode
from collections.abc import Sequence
from urllib.parse import quote

import attrs

from tawebeval.core.hosts import (
    DEFAULT_PORTS,
    IPAddress,
    ServerAddress,
    format_address,
    is_public_address,
    matches_host_pattern,
)
from tawebeval.errors import EvaluationFailure, format_size

MAX_PASSWORD_SIZE = 2048
"""Bytes of a password: with the user name it fits into any pipe at once."""

_WHOLE_LINE = re.compile(r"[^\x00-\x1f\x7f]+")


@attrs.frozen
class Login:
    """A user name and a password, for one server alone.

    `origin`: the server's protocol, host and port, as in `credential.<origin>.helper`.
    """

    origin: str
    _username: str
    _password: str = attrs.field(repr=False)

    @property
    def git_credential_output(self) -> bytes:
        """The answer to git's request for a credential (git-credential(1))."""
        return f"username={self._username}\npassword={self._password}\n".encode()

    @property
    def basic_authorization(self) -> str:
        """The value of the header `Authorization` (RFC 7617)."""
        return "Basic " + b64encode(f"{self._username}:{self._password}".encode()).decode()

    def scrub_password(self, text: str) -> str:
        """Return `text` with stars for the password, plain or encoded as in HTTP."""
        for form in self._forms():
            text = text.replace(form, "***")
        return text

    @property
    def max_encoded_password_bytes(self) -> int:
        """Bytes of the longest form of the password in a text."""
        return max(len(form.encode()) for form in self._forms())

    def _forms(self) -> Sequence[str]:
        pair = f"{self._username}:{self._password}"
        basic = b64encode(pair.encode()).decode()
        return basic, basic.rstrip("="), quote(self._password, safe=""), self._password


@attrs.frozen
class Credential:
    """One entry of `repositories.credentials`, with its secret.

    `host`: a pattern of `HostPolicy`. `port`: 0 is the default port of the protocol.
    `callers`: names of the callers who may use it; empty: all.
    `secret_file_content`: content of the password or key file, for the identity.
    `password`: for HTTP; None: ssh uses the files `key_file` and `known_hosts_file`.
    """

    host: str
    port: int
    username: str
    callers: Sequence[str]
    secret_file_content: bytes = attrs.field(repr=False)
    password: str | None = attrs.field(default=None, repr=False)
    key_file: str = ""
    known_hosts_file: str = ""

    def is_usable_for(self, target: ServerAddress, caller: str) -> bool:
        """Tell whether the credential is for this server, and whether the caller may use it."""
        protocols = ("https", "http") if self.password is not None else ("ssh",)
        return (
            target.protocol in protocols
            and matches_host_pattern(target.host, self.host)
            and target.port == (self.port or DEFAULT_PORTS[target.protocol])
            and (not self.callers or caller in self.callers)
        )

    def derive_credential_id(self, key: bytes) -> bytes:
        """Return the MAC of the credential under `key`, which reveals nothing of the secret.

        The callers are no part of it: another caller who may use the credential may read what it
        has fetched. A new secret changes the identity, since it may open other repositories.
        """
        named = "\0".join((self.host, str(self.port), self.username, self.key_file))
        return hmac.digest(key, named.encode() + b"\0" + self.secret_file_content, "sha256")

    def make_login(self, target: ServerAddress, addresses: Sequence[IPAddress]) -> Login | None:
        """Return the login for the server at `addresses`, None for a key.

        Raises: EvaluationError if the password would cross the internet unencrypted.
        """
        if self.password is None:
            return None
        if target.protocol == "http" and any(map(is_public_address, addresses)):
            raise EvaluationFailure(
                "repository",
                f"the credentials for {target.host} are sent over https only; use an https URL",
            )
        host = format_address(target.ip_address) if target.ip_address else target.host
        port = "" if target.port == DEFAULT_PORTS[target.protocol] else f":{target.port}"
        return Login(f"{target.protocol}://{host}{port}", self.username, self.password)

    @property
    def ssh_files(self) -> Sequence[str]:
        """Files that ssh has to read."""
        return () if self.password is not None else (self.key_file, self.known_hosts_file)

    @property
    def ssh_options(self) -> Sequence[str]:
        """Options of ssh: this user name and key and no other, and a known server only."""
        if self.password is not None:
            return ()
        return (
            "-F/dev/null",
            f"-oUser={self.username}",
            f"-i{self.key_file}",
            "-oIdentitiesOnly=yes",
            "-oIdentityAgent=none",
            f"-oUserKnownHostsFile={self.known_hosts_file}",
            "-oGlobalKnownHostsFile=/dev/null",
            "-oStrictHostKeyChecking=yes",
        )


def parse_password(content: bytes) -> str:
    """Return the password in a file, without the line end. Raises ValueError with the reason."""
    try:
        password = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if not password.strip():
        raise ValueError("is empty")
    if not _WHOLE_LINE.fullmatch(password):
        raise ValueError("has more than one line, or control characters")
    if len(content) > MAX_PASSWORD_SIZE:
        raise ValueError(f"is over {format_size(MAX_PASSWORD_SIZE)}")
    return password
