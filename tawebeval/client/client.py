"""The asynchronous client."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
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
from tawebeval.client.errors import EvaluationGone, UnknownEvaluation
from tawebeval.client.events import Event, Page, parse_page, split_cursor
from tawebeval.client.http import Answer, Exchange, Question, is_unknown
from tawebeval.client.submission import Content, Form
from tawebeval.core.backoff import Backoff

ASKING = Backoff(attempts=7, first_delay=0.5, longest_delay=10, longest_asked=120)
"""How often to ask before giving up: for about 10 seconds, unless the server asks for more."""
FOLLOWING = Backoff(attempts=40, first_delay=0.5, longest_delay=30, longest_asked=600)
"""The same for events: for about 10 minutes, for an evaluation waits longer for its reader."""

_WAIT = 25  # seconds for which the server may hold a question for events
_PATIENCE = 30.0  # seconds that it may take to answer beyond that
_POLL = 0.5  # seconds between two questions where the server says nothing of it

Document = dict[str, Any]
Kind = TypeVar("Kind")


class Client:
    """Asks the server at the URL `server`, with a token where it wants one.

    `asking` and `following` say how often a question is repeated that got no answer, none that is
    whole, or one that says "later" (429, 5xx); `told(why, seconds)` is called before each pause,
    `answered()` when a question is answered after one. A server that says how much later is never
    asked sooner. What is refused raises `Refused` at once; what has failed too often, may not be
    repeated before `longest_asked`, or shows that no tawebeval answers there, `Unavailable`.

    Connections are kept until `close`, which `async with` calls. `agent` is what to ask by
    instead of connections of its own. Raises ValueError for what is no URL.
    """

    def __init__(
        self,
        server: str,
        token: str | None = None,
        *,
        asking: Backoff = ASKING,
        following: Backoff = FOLLOWING,
        told: Callable[[str, float], object] = lambda why, seconds: None,
        answered: Callable[[], object] = lambda: None,
        reactor: Any = None,
        agent: IAgent | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if reactor is None:
            from twisted.internet import reactor
        self._clock = reactor
        self._pool: HTTPConnectionPool | None = None
        if agent is None:
            self._pool = HTTPConnectionPool(reactor)
            agent = Agent(reactor, connectTimeout=_PATIENCE, pool=self._pool)
        headers = {"User-Agent": f"tawebeval/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._exchange = Exchange(
            HTTPClient(agent),
            base_url(server),
            headers,
            reactor,
            Cooperator(scheduler=lambda call: reactor.callLater(0, call)),
            chance,
            time.time,
            told,
            answered,
            functools.partial(is_unknown, reactor),
        )
        self._asking = asking
        self._following = following

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that are kept."""
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
        callback_url: str | None = None,
        key: str | None = None,
    ) -> str:
        """Begin an evaluation; return its identifier.

        `submission` has by the name of each field a text or bytes, which become the file
        `<field>.txt`, a `Path`, which is sent under its own name, or a `Named`. Everything else
        is as the API has it. However often the form has to be sent, one evaluation begins: it has
        an `Idempotency-Key`. A program that may be restarted in the middle gives its own `key`,
        so that the next attempt finds the evaluation of the last.

        Raises InvalidRequest, Forbidden, Unavailable; ValueError for an impossible name of a file
        and for text that cannot be UTF-8, OSError for a file that cannot be read.
        """
        given = {
            "repository[url]": repository,
            "repository[branch]": branch,
            "repository[depth]": depth,
            "commit_oid": commit,
            "directory": directory,
            "evaluator_cmd": evaluator_cmd,
            "seed": seed,
            "callback_url": callback_url,
        }
        fields = {name: str(value) for name, value in given.items() if value is not None}
        question = Question(
            "POST",
            "/evaluate",
            {"Idempotency-Key": key or uuid4().hex},
            Form(fields, submission),
        )
        return await self._exchange.ask(question, self._asking, _identifier)

    async def events(self, identifier: str, after: str | None = None) -> AsyncIterator[Event]:
        """Yield the events of an evaluation, each once and in order, as they come.

        They are those of `pages`, which says what `after` is and what is raised.
        """
        async for page in self.pages(identifier, after):
            for event in page.events:
                yield event

    async def pages(
        self, identifier: str, after: str | None = None, *, limit: int | None = None
    ) -> AsyncIterator[Page]:
        """Yield the pages of an evaluation up to its end, as they come; none is empty.

        `after` is the `cursor` of an event, or the `end` of a page: it goes on from there. A page
        has up to `limit` bytes of events as JSON, or one event; None leaves that to the server.
        Asking for the next page acknowledges this one: then the server has it no more. So who may
        not lose an event stores its cursor, or that of the page, together with what came of it.

        Raises UnknownEvaluation, EvaluationGone, Forbidden, Unavailable; ValueError for what is no
        cursor. One that the server has known before, and knows no more, is gone.
        """
        path = _path_of(identifier) + "/events"
        after, skip = split_cursor(after)
        known = False
        while True:
            question = Question(
                "GET",
                path + _query(after=after, limit=limit),
                {"Accept": "application/json", "Prefer": f"wait={_WAIT}"},
                timeout=_WAIT + _PATIENCE,
            )
            try:
                page, pause = await self._exchange.ask(
                    question, self._following, functools.partial(self._page, after)
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

    def _page(self, after: str | None, answer: Answer) -> tuple[Page, float]:
        """Return a page, and for how long to leave a server in peace that does not wait."""
        page = parse_page(answer.body, after)
        if page.events or b"wait=" in answer.header(b"Preference-Applied"):
            return page, 0
        return page, self._exchange.retry_after(answer) or _POLL

    async def status(self, identifier: str) -> Document:
        """Return the status document. Raises UnknownEvaluation, EvaluationGone, Unavailable."""
        question = Question("GET", _path_of(identifier))
        return await self._exchange.ask(question, self._asking, _document)

    async def cancel(self, identifier: str) -> None:
        """End an evaluation; return when nothing of it runs. One that has ended stays as it is."""
        await self._exchange.ask(
            Question("DELETE", _path_of(identifier)), self._asking, _check_cancelled
        )

    async def evaluations(self) -> AsyncIterator[Document]:
        """Yield the caller's own evaluations that are not forgotten, those accepted first first."""
        after: str | None = None
        while True:
            question = Question("GET", f"/evaluations{_query(after=after)}")
            evaluations, after = await self._exchange.ask(question, self._asking, _listing)
            for evaluation in evaluations:
                yield evaluation
            if after is None:
                return


def base_url(server: str) -> str:
    """Return the URL of a server without a slash at its end. Raises ValueError."""
    try:
        parts = urlsplit(server)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{server!r} is no URL of a server, such as https://host:8080")
    return server.rstrip("/")


def _path_of(identifier: str) -> str:
    return f"/evaluation/{quote(identifier, safe='')}"


def _query(**parameters: str | int | None) -> str:
    """Return the query of a URL, with the parameters that are given."""
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"?{urlencode(given)}" if given else ""


def _document(answer: Answer) -> Document:
    return _sound(_decode(answer, Document), "state")


def _sound(document: Document, *names: str) -> Document:
    """Return a document that has these members. Raises ValueError."""
    for name in names:
        if not isinstance(document.get(name), str):
            raise ValueError(f"what came is no answer of this API: it has no {name}")  # noqa: TRY004
    return document


class _Accepted(msgspec.Struct):
    evaluation_id: str


class _Listing(msgspec.Struct):
    end: str | None
    data: list[Document]


def _identifier(answer: Answer) -> str:
    return _decode(answer, _Accepted).evaluation_id


def _check_cancelled(answer: Answer) -> None:
    if answer.status != NO_CONTENT:
        raise ValueError(f"what came is no answer of this API: {answer.status}")


def _listing(answer: Answer) -> tuple[list[Document], str | None]:
    listing = _decode(answer, _Listing)
    named = [_sound(one, "evaluation_id", "state", "created") for one in listing.data]
    return named, listing.end


def _decode(answer: Answer, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what came is no answer of this API: {error}") from None
