"""Lists: the caller's evaluations, on this daemon or on all at its address, and the problems.

The operator has chosen the URLs of the other daemons, but a daemon may be away, hang, or answer
with anything: an answer has `PEER_TIMEOUT` seconds, and `MAX_LIST_ENTRY_BYTES` for each evaluation
that it may have. A request carries the caller's own credentials, and `SINGLE_DAEMON_LIST_HEADER`:
its receiver asks nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import attrs
from treq.content import collect
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.logger import Logger
from twisted.web.client import BrowserLikePolicyForHTTPS
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent

from tawebeval import __version__
from tawebeval.config import Configuration
from tawebeval.core.budgets import Budget, SharedResource
from tawebeval.core.evaluations import (
    ListPage,
    MultiDaemonListCursor,
    make_invalid_cursor_error,
    merge_list_pages,
    parse_list_page,
)
from tawebeval.core.form import DEFAULT_ENVIRONMENT_NAME, LIMIT_UNITS, choose_limits, parse_limits
from tawebeval.core.hosts import HostPolicy, IPAddress, ServerAddress, parse_server_address
from tawebeval.core.tokens import CALLER_NAME_PATTERN
from tawebeval.errors import (
    InvalidCursor,
    MalformedRequest,
    ServerBusy,
    TawebevalError,
)
from tawebeval.evaluations.reading import MAX_PAGE_EVALUATIONS, is_filter_parameter, parse_filter
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.evaluations.store import format_rfc3339_time
from tawebeval.pinned_agent import (
    CachedPolicyForHTTPS,
    CheckedResolver,
    PinnedAgent,
    Resolver,
    ResponseSizeLimit,
    convert_request_failures,
)
from tawebeval.web.server.channel import ApiRequest
from tawebeval.web.server.messages import (
    WHOLE_NUMBER_REGEX,
    get_header,
    get_header_values,
    get_query_argument,
    get_query_arguments,
)

PROBLEMS_PER_PAGE = 100
"""Problems in one answer, at most."""

SINGLE_DAEMON_LIST_HEADER = "Tawebeval-Own-List"
"""Header of a request for the list of one daemon alone; its value is the most entries."""

PEER_TIMEOUT = 2.0
"""Seconds in which a daemon has to answer."""

MAX_CONCURRENT_JOINT_LISTS = 16
"""Lists over all daemons at once."""

MAX_CONCURRENT_JOINT_LISTS_PER_CALLER = 4
"""Those of one caller with a token."""

MAX_LIST_ENTRY_BYTES = 48 * 1024
"""Bytes of one evaluation in a list, at most: 20 KiB of results, and labels with their escapes."""

_NO_CALLER = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)  # though this daemon knows the token
_HEAD_BYTES = 16 * 1024
_EVERY_NETWORK = ("0.0.0.0/0", "::/0")  # the operator has chosen the hosts
_TOO_MANY = "too many lists over all daemons at once; try again in a moment"

log = Logger()


@attrs.define(eq=False)
class EvaluationLists:
    """The lists of evaluations, of this daemon and of the others at its address.

    `agent` returns an agent for a server at its addresses, whose answers are limited.
    """

    _registry: EvaluationRegistry
    _clock: Any
    _resolver: CheckedResolver
    _agent: Callable[[ServerAddress, Sequence[IPAddress], ResponseSizeLimit], IAgent]
    joint_lists_budget: Budget = attrs.Factory(
        lambda: Budget(
            SharedResource.JOINT_LISTS,
            MAX_CONCURRENT_JOINT_LISTS,
            MAX_CONCURRENT_JOINT_LISTS_PER_CALLER,
            _TOO_MANY,
            _TOO_MANY,
            retry_after=1,
        )
    )
    _away: set[str] = attrs.field(factory=set, init=False)  # URLs of which the log has the reason

    async def list_standings(self, request: ApiRequest, callers: Collection[str]) -> dict[str, Any]:
        """Return the standings of `callers`. Raises: RequestError."""
        after = get_query_argument(request.query, "after") or ""
        wanted = parse_filter(get_query_arguments(request.query, lambda name: name == "problem"))
        callers = _choose_callers(request, callers)
        listing = await self._registry.lister.list_caller_standings(
            request.token.caller, callers, after, wanted.problem
        )
        return _make_page(after, listing)

    async def list_evaluations(
        self, request: ApiRequest, callers: Collection[str]
    ) -> dict[str, Any]:
        """Return the list of what `callers` own. Raises: RequestError."""
        service = self._registry.context.configuration.service
        after = get_query_argument(request.query, "after") or ""
        parameters = get_query_arguments(request.query, is_filter_parameter)
        wanted = parse_filter(parameters)
        callers = _choose_callers(request, callers)
        own_limit = _parse_own_limit(request)
        if own_limit is None and service.other_daemon_urls:
            self.joint_lists_budget.take_within_quota(1, request.caller)
            try:
                return await self._list_all(request, callers, after, parameters)
            finally:
                self.joint_lists_budget.give_back(1, request.caller)
        listing = await self._registry.lister.list_evaluations(
            after, request.caller, callers, wanted, own_limit
        )
        members = {} if own_limit is None else {"daemon": service.name}
        return {**members, **_make_page(after, listing)}

    async def _list_all(
        self,
        request: ApiRequest,
        callers: Collection[str],
        after: str,
        parameters: Mapping[str, str],
    ) -> dict[str, Any]:
        """Return the list over all daemons: a part of each, `MAX_PAGE_EVALUATIONS` in all."""
        service = self._registry.context.configuration.service
        own, others = service.name, service.other_daemon_urls
        before = MultiDaemonListCursor.parse(after, (own, *others))
        cursors = before.find_unfinished_cursors((own, *others))
        limit = max(1, MAX_PAGE_EVALUATIONS // max(1, len(cursors)))
        parts: dict[str, ListPage] = {}
        if own in cursors:
            with suppress(ServerBusy):  # its archive's disk does not answer: then it is away, too
                parts[own] = await self._registry.lister.list_evaluations(
                    cursors[own], request.caller, callers, parse_filter(parameters), limit
                )
        headers = Headers(
            {
                b"Authorization": get_header_values(request.requestHeaders, "Authorization"),
                b"User-Agent": [f"tawebeval/{__version__}".encode()],
                SINGLE_DAEMON_LIST_HEADER.encode(): [str(limit).encode()],
            }
        )
        asked = [name for name in others if name in cursors]
        attempts = []
        for name in asked:
            cursor = cursors[name]
            query = {**parameters, "after": cursor} if cursor else parameters
            fetching = self._fetch_unless_away(name, others[name], query, headers, limit)
            attempts.append(Deferred.fromCoroutine(fetching))
        try:
            for name, attempt in zip(asked, attempts, strict=True):
                found = await attempt
                if found is not None:
                    parts[name] = found
        finally:  # the client has left, or a daemon has refused its cursor
            for attempt in attempts:
                attempt.addErrback(lambda failure: failure.trap(CancelledError, InvalidCursor))
                attempt.cancel()
        joint = merge_list_pages(before, cursors, parts)
        return {**_make_page(after, joint), "away": sorted(set(cursors) - set(parts))}

    async def _fetch_unless_away(
        self, name: str, url: str, query: Mapping[str, str], headers: Headers, limit: int
    ) -> ListPage | None:
        """Return a daemon's part, of `limit` entries at most; None if the daemon is away.

        Raises: InvalidCursor, if the daemon refuses its cursor.
        """
        size = ResponseSizeLimit(_HEAD_BYTES + limit * MAX_LIST_ENTRY_BYTES)
        attempt = Deferred.fromCoroutine(self._fetch(url, query, headers, size))
        try:
            status, body = await attempt.addTimeout(PEER_TIMEOUT, self._clock)
            if status == HTTPStatus.BAD_REQUEST and "after" in query:
                raise make_invalid_cursor_error(query["after"])
            if status == HTTPStatus.TOO_MANY_REQUESTS:  # the caller's doing, no fault of the daemon
                return None
            if status != HTTPStatus.OK:
                hint = "; are its callers.tokens the same?" if status in _NO_CALLER else ""
                raise ValueError(f"status {status}{hint}")
            part = parse_list_page(body, name)
        except (CancelledError, InvalidCursor):
            raise
        except TookTooLong:
            reason = f"no answer within {PEER_TIMEOUT:g} seconds"
        except (TawebevalError, ValueError) as error:
            reason = str(error)
        except Exception:  # noqa: BLE001  (the list goes on without this daemon)
            log.failure("defect: the list of the daemon {name} cannot be read", name=name)
            return None
        else:
            self._away.discard(url)
            return part
        finally:
            size.abort_connection()
        if url not in self._away:
            self._away.add(url)
            log.warn(
                "the daemon {name} at {url} (service.peers) is left out of lists: {reason}",
                name=name,
                url=url,
                reason=reason,
            )
        return None

    async def _fetch(
        self, url: str, query: Mapping[str, str], headers: Headers, size: ResponseSizeLimit
    ) -> tuple[int, bytes]:
        """Return status and body of a daemon's answer."""
        target = parse_server_address(url)
        assert target is not None, "the configuration accepts URLs only"
        addresses = await self._resolver.find_permitted_addresses(target, PEER_TIMEOUT)
        agent = self._agent(target, addresses, size)  # follows no redirect with the token
        body = bytearray()
        with convert_request_failures(target.host):
            whole = f"{url}/evaluations?{urlencode(query)}"
            response = await agent.request(b"GET", whole.encode(), headers, None)
            await collect(response, body.extend)
        return response.code, bytes(body)


def make_evaluation_lists(
    registry: EvaluationRegistry, resolver: Resolver, reactor: Any
) -> EvaluationLists:
    """Return the lists of evaluations; `resolver` looks up the hosts of other daemons."""
    policy = HostPolicy(allowed_private_networks=_EVERY_NETWORK, settings_section="service.peers")
    tls_policy = CachedPolicyForHTTPS(BrowserLikePolicyForHTTPS())
    return EvaluationLists(
        registry,
        reactor,
        CheckedResolver(policy, resolver, reactor),
        partial(PinnedAgent, reactor, tls_policy, PEER_TIMEOUT),
    )


def _make_page(after: str, listing: Any) -> dict[str, Any]:
    return {
        "begin": after or None,
        "end": listing.end_cursor,
        "data": [entry.orjson_fragment for entry in listing.entries],
    }


def _choose_callers(request: ApiRequest, callers: Collection[str]) -> Collection[str]:
    """Return those of `callers` that the query wants. Raises: MalformedRequest."""
    wanted = get_query_argument(request.query, "caller")
    if wanted is None:
        return callers
    if not CALLER_NAME_PATTERN.fullmatch(wanted):
        raise MalformedRequest(f"caller: {wanted[:80]!r} is no name of a caller")
    return [name for name in callers if name == wanted]


def _parse_own_limit(request: ApiRequest) -> int | None:
    """Return the most entries for a daemon that asks; None for other clients."""
    text = get_header(request.requestHeaders, SINGLE_DAEMON_LIST_HEADER)
    if text is None:
        return None
    if not WHOLE_NUMBER_REGEX.fullmatch(text) or not 0 < int(text) <= MAX_PAGE_EVALUATIONS:
        raise MalformedRequest(
            f"{SINGLE_DAEMON_LIST_HEADER}: {text[:80]!r} is not a number from 1 to"
            f" {MAX_PAGE_EVALUATIONS}"
        )
    return int(text)


def list_problems(
    configuration: Configuration, after: str | None, permitted: Collection[str] | None
) -> dict[str, Any]:
    """Return the problems whose names follow `after`, in the order of their names.

    Only `permitted` ones, None for all. `end` is the last name if others follow, else None.
    """
    names = sorted(
        name
        for name in configuration.problems
        if (permitted is None or name in permitted) and name > (after or "")
    )
    listed = names[:PROBLEMS_PER_PAGE]
    return {
        "begin": after or None,
        "end": listed[-1] if len(names) > len(listed) else None,
        "data": [describe_problem(configuration, name) for name in listed],
    }


def describe_problem(configuration: Configuration, name: str) -> dict[str, Any]:
    """Return what the list has of a problem."""
    problem, limits = configuration.problems[name], configuration.limits
    values = {name: str(value) for name, value in problem.limits.items()}
    ranges = limits.requestable_ranges
    held = choose_limits(limits, parse_limits(values, ranges), ranges)
    return {
        "name": name,
        "title": problem.title,
        "description": problem.description,
        "fields": problem.fields,
        "extensions": problem.extensions,
        "own_input": problem.own_input,
        "environment": problem.environment or DEFAULT_ENVIRONMENT_NAME,
        "limits": {name: getattr(held, name) for name in LIMIT_UNITS},
        **{
            key: moment and format_rfc3339_time(moment.timestamp())
            for key, moment in (("opens", problem.opens), ("closes", problem.closes))
        },
        "late": problem.late,
    }
