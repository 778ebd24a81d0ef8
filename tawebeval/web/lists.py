"""Lists: the caller's evaluations, on this daemon or on all at its address, and the problems."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from tawebeval.config import Configuration
from tawebeval.core.evaluations import DaemonListPage, MergedListCursor, merge_list_pages
from tawebeval.core.form import DEFAULT_ENVIRONMENT_NAME, LIMIT_UNITS, LimitRange, parse_limits
from tawebeval.errors import MalformedRequest, ProblemNotFound, ServerBusy
from tawebeval.evaluations.lister import MAX_LISTED_EVALUATIONS, is_filter_parameter, parse_filter
from tawebeval.web.context import WebContext
from tawebeval.web.peers import SINGLE_DAEMON_LIST_HEADER, PeerListRequest
from tawebeval.web.server.messages import (
    WHOLE_NUMBER_REGEX,
    get_header,
    get_header_values,
    get_query_argument,
    get_query_arguments,
)
from tawebeval.web.server.request import ApiRequest

PROBLEMS_PER_PAGE = 100
"""Problems in one answer, at most."""


async def list_evaluations(context: WebContext, request: ApiRequest) -> dict[str, Any]:
    """Return the answer to a request. Raises: RequestError."""
    context.check_listing_access(request.requestHeaders)
    service = context.configuration.service
    own_limit = _parse_own_limit(request)
    if own_limit is None and service.other_daemons:
        return await _list_all(context, request)
    listing = await context.registry.lister.list_evaluations(
        get_query_argument(request.query, "after"),
        request.caller,
        parse_filter(get_query_arguments(request.query, is_filter_parameter)),
        own_limit,
    )
    own = {} if own_limit is None else {"daemon": service.name}
    data = [entry.json_fragment for entry in listing.entries]
    page = {"begin": listing.begin_cursor, "end": listing.end_cursor, "data": data}
    return {**own, **page}


async def _list_all(context: WebContext, request: ApiRequest) -> dict[str, Any]:
    """Return the list over all daemons: a part of each, `MAX_LISTED_EVALUATIONS` in all."""
    service = context.configuration.service
    own, others = service.name, service.other_daemons
    after = get_query_argument(request.query, "after") or ""
    parameters = get_query_arguments(request.query, is_filter_parameter)
    wanted = parse_filter(parameters)
    before = MergedListCursor.parse(after, (own, *others))
    cursors = before.find_unfinished_lists((own, *others))
    limit = max(1, MAX_LISTED_EVALUATIONS // max(1, len(cursors)))
    parts = {}
    if own in cursors:
        with suppress(ServerBusy):  # its archive's disk does not answer: then it is away, too
            listing = await context.registry.lister.list_evaluations(
                cursors[own], request.caller, wanted, limit
            )
            parts[own] = DaemonListPage(listing.end_cursor, listing.entries)
    asked = {name: url for name, url in others.items() if name in cursors}
    authorization = get_header_values(request.requestHeaders, "Authorization")
    parts |= await context.peer_lists.fetch_list_pages(
        asked, cursors, PeerListRequest(request.caller, authorization, parameters, limit)
    )
    joint = merge_list_pages(before, cursors, parts)
    return {
        "begin": after or None,
        "end": joint.end_cursor,
        "data": [entry.json_fragment for entry in joint.entries],
        "away": joint.unavailable_daemons,
    }


def _parse_own_limit(request: ApiRequest) -> int | None:
    """Return the most entries for a daemon that asks; None for other clients."""
    text = get_header(request.requestHeaders, SINGLE_DAEMON_LIST_HEADER)
    if text is None:
        return None
    if not WHOLE_NUMBER_REGEX.fullmatch(text) or not 0 < int(text) <= MAX_LISTED_EVALUATIONS:
        raise MalformedRequest(
            f"{SINGLE_DAEMON_LIST_HEADER}: {text[:80]!r} is not a number from 1 to"
            f" {MAX_LISTED_EVALUATIONS}"
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
    ranges = configuration.limits.requestable_ranges
    return {
        "begin": after or None,
        "end": listed[-1] if len(names) > len(listed) else None,
        "data": [_describe_problem(configuration, name, ranges) for name in listed],
    }


def describe_problem(configuration: Configuration, name: str) -> dict[str, Any]:
    """Return the document of a problem, with its statement. Raises: ProblemNotFound."""
    if name not in configuration.problems:
        raise ProblemNotFound(name)
    return {
        **_describe_problem(configuration, name, configuration.limits.requestable_ranges),
        "statement": configuration.problems[name].statement,
    }


def _describe_problem(
    configuration: Configuration, name: str, ranges: Mapping[str, LimitRange]
) -> dict[str, Any]:
    problem, limits = configuration.problems[name], configuration.limits
    chosen = parse_limits({name: str(value) for name, value in problem.limits.items()}, ranges)
    held = limits.choose_limits(chosen)
    return {
        "name": name,
        "title": problem.title,
        "description": problem.description,
        "fields": problem.fields,
        "extensions": problem.extensions,
        "environment": problem.environment or DEFAULT_ENVIRONMENT_NAME,
        "limits": {name: getattr(held, name) for name in LIMIT_UNITS},
    }
