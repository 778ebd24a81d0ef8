"""The asynchronous client, one method for each operation of the API."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit
from uuid import uuid4

import attrs
import msgspec
from treq.client import HTTPClient
from twisted.internet.task import Cooperator, deferLater
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http import NO_CONTENT
from twisted.web.iweb import IAgent

from tawebeval import __version__
from tawebeval.client.errors import EvaluationGone, InvalidRequest, UnknownEvaluation
from tawebeval.client.events import Event, Page, parse_page, split_cursor
from tawebeval.client.http import (
    Content,
    Request,
    Response,
    Session,
    SubmissionForm,
    is_plain_http,
)
from tawebeval.core.backoff import Backoff

REQUEST_BACKOFF = Backoff(
    max_attempts=7, first_delay=0.5, longest_delay=10, longest_retry_after=120
)
"""Attempts of a request: about 10 seconds in all, unless the server asks for more."""
FOLLOW_BACKOFF = Backoff(
    max_attempts=40, first_delay=0.5, longest_delay=30, longest_retry_after=600
)
"""Attempts of a request for events: about 10 minutes in all, as an evaluation waits as long."""

_WAIT = 25  # seconds for which the server may hold a request for events
_TIMEOUT = 30.0  # seconds for a connection, and for an answer beyond `_WAIT`
_POLL = 0.5  # seconds between two requests to a server that neither waits nor says Retry-After

_LIST_RESTARTS = 5  # times that a list begins again
_SUMMARY = ("evaluation_id", "state", "created")  # members of an evaluation in a list

Document = dict[str, Any]
Kind = TypeVar("Kind")


class Client:
    """The client of one server. Needs a running reactor; connections are kept until `close`.

    - `server`: its URL, http or https. Raises ValueError for any other.
    - `token`: the bearer token; None or empty sends none.
    - `asking`, `following`: the back-off of requests, and of those for events. A request is
      repeated when no response comes, a broken one, or one that says "later" (429, 5xx), never
      before its `Retry-After`.
    - `told(why, seconds)`: called before each pause.
    - `answered()`: called when a response comes after a pause.
    - `uploaded(sent, total)`: called for each piece of a form that is sent, in bytes.
    - `reactor`, `agent`: used instead of Twisted's reactor, and of connections of the client's own.
    - `chance`: draws from 0 to 1, for the jitter of pauses.
    - `time`: returns seconds since the epoch.

    A refused request raises `Refused` at once. `Unavailable` says that the attempts are used up,
    that the server asks for a longer pause than `longest_retry_after`, that no tawebeval answers,
    or that nothing listens at a loopback address from which no response has come before. Requests
    for events are repeated also then.
    """

    def __init__(
        self,
        server: str,
        token: str | None = None,
        *,
        asking: Backoff = REQUEST_BACKOFF,
        following: Backoff = FOLLOW_BACKOFF,
        told: Callable[[str, float], object] = lambda why, seconds: None,
        answered: Callable[[], object] = lambda: None,
        uploaded: Callable[[int, int], object] = lambda sent, total: None,
        reactor: Any = None,
        agent: IAgent | None = None,
        chance: Callable[[], float] = random.random,
        time: Callable[[], float] = time.time,
    ) -> None:
        if reactor is None:
            from twisted.internet import reactor
        self._clock = reactor
        self._pool: HTTPConnectionPool | None = None
        if agent is None:
            self._pool = HTTPConnectionPool(reactor)
            agent = Agent(reactor, connectTimeout=_TIMEOUT, pool=self._pool)
        headers = {"User-Agent": f"tawebeval/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        base = normalize_server_url(server)
        self._session = Session(
            HTTPClient(agent),
            base,
            headers,
            reactor,
            Cooperator(scheduler=lambda call: reactor.callLater(0, call)),
            chance,
            time,
            told,
            answered,
            uploaded,
            functools.partial(is_plain_http, reactor, base),
        )
        self.asking = asking
        self.following = following

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all idle connections."""
        if self._pool is not None:
            await self._pool.closeCachedConnections()

    async def evaluate(
        self,
        submission: Mapping[str, Content],
        *,
        repository: str,
        commit: str,
        evaluator_cmd: str,
        branch: str | None = None,
        depth: int | None = None,
        directory: str | None = None,
        seed: int | None = None,
        environment: str | None = None,
        callback_url: str | None = None,
        limits: Mapping[str, str | float] = MappingProxyType({}),
        metadata: Mapping[str, str] = MappingProxyType({}),
        key: str | None = None,
    ) -> str:
        """Begin an evaluation and return its identifier.

        `submission` maps each field to its content: text or bytes, which become the file
        `<field>.txt`, a `Path`, sent under its own name, or a `Named`. All other fields are those
        of `POST /evaluate` (docs/api.md); `limits` maps names such as `memory` to numbers, or to
        texts such as "256M". `metadata` maps names of labels to texts. `key` is the
        `Idempotency-Key`: repeated attempts begin one evaluation. A program that may be restarted
        stores a `key` of its own, and finds the evaluation of its last attempt by it.

        Raises InvalidRequest, Forbidden, Unavailable; ValueError for an invalid file name and for
        text that is not UTF-8; OSError for a file that cannot be read.
        """
        fields = {
            "repository[url]": repository,
            "repository[branch]": branch,
            "repository[depth]": depth,
            "commit_oid": commit,
            "directory": directory,
            "evaluator_cmd": evaluator_cmd,
            "seed": seed,
            "environment": environment,
            "callback_url": callback_url,
            **_limit_fields(limits),
            **_label_fields(metadata),
        }
        return await self._begin("/evaluate", submission, fields, key)

    async def evaluate_problem(
        self,
        problem: str,
        submission: Mapping[str, Content],
        *,
        callback_url: str | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        key: str | None = None,
    ) -> str:
        """Begin an evaluation for a problem of the server, as `evaluate` does otherwise.

        Raises InvalidRequest also for an unknown problem.
        """
        fields = {"callback_url": callback_url, **_label_fields(metadata)}
        path = f"/problems/{quote(problem, safe='')}/evaluate"
        try:
            return await self._begin(path, submission, fields, key)
        except UnknownEvaluation as error:
            raise InvalidRequest(error.status, str(error), error.members) from None

    async def rerun(
        self,
        identifier: str,
        *,
        commit: str | None = None,
        seed: int | None = None,
        callback_url: str | None = None,
        limits: Mapping[str, str | float] = MappingProxyType({}),
        metadata: Mapping[str, str] = MappingProxyType({}),
        key: str | None = None,
    ) -> str:
        """Begin an evaluation as an ended one, with its files, commit, seed, limits and labels.

        The arguments replace these. Returns the new identifier. Raises UnknownEvaluation,
        EvaluationGone (also if only the files are discarded), and as `evaluate`.
        """
        fields = {
            "commit_oid": commit,
            "seed": seed,
            "callback_url": callback_url,
            **_limit_fields(limits),
            **_label_fields(metadata),
        }
        return await self._begin(f"{_path_of(identifier)}/rerun", {}, fields, key)

    async def _begin(
        self,
        path: str,
        submission: Mapping[str, Content],
        fields: Mapping[str, str | float | None],
        key: str | None,
    ) -> str:
        """Send a form without the fields that are None, and return the identifier."""
        given = {name: str(value) for name, value in fields.items() if value is not None}
        request = Request(
            "POST",
            path,
            {"Idempotency-Key": key or uuid4().hex},
            SubmissionForm(given, submission),
        )
        return await self._session.send_request(request, self.asking, _identifier)

    async def events(
        self, identifier: str, after: str | None = None, *, times: bool = False
    ) -> AsyncIterator[Event]:
        """Yield the events of an evaluation as they come, each once and in order.

        For `after`, `times` and the exceptions see `pages`.
        """
        async for page in self.pages(identifier, after, times=times):
            for event in page.events:
                yield event

    async def pages(
        self,
        identifier: str,
        after: str | None = None,
        *,
        limit: int | None = None,
        times: bool = False,
    ) -> AsyncIterator[Page]:
        """Yield the pages of an evaluation as they come, up to its end; none is empty.

        `after` is the `cursor` of an event or the `end` of a page; reading continues there. None
        reads from the beginning. `limit` is the size of a page in bytes of JSON, which at least
        one event may exceed; None leaves the size to the server. `times` adds to each event the
        `time` when the server stored it. Requesting the next page acknowledges the last one, and
        the server discards it. A program that must not lose an event stores the cursor together
        with its own result.

        Raises UnknownEvaluation, Forbidden, Unavailable; EvaluationGone also for an evaluation
        that the server knew before; ValueError for an invalid cursor.
        """
        path = _path_of(identifier) + "/events"
        after, skip = split_cursor(after)
        known = False
        while True:
            request = Request(
                "GET",
                path + _query(after=after, limit=limit, times=1 if times else None),
                {"Accept": "application/json", "Prefer": f"wait={_WAIT}"},
                timeout=_WAIT + _TIMEOUT,
                can_wait_for_daemon=True,
            )
            try:
                page, pause = await self._session.send_request(
                    request, self.following, functools.partial(self._page, after)
                )
            except UnknownEvaluation as error:
                if not known:
                    raise
                raise EvaluationGone(error.status, str(error), error.members) from None
            known = True
            if page.end is None:
                return
            rest = page.events[skip:]
            skip -= len(page.events) - len(rest)
            if rest:
                yield attrs.evolve(page, events=rest)
            elif pause:
                await deferLater(self._clock, pause)
            after = page.end

    def _page(self, after: str | None, response: Response) -> tuple[Page, float]:
        """Return a page, and the seconds to pause if the server does not hold requests."""
        page = parse_page(response.body, after)
        if page.events or b"wait=" in response.get_header(b"Preference-Applied"):
            return page, 0
        return page, self._session.parse_retry_after(response) or _POLL

    async def status(self, identifier: str) -> Document:
        """Return the status document. Raises UnknownEvaluation, EvaluationGone, Unavailable."""
        request = Request("GET", _path_of(identifier))
        return await self._session.send_request(request, self.asking, _document)

    async def cancel(self, identifier: str) -> None:
        """Cancel an evaluation; return when none of its processes runs. May be repeated."""
        await self._session.send_request(
            Request("DELETE", _path_of(identifier)), self.asking, _check_cancelled
        )

    async def environments(self) -> list[Document]:
        """Return the environments of the server: name, description and digest of each."""
        return await self._session.send_request(
            Request("GET", "/environments"), self.asking, _environments
        )

    async def evaluations(
        self,
        *,
        state: str | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        since: datetime | None = None,
        until: datetime | None = None,
        problem: str | None = None,
        on_away: Callable[[Sequence[str]], object] = lambda names: None,
    ) -> AsyncIterator[Document]:
        """Yield the caller's evaluations that the server still has, each once, oldest first.

        Only those in this state, of this problem, with these labels, and accepted from `since` on,
        before `until`; both times have a time zone. Raises InvalidRequest for a state, problem or
        label that cannot be.

        Where several daemons share the server's address, those of each daemon are in this order. At
        the end `on_away` is called with the names of daemons that have not answered, if there are
        any: the list is without evaluations of theirs.
        """
        times = {
            name: None if moment is None else moment.isoformat()
            for name, moment in (("since", since), ("until", until))
        }
        wanted = {"state": state, "problem": problem, **times, **_label_fields(metadata)}
        async for evaluation in self._list("/evaluations", wanted, *_SUMMARY, on_away=on_away):
            yield evaluation

    async def problems(self) -> AsyncIterator[Document]:
        """Yield the problems of the server that the caller may use, in the order of their names."""
        async for problem in self._list("/problems", {}, "name"):
            yield problem

    async def _list(
        self,
        path: str,
        wanted: Mapping[str, str | None],
        *members: str,
        on_away: Callable[[Sequence[str]], object] = lambda names: None,
    ) -> AsyncIterator[Document]:
        """Yield the entries of a list, which have these members; the first one identifies them."""
        after: str | None = None
        yielded: set[str] = set()
        restarts = 0
        while True:
            request = Request("GET", path + _query(after=after, **wanted))
            try:
                listing = await self._session.send_request(
                    request, self.asking, functools.partial(_listing, members)
                )
            except InvalidRequest:
                # A daemon was restarted since the last part: the list begins again.
                restarts += 1
                if after is None or restarts > _LIST_RESTARTS:
                    raise
                after = None
                continue
            for entry in listing.data:
                if entry[members[0]] not in yielded:
                    yielded.add(entry[members[0]])
                    yield entry
            after = listing.end
            if after is None:
                if listing.away:
                    on_away(listing.away)
                return


def normalize_server_url(server: str) -> str:
    """Return the URL of a server without trailing slashes. Raises ValueError."""
    try:
        parts = urlsplit(server)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or "@" in parts.netloc:
        example = "https://judge.example.org"
        if re.fullmatch(r"[A-Za-z0-9.-]+(:[0-9]+)?", server):
            example = f"http://{server}"
        raise ValueError(f"{server!r} is not the URL of a server, such as {example}")
    return server.rstrip("/")


def _path_of(identifier: str) -> str:
    return f"/evaluation/{quote(identifier, safe='')}"


def _label_fields(metadata: Mapping[str, str]) -> dict[str, str]:
    return {f"metadata[{name}]": value for name, value in metadata.items()}


def _limit_fields(limits: Mapping[str, str | float]) -> dict[str, str | float]:
    return {f"limits[{name}]": value for name, value in limits.items()}


def _query(**parameters: str | int | None) -> str:
    """Return the query of a URL, without parameters that are None or empty."""
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"?{urlencode(given)}" if given else ""


def _document(response: Response) -> Document:
    return _check_members(_decode(response, Document), "state")


def _check_members(document: Document, *names: str) -> Document:
    """Return a document that has these members, all strings. Raises ValueError."""
    for name in names:
        if not isinstance(document.get(name), str):
            raise ValueError(f"unexpected answer: it has no {name}")  # noqa: TRY004
    return document


class _Accepted(msgspec.Struct):
    evaluation_id: str


class _Listing(msgspec.Struct):
    end: str | None
    data: list[Document]
    away: list[str] = []


class _Environments(msgspec.Struct):
    data: list[Document]


def _environments(response: Response) -> list[Document]:
    return [_check_members(one, "name") for one in _decode(response, _Environments).data]


def _identifier(response: Response) -> str:
    return _decode(response, _Accepted).evaluation_id


def _check_cancelled(response: Response) -> None:
    if response.status != NO_CONTENT:
        raise ValueError(f"unexpected answer: the status is {response.status}")


def _listing(members: Iterable[str], response: Response) -> _Listing:
    listing = _decode(response, _Listing)
    for one in listing.data:
        _check_members(one, *members)
    return listing


def _decode(response: Response, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(response.body, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"unexpected answer: {error}") from None
