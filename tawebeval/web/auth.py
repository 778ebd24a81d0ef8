"""Access to the API: tokens and their rates, links to one evaluation, origins.

A link only reads one evaluation. The daemon keeps for each evaluation with links its caller, a
generation and the latest expiry. A revocation removes them, and cuts the requests and streams of
the evaluation's links. Requests and rates of links have bounds of their own, of which one caller
has half.

A daemon without tokens serves programs of this machine and its own page: the origins of requests
are checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.web.http_headers import Headers

from tawebeval.config import CallerSettings, MetricsSettings
from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.tokens import (
    ANONYMOUS_CALLER,
    ANONYMOUS_TOKEN,
    LINK_GENERATION_BYTES,
    LinkSigner,
    Token,
    TokenTable,
    find_bearer_link,
    parse_tokens,
)
from tawebeval.errors import (
    AccessDenied,
    CallerQuotaExceeded,
    ConfigurationError,
    ForeignOrigin,
    MalformedRequest,
    Unauthorized,
)
from tawebeval.evaluations.context import EvaluationContext
from tawebeval.evaluations.store import EvaluationLinksRow, EvaluationStore
from tawebeval.linux.privileges import ReloadableFiles, find_secret_file, parse_text_file
from tawebeval.web.server.messages import Query, get_header, get_query_number

if TYPE_CHECKING:  # or `tawebeval try` imports the web server
    from tawebeval.web.server.channel import ApiRequest

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
class Authenticator:
    """Authentication by the token file `token_file`; None = anybody may call.

    `file_setting_name` names the file in messages. When a reload has read the file again, each of
    `on_reload` is called.
    """

    rate_limit: RateLimit
    token_file: Path | None = None
    file_setting_name: str = "callers.tokens"
    on_reload: list[Callable[[], object]] = attrs.field(factory=list, init=False)
    _tokens: TokenTable | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Read the token file. Raises: ConfigurationError."""
        if self.token_file is not None:
            self._tokens = self._read(self.token_file)

    @property
    def is_token_optional(self) -> bool:
        """Whether anybody may call."""
        return self._tokens is None

    def authenticate_request(self, authorization: Sequence[bytes], method: bytes = b"GET") -> Token:
        """Return the token in the headers `Authorization`, and count the request.

        The token is that of ANONYMOUS_CALLER if anybody may call. `check_token_access` decides
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

    def find_supervised_members(self, token: Token) -> dict[str, list[str]]:
        """Return the members of each group that a token supervises, by the group's name."""
        groups = {} if self._tokens is None else self._tokens.find_supervised_members(token)
        return {name: sorted(members) for name, members in sorted(groups.items())}

    def find_permitted_callers(self, token: Token) -> Set[str]:
        """Return the names of the callers whose evaluations a token permits."""
        if self._tokens is None or not token.supervised_groups:
            return frozenset((token.caller,))
        return self._tokens.find_permitted_callers(token)

    def is_owner_permitted(self, token: Token, owner: str) -> bool:
        """Return whether a token is still valid as it was, and permits evaluations of `owner`."""
        return self._tokens is None or self._tokens.has_access(token, owner)

    def has_caller(self, name: str) -> bool:
        """Return whether the caller has a token; without tokens only ANONYMOUS_CALLER exists."""
        if self._tokens is None:
            return name == ANONYMOUS_CALLER
        return name in self._tokens.caller_names

    def list_reloadable_files(self) -> Iterator[ReloadableFiles[TokenTable]]:
        """Yield the token file as a reloadable, if there is one."""
        if self.token_file is not None:
            yield ReloadableFiles(
                self.file_setting_name,
                (self.token_file,),
                partial(self._read, self.token_file),
                self._take,
            )

    def _take(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        for callback in self.on_reload:
            callback()

    def _read(self, source: Path) -> TokenTable:
        try:
            return read_token_file(source)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.file_setting_name}: {error}") from None


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


def read_token_file(path: Path) -> TokenTable:
    """Parse the token file at `path`. Raises: ConfigurationError, with file and line."""
    return parse_text_file(path, parse_tokens)


READ_PROBLEM_ROUTE = "/problems/<name>"
EVALUATE_PROBLEM_ROUTE = "/problems/<name>/evaluate"
RERUN_ROUTE = "/evaluation/<identifier>/rerun"
EVENTS_ROUTE = "/evaluation/<identifier>/events"
EVALUATION_STATUS_ROUTE = "/evaluation/<identifier>"
SUBMISSION_ROUTE = "/evaluation/<identifier>/submission"
EVALUATION_LIST_ROUTE = "/evaluations"
STANDINGS_ROUTE = "/standings"
LINKS_ROUTE = "/evaluation/<identifier>/links"

_PROBLEM_TOKEN_ROUTES = frozenset(
    {
        ("POST", EVALUATE_PROBLEM_ROUTE),
        ("POST", RERUN_ROUTE),  # `make_form_receiver` checks the problem
        ("GET", "/problems"),
        ("GET", READ_PROBLEM_ROUTE),
        ("GET", EVALUATION_STATUS_ROUTE),
        ("DELETE", EVALUATION_STATUS_ROUTE),
        ("GET", EVENTS_ROUTE),
        ("GET", SUBMISSION_ROUTE),
        ("POST", LINKS_ROUTE),
        ("DELETE", LINKS_ROUTE),
        ("GET", "/evaluation_events"),
        ("GET", "/whoami"),
        ("GET", EVALUATION_LIST_ROUTE),
        ("GET", STANDINGS_ROUTE),
    }
)

_LINK_ROUTES = frozenset({EVALUATION_STATUS_ROUTE, EVENTS_ROUTE, SUBMISSION_ROUTE})


def check_link_access(method: str, route: str) -> None:
    """Raise AccessDenied unless a link permits the request, whether or not the link is valid."""
    if method not in ("GET", "HEAD") or route not in _LINK_ROUTES:
        raise AccessDenied(
            "a link permits only GET of /evaluation/ID, /evaluation/ID/events and"
            " /evaluation/ID/submission; use a token"
        )


def check_token_access(
    token: Token, method: str, route: str, parameters: Mapping[str, str]
) -> None:
    """Raise AccessDenied if a token that is shared or restricted does not permit the request.

    `route` is the request's rule, `parameters` are the values of its parameters. Of a token that is
    restricted to problems only the routes listed here are permitted.
    """
    if token.is_shared and route in (EVALUATION_LIST_ROUTE, STANDINGS_ROUTE):
        raise AccessDenied(
            "many people share the token, so it lists no evaluations; an identifier gives access to"
            " its evaluation"
        )
    problems = token.permitted_problems
    if problems is None:
        return
    known = ("GET" if method == "HEAD" else method, route)
    if known not in _PROBLEM_TOKEN_ROUTES:
        raise AccessDenied(
            "the token is restricted to problems: it permits GET /problems, GET /problems/NAME,"
            " POST /problems/NAME/evaluate, GET /whoami, GET /standings, and to list, read, share,"
            " cancel and rerun evaluations; use another token"
        )
    if route in (READ_PROBLEM_ROUTE, EVALUATE_PROBLEM_ROUTE) and parameters["name"] not in problems:
        raise AccessDenied(
            f"the token does not permit the problem {parameters['name'][:80]!r}; GET /problems"
            " lists the permitted ones"
        )


def check_problem_open(
    context: EvaluationContext, token: Token, name: str | None, *, for_reading: bool = False
) -> None:
    """Raise ProblemClosed if a problem is not open to a token now, to submit or only to read.

    Supervisors read and submit at any time. `name` may be that of no problem.
    """
    problem = context.configuration.problems.get(name or "")
    if name is not None and problem is not None and not token.supervised_groups:
        problem.check_open(name, context.read_wall_clock(), for_reading=for_reading)


LOOPBACK_REGEX = re.compile(r"localhost|127\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}|::1")
"""The names and addresses by which only programs of this machine reach a server."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[?([^/\]]*?)\]?(?::[0-9]+)?)")
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")


CROSS_ORIGIN_WRITE_REFUSAL = (
    "cannot submit or cancel, as this server has no tokens; the operator can list the origin in"
    " callers.origins"
)
CROSS_ORIGIN_READ_REFUSAL = "cannot read this; the operator can list the origin in callers.origins"


def check_origin(
    headers: Headers, origins: Collection[str], refusal: str, *, is_host_checked: bool = False
) -> None:
    """Raise ForeignOrigin, with the reason `refusal`, for a page that is not trusted.

    Trusted are pages of this daemon's own address, and of `origins` (`*` names none). The address
    must be a loopback address or localhost: another name may be an attacker's that resolves to this
    machine (DNS rebinding). A request without `Origin` is of no page; or, if `is_host_checked`, of
    a page of its `Host`, for browsers omit the origin there.
    """
    origin, host = get_header(headers, "Origin"), get_header(headers, "Host")
    if is_host_checked and not origin:
        origin = f"http://{host}".lower()
    if origin is None or origin in origins:
        return
    found = _ORIGIN.fullmatch(origin)
    is_own = found and found[1] == (host or "").lower() and LOOPBACK_REGEX.fullmatch(found[2])
    if not is_own:
        raise ForeignOrigin(f"pages of {origin!r:.80} {refusal}")


def check_listing_access(headers: Headers, callers: CallerSettings) -> None:
    """Raise Unauthorized or ForeignOrigin if a client may not list evaluations without a token.

    They have no owner then: only programs of this machine and the daemon's own page may.
    """
    if callers.open:
        raise Unauthorized(
            "the list of evaluations needs a token; the operator can set callers.tokens"
        )
    check_origin(headers, callers.origins, CROSS_ORIGIN_READ_REFUSAL, is_host_checked=True)


# Of all, of one caller with a token, and of one evaluation, at most.
MAX_EVALUATIONS_WITH_LINKS = 5000
MAX_EVALUATIONS_WITH_LINKS_PER_CALLER = 1000
MAX_LINK_READERS = 200  # requests and streams at once
MAX_LINK_READERS_PER_CALLER = 100
MAX_LINK_READERS_PER_EVALUATION = 50
LINK_REQUESTS_PER_MINUTE = 6000
LINK_REQUESTS_PER_MINUTE_PER_CALLER = 3000
LINK_REQUESTS_PER_MINUTE_PER_EVALUATION = 1200

DEFAULT_LINK_LIFETIME_SECONDS = 7 * 86400
"""Seconds for which a link holds if its maker does not choose."""

_EVERY = ""  # the bucket of all links
_OF_CALLER = "caller "  # the beginning of that of a caller's links; no identifier has a space
_RETRY_AFTER = 10  # seconds, if too many requests of links run
_TOO_MANY_READERS = "too many requests by links to evaluations at the same time; try again later"
_DAY = 86400


@attrs.define(eq=False)
class _Reader:
    """A request that uses a link, until its response ends."""

    identifier: str
    caller: str
    abort: Callable[[], object]
    timer: IDelayedCall


@attrs.define(eq=False)
class EvaluationLinks:
    """All links of the daemon; the `store` keeps them.

    `random_bytes(n)` returns n random bytes. `readers_budget` counts requests and streams that use
    a link now, for the callers that have made them; `linked_evaluations_budget` those with links.
    """

    _store: EvaluationStore
    _signer: LinkSigner
    _authenticator: Authenticator
    _clock: IReactorTime
    _read_wall_clock: Callable[[], float]
    _random_bytes: Callable[[int], bytes]
    links_by_evaluation: dict[str, EvaluationLinksRow] = attrs.field(init=False)
    _rate: RateLimit = attrs.field(init=False)
    _readers: dict[Any, _Reader] = attrs.field(factory=dict, init=False)  # by request
    readers_budget: Budget = attrs.field(init=False)
    linked_evaluations_budget: Budget = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.readers_budget = Budget(
            SharedResource.LINK_READERS,
            MAX_LINK_READERS,
            MAX_LINK_READERS_PER_CALLER,
            _TOO_MANY_READERS,
            _TOO_MANY_READERS,
            _RETRY_AFTER,
        )
        self.linked_evaluations_budget = Budget(
            SharedResource.LINKED_EVALUATIONS,
            MAX_EVALUATIONS_WITH_LINKS,
            MAX_EVALUATIONS_WITH_LINKS_PER_CALLER,
            f"{MAX_EVALUATIONS_WITH_LINKS_PER_CALLER} of your evaluations have links; revoke some"
            " by DELETE /evaluation/ID/links, or try again when some have expired",
            f"{MAX_EVALUATIONS_WITH_LINKS} evaluations have links; revoke some by DELETE"
            " /evaluation/ID/links, or try again when some have expired",
            _RETRY_AFTER,
        )
        self.links_by_evaluation = self._store.load_links()
        for linked in self.links_by_evaluation.values():
            self.linked_evaluations_budget.record_usage(1, linked.caller)
        self._rate = RateLimit(0, self._clock.seconds)
        self._authenticator.on_reload.append(self._cut_unknown_callers)

    async def make_link(self, identifier: str, caller: str, lifetime: int) -> tuple[str, int]:
        """Return a new link of an evaluation, and its expiry in seconds since the epoch.

        `lifetime` is in seconds. Raises: ServerBusy, CallerQuotaExceeded.
        """
        self._drop_expired()
        known = self.links_by_evaluation.get(identifier)
        if known is None:
            self._check_room(caller)
        expires = int(self._read_wall_clock()) + lifetime
        generation = known.link_generation if known else self._random_bytes(LINK_GENERATION_BYTES)
        latest = max(expires, known.last_expiry_time if known else 0)
        self._change(identifier, EvaluationLinksRow(caller, generation, latest))
        await self._store.flush()
        return self._signer.sign_link(identifier, generation, expires), expires

    async def revoke_links(self, identifier: str) -> None:
        """Revoke all links of an evaluation, and cut the requests that use them.

        Raises: ServerBusy, if the store does not work; then they are revoked only as long as the
        daemon runs.
        """
        if identifier in self.links_by_evaluation:
            self._change(identifier, None)
        self._cut_readers(identifier)
        await self._store.flush()

    def add_reader(
        self, request: Any, identifier: str, link: str, abort: Callable[[], object]
    ) -> str:
        """Count a request by a link; return the name of the evaluation's caller.

        `abort` ends the request when the link expires or is revoked. Raises: Unauthorized, the same
        for every reason; CallerQuotaExceeded.
        """
        caller, expires = self._check_link(identifier, link)
        self.readers_budget.check_amount(1, caller)
        others = sum(reader.identifier == identifier for reader in self._readers.values())
        if others >= MAX_LINK_READERS_PER_EVALUATION:
            raise CallerQuotaExceeded(_TOO_MANY_READERS, _RETRY_AFTER)
        self._rate.count_in_bucket(
            identifier, LINK_REQUESTS_PER_MINUTE_PER_EVALUATION, "for the links of an evaluation"
        )
        if caller != ANONYMOUS_CALLER:
            self._rate.count_in_bucket(
                f"{_OF_CALLER}{caller}",
                LINK_REQUESTS_PER_MINUTE_PER_CALLER,
                "for the links of a caller",
            )
        self._rate.count_in_bucket(_EVERY, LINK_REQUESTS_PER_MINUTE, "for all links")
        left = max(0.0, expires - self._read_wall_clock())
        timer = self._clock.callLater(left, abort)
        self._readers[request] = _Reader(identifier, caller, abort, timer)
        self.readers_budget.record_usage(1, caller)
        return caller

    def remove_reader(self, request: Any) -> None:
        """Count a request no more, if it uses a link: its response has ended."""
        reader = self._readers.pop(request, None)
        if reader is not None:
            self.readers_budget.give_back(1, reader.caller)
            if reader.timer.active():
                reader.timer.cancel()

    def _check_link(self, identifier: str, link: str) -> tuple[str, int]:
        linked = self.links_by_evaluation.get(identifier)
        generation = linked.link_generation if linked else bytes(LINK_GENERATION_BYTES)
        expires = self._signer.verify_and_read_expiry(link, identifier, generation)
        if (
            linked is None
            or expires is None
            or expires <= self._read_wall_clock()
            or not self._authenticator.has_caller(linked.caller)
        ):
            raise Unauthorized(
                "the link to the evaluation is unknown, expired or revoked; ask for a new one"
            )
        return linked.caller, expires

    def _cut_readers(self, identifier: str) -> None:
        for reader in list(self._readers.values()):
            if reader.identifier == identifier:
                reader.abort()

    def _cut_unknown_callers(self) -> None:
        """Cut the requests by links of callers without a token."""
        for identifier in {reader.identifier for reader in self._readers.values()}:
            linked = self.links_by_evaluation.get(identifier)
            if linked is not None and not self._authenticator.has_caller(linked.caller):
                self._cut_readers(identifier)

    def _check_room(self, caller: str) -> None:
        if caller == ANONYMOUS_CALLER and self.linked_evaluations_budget.is_quota_used_up(caller):
            # Clients without tokens cannot be told apart: one could keep all places for 30 days.
            first = min(
                self.links_by_evaluation,
                key=lambda identifier: self.links_by_evaluation[identifier].last_expiry_time,
            )
            self._change(first, None)
            self._cut_readers(first)
        self.linked_evaluations_budget.check_amount(1, caller)

    def _drop_expired(self) -> None:
        now = self._read_wall_clock()
        for identifier in [
            name
            for name, linked in self.links_by_evaluation.items()
            if linked.last_expiry_time <= now
        ]:
            self._change(identifier, None)

    def _change(self, identifier: str, linked: EvaluationLinksRow | None) -> None:
        known = self.links_by_evaluation.pop(identifier, None)
        if known is not None:
            self.linked_evaluations_budget.give_back(1, known.caller)
        if linked is not None:
            self.linked_evaluations_budget.record_usage(1, linked.caller)
            self.links_by_evaluation[identifier] = linked
        else:
            self._rate.drop_bucket(identifier)
        self._store.save_links(identifier, linked)


def find_link(query: Query, authorization: Sequence[bytes]) -> str | None:
    """Return the link of a request, from `Authorization: Bearer` or `?link=`; None without one.

    `authorization` has the values of these headers. The link may be none of this daemon. Raises:
    MalformedRequest, for more than one.
    """
    if not authorization and b"link" not in query:
        return None
    given = [value.decode("latin-1") for value in query.get(b"link", [])]
    in_header = find_bearer_link(authorization)
    if len(given) > 1 or (given and authorization):
        raise MalformedRequest(
            "link: the query parameter is repeated, or the request has a token or link in the"
            " header Authorization, too; send one of them"
        )
    return given[0] if given else in_header


def parse_link_lifetime(request: ApiRequest, settings: CallerSettings) -> int:
    """Return `?lifetime=N` in seconds, or the default. Raises: AccessDenied, MalformedRequest."""
    most = int(settings.link_days * _DAY)
    if not most:
        raise AccessDenied("links are disabled; the operator can set callers.link_days")
    lifetime = get_query_number(request.query, "lifetime")
    if lifetime is None:
        return min(DEFAULT_LINK_LIFETIME_SECONDS, most)
    if not 0 < lifetime <= most:
        raise MalformedRequest(
            f"lifetime: {lifetime} should be from 1 to {most} seconds (callers.link_days)",
            limit=most,
        )
    return lifetime
