"""The operations of the API as coroutines, and as asynchronous generators where they yield items.

They send requests and pause by the methods `exchange` and `pause` of their client, and await
nothing else. Those of the asynchronous client suspend; those of the other client block, so its
operations never suspend.

Every request of the API can be repeated: a form by its `Idempotency-Key`, all others by themselves.
"""

from __future__ import annotations

import inspect
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Mapping,
    Sequence,
)
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote, urlencode, urlsplit
from uuid import uuid4

import attrs
import msgspec

from tawebeval_client import __version__
from tawebeval_client.backoff import (
    Backoff,
    RequestOutcome,
    classify_http_status,
    parse_retry_after,
)
from tawebeval_client.documents import (
    Environment,
    JudgedProblem,
    Link,
    ProblemDocument,
    Standing,
    Status,
    SubmittedFile,
    Summary,
    TokenPermissions,
)
from tawebeval_client.events import (
    Data,
    EvaluationError,
    Event,
    Outcome,
    Page,
    parse_page,
    split_cursor,
)
from tawebeval_client.http import (
    Content,
    EvaluationGone,
    HttpRequest,
    InvalidRequest,
    Parsed,
    Repetition,
    RequestFailure,
    Response,
    SubmissionForm,
    Unavailable,
    UnknownEvaluation,
    build_refusal,
    parse_response,
)
from tawebeval_client.results import MAX_RESULT_BYTES, ResultSummary

REQUEST_BACKOFF = Backoff(
    max_attempts=7, first_delay_seconds=0.5, max_delay_seconds=10, max_retry_after_seconds=120
)
"""Attempts of a request: about 10 seconds in all, unless the server asks for more."""
FOLLOW_BACKOFF = Backoff(
    max_attempts=40, first_delay_seconds=0.5, max_delay_seconds=30, max_retry_after_seconds=600
)
"""Attempts of a request for events: about 10 minutes in all, as an evaluation waits as long."""


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
        shown = re.sub("(?s)^(https?://)?.*@", r"\1***@", server)  # without a password
        raise ValueError(f"{shown!r} is not the URL of a server, such as {example}")
    return server.rstrip("/")


def _check_token(client: BaseClient, _: object, token: str | None) -> None:
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError("a token is one word of ASCII characters without spaces")


@attrs.define(eq=False, slots=False)
class BaseClient(ABC):
    """The server that a client sends its requests to, and how the client repeats them.

    - `server`: its URL, http or https. Raises ValueError for any other.
    - `token`: the bearer token; None or empty sends none. Raises ValueError for spaces in it.
    - `request_backoff`, `events_backoff`: the back-off of requests, and of those for events. A
      request is repeated when no response comes, a broken one, or one that says "later" (429, 5xx),
      never before its `Retry-After`.
    - `on_retry(why, seconds)`: called before each pause.
    - `on_recovery()`: called when a response comes after a pause.
    - `draw_random()`: returns a number from 0 to 1, for the jitter of pauses.
    - `get_time()`: returns seconds since the epoch.

    A refused request raises `Refused` at once. `Unavailable` says that the attempts are used up,
    that the server asks for a longer pause than `max_retry_after_seconds`, that no tawebeval
    answers, or that nothing listens at a loopback address from which no response has come before.
    Requests for events are repeated also then. No redirect is followed: the token reaches no other
    server.
    """

    server: str = attrs.field(converter=normalize_server_url)
    token: str | None = attrs.field(default=None, repr=False, validator=_check_token)
    request_backoff: Backoff = attrs.field(default=REQUEST_BACKOFF, kw_only=True, repr=False)
    events_backoff: Backoff = attrs.field(default=FOLLOW_BACKOFF, kw_only=True, repr=False)
    on_retry: Callable[[str, float], object] = attrs.field(
        default=lambda why, seconds: None, kw_only=True, repr=False
    )
    on_recovery: Callable[[], object] = attrs.field(default=lambda: None, kw_only=True, repr=False)
    draw_random: Callable[[], float] = attrs.field(default=random.random, kw_only=True, repr=False)
    get_time: Callable[[], float] = attrs.field(default=time.time, kw_only=True, repr=False)
    server_has_answered: bool = attrs.field(default=False, init=False, repr=False)
    """Whether the server has sent any response."""

    @abstractmethod
    async def exchange(self, request: HttpRequest) -> Response | RequestFailure:
        """Send a request once. Raises OSError for a file that cannot be read."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Return after so many seconds."""


MAX_WAIT_SECONDS = 25
"""Seconds for which the server may hold a request for events."""
_TIMEOUT = 30.0  # seconds for an answer beyond the wait
_CANCEL_TIMEOUT = 600.0  # seconds; the server first makes events of all that was printed
_POLL = 0.5  # seconds between two requests to a server that neither waits nor says Retry-After
_PERMANENT = (501, 505)  # 5xx statuses that a later attempt would get as well
_NO_CONTENT = 204


P = ParamSpec("P")
T = TypeVar("T")


def _make_request(
    client: BaseClient,
    method: str,
    path: str,
    headers: Mapping[str, str] = MappingProxyType({}),
    form: SubmissionForm | None = None,
    timeout: float = 60.0,
) -> HttpRequest:
    """Return a request that can be repeated; `path` includes the query."""
    sent = {"User-Agent": f"tawebeval/{__version__}", **headers}
    if client.token:
        sent["Authorization"] = f"Bearer {client.token}"
    if form is not None:
        sent["Content-Type"] = form.content_type
    return HttpRequest(method, client.server + path, sent, form, timeout)


async def _send_request(
    client: BaseClient,
    request: HttpRequest,
    parse: Callable[[Response], Parsed],
    *,
    follows_events: bool = False,
) -> Parsed:
    """Send a request until `parse` accepts a response, and return its result.

    `parse` raises ValueError for a body that is not one of this API. With `follows_events` the
    request is repeated by `events_backoff`, also if nothing listens at a loopback address and the
    server has not answered before. Raises Refused for a status that a repetition would get as well;
    Unavailable when the attempts are used up, another one would be of no use, or `Retry-After`
    exceeds `max_retry_after_seconds`.
    """
    backoff = client.events_backoff if follows_events else client.request_backoff
    made = 0
    while True:
        asked = 0.0
        outcome = await client.exchange(request)
        if isinstance(outcome, Response):
            client.server_has_answered = True
            meaning = classify_http_status(outcome.status)
            if meaning is RequestOutcome.ACCEPTED:
                parsed = parse_response(client.server, outcome, parse)
                if not isinstance(parsed, RequestFailure):
                    if made:
                        client.on_recovery()
                    return parsed
                outcome = parsed
        if isinstance(outcome, RequestFailure):
            refused = outcome.repetition is Repetition.IF_SERVER_MAY_START
            why = outcome.message
            if outcome.is_permanent(
                client.server,
                server_has_answered=client.server_has_answered,
                can_wait=follows_events,
            ):
                raise Unavailable(why, refused)
        else:
            location = outcome.get_header("Location")
            refusal = build_refusal(outcome.status, outcome.body, location)
            if meaning is RequestOutcome.REFUSED or outcome.status in _PERMANENT:
                raise refusal
            refused, why = False, f"{client.server}: {refusal}"
            asked = _get_retry_after(client, outcome)
        made += 1
        pause = backoff.draw_delay(made, client.draw_random(), asked)
        if pause is None:
            later = f"; the server asks to retry after {asked:.0f} seconds" if asked else ""
            raise Unavailable(f"{why}{later}", refused)
        client.on_retry(why, pause)
        await client.pause(pause)


def _get_retry_after(client: BaseClient, response: Response) -> float:
    """Return the seconds that `Retry-After` asks for, 0 without the header."""
    header = response.get_header("Retry-After").encode("latin-1", "replace")
    return parse_retry_after(header, client.get_time())


async def evaluate(
    client: BaseClient,
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
    `<field>.txt`, a `Path`, sent under its own name, or a `NamedFile`. All other fields are those
    of `POST /evaluate` (docs/api.md); `limits` maps names such as `memory` to numbers, or to
    texts such as "256M". `metadata` maps names of labels to texts. `key` is the
    `Idempotency-Key`: repeated attempts begin one evaluation. A program that may be restarted
    stores a `key` of its own, and finds the evaluation of its last attempt by it.

    Raises InvalidRequest, Forbidden, Unavailable; ValueError for text and for a file name
    that is not UTF-8; OSError for a file that cannot be read.
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
        **_fields_of("limits", limits),
        **_fields_of("metadata", metadata),
    }
    return await _begin(client, "/evaluate", submission, fields, key)


async def evaluate_problem(
    client: BaseClient,
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
    fields = {"callback_url": callback_url, **_fields_of("metadata", metadata)}
    begin = _begin(client, f"{_path_of_problem(problem)}/evaluate", submission, fields, key)
    return await _name_unknown_problem(begin)


async def _name_unknown_problem(operation: Awaitable[T]) -> T:
    """Return the result of an operation on a problem. Raises InvalidRequest for an unknown one."""
    try:
        return await operation
    except UnknownEvaluation as error:
        raise InvalidRequest(error.status, str(error), error.members) from None


async def rerun(
    client: BaseClient,
    identifier: str,
    *,
    commit: str | None = None,
    seed: int | None = None,
    callback_url: str | None = None,
    limits: Mapping[str, str | float] = MappingProxyType({}),
    metadata: Mapping[str, str] = MappingProxyType({}),
    key: str | None = None,
    uses_current_evaluator: bool = False,
) -> str:
    """Begin an evaluation as an ended one, with its files, commit, seed, limits and labels.

    The arguments replace these. With `uses_current_evaluator` commit, command and limits are those
    that its problem has now. Returns the new identifier. Raises UnknownEvaluation,
    EvaluationGone (also if only the files are discarded), and as `evaluate`.
    """
    fields = {
        "commit_oid": commit,
        "seed": seed,
        "callback_url": callback_url,
        **_fields_of("limits", limits),
        **_fields_of("metadata", metadata),
    }
    query = "?evaluator=current" if uses_current_evaluator else ""
    return await _begin(client, f"{_path_of(identifier)}/rerun{query}", {}, fields, key)


async def _begin(
    client: BaseClient,
    path: str,
    submission: Mapping[str, Content],
    fields: Mapping[str, str | float | None],
    key: str | None,
) -> str:
    """Send a form without the fields that are None, and return the identifier."""
    given = {name: str(value) for name, value in fields.items() if value is not None}
    headers = {"Idempotency-Key": key or uuid4().hex}
    request = _make_request(client, "POST", path, headers, SubmissionForm(given, submission))
    return await _send_request(client, request, _identifier)


async def events(
    client: BaseClient, identifier: str, after: str | None = None, *, times: bool = False
) -> AsyncGenerator[Event, None]:
    """Yield the events of an evaluation as they come, each once and in order.

    For `after`, `times` and the exceptions see `pages`.
    """
    async for page in pages(client, identifier, after, times=times):
        for event in page.events:
            yield event


async def pages(
    client: BaseClient,
    identifier: str,
    after: str | None = None,
    *,
    limit: int | None = None,
    times: bool = False,
    choose_wait: Callable[[], int] = lambda: MAX_WAIT_SECONDS,
) -> AsyncGenerator[Page, None]:
    """Yield the pages of an evaluation as they come, up to its end; none is empty.

    `after` is the `cursor` of an event or the `end` of a page; reading continues there. None
    reads from the beginning. `limit` is the size of a page in bytes of JSON, which at least
    one event may exceed; None leaves the size to the server. `times` adds to each event the
    `time` when the server stored it. `choose_wait` is called before each request, and returns the
    seconds for which the server may hold it without events. Requesting the next page acknowledges
    the last one, and the server discards it. A program that must not lose an event stores the
    cursor together with its own result.

    Raises UnknownEvaluation, Forbidden, Unavailable; EvaluationGone also for an evaluation
    that the server knew before; ValueError for an invalid cursor.
    """
    path = _path_of(identifier) + "/events"
    after, skip = split_cursor(after)
    known = False
    while True:
        wait = choose_wait()
        begun = client.get_time()
        request = _make_request(
            client,
            "GET",
            path + _query(after=after, limit=limit, times=1 if times else None),
            {"Accept": "application/json", "Prefer": f"wait={wait}"},
            timeout=wait + _TIMEOUT,
        )
        parse = partial(_page, client, after)
        try:
            page, pause = await _send_request(client, request, parse, follows_events=True)
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
        elif pause or client.get_time() - begun < _POLL:  # a held page may be empty at once
            await client.pause(pause or _POLL)
        after = page.end


def _page(client: BaseClient, after: str | None, response: Response) -> tuple[Page, float]:
    """Return a page, and the seconds to pause if the server does not hold requests."""
    page = parse_page(response.body, after)
    if page.events or "wait=" in response.get_header("Preference-Applied"):
        return page, 0
    return page, _get_retry_after(client, response) or _POLL


async def wait(client: BaseClient, identifier: str) -> Outcome:
    """Read all events of an evaluation to its end, and return how it has ended.

    Nobody may have read them before. For the exceptions see `pages`.
    """
    summary, last = ResultSummary(), None
    async for last in events(client, identifier):
        if isinstance(last, Data) and len(value := last.raw_json.encode()) <= MAX_RESULT_BYTES:
            summary.add_if_result(value)
    error = last if isinstance(last, EvaluationError) and last.is_failure else None
    return Outcome(identifier, summary.build_json_object(), error)


def _then_wait(
    begin: Callable[Concatenate[BaseClient, P], Coroutine[Any, Any, str]],
) -> Callable[Concatenate[BaseClient, P], Coroutine[Any, Any, Outcome]]:
    """Return the operation that begins an evaluation, and returns how it has ended."""

    async def operation(client: BaseClient, /, *args: P.args, **kwargs: P.kwargs) -> Outcome:
        return await wait(client, await begin(client, *args, **kwargs))

    operation.__doc__ = f"Begin as `{begin.__name__}`, and `wait`: return how it has ended."
    signature = inspect.signature(begin).replace(return_annotation=Outcome)
    operation.__signature__ = signature  # type: ignore[attr-defined]
    operation.__name__ = operation.__qualname__ = begin.__name__.replace("evaluate", "run")
    return operation


run = _then_wait(evaluate)
run_problem = _then_wait(evaluate_problem)


async def status(client: BaseClient, identifier: str) -> Status:
    """Return the status document. Raises UnknownEvaluation, EvaluationGone, Unavailable."""
    return await _send_request(
        client, _make_request(client, "GET", _path_of(identifier)), partial(_document, _Status)
    )


async def submission(client: BaseClient, identifier: str) -> list[SubmittedFile]:
    """Return the submitted files: `field`, `filename`, `size`, and `text` or `base64`.

    The content of files is absent if there is too much. Raises EvaluationGone also if only the
    files are discarded.
    """
    request = _make_request(client, "GET", f"{_path_of(identifier)}/submission")
    return await _send_request(client, request, partial(_documents, "files", _File))


async def make_link(client: BaseClient, identifier: str, *, lifetime: int | None = None) -> Link:
    """Make a link that only reads this evaluation; return the `link` and when it `expires`.

    A link takes the place of a token. `lifetime` is in seconds; None leaves it to the server.
    """
    path = f"{_path_of(identifier)}/links{_query(lifetime=lifetime)}"
    return await _send_request(
        client, _make_request(client, "POST", path), partial(_document, _Link)
    )


async def revoke_links(client: BaseClient, identifier: str) -> None:
    """Revoke all links of an evaluation, and end the requests that use them."""
    request = _make_request(client, "DELETE", f"{_path_of(identifier)}/links")
    await _send_request(client, request, _check_deleted)


async def cancel(client: BaseClient, identifier: str) -> None:
    """Cancel an evaluation; return when none of its processes runs. May be repeated."""
    request = _make_request(client, "DELETE", _path_of(identifier), timeout=_CANCEL_TIMEOUT)
    await _send_request(client, request, _check_deleted)


async def environments(client: BaseClient) -> list[Environment]:
    """Return the environments of the server: name, description and digest of each."""
    request = _make_request(client, "GET", "/environments")
    return await _send_request(client, request, partial(_documents, "data", _Environment))


async def whoami(client: BaseClient) -> TokenPermissions:
    """Return the name of the `caller`, None without tokens, and what its token permits."""
    return await _send_request(
        client, _make_request(client, "GET", "/whoami"), partial(_document, _Caller)
    )


def evaluations(
    client: BaseClient,
    *,
    state: str | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
    since: datetime | None = None,
    until: datetime | None = None,
    problem: str | None = None,
    caller: str | None = None,
    on_unreachable_daemons: Callable[[Sequence[str]], object] = lambda names: None,
) -> AsyncGenerator[Summary, None]:
    """Yield the evaluations that the server still has, each once, oldest first.

    They are those of the caller, and of members of the groups that its token supervises: only those
    in this state, of this problem and `caller`, with these labels, and accepted from `since` on,
    before `until`; both times have a time zone. Raises InvalidRequest for a state, problem or
    label that cannot be.

    Where several daemons share the server's address, those of each daemon are in this order. At the
    end `on_unreachable_daemons` is called with the names of daemons that have not answered, if
    there are any: the list is without evaluations of theirs.
    """
    times = {
        name: None if moment is None else moment.isoformat()
        for name, moment in (("since", since), ("until", until))
    }
    wanted = {"state": state, "problem": problem, "caller": caller}
    wanted |= {**times, **_fields_of("metadata", metadata)}
    members = ("evaluation_id",)
    return _list(client, "/evaluations", wanted, _Summary, members, on_unreachable_daemons)


def standings(
    client: BaseClient, *, problem: str | None = None, caller: str | None = None
) -> AsyncGenerator[Standing, None]:
    """Yield what the caller has reached in each problem, or members of groups that it supervises.

    Only that in this problem, and of this `caller`. The order is that of callers and problems.
    """
    wanted = {"problem": problem, "caller": caller}
    return _list(client, "/standings", wanted, _Standing, ("caller", "problem"))


def problems(client: BaseClient) -> AsyncGenerator[JudgedProblem, None]:
    """Yield the problems of the server that the caller may use, in the order of their names."""
    return _list(client, "/problems", {}, _ListedProblem, ("name",))


async def problem(client: BaseClient, name: str) -> ProblemDocument:
    """Return a problem with its `statement`. Raises InvalidRequest for an unknown problem."""
    request = _make_request(client, "GET", _path_of_problem(name))
    return await _name_unknown_problem(_send_request(client, request, partial(_document, _Problem)))


async def _list(
    client: BaseClient,
    path: str,
    wanted: Mapping[str, str | None],
    kind: type[msgspec.Struct],
    members: Sequence[str],
    on_unreachable_daemons: Callable[[Sequence[str]], object] = lambda names: None,
) -> AsyncGenerator[Any, None]:
    """Yield the entries of a list, which are of this kind; these members identify them."""
    after: str | None = None
    cursors: set[str] = set()
    yielded: set[tuple[object, ...]] = set()
    while True:
        request = _make_request(client, "GET", path + _query(after=after, **wanted))
        listing = await _send_request(client, request, partial(_listing, kind, cursors))
        for entry in listing.data:
            identity = tuple(entry[member] for member in members)
            if identity not in yielded:
                yielded.add(identity)
                yield entry
        after = listing.end
        if after is None:
            if listing.away:
                on_unreachable_daemons(listing.away)
            return
        cursors.add(after)


def _path_of(identifier: str) -> str:
    return f"/evaluation/{quote(identifier, safe='')}"


def _path_of_problem(name: str) -> str:
    return f"/problems/{quote(name, safe='')}"


def _fields_of(group: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the fields of a form, such as `limits[memory]`, for values by name."""
    return {f"{group}[{name}]": value for name, value in values.items()}


def _query(**parameters: str | int | None) -> str:
    """Return the query of a URL, without parameters that are None or empty."""
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    return f"?{urlencode(given)}" if given else ""


class _Score(msgspec.Struct):
    score: float
    maximum: float | None


class _Progress(msgspec.Struct):
    done: int
    total: int


class _Results(msgspec.Struct):
    score: _Score | None
    goals: dict[str, bool]
    goals_omitted: int
    cases: dict[str, int]
    progress: _Progress | None


class _Error(msgspec.Struct):
    reason: str


class _Status(msgspec.Struct):
    state: str
    results: _Results | None = None
    error: _Error | None = None
    metadata: dict[str, str] = {}
    created: str | None = None

    def __post_init__(self) -> None:
        """Check the time. Raises ValueError."""
        if self.created is not None and datetime.fromisoformat(self.created).tzinfo is None:
            raise ValueError(f"the time {self.created!r} has no time zone")


class _Summary(_Status, kw_only=True):
    evaluation_id: str
    created: str


class _Standing(msgspec.Struct):
    caller: str | None
    problem: str
    best: _Summary


class _ListedProblem(msgspec.Struct):
    name: str
    title: str
    fields: list[str]
    closes: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _Problem(msgspec.Struct):
    name: str
    statement: str


class _Link(msgspec.Struct):
    link: str
    expires: str


class _File(msgspec.Struct):
    field: str
    filename: str
    text: str | None = None
    base64: bytes | None = None


class _Environment(msgspec.Struct):
    name: str


class _Caller(msgspec.Struct):
    caller: str | None


class _Accepted(msgspec.Struct):
    evaluation_id: str


class _Listing(msgspec.Struct):
    end: str | None
    data: list[dict[str, Any]]
    away: list[str] = []


def _document(kind: type[msgspec.Struct], response: Response) -> Any:
    """Return a document of which the members are checked that this library or the command uses."""
    return _check_kind(_decode(response, dict[str, Any]), kind)


def _documents(member: str, kind: type[msgspec.Struct], response: Response) -> Any:
    """Return the documents in a member of an answer."""
    listed = _decode(response, dict[str, Any]).get(member)
    return _check_kind(listed, list[kind])  # type: ignore[valid-type]


def _identifier(response: Response) -> str:
    return _decode(response, _Accepted).evaluation_id


def _check_deleted(response: Response) -> None:
    if response.status != _NO_CONTENT:
        raise ValueError(f"unexpected answer: the status is {response.status}")


def _listing(kind: type[msgspec.Struct], cursors: Container[str], response: Response) -> _Listing:
    """Return a part of a list whose earlier parts had these cursors. Raises ValueError."""
    listing = _decode(response, _Listing)
    if listing.end in cursors:
        raise ValueError(f"unexpected answer: the cursor {listing.end!r} comes twice in a list")
    _check_kind(listing.data, list[kind])  # type: ignore[valid-type]
    return listing


def _check_kind(value: T, kind: type[object]) -> T:
    """Return a document or a list of this kind; other members do not matter. Raises ValueError."""
    try:
        msgspec.convert(value, kind)
    except ValueError as error:
        raise ValueError(f"unexpected answer: {error}") from None
    return value


def _decode(response: Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.body, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"unexpected answer: {error}") from None
