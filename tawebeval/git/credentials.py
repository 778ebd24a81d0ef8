"""Credentials for private repositories: whose they are, and how git or ssh comes to know them.

A credential belongs to hosts, never to what a client names: it is for exactly the protocol,
host and port of a URL that was understood and checked here. Whatever was fetched with one is
kept apart by its identity, a MAC of all of it, so that nobody reaches by another one, or by
none, what only that one has opened.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64encode
from collections.abc import Sequence
from urllib.parse import quote

import attrs

from tawebeval.core.hosts import DEFAULT_PORTS, Address, Target, bracketed, is_public, matches
from tawebeval.errors import EvaluationError

LARGEST_SECRET = 2048
"""Bytes that a password may have: with its name it fits into any pipe at once."""

_WHOLE_LINE = re.compile(r"[^\x00-\x1f\x7f]+")


@attrs.frozen
class Login:
    """A name and a password, for one server alone.

    `origin` is that server's protocol, host and port, as git's settings are written.
    """

    origin: str
    _username: str
    _password: str = attrs.field(repr=False)

    @property
    def answer(self) -> bytes:
        """What git is told that asks for it (git-credential(1))."""
        return f"username={self._username}\npassword={self._password}\n".encode()

    def scrub(self, text: str) -> str:
        """Return `text` with stars for the password, also where it is encoded as in HTTP."""
        for form in self._forms():
            text = text.replace(form, "***")
        return text

    @property
    def longest(self) -> int:
        """How many bytes of a text one appearance of the password may take."""
        return max(len(form.encode()) for form in self._forms())

    def _forms(self) -> Sequence[str]:
        pair = f"{self._username}:{self._password}"
        basic = b64encode(pair.encode()).decode()
        return basic, basic.rstrip("="), quote(self._password, safe=""), self._password


@attrs.frozen
class Credential:
    """One entry of `repositories.credentials`, with its secret.

    `host` is a pattern of `HostPolicy`; `port` 0 the protocol's own; without `callers` it is
    every caller's. `password` is for HTTP; without one ssh has the key in the file `key`, and
    knows the server by the file `known_hosts`. `secret` is what the identity depends on.
    """

    host: str
    port: int
    username: str
    callers: Sequence[str]
    secret: bytes = attrs.field(repr=False)
    password: str | None = attrs.field(default=None, repr=False)
    key: str = ""
    known_hosts: str = ""

    def serves(self, target: Target, caller: str) -> bool:
        """Tell whether it is for this server, and whether the caller may use it."""
        protocols = ("https", "http") if self.password is not None else ("ssh",)
        return (
            target.protocol in protocols
            and matches(target.host, self.host)
            and target.port == (self.port or DEFAULT_PORTS[target.protocol])
            and (not self.callers or caller in self.callers)
        )

    def identity(self, key: bytes) -> bytes:
        """Return what is equal for equal credentials only, and tells nothing of the secret.

        Whose it is does not matter: what it has fetched stays what it was when another caller
        may use it, too. A new secret makes another identity, since it may open other things.
        """
        named = "\0".join((self.host, str(self.port), self.username, self.key))
        return hmac.digest(key, named.encode() + b"\0" + self.secret, "sha256")

    def login(self, target: Target, address: Address) -> Login | None:
        """Return what to tell the server at `address`, None for a key.

        Raises EvaluationError rather than let a password cross the internet in the clear.
        """
        if self.password is None:
            return None
        if target.protocol == "http" and is_public(address):
            raise EvaluationError(
                "repository",
                f"the credentials for {target.host} are sent to public addresses over https"
                " only; use https in the repository's URL",
            )
        host = bracketed(target.address) if target.address else target.host
        port = "" if target.port == DEFAULT_PORTS[target.protocol] else f":{target.port}"
        return Login(f"{target.protocol}://{host}{port}", self.username, self.password)

    @property
    def files(self) -> Sequence[str]:
        """Which files ssh has to read."""
        return () if self.password is not None else (self.key, self.known_hosts)

    @property
    def ssh_options(self) -> Sequence[str]:
        """What to tell ssh: this name and key and no other, and a server that is known."""
        if self.password is not None:
            return ()
        return (
            "-F/dev/null",
            f"-oUser={self.username}",
            f"-i{self.key}",
            "-oIdentitiesOnly=yes",
            "-oIdentityAgent=none",
            f"-oUserKnownHostsFile={self.known_hosts}",
            "-oGlobalKnownHostsFile=/dev/null",
            "-oStrictHostKeyChecking=yes",
        )


def parse_password(content: bytes) -> str:
    """Return the password that a file has. Raises ValueError with why it has none.

    A line's end after it does not belong to it.
    """
    try:
        password = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if not password.strip():
        raise ValueError("is empty")
    if not _WHOLE_LINE.fullmatch(password):
        raise ValueError("has more than one line, or control characters")
    if len(content) > LARGEST_SECRET:
        raise ValueError(f"has more than {LARGEST_SECRET} bytes")
    return password
