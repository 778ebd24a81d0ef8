"""Configuration: every setting with its type, range and default; parser of the TOML file.

`etc/tawebeval.toml` documents the same settings for operators; a test compares the two. An error
names the path of the key.
"""

from __future__ import annotations

import re
import tomllib
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tawebeval.core.forwarded import UNIX, Proxies
from tawebeval.core.identifiers import NAME as DAEMON_NAME
from tawebeval.core.variables import is_reserved
from tawebeval.errors import ConfigurationError
from tawebeval.outbound import CallbackSettings, CredentialSettings, Repositories
from tawebeval.settings import (
    GIB,
    KIB,
    MIB,
    AbsolutePath,
    Bytes,
    ByteShare,
    Count,
    Origin,
    Seconds,
    Section,
    Share,
    shaped,
    worded,
)

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "Buffers",
    "CallbackSettings",
    "Callers",
    "Configuration",
    "CredentialSettings",
    "Evaluations",
    "Health",
    "Http",
    "Limits",
    "Log",
    "Metrics",
    "Polls",
    "Repositories",
    "SandboxSettings",
    "Section",
    "Service",
    "Streams",
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


class Service(Section, frozen=True):
    """`[service]`: the daemon's process."""

    user: Annotated[
        str, shaped(r"([a-z_][a-z0-9_-]*\$?)?", "the name of a user: a-z, 0-9, _ and -, or empty")
    ] = ""
    drain: Annotated[float, Meta(ge=0, le=10**9)] = 20
    name: Annotated[
        str, shaped(f"({DAEMON_NAME})?", "up to 16 of the characters a-z and 0-9, or empty")
    ] = ""


class Callers(Section, frozen=True):
    """`[callers]`: tokens, and the share of each caller."""

    tokens: str = ""
    open: bool = False
    origins: tuple[Origin, ...] = ("*",)
    running: Share = 0
    queued: Share = 200
    kept: Share = 2000
    buffers: ByteShare = 40 * MIB
    requests_per_minute: Share = 6000


class Evaluations(Section, frozen=True):
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


class Limits(Section, frozen=True):
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


class Buffers(Section, frozen=True):
    """`[buffers]`: memory for events."""

    total: Bytes = 256 * MIB
    evaluation: Bytes = 8 * MIB
    page: Bytes = 256 * KIB


class Polls(Section, frozen=True):
    """`[polls]`: long polls."""

    wait: Annotated[int, Meta(ge=0, le=3600)] = 30
    older: Annotated[int, Meta(ge=0, le=3600)] = 20


class Streams(Section, frozen=True):
    """`[streams]`: streams of events."""

    heartbeat: Seconds = 15


class Http(Section, frozen=True):
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
            Proxies.of(self.trusted_proxies, self.client_header)
        except ValueError as error:
            raise ValueError(
                f".trusted_proxies: {error}; there may be addresses, networks and {UNIX!r}"
            ) from None


class Log(Section, frozen=True):
    """`[log]`: contents and format of the log."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warn", "error"] = "info"
    access: bool = False


class Metrics(Section, frozen=True):
    """`[metrics]`: readers of `GET /metrics`."""

    readers: Literal["loopback", "tokens", "nobody"] = "loopback"
    tokens: str = ""

    def __post_init__(self) -> None:
        if self.tokens and self.readers != "tokens":
            raise ValueError('.tokens: counts only where readers = "tokens"')


class Health(Section, frozen=True):
    """`[health]`: conditions of `GET /health/ready`."""

    free_disk: Annotated[int, Meta(ge=0, le=2**50)] = GIB


class Configuration(Section, frozen=True):
    """All sections of the file."""

    listen: Annotated[tuple[str, ...], Meta(min_length=1)] = ("tcp:8080:interface=127.0.0.1",)
    service: Service = Service()
    callers: Callers = Callers()
    repositories: Repositories = Repositories()
    evaluations: Evaluations = Evaluations()
    sandbox: SandboxSettings = SandboxSettings()
    limits: Limits = Limits()
    buffers: Buffers = Buffers()
    polls: Polls = Polls()
    streams: Streams = Streams()
    callbacks: CallbackSettings = CallbackSettings()
    http: Http = Http()
    log: Log = Log()
    metrics: Metrics = Metrics()
    health: Health = Health()


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
    return f"{path}: {worded(message)}"
