"""Settings of what the daemon connects to by itself: git's servers, and receivers of callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_network
from typing import Annotated, Literal

from msgspec import Meta

from tawebeval.settings import (
    GIB,
    MIB,
    Bytes,
    CallerName,
    Count,
    Host,
    Seconds,
    SecretFile,
    Section,
    shaped,
)

Protocol = Literal["https", "http", "git", "ssh", "file"]


def _check_networks(networks: Iterable[str]) -> None:
    for network in networks:
        try:
            ip_network(network)
        except ValueError as error:
            raise ValueError(f".private_networks: {error}") from None


class CredentialSettings(Section, frozen=True):
    """`[[repositories.credentials]]`: user name and secret for git servers."""

    host: Host
    username: Annotated[
        str,
        shaped(
            r"[A-Za-z0-9_][^\x00-\x20\x7f:%]*",
            "a user's name, which begins with a letter, a digit or _, without spaces, ':' and '%'",
        ),
    ]
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    password_file: SecretFile = ""
    key_file: SecretFile = ""
    known_hosts_file: SecretFile = ""
    callers: tuple[CallerName, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.password_file) == bool(self.key_file):
            raise ValueError("one of password_file and key_file is needed")
        if bool(self.key_file) != bool(self.known_hosts_file):
            raise ValueError(
                "known_hosts_file belongs to key_file, for host keys are never believed unseen"
            )


class Repositories(Section, frozen=True):
    """`[repositories]`: allowed sources of evaluators, and the cache."""

    protocols: tuple[Protocol, ...] = ("https",)
    allow_hosts: tuple[Host, ...] = ()
    deny_hosts: tuple[Host, ...] = ()
    private_networks: tuple[str, ...] = ()
    credentials: tuple[CredentialSettings, ...] = ()
    cache: Bytes = 10 * GIB
    fetches: Annotated[int, Meta(ge=1, le=1000)] = 4
    fetch_timeout: Seconds = 300
    fetch_bytes: Bytes = GIB
    memory: Annotated[int, Meta(ge=64 * MIB, le=2**50)] = GIB
    tree_files: Count = 100_000
    tree_bytes: Bytes = GIB

    def __post_init__(self) -> None:
        _check_networks(self.private_networks)


class CallbackSettings(Section, frozen=True):
    """`[callbacks]`: receivers of callbacks, and retries."""

    enabled: bool = False
    secrets: str = ""
    allow_hosts: tuple[Host, ...] = ()
    deny_hosts: tuple[Host, ...] = ()
    private_networks: tuple[str, ...] = ()
    attempts: Annotated[int, Meta(ge=1, le=100)] = 8
    first_delay: Seconds = 5
    longest_delay: Seconds = 600
    timeout: Seconds = 15
    at_once: Count = 10
    buffer: Bytes = 16 * MIB

    def __post_init__(self) -> None:
        _check_networks(self.private_networks)
