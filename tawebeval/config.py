"""What the configuration is made of: tables, and the kinds of values that settings have."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import reduce
from ipaddress import ip_network
from operator import getitem
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tawebeval.core.forwarded import UNIX, Proxies
from tawebeval.core.identifiers import NAME as DAEMON_NAME
from tawebeval.core.tokens import NAME
from tawebeval.core.variables import is_reserved
from tawebeval.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_WORDS: dict[str, str] = {}  # by what msgspec says, which would show the pattern


def matching(pattern: str, words: str) -> Meta:
    """Return the constraint that a text matches `pattern` as a whole.

    `words` complete the message "should be ..." about a text that does not.
    """
    whole = rf"^(?:{pattern})\Z"
    _WORDS[f"Expected `str` matching regex {whole!r}"] = words
    return Meta(pattern=whole)


def describe_error(message: str) -> str:
    """Return msgspec's `message`, in words in place of a pattern."""
    return f"should be {_WORDS[message]}" if message in _WORDS else message


Count = Annotated[int, Meta(ge=1, le=10**9)]
Bytes = Annotated[int, Meta(ge=KIB, le=2**50)]
Host = Annotated[
    str, matching(r"(\*\.)?[A-Za-z0-9_.:-]+", 'a host such as "example.org", or "*.example.org"')
]
Seconds = Annotated[float, Meta(gt=0, le=10**9)]

# Written plainly, so that what is mounted there is what stands there.
AbsolutePath = Annotated[
    str,
    matching(
        r"(/(?!\.{1,2}(/|\Z))[^/\0]+)+",
        "an absolute path without '.' or '..', and without a slash at the end",
    ),
]
# A file of a secret: a path, or the name of what systemd hands over. ssh would take more than
# these characters apart.
SecretFile = Annotated[
    str,
    matching(
        r"(/?[A-Za-z0-9_@+.,:=-]+(/[A-Za-z0-9_@+.,:=-]+)*)?",
        "the path of a file, or a name, of the characters A-Z a-z 0-9 _ @ + . , : = - only",
    ),
]
Share = Annotated[int, Meta(ge=0, le=10**6)]
ByteShare = Annotated[int, Meta(ge=0, le=2**50)]
CallerName = Annotated[
    str,
    matching(
        NAME.pattern,
        "the name of a caller: up to 64 of A-Z a-z 0-9 . _ @ -, of which the first is a letter or"
        " a digit",
    ),
]
# As browsers write it: in lower case, and without a slash at the end.
Origin = Annotated[
    str,
    matching(
        r"\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "an origin as browsers write it, such as 'https://judge.example.org', in lower case and"
        " without a slash at the end, or '*'",
    ),
]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Table of the configuration file; unknown keys are errors."""


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
        matching(
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


class RepositorySettings(Section, frozen=True):
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


__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "BufferSettings",
    "CallbackSettings",
    "CallerSettings",
    "Configuration",
    "CredentialSettings",
    "EvaluationSettings",
    "HealthSettings",
    "HttpSettings",
    "LimitSettings",
    "LogSettings",
    "MetricsSettings",
    "PollSettings",
    "RepositorySettings",
    "SandboxSettings",
    "Section",
    "ServiceSettings",
    "StreamSettings",
    "parse_configuration",
]

OWN_PATHS = frozenset(
    {"evaluate", "evaluation", "evaluation_events", "evaluations", "health", "metrics"}
    | {"openapi.json", "static"}
)
"""With what the paths of the API begin: behind a proxy that takes the base path away they would be
taken for it."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BASE_PATH = re.compile(r"(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._~-]+)*")


class ServiceSettings(Section, frozen=True):
    """`[service]`: the daemon's process."""

    user: Annotated[
        str, matching(r"([a-z_][a-z0-9_-]*\$?)?", "the name of a user: a-z, 0-9, _ and -, or empty")
    ] = ""
    drain: Annotated[float, Meta(ge=0, le=10**9)] = 20
    name: Annotated[
        str, matching(f"({DAEMON_NAME})?", "up to 16 of the characters a-z and 0-9, or empty")
    ] = ""


class CallerSettings(Section, frozen=True):
    """`[callers]`: tokens, and the share of each caller."""

    tokens: str = ""
    open: bool = False
    origins: tuple[Origin, ...] = ("*",)
    running: Share = 0
    queued: Share = 200
    kept: Share = 2000
    buffers: ByteShare = 40 * MIB
    requests_per_minute: Share = 6000


class EvaluationSettings(Section, frozen=True):
    """`[evaluations]`: numbers and times of evaluations."""

    running: Annotated[int, Meta(ge=0, le=10**6)] = 0
    queued: Annotated[int, Meta(ge=0, le=10**6)] = 1000
    grace: Seconds = 2
    paused: Seconds = 600
    abandon_after: Seconds = 900
    retain: Seconds = 900
    kept: Count = 10_000
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(
                    f".environment: {name!r} should be the name of a variable: letters, digits and"
                    " _, and no digit at first"
                )
            if is_reserved(name):
                raise ValueError(f".environment.{name}: tawebeval sets this variable by itself")
            if "\0" in value:
                raise ValueError(f".environment.{name}: no variable can contain NUL")


class SandboxSettings(Section, frozen=True):
    """`[sandbox]`: kind and file system of the sandbox."""

    kind: Literal["auto", "bubblewrap", "none"] = "auto"
    network: bool = False
    loopback: bool = False
    readable: tuple[AbsolutePath, ...] = ()


class LimitSettings(Section, frozen=True):
    """`[limits]`: limits of one request and of one evaluation."""

    request_body: Bytes = 64 * MIB
    uploads: Bytes = 16 * GIB
    fields: Count = 64
    field: Bytes = 64 * KIB
    wall_clock: Seconds = 300
    cpu: Annotated[int, Meta(ge=1, le=10**9)] = 300
    memory: Annotated[int, Meta(ge=16 * MIB, le=2**50)] = 512 * MIB
    processes: Annotated[int, Meta(ge=8, le=10**6)] = 128
    open_files: Annotated[int, Meta(ge=16, le=10**6)] = 256
    file_size: Bytes = 256 * MIB
    disk: Bytes = GIB
    disk_files: Count = 100_000
    free_disk: Annotated[int, Meta(ge=0, le=2**50)] = 512 * MIB
    output: Bytes = 256 * MIB
    stderr: Bytes = 64 * MIB
    data_value: Bytes = MIB
    file: Bytes = 2 * MIB


class BufferSettings(Section, frozen=True):
    """`[buffers]`: memory for events."""

    total: Bytes = 256 * MIB
    evaluation: Bytes = 8 * MIB
    page: Bytes = 256 * KIB


class PollSettings(Section, frozen=True):
    """`[polls]`: long polls."""

    wait: Annotated[int, Meta(ge=0, le=3600)] = 30
    older: Annotated[int, Meta(ge=0, le=3600)] = 20


class StreamSettings(Section, frozen=True):
    """`[streams]`: streams of events."""

    heartbeat: Seconds = 15


class HttpSettings(Section, frozen=True):
    """`[http]`: limits and time-outs of connections and requests."""

    connections: Count = 800
    connections_per_address: Annotated[int, Meta(ge=0, le=10**9)] = 200
    line: Bytes = 8 * KIB
    headers: Count = 100
    header_bytes: Bytes = 32 * KIB
    head_deadline: Seconds = 20
    window: Seconds = 30
    rate: Bytes = 4 * KIB
    idle: Seconds = 60
    base_path: str = ""
    trusted_proxies: tuple[str, ...] = ()
    client_header: Literal["X-Forwarded-For", "Forwarded"] = "X-Forwarded-For"

    def __post_init__(self) -> None:
        if not _BASE_PATH.fullmatch(self.base_path):
            raise ValueError(
                f".base_path: {self.base_path!r} is no path such as '/judge', with a slash before"
                " each part and none at the end"
            )
        if self.base_path[1:].partition("/")[0] in OWN_PATHS:
            raise ValueError(
                f".base_path: {self.base_path!r} begins as paths of the API do; take another one"
            )
        try:
            Proxies.parse(self.trusted_proxies, self.client_header)
        except ValueError as error:
            raise ValueError(
                f".trusted_proxies: {error}; there may be addresses, networks and {UNIX!r}"
            ) from None


class LogSettings(Section, frozen=True):
    """`[log]`: contents and format of the log."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warn", "error"] = "info"
    access: bool = False


class MetricsSettings(Section, frozen=True):
    """`[metrics]`: readers of `GET /metrics`."""

    readers: Literal["loopback", "tokens", "nobody"] = "loopback"
    tokens: str = ""

    def __post_init__(self) -> None:
        if self.tokens and self.readers != "tokens":
            raise ValueError('.tokens: counts only where readers = "tokens"')


class HealthSettings(Section, frozen=True):
    """`[health]`: conditions of `GET /health/ready`."""

    free_disk: Annotated[int, Meta(ge=0, le=2**50)] = GIB


class Configuration(Section, frozen=True):
    """All sections of the file."""

    listen: Annotated[tuple[str, ...], Meta(min_length=1)] = ("tcp:8080:interface=127.0.0.1",)
    service: ServiceSettings = ServiceSettings()
    callers: CallerSettings = CallerSettings()
    repositories: RepositorySettings = RepositorySettings()
    evaluations: EvaluationSettings = EvaluationSettings()
    sandbox: SandboxSettings = SandboxSettings()
    limits: LimitSettings = LimitSettings()
    buffers: BufferSettings = BufferSettings()
    polls: PollSettings = PollSettings()
    streams: StreamSettings = StreamSettings()
    callbacks: CallbackSettings = CallbackSettings()
    http: HttpSettings = HttpSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    health: HealthSettings = HealthSettings()


def parse_configuration(text: str) -> Configuration:
    """Return the configuration of a file's text, with defaults for missing settings.

    Raises ConfigurationError with the path of the wrong key.
    """
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise ConfigurationError(f"the configuration is not TOML: {error}") from None
    unknown = [name for name in settings if name not in Configuration.__struct_fields__]
    if unknown:
        raise ConfigurationError(_escape(f"{unknown[0]}: there is no such setting"))
    try:
        return msgspec.convert(settings, Configuration)
    except msgspec.ValidationError as error:
        message = _with_path(str(error), settings)
        raise ConfigurationError(_escape(message)) from None


def _escape(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _with_path(message: str, settings: dict[str, Any]) -> str:
    """Return a message of msgspec with the key's path, `$.section` at its end, put in front.

    A section that rejects one of its keys begins its message with a dot and that key.
    """
    placed = re.fullmatch(r"(.*) - at `\$\.?([^`]*)`", message, re.DOTALL)
    assert placed is not None, message
    message, path = placed.groups()
    if message.startswith("."):
        key, _, message = message.partition(": ")
        path += key
    path, any_key, _ = path.partition("[...]")
    if any_key:  # msgspec names no key of a table that has keys of any name
        table = reduce(getitem, path.split("."), settings)
        path += "." + next(name for name, value in table.items() if not isinstance(value, str))
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL)
    if unknown:
        path = f"{path}.{unknown[1]}"
        message = "there is no such setting"
    return f"{path}: {describe_error(message)}"
