"""Bearer tokens and rate limits of callers; who may use a daemon without tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from math import ceil
from pathlib import Path

import attrs

from tawebeval.config import CallerSettings, MetricsSettings
from tawebeval.core.tokens import ANONYMOUS_CALLER, Token, TokenHashes, parse_tokens
from tawebeval.errors import AccessDenied, CallerQuotaExceeded, ConfigurationError, ForeignOrigin
from tawebeval.linux.ownership import find_secret_file, read_secret_file
from tawebeval.reloadable import ReloadableFiles

ANONYMOUS_TOKEN = Token(b"", ANONYMOUS_CALLER)

_CREDENTIAL = "tokens"
_METRICS_CREDENTIAL = "metrics-tokens"
_ROUNDING = 1e-9  # of a request; so no client is refused that has waited for Retry-After


@attrs.define
class RateLimit:
    """A token bucket for each caller: `per_minute` requests, refilled steadily; 0 = no limit.

    A token with a limit of its own has its own bucket. `seconds` is a clock, in seconds.
    """

    per_minute: int
    _seconds: Callable[[], float]
    # By caller, or by the digest of a token: the requests left, and the time of that in seconds.
    _left: dict[str | bytes, tuple[float, float]] = attrs.field(factory=dict, init=False)

    def count_request(self, token: Token) -> None:
        """Count a request.

        Raises: CallerQuotaExceeded, without counting, if the bucket is empty.
        """
        bucket: str | bytes = token.caller
        limit, setting = self.per_minute, "callers.requests_per_minute"
        if token.requests_per_minute is not None:
            bucket, limit, setting = token.digest, token.requests_per_minute, "rate of the token"
        if not limit:
            return
        self.count_in_bucket(bucket, limit, setting)

    def count_in_bucket(self, bucket: str | bytes, limit: int, setting: str) -> None:
        """Count a request in a bucket of `limit` requests a minute; `setting` names the limit.

        Raises: CallerQuotaExceeded, without counting, if the bucket is empty.
        """
        now = self._seconds()
        left, since = self._left.get(bucket, (limit, now))
        left = min(limit, left + (now - since) * limit / 60)
        if left < 1 - _ROUNDING:
            wait = (1 - left) * 60 / limit
            raise CallerQuotaExceeded(
                f"too many requests; the limit is {limit} per minute ({setting})",
                max(1, ceil(wait)),
            )
        self._left[bucket] = left - 1, now

    def drop_bucket(self, bucket: str | bytes) -> None:
        """Drop a bucket."""
        self._left.pop(bucket, None)


@attrs.define
class Authentication:
    """Authentication by the token file `token_file`; None = anybody may call.

    `file_setting` names the file in messages.
    """

    rate_limit: RateLimit
    token_file: Path | None = None
    file_setting: str = "callers.tokens"
    _tokens: TokenHashes | None = attrs.field(default=None, init=False)
    _observers: list[Callable[[], object]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the token file. Raises: ConfigurationError."""
        if self.token_file is not None:
            self._tokens = self._read(self.token_file)

    @property
    def is_token_optional(self) -> bool:
        """Whether anybody may call."""
        return self._tokens is None

    def authenticate_token(self, authorization: Sequence[bytes], method: bytes = b"GET") -> Token:
        """Return the token in the headers `Authorization`, and count the request.

        The token is that of ANONYMOUS_CALLER if anybody may call. `check_problem_access` decides
        which routes a token for some problems permits. Raises: Unauthorized, CallerQuotaExceeded;
        AccessDenied if the token does not permit the method.
        """
        if self._tokens is None:
            return ANONYMOUS_TOKEN
        token = self._tokens.find_token(authorization)
        self.rate_limit.count_request(token)
        if token.is_read_only and method not in SAFE_METHODS:
            raise AccessDenied(
                "a token of kind `read` cannot submit or cancel; use another token of the caller"
            )
        return token

    def has_caller(self, name: str) -> bool:
        """Return whether the caller has a token; without tokens only ANONYMOUS_CALLER exists."""
        if self._tokens is None:
            return name == ANONYMOUS_CALLER
        return name in self._tokens.caller_names

    def add_reload_observer(self, observer: Callable[[], object]) -> None:
        """Call `observer` whenever a reload has read the token file again."""
        self._observers.append(observer)

    def list_reloadable_files(self) -> Iterator[ReloadableFiles[TokenHashes]]:
        """Yield the token file as a reloadable, if there is one."""
        if self.token_file is not None:
            yield ReloadableFiles(
                self.file_setting,
                (self.token_file,),
                partial(self._read, self.token_file),
                self._take,
            )

    def _take(self, tokens: TokenHashes) -> None:
        self._tokens = tokens
        for observer in self._observers:
            observer()

    def _read(self, source: Path) -> TokenHashes:
        try:
            return read_token_file(source)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.file_setting}: {error}") from None


def find_token_file(callers: CallerSettings, environment: Mapping[str, str]) -> Path | None:
    """Return the path of the token file; None if there is none.

    It is the configured path, or a credential of systemd (`LoadCredential=tokens:...`). Raises:
    ConfigurationError, if there is a file and `callers.open` is true, or if the credential cannot
    be looked up.
    """
    found = find_secret_file(callers.tokens, _CREDENTIAL, environment)
    if found is not None and callers.open:
        raise ConfigurationError(
            f"callers.open: true, although {found} has tokens; remove callers.open or"
            " callers.tokens"
        )
    return found


def find_metrics_token_file(
    metrics: MetricsSettings, environment: Mapping[str, str]
) -> Path | None:
    """Return the path of the metrics' token file; None if metrics need no token."""
    return find_secret_file(metrics.tokens, _METRICS_CREDENTIAL, environment)


def read_token_file(path: Path) -> TokenHashes:
    """Parse the token file at `path`. Raises: ConfigurationError, with file and line."""
    return read_secret_file(path, parse_tokens)


PROBLEM_ROUTE = "/problems/<name>"
EVALUATE_PROBLEM_ROUTE = "/problems/<name>/evaluate"
RERUN_ROUTE = "/evaluation/<identifier>/rerun"
EVENTS_ROUTE = "/evaluation/<identifier>/events"
STATUS_ROUTE = "/evaluation/<identifier>"
SUBMISSION_ROUTE = "/evaluation/<identifier>/submission"
LINKS_ROUTE = "/evaluation/<identifier>/links"

_PROBLEM_TOKEN_ROUTES = frozenset(
    {
        ("POST", EVALUATE_PROBLEM_ROUTE),
        ("POST", RERUN_ROUTE),  # `make_form_receiver` checks the problem
        ("GET", "/problems"),
        ("GET", PROBLEM_ROUTE),
        ("GET", STATUS_ROUTE),
        ("DELETE", STATUS_ROUTE),
        ("GET", EVENTS_ROUTE),
        ("GET", SUBMISSION_ROUTE),
        ("POST", LINKS_ROUTE),
        ("DELETE", LINKS_ROUTE),
        ("GET", "/evaluation_events"),
    }
)

_LINK_ROUTES = frozenset({STATUS_ROUTE, EVENTS_ROUTE, SUBMISSION_ROUTE})


def check_link_access(method: str, route: str) -> None:
    """Raise AccessDenied unless a link permits the request, whether or not the link is valid."""
    if method not in ("GET", "HEAD") or route not in _LINK_ROUTES:
        raise AccessDenied(
            "a link permits only GET of /evaluation/ID, /evaluation/ID/events and"
            " /evaluation/ID/submission; use a token"
        )


def check_problem_access(
    problems: Collection[str], method: str, route: str, parameters: Mapping[str, str]
) -> None:
    """Raise AccessDenied if a token that is restricted to `problems` does not permit the request.

    `route` is the request's rule, `parameters` are the values of its parameters. Only the routes
    listed here are permitted. The list of evaluations is not: browsers may share the token, and an
    identifier gives access to the evaluation.
    """
    known = ("GET" if method == "HEAD" else method, route)
    if known not in _PROBLEM_TOKEN_ROUTES:
        raise AccessDenied(
            "the token is restricted to problems: it permits GET /problems, GET /problems/NAME,"
            " POST /problems/NAME/evaluate, and to read, share, cancel and rerun evaluations by"
            " identifier; use another token"
        )
    if route in (PROBLEM_ROUTE, EVALUATE_PROBLEM_ROUTE) and parameters["name"] not in problems:
        raise AccessDenied(
            f"the token does not permit the problem {parameters['name'][:80]!r}; GET /problems"
            " lists the permitted ones"
        )


_LOOPBACK = re.compile(r"localhost|127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|::1")
_PARTS = re.compile(r"(?:[^:\\]|\\.)+", re.DOTALL)
_SETTING = re.compile(r"((?:[^=\\]|\\.)*)=(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[?([^/\]]*?)\]?(?::[0-9]+)?)")
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")


class EndpointExposure(Enum):
    """The clients that can connect to an endpoint."""

    LOCAL_PROGRAMS = "programs of this machine"
    UNKNOWN = "whom the operator lets: the socket is opened by somebody else"
    OTHER_MACHINES = "other machines, as far as can be seen"


def classify_endpoint(endpoint: str) -> EndpointExposure:
    """Return the exposure of one of Twisted's endpoint strings."""
    kind, *arguments = _PARTS.findall(endpoint) or [""]
    if kind == "haproxy":  # a prefix of another endpoint
        return classify_endpoint(endpoint.partition(":")[2])
    if kind == "unix":
        return EndpointExposure.LOCAL_PROGRAMS
    if kind in ("systemd", "fd"):
        return EndpointExposure.UNKNOWN
    interface = ""
    for argument in arguments:
        setting = _SETTING.fullmatch(argument)
        if setting and _ESCAPED.sub(r"\1", setting[1]) == "interface":  # the last one counts
            interface = _ESCAPED.sub(r"\1", setting[2])
    local = kind in ("tcp", "tcp6", "ssl") and _LOOPBACK.fullmatch(interface)
    return EndpointExposure.LOCAL_PROGRAMS if local else EndpointExposure.OTHER_MACHINES


def find_endpoints_of_unknown_exposure(endpoints: Iterable[str]) -> list[str]:
    """Return the endpoints whose exposure only the operator knows.

    Raises: ConfigurationError, if other machines may reach a daemon without tokens.
    """
    unknown = []
    for endpoint in endpoints:
        found = classify_endpoint(endpoint)
        if found is EndpointExposure.OTHER_MACHINES:
            raise ConfigurationError(
                f"listen: other machines can reach {endpoint!r}, and without tokens any of them"
                " could run programs here; set callers.tokens to a file of the lines that"
                " `tawebeval token new NAME` prints, or listen on tcp:8080:interface=127.0.0.1, or"
                " set callers.open = true to admit everybody"
            )
        if found is EndpointExposure.UNKNOWN:
            unknown.append(endpoint)
    return unknown


def check_write_origin(origin: str | None, host: str | None, origins: Collection[str]) -> None:
    """Raise ForeignOrigin for an unsafe method from a page that is not trusted."""
    if not is_trusted_origin(origin, host, origins):
        raise ForeignOrigin(
            f"pages of {origin!r:.80} cannot submit or cancel, as this server has no tokens; the"
            " operator can list the origin in callers.origins"
        )


def check_read_origin(origin: str | None, host: str | None, origins: Collection[str]) -> None:
    """Raise ForeignOrigin for a page that is not trusted and may not read this response."""
    if not is_trusted_origin(origin, host, origins):
        raise ForeignOrigin(
            f"pages of {origin!r:.80} cannot read this; the operator can list the origin in"
            " callers.origins"
        )


def is_trusted_origin(origin: str | None, host: str | None, origins: Collection[str]) -> bool:
    """Tell whether a request is of no browser page, or of a trusted page.

    `origin` and `host` are the headers `Origin` and `Host`. Trusted are pages of this daemon's own
    address, and of `origins` (`*` names none). A request without `Origin` is of no page. The
    address must be a loopback address or localhost: another name may be an attacker's that resolves
    to this machine (DNS rebinding).
    """
    if origin is None or origin in origins:
        return True
    found = _ORIGIN.fullmatch(origin)
    return (
        found is not None
        and found[1] == (host or "").lower()
        and _LOOPBACK.fullmatch(found[2]) is not None
    )
