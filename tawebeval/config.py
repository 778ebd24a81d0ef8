"""Configuration: every setting with its type, range and default; parser of the TOML file.

`etc/tawebeval.toml` documents the same settings for operators; a test compares the two. An error
names the path of the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache, lru_cache
from ipaddress import ip_network
from math import inf
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, structs

from tawebeval.core.evaluations import DAEMON_NAME_PATTERN as DAEMON_NAME
from tawebeval.core.form import (
    DEFAULT_ENVIRONMENT_NAME,
    FIELD_NAME_PATTERN,
    LIMIT_UNITS,
    OWN_INPUT_FIELD,
    LimitRange,
    SubmissionFile,
    choose_limits,
    describe_limit,
    find_field_size_limit,
    parse_form,
    parse_size,
)
from tawebeval.core.hosts import UNIX_PROXIES_KEYWORD, TrustedProxies, parse_server_address
from tawebeval.core.segi import is_reserved_variable
from tawebeval.core.tokens import CALLER_NAME_PATTERN, PROBLEM_NAME_PATTERN
from tawebeval.errors import ConfigurationError, InvalidField, ProblemClosed, format_size

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

RESERVED_URL_PATHS = frozenset(
    {"docs", "environments", "evaluate", "evaluation", "evaluation_events", "evaluations", "health"}
    | {"metrics", "openapi.json", "problems", "standings", "static", "whoami"}
)
"""First parts of the API's paths. A base path must not begin with one: behind a proxy that removes
the base path, a path of the API would be taken for the base path."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Settings in whose place a secret may stand by mistake: errors do not show it.
_SECRET = re.compile(
    r"_file$|\.tokens$|\.secrets$|^evaluations\.environment\.|^environments\..*\.variables\."
)
_TABLE_NAME = re.compile(PROBLEM_NAME_PATTERN)
_MAX_VARIABLE_BYTES = 64 * KIB
_BOUND = re.compile(r"[0-9]{4,}")
_PATH = r"(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._~-]+)*"
_BASE_PATH = re.compile(_PATH)
_PEER_URL = re.compile(rf"https?://[^/?#@\s]+{_PATH}")
MAX_TREE_FILES = 100_000
"""Files and directories of a checked-out tree, those of its submodules among them."""
MAX_SUBMODULES = 16
"""Submodules of a commit, those of its submodules among them."""
MAX_CONCURRENT_CALLBACKS = 10
"""Attempts of callbacks that are made at the same time."""
MAX_PEER_DAEMONS = 15
"""The most other daemons in `service.peers`."""

_WORDS: dict[str, str] = {}  # by msgspec's message, which would show the pattern


def _matching(pattern: str, words: str) -> Meta:
    """Return the constraint that a text matches `pattern` as a whole.

    `words` complete the message "should be ..." about any other text.
    """
    whole = rf"^(?:{pattern})\Z"
    _WORDS[f"Expected `str` matching regex {whole!r}"] = words
    return Meta(pattern=whole)


def _add_unit(bound: re.Match[str]) -> str:
    """Return the bound of a range, also in a larger unit if it seems to be a size."""
    number = int(bound[0])
    return bound[0] if number % KIB else f"{number} ({format_size(number)})"


_FORMS = {
    "bool": "true or false, without quotes",
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "array": "a list",
    "datetime": "a time with its offset, such as 2026-12-01T12:00:00+01:00",
    "object": "a table",
}
"""How TOML writes each type of msgspec's messages."""

_NO_TIME = "Invalid RFC3339 encoded datetime"


def _format_value(value: object) -> str:
    """Return a value as TOML writes it, at most 80 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    is_date_or_time = hasattr(value, "isoformat")
    return f"{value!s:.80}" if is_date_or_time else f"{value!r:.80}"


_Count = Annotated[int, Meta(ge=1, le=10**9)]
# The file may have such a number as a text, too, such as "256M".
_SIZE = {"unit": "bytes"}
_Bytes = Annotated[int, Meta(ge=KIB, le=2**50, extra=_SIZE)]
_Host = Annotated[
    str, _matching(r"(\*\.)?[A-Za-z0-9_.:-]+", 'a host such as "example.org", or "*.example.org"')
]
_FieldName = Annotated[
    str, _matching(FIELD_NAME_PATTERN, "NAME of a field submission[NAME], such as source")
]
_FileExtension = Annotated[
    str, _matching(r"[a-z0-9_+-]{1,16}", "the end of file names behind the last dot, such as py")
]
_Line = Annotated[str, _matching(r"[^\x00-\x1f\x7f]{0,200}", "one line of up to 200 characters")]
_Seconds = Annotated[float, Meta(gt=0, le=10**9)]

# In its plainest form, so that the operator sees the path that is mounted.
_AbsolutePath = Annotated[
    str,
    _matching(
        r"(/(?!\.{1,2}(/|\Z))[^/\0]+)+",
        "an absolute path without '.', '..' or a slash at the end",
    ),
]
# The file of a secret: a path, or the name of a credential that systemd provides. ssh would split
# a path with other characters.
_SecretFile = Annotated[
    str,
    _matching(
        r"(/?[A-Za-z0-9_@+.,:=-]+(/[A-Za-z0-9_@+.,:=-]+)*)?",
        "a path or a name of the characters A-Z a-z 0-9 _ @ + . , : = -",
    ),
]
_OptionalCount = Annotated[int, Meta(ge=0, le=10**6)]
_OptionalBytes = Annotated[int, Meta(ge=0, le=2**50, extra=_SIZE)]
_Maximum = Annotated[int, Meta(ge=0, le=10**9)]
_CallerName = Annotated[
    str,
    _matching(
        CALLER_NAME_PATTERN.pattern,
        "a caller's name: up to 64 of the characters A-Z a-z 0-9 . _ @ -, the first a letter or"
        " digit",
    ),
]
# As browsers write an origin: in lower case, and without a slash at the end.
_Origin = Annotated[
    str,
    _matching(
        r"\*|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "an origin such as 'https://judge.example.org', in lower case and without a slash at the"
        " end, or '*'",
    ),
]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Table of the configuration file; unknown keys are errors."""


def _check_variables(key: str, variables: Mapping[str, str]) -> None:
    """Raise ValueError unless the operator may set these variables in the table `key`."""
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(
                f".{key}: {name!r} should be a variable's name: letters, digits and _, the first"
                " no digit"
            )
        if is_reserved_variable(name):
            raise ValueError(f".{key}.{name}: tawebeval sets this variable; remove the key")
        if "\0" in value:
            raise ValueError(f".{key}.{name}: a variable cannot contain NUL")


def _check_networks(networks: Iterable[str]) -> None:
    for network in networks:
        try:
            ip_network(network)
        except ValueError as error:
            raise ValueError(f".private_networks: {error}") from None


def _check_peer(name: str, url: str) -> None:
    """Raise ValueError unless a daemon can have this name and this base URL."""
    if not re.fullmatch(DAEMON_NAME, name):
        raise ValueError(
            f".peers: {name!r:.80} should be a daemon's name: up to 16 of the characters a-z and"
            " 0-9"
        )
    try:
        if not _PEER_URL.fullmatch(url):
            raise ValueError(
                "should be a URL such as 'http://192.0.2.1:8080' or 'https://b.example.org/judge',"
                " without user, query or a slash at the end"
            )
        parse_server_address(url)
    except ValueError as error:
        shown = "the URL" if "@" in url else f"{url!r:.80}"
        raise ValueError(f".peers.{name}: {shown} {error}") from None


class ServiceSettings(Section, frozen=True):
    """`[service]`: the daemon's process."""

    drain: Annotated[float, Meta(ge=0, le=10**9)] = 20
    name: Annotated[
        str, _matching(f"({DAEMON_NAME})?", "up to 16 of the characters a-z and 0-9, or empty")
    ] = ""
    peers: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.peers and not self.name:
            raise ValueError(".peers: needs service.name, the name of this daemon")
        if (count := len(self.other_daemon_urls)) > MAX_PEER_DAEMONS:
            raise ValueError(f".peers: has {count} other daemons; the limit is {MAX_PEER_DAEMONS}")
        for name, url in self.peers.items():
            _check_peer(name, url)

    @property
    def other_daemon_urls(self) -> dict[str, str]:
        """The base URLs of the other daemons by name: `peers` may have this daemon, too."""
        return {name: url for name, url in self.peers.items() if name != self.name}


class CallerSettings(Section, frozen=True):
    """`[callers]`: tokens, and the share of each caller."""

    tokens: str = ""
    open: bool = False
    origins: tuple[_Origin, ...] = ("*",)
    running: _OptionalCount = 0
    queued: _OptionalCount = 200
    kept: _OptionalCount = 2000
    requests_per_minute: _OptionalCount = 6000
    link_days: Annotated[float, Meta(ge=0, le=366)] = 30


class CredentialSettings(Section, frozen=True):
    """`[[repositories.credentials]]`: user name and secret for git servers."""

    host: _Host
    username: Annotated[
        str,
        _matching(
            r"[A-Za-z0-9_][^\x00-\x20\x7f:%]*",
            "a user name that begins with a letter, a digit or _, without spaces, ':' and '%'",
        ),
    ]
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    password_file: _SecretFile = ""
    key_file: _SecretFile = ""
    known_hosts_file: _SecretFile = ""
    callers: tuple[_CallerName, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.password_file) == bool(self.key_file):
            raise ValueError("set either password_file or key_file")
        if bool(self.key_file) != bool(self.known_hosts_file):
            raise ValueError(
                "set key_file and known_hosts_file together: the server's host key is checked"
            )


class RepositoryFetchSettings(Section, frozen=True):
    """`[repositories]`: allowed sources of evaluators, and the cache."""

    protocols: tuple[Literal["https", "http", "git", "ssh", "file"], ...] = ("https",)
    allow_hosts: tuple[_Host, ...] = ()
    private_networks: tuple[str, ...] = ()
    credentials: tuple[CredentialSettings, ...] = ()
    cache: _Bytes = 10 * GIB
    fetches: Annotated[int, Meta(ge=1, le=1000)] = 4
    fetch_timeout: _Seconds = 300
    fetch_bytes: _Bytes = GIB
    memory: Annotated[int, Meta(ge=64 * MIB, le=2**50, extra=_SIZE)] = GIB
    tree_bytes: _Bytes = GIB

    def __post_init__(self) -> None:
        _check_networks(self.private_networks)


class EvaluationSettings(Section, frozen=True):
    """`[evaluations]`: numbers and times of evaluations."""

    running: Annotated[int, Meta(ge=0, le=10**6)] = 0
    queued: Annotated[int, Meta(ge=0, le=10**6)] = 1000
    retain: _Seconds = 900
    kept: _Count = 10_000
    problems: Annotated[str, _matching(r"(/.+)?", "the absolute path of a file, or empty")] = ""
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_variables("environment", self.environment)


class SandboxSettings(Section, frozen=True):
    """`[sandbox]`: kind and file system of the sandbox."""

    kind: Literal["auto", "bubblewrap", "none"] = "auto"
    network: bool = False
    loopback: bool = False
    readable: tuple[_AbsolutePath, ...] = ()


_SLURM_OPTIONS = (
    *("account", "comment", "constraint", "contiguous", "cpus-per-task", "exclude", "exclusive"),
    *("extra-node-info", "gpus", "gpus-per-node", "gres", "hint", "licenses", "mincpus", "nice"),
    *("nodelist", "oversubscribe", "partition", "priority", "qos", "reservation", "tmp", "wckey"),
)
_SlurmArgument = Annotated[
    str,
    _matching(
        rf"--({'|'.join(_SLURM_OPTIONS)})(=[A-Za-z0-9_.:,=@&|*()\[\]/+-]+)?",
        f"one of the options of srun --{', --'.join(_SLURM_OPTIONS)}, with =VALUE",
    ),
]
_SlurmArguments = Annotated[tuple[_SlurmArgument, ...], Meta(max_length=20)]
_Time = Annotated[datetime, Meta(tz=True)]
_StatementPath = Annotated[
    str, _matching(r"([^/\0][^\0]*)?", "a path in the problem's directory, such as 'statement.md'")
]
_OptionalPath = Annotated[str, _matching(r"(/[^\0]+)?", "an absolute path, or empty")]


class SlurmJobSettings(Section, frozen=True):
    """`[environments.NAME.runner]`, `[problems.NAME.runner]`: options of Slurm's jobs.

    They follow those in `[runner]`.
    """

    arguments: _SlurmArguments = ()


class RunnerSettings(Section, frozen=True):
    """`[runner]`: the machines that evaluators run on."""

    kind: Literal["local", "slurm"] = "local"
    shared: _OptionalPath = ""
    arguments: _SlurmArguments = ()
    retries: Annotated[int, Meta(ge=0, le=1)] = 0


class MaximumLimitSettings(Section, frozen=True):
    """`[limits.maximum]`: the most that a request may choose; 0: the default in `[limits]`."""

    wall_clock: Annotated[float, Meta(ge=0, le=10**9)] = 0
    cpu: _Maximum = 0
    memory: _OptionalBytes = 0
    processes: _OptionalCount = 0
    open_files: _OptionalCount = 0
    file_size: _OptionalBytes = 0
    disk: _OptionalBytes = 0
    disk_files: _Maximum = 0
    output: _OptionalBytes = 0
    stderr: _OptionalBytes = 0


class LimitSettings(Section, frozen=True):
    """`[limits]`: limits of one request and of one evaluation.

    One evaluation has the limits of `core.form.choose_limits`.
    """

    request_body: _Bytes = 64 * MIB
    uploads: _Bytes = 16 * GIB
    wall_clock: _Seconds = 300
    cpu: Annotated[int, Meta(ge=1, le=10**9)] = 300
    memory: Annotated[int, Meta(ge=16 * MIB, le=2**50, extra=_SIZE)] = 512 * MIB
    processes: Annotated[int, Meta(ge=8, le=10**6)] = 128
    open_files: Annotated[int, Meta(ge=16, le=10**6)] = 256
    file_size: _Bytes = 256 * MIB
    disk: _Bytes = GIB
    disk_files: _Count = 100_000
    free_disk: _OptionalBytes = 512 * MIB
    output: _Bytes = 256 * MIB
    stderr: _Bytes = 64 * MIB
    maximum: MaximumLimitSettings = MaximumLimitSettings()

    def __post_init__(self) -> None:
        for name in LIMIT_UNITS:
            default, maximum = getattr(self, name), getattr(self.maximum, name)
            if 0 < maximum < default:
                raise ValueError(
                    f".maximum.{name}: {describe_limit(name, maximum)} is below limits.{name},"
                    f" {describe_limit(name, default)}; raise it, or remove the key"
                )

    @property
    def free_disk_for_readiness(self) -> int:
        """Bytes that are free on the disks of a daemon that is ready: twice `free_disk`."""
        return 2 * self.free_disk

    @property
    @lru_cache(4)  # noqa: B019  (each form needs them; four configurations are no leak)
    def requestable_ranges(self) -> Mapping[str, LimitRange]:
        """The values that a request may choose, by the names of the limits."""
        return {
            name: LimitRange(_LEAST[name], max(getattr(self, name), getattr(self.maximum, name)))
            for name in LIMIT_UNITS
        }

    @property
    def largest_requestable_limits(self) -> LimitSettings:
        """The limits of the largest evaluation that a request may ask for."""
        return choose_limits(self, dict.fromkeys(LIMIT_UNITS, inf), self.requestable_ranges)


def _read_least(name: str) -> float:
    """Return the minimum of a setting of `[limits]`; 0 for a setting that is just above 0."""
    field = next(one for one in structs.fields(LimitSettings) if one.name == name)
    least = get_args(field.type)[1].ge
    return 0 if least is None else least


_LEAST: Mapping[str, float] = {name: _read_least(name) for name in LIMIT_UNITS}


class EventBufferSettings(Section, frozen=True):
    """`[buffers]`: memory and disk space for events."""

    max_page_bytes: ClassVar[int] = 256 * KIB  # of events on one page
    total: _Bytes = 256 * MIB
    disk: _Bytes = 16 * GIB


class LongPollSettings(Section, frozen=True):
    """`[polls]`: long polls."""

    wait: Annotated[int, Meta(ge=0, le=3600)] = 30


class ArchiveSettings(Section, frozen=True):
    """`[archive]`: ended evaluations on the disk."""

    enabled: bool = False
    days: Annotated[float, Meta(gt=0, le=100_000)] = 90
    size: Annotated[int, Meta(ge=MIB, le=2**50, extra=_SIZE)] = 10 * GIB


class CallbackSettings(Section, frozen=True):
    """`[callbacks]`: secrets and receivers of callbacks."""

    secrets: str = ""
    allow_hosts: tuple[_Host, ...] = ()
    private_networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_networks(self.private_networks)


class HttpSettings(Section, frozen=True):
    """`[http]`: limits of connections, and proxies. The bounds of requests are constants."""

    max_line_bytes: ClassVar[int] = 8 * KIB  # the request line, and each header
    max_headers: ClassVar[int] = 100  # headers; browsers behind proxies send about 40
    max_header_bytes: ClassVar[int] = 32 * KIB
    head_timeout: ClassVar[float] = 20
    # A client sends that many bytes of a body in each window, and takes them after the first one.
    rate_window_seconds: ClassVar[float] = 30
    min_bytes_per_second: ClassVar[int] = 4 * KIB
    idle_timeout: ClassVar[float] = 60
    connections: _Count = 1500
    connections_per_address: Annotated[int, Meta(ge=0, le=10**9)] = 200
    base_path: str = ""
    trusted_proxies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _BASE_PATH.fullmatch(self.base_path):
            raise ValueError(
                f".base_path: {self.base_path!r} should be a path such as '/judge', with a slash"
                " before each part and none at the end"
            )
        if self.base_path[1:].partition("/")[0] in RESERVED_URL_PATHS:
            raise ValueError(
                f".base_path: {self.base_path!r} begins with a path of the API; choose another path"
            )
        try:
            TrustedProxies.parse(self.trusted_proxies)
        except ValueError as error:
            raise ValueError(
                f".trusted_proxies: {error};"
                f" allowed: IP addresses, networks and {UNIX_PROXIES_KEYWORD!r}"
            ) from None


class LogSettings(Section, frozen=True):
    """`[log]`: contents and format of the log."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warn", "error"] = "info"
    access: bool = False


class MetricsSettings(Section, frozen=True):
    """`[metrics]`: readers of `GET /metrics`."""

    tokens: str = ""


class EnvironmentSettings(Section, frozen=True):
    """`[environments.NAME]`: a root file system that a request may choose."""

    root: _AbsolutePath
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    description: _Line = ""
    runner: SlurmJobSettings = SlurmJobSettings()

    def __post_init__(self) -> None:
        _check_variables("variables", self.variables)
        size = sum(len(f"{name}={value}".encode()) for name, value in self.variables.items())
        if size > _MAX_VARIABLE_BYTES:
            raise ValueError(
                f".variables: names and values have {format_size(size)}; the limit is"
                f" {format_size(_MAX_VARIABLE_BYTES)}"
            )


class ProblemSettings(Section, frozen=True):
    """`[problems.NAME]`: an evaluator with all that a submission does not choose.

    `build` is a command that prepares the tree once for all evaluations of a commit. `fields` are
    the names of the submission's fields, empty for any. `extensions` are those of the
    files that the page offers, the first one to begin with; empty for any. `title` and
    `description` are for people. `statement` is the path of a file of Markdown in `directory`.
    With `own_input` the evaluator also runs a submission on an input of its author's own.
    Submissions are accepted from `opens` on, before `closes` or, if they may be `late`, after it.
    """

    repository: str
    command: str
    build: Annotated[
        str, _matching(r"[^\0]{0,4096}", "a shell command of up to 4096 characters without NUL")
    ] = ""
    commit: str = ""
    branch: str = ""
    directory: str = ""
    environment: str = ""
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    fields: Annotated[tuple[_FieldName, ...], Meta(max_length=1000)] = ()
    extensions: Annotated[tuple[_FileExtension, ...], Meta(max_length=50)] = ()
    title: _Line = ""
    description: _Line = ""
    statement: _StatementPath = ""
    own_input: bool = False
    opens: _Time | None = None
    closes: _Time | None = None
    late: bool = False
    runner: SlurmJobSettings = SlurmJobSettings()

    def __post_init__(self) -> None:
        if self.late and self.closes is None:
            raise ValueError(".late: needs closes")
        if self.opens and self.closes and self.closes < self.opens:
            raise ValueError(".closes: is before opens")
        for name, moment in (("opens", self.opens), ("closes", self.closes)):
            # Clients are told it in UTC, where the year may be 0 or 10000.
            if moment and not 1970 <= moment.year < 9999:
                raise ValueError(f".{name}: the year is not 1970 to 9998")
        if OWN_INPUT_FIELD in self.fields:
            raise ValueError(f".fields: {OWN_INPUT_FIELD} is reserved; set own_input = true")
        if bool(self.commit) == bool(self.branch):
            raise ValueError("set either commit or branch")
        for name, value in self.limits.items():
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError(  # noqa: TRY004  (msgspec adds the path to no other)
                    f".limits.{name}: {value!r:.80} is neither a number nor a text such as '256M'"
                )

    def check_open(self, name: str, timestamp: float, *, for_reading: bool = False) -> None:
        """Raise ProblemClosed if the problem `name` accepts no submissions at a time.

        `timestamp` is in seconds since the epoch. A closed problem may be read.
        """
        now = datetime.fromtimestamp(timestamp, UTC)
        if self.opens and now < self.opens:
            raise ProblemClosed(f"the problem {name!r} opens at {self.opens.isoformat()}")
        if self.closes and now >= self.closes and not (self.late or for_reading):
            raise ProblemClosed(f"the problem {name!r} closed at {self.closes.isoformat()}")

    @property
    def form_fields(self) -> dict[str, str]:
        """The values of the form's fields that are no files, by name."""
        given = {
            "repository[url]": self.repository,
            "repository[branch]": self.branch,
            "commit_oid": self.commit,
            "directory": self.directory,
            "evaluator_cmd": self.command,
            "environment": self.environment,
            **{f"limits[{name}]": str(value) for name, value in self.limits.items()},
        }
        return {name: value for name, value in given.items() if value}


class Configuration(Section, frozen=True):
    """All sections of the file."""

    listen: Annotated[tuple[str, ...], Meta(min_length=1)] = ("tcp:8080:interface=127.0.0.1",)
    service: ServiceSettings = ServiceSettings()
    callers: CallerSettings = CallerSettings()
    repositories: RepositoryFetchSettings = RepositoryFetchSettings()
    evaluations: EvaluationSettings = EvaluationSettings()
    sandbox: SandboxSettings = SandboxSettings()
    runner: RunnerSettings = RunnerSettings()
    limits: LimitSettings = LimitSettings()
    buffers: EventBufferSettings = EventBufferSettings()
    polls: LongPollSettings = LongPollSettings()
    archive: ArchiveSettings = ArchiveSettings()
    callbacks: CallbackSettings = CallbackSettings()
    http: HttpSettings = HttpSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    environments: dict[str, EnvironmentSettings] = msgspec.field(default_factory=dict)
    problems: dict[str, ProblemSettings] = msgspec.field(default_factory=dict)


MAX_NAMES_BY_TABLE: Mapping[str, int] = {"environments": 100, "problems": 1000}
"""The tables whose keys are names, `[environments.NAME]`, and the most names in each."""


def parse_configuration(text: str) -> Configuration:
    """Return the configuration of a file's text, with defaults for missing settings.

    Raises ConfigurationError with the path of the wrong key.
    """
    configuration: Configuration = _convert(_load_toml(text, "the configuration"), Configuration)
    _check_environments(configuration)
    _check_runner(configuration)
    check_problem_settings(configuration, configuration.problems)
    return configuration


def add_problem_settings(configuration: Configuration, text: str) -> Configuration:
    """Return a checked configuration with the problems of a file's text, too: a table for each.

    Raises ConfigurationError with the path of the wrong key.
    """
    problems = dict(configuration.problems)
    tables = _load_toml(text, "the file")
    added: dict[str, ProblemSettings] = _convert(tables, dict[str, ProblemSettings], "problems")
    for name, problem in added.items():
        if name in problems:
            raise ConfigurationError(
                f"problems.{name}: the configuration has this problem, too; remove one of them"
            )
        problems[name] = problem
    _check_table_count("problems", len(problems))
    check_problem_settings(configuration, added)
    return structs.replace(configuration, problems=problems)


def _load_toml(text: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise ConfigurationError(f"{what} is not TOML: {error}") from None


def check_problem_settings(
    configuration: Configuration, problems: Mapping[str, ProblemSettings]
) -> None:
    """Check the fields that problems set as those of a form of this configuration.

    Raises ConfigurationError with the path of the wrong key.
    """
    limits = configuration.limits
    ranges = limits.requestable_ranges
    for name, problem in problems.items():
        fields = problem.form_fields
        try:
            for field, value in fields.items():
                size, most = len(value.encode()), find_field_size_limit(field) or 0
                if size > most:
                    raise InvalidField(
                        field, f"is {format_size(size)}; the limit is {format_size(most)}"
                    )
            parse_form(
                fields,
                [SubmissionFile("source", "source")],
                configuration.repositories.protocols,
                ranges,
                configuration.environments,
                name,
            )
        except InvalidField as error:
            field = str(error.extra_members["field"])
            key = _PROBLEM_KEYS.get(field, field.replace("[", ".").removesuffix("]"))
            detail = error.detail.removeprefix(f"{field}: ")
            place = _check_table_name("problems", name)
            raise ConfigurationError(_escape(f"{place}.{key}: {detail}")) from None


_PROBLEM_KEYS = {
    "repository[url]": "repository",
    "repository[branch]": "branch",
    "commit_oid": "commit",
    "evaluator_cmd": "command",
}
"""The keys of `[problems.NAME]` by the fields of the form, where their names differ."""


def _check_environments(configuration: Configuration) -> None:
    if DEFAULT_ENVIRONMENT_NAME in configuration.environments:
        raise ConfigurationError(
            f"environments.{DEFAULT_ENVIRONMENT_NAME}: the name of the machine's own programs",
            "choose another name",
        )
    if configuration.environments and configuration.sandbox.kind == "none":
        raise ConfigurationError(
            'environments: an environment needs a sandbox, and sandbox.kind is "none"',
            "remove one of the two settings",
        )


def _check_runner(configuration: Configuration) -> None:
    runner = configuration.runner
    if runner.kind == "local":
        return
    if not runner.shared:
        raise ConfigurationError(
            "runner.shared: no directory is named that this machine and the nodes see",
            'set it, or runner.kind = "local"',
        )
    if configuration.sandbox.kind == "none":
        raise ConfigurationError(
            'runner.kind: the nodes run evaluators in a sandbox, and sandbox.kind is "none"',
            "remove one of the two settings",
        )


def _check_table_count(table: str, count: int) -> None:
    most = MAX_NAMES_BY_TABLE[table]
    if count > most:
        raise ConfigurationError(f"{table}: {count} tables; the limit is {most}")


def _check_table_name(table: str, name: str) -> str:
    """Return the path of a table with a name, as TOML writes it."""
    if not _TABLE_NAME.fullmatch(name):
        shown = f"{name!r:.80}"
        raise ConfigurationError(
            f"{table}: {shown} should be a name of up to 64 of the characters a-z 0-9 _ . -, the"
            " first a letter or digit"
        )
    return f'{table}."{name}"' if "." in name else f"{table}.{name}"


def _convert(value: Any, kind: Any, path: str = "") -> Any:
    """Return the value of the setting at `path`, checked against its type.

    Raises ConfigurationError with the path of the wrong key.
    """
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    given, inner = value, get_args(base)
    if isinstance(base, type) and issubclass(base, Section):
        return _convert_section(value, base, path)
    if get_origin(base) is tuple and isinstance(value, list):
        value = [_convert(one, inner[0], f"{path}[{number}]") for number, one in enumerate(value)]
    elif get_origin(base) is dict and isinstance(value, dict):
        if path in MAX_NAMES_BY_TABLE:
            _check_table_count(path, len(value))
        value = {
            name: _convert(
                one,
                inner[1],
                _check_table_name(path, name) if path in MAX_NAMES_BY_TABLE else f"{path}.{name}",
            )
            for name, one in value.items()
        }
    elif _is_size(kind) and type(value) is not int:
        size = parse_size(value) if isinstance(value, str) else None
        if size is None:
            raise ConfigurationError(
                _escape(f"{path}: {_format_value(value)} is not a size"),
                'write a number of bytes, or a text with K, M, G or T, such as "256M"',
            )
        value = size
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _make_error(path, given, str(error), inner) from None


def _convert_section(settings: Any, kind: type[Section], path: str) -> Section:
    """Return the table at `path`, with defaults for missing settings."""
    if not isinstance(settings, dict):
        raise _make_error(path, settings, "Expected `object`")
    types = _read_types(kind)
    if unknown := [name for name in settings if name not in types]:
        raise ConfigurationError(_escape(_describe_unknown(unknown[0], path)))
    read = {
        name: _convert(value, types[name], f"{path}.{name}".lstrip("."))
        for name, value in settings.items()
    }
    try:
        return msgspec.convert(read, kind)
    except msgspec.ValidationError as error:
        raise _make_error(path, settings, str(error)) from None


@cache
def _read_types(kind: type[Section]) -> Mapping[str, Any]:
    return {field.name: field.type for field in structs.fields(kind)}


def _make_error(path: str, value: object, message: str, allowed: Sequence[Any] = ()) -> Exception:
    """Return the error about the `value` at `path`, from the message of msgspec or of a section.

    A section that rejects one of its keys begins its message with a dot and that key.
    """
    shown = "the value" if _SECRET.search(path) else _format_value(value)
    if message.startswith("."):
        return ConfigurationError(_escape(path + message))
    if message in _WORDS:
        message = f"{shown} should be {_WORDS[message]}"
    elif message in ("Expected `datetime` with a timezone component", _NO_TIME):
        message = f"{shown} is not allowed; write {_FORMS['datetime']}"
    elif message.startswith("Invalid enum value"):
        message = f"{shown} is not allowed; allowed: {', '.join(allowed)}"
    elif expected := re.fullmatch("Expected `([a-z |]+)`(.*)", message):
        kinds = [kind for kind in expected[1].split(" | ") if kind != "null"]
        form = " or ".join(_FORMS.get(kind, kind) for kind in kinds)
        bounds = "" if expected[2].startswith(", got") else _BOUND.sub(_add_unit, expected[2])
        message = f"{shown} is not allowed; write {form}{bounds}"
    elif missing := re.fullmatch("Object missing required field `(.*)`", message):
        message = f"{missing[1]} is required"
    return ConfigurationError(_escape(f"{path}: {message}"))


def _is_size(kind: Any) -> bool:
    """Tell whether the type of a setting is a number of bytes."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return any(isinstance(meta, Meta) and meta.extra == _SIZE for meta in metas)


def _describe_unknown(name: str, table: str) -> str:
    """Return the message about an unknown key of a table ("" = the top), with the nearest setting.

    A key of that name in another table is the nearest.
    """
    paths = list(_list_settings(Configuration))
    place = re.sub(r"\[[0-9.]*\]", "", table)
    place = re.sub(rf"^({'|'.join(MAX_NAMES_BY_TABLE)})\..*", r"\1.NAME", place)
    path = f"{place}.{name}".lstrip(".")
    near = [one for one in paths if one.endswith(f".{name}") and one.count(".") == 1]
    near = near or get_close_matches(path, paths, 1, 0.8)
    hint = (
        f"; did you mean {' or '.join(near[:3])}?"
        if near
        else "; etc/tawebeval.toml lists all settings"
    )
    return f"{table}.{name}".lstrip(".") + f": unknown setting{hint}"


def _list_settings(table: type[Struct], path: str = "") -> Iterator[str]:
    """Yield the path of each table and setting of `table`."""
    for field in structs.fields(table):
        place = path + field.name
        yield place
        prefix = f"{place}.NAME." if place in MAX_NAMES_BY_TABLE else f"{place}."
        # A table, a list of tables, or tables with names.
        for inner in (field.type, *get_args(field.type)):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from _list_settings(inner, prefix)


def _escape(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
