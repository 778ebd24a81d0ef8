"""A client: begins evaluations, and follows their events page by page."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from typing import Any

import attrs
from treq.client import HTTPClient
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.web.client import Agent, BrowserLikePolicyForHTTPS, HTTPConnectionPool
from twisted.web.http_headers import Headers
from twisted.web.iweb import IPolicyForHTTPS

from tests.cases.patience import PATIENCE
from tests.integration.unprivileged import PYTHON

Event = dict[str, Any]
Form = list[tuple[str, Any]]

_CURSOR = re.compile(r"[A-Za-z0-9_-]+")
_MAX_PAYLOAD = 64 * 1024


def python(program: str, *arguments: str) -> str:
    """Return the shell command that runs a Python program and becomes it."""
    return "exec " + shlex.join([PYTHON, "-S", "-u", "-c", program, *arguments])


@attrs.frozen
class Answer:
    """An answer, read to its end."""

    code: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        values = self.headers.getRawHeaders(name)
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def problem(self, code: int) -> dict[str, Any]:
        """Return the problem document that the answer must be, with the status `code`."""
        assert self.code == code, f"{self.code}, not {code}: {self.body!r}"
        assert self.header("Content-Type") == "application/problem+json"
        assert self.header("Access-Control-Allow-Origin") == "*"
        document: dict[str, Any] = self.json
        assert document["status"] == code
        assert document["message"] == document["detail"] != ""
        assert "Traceback" not in document["message"]
        return document


class Client:
    """Talks to the daemon at `url`, over connections that are kept, with a token if need be.

    `trust` decides over TLS, and `source` is the address from which to connect.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        trust: IPolicyForHTTPS | None = None,
        source: str | None = None,
    ) -> None:
        self.url = url
        self._credentials = {"Authorization": f"Bearer {token}"} if token else {}
        self.evaluations: list[str] = []
        self._pool = HTTPConnectionPool(reactor)
        self.http = HTTPClient(
            Agent(
                reactor,
                trust or BrowserLikePolicyForHTTPS(),
                connectTimeout=PATIENCE,
                bindAddress=(source, 0) if source else None,
                pool=self._pool,
            )
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pool.closeCachedConnections()

    async def request(self, method: str, path: str, **arguments: Any) -> Answer:
        headers = {**self._credentials, **(arguments.pop("headers", None) or {})}
        response = await self.http.request(
            method, self.url + path, timeout=PATIENCE, headers=headers, **arguments
        )
        return Answer(response.code, response.headers, await response.content())

    async def get(self, path: str, **arguments: Any) -> Answer:
        return await self.request("GET", path, **arguments)

    async def stream(
        self, path: str, received: Callable[[bytes], object], headers: dict[str, str]
    ) -> None:
        """Read a stream to its end; `received` gets it piece by piece."""
        response = await self.http.get(self.url + path, headers={**self._credentials, **headers})
        assert response.code == 200, response.code
        await response.collect(received)

    # Evaluations

    async def post(
        self,
        repository: str,
        commit: str,
        command: str,
        files: Iterable[tuple[str, str, bytes]] = (("solution", "solution.txt", b"42\n"),),
        headers: Mapping[str, str] | None = None,
        **fields: str,
    ) -> Answer:
        """Return the answer to a form; `files` are a field's name, a file's name, its bytes."""
        form: Form = [
            ("repository[url]", repository),
            ("commit_oid", commit),
            ("evaluator_cmd", command),
            *((_field(name), value) for name, value in fields.items()),
        ]
        parts: Form = [
            (f"submission[{field}]", (name, "application/octet-stream", BytesIO(content)))
            for field, name, content in files
        ]
        answer = await self.request(
            "POST", "/evaluate", data=form, files=parts, headers=dict(headers or {})
        )
        if answer.code == 200:
            self.evaluations.append(answer.json["evaluation_id"])
        return answer

    async def evaluate(self, repository: str, commit: str, command: str, **more: Any) -> str:
        answer = await self.post(repository, commit, command, **more)
        assert answer.code == 200, answer.body
        return str(answer.json["evaluation_id"])

    async def evaluate_problem(self, name: str) -> str:
        files: Form = [("submission[solution]", ("solution.txt", "text/plain", BytesIO(b"42\n")))]
        answer = await self.request("POST", f"/problems/{name}/evaluate", files=files)
        assert answer.code == 200, answer.body
        self.evaluations.append(answer.json["evaluation_id"])
        return self.evaluations[-1]

    async def status(self, identifier: str) -> dict[str, Any]:
        answer = await self.get(f"/evaluation/{identifier}")
        assert answer.code == 200, answer.body
        document: dict[str, Any] = answer.json
        return document

    async def ended(self, identifier: str) -> dict[str, Any]:
        """Wait until an evaluation has ended; return its status, which its reader's end frees."""
        while True:
            status = await self.status(identifier)
            if status["ended"] is not None:
                return status
            await deferLater(reactor, 0.05)

    async def cancel(self, identifier: str) -> None:
        answer = await self.request("DELETE", f"/evaluation/{identifier}")
        assert answer.code == 204, answer.body

    async def cancel_all(self) -> None:
        for identifier in self.evaluations:
            await self.cancel(identifier)

    async def streams(self) -> int:
        return int(await self.figure("streams"))

    async def figure(self, name: str) -> float:
        """Return a metric of the daemon that has no labels."""
        figures = (await self.get("/metrics")).body.decode()
        return float(re.findall(rf"(?m)^tawebeval_{name} (\S+)$", figures)[0])

    # Events

    async def ask(self, identifier: str, after: str | None = None, wait: int = 0) -> Answer:
        query = {"after": after} if after is not None else {}
        return await self.get(
            f"/evaluation/{identifier}/events",
            params=query,
            headers={"Prefer": f"wait={wait}"} if wait else {},
        )

    async def page(self, identifier: str, after: str | None = None, wait: int = 0) -> Any:
        """Return a page, of which everything is checked that holds for any page."""
        answer = await self.ask(identifier, after, wait)
        assert answer.code == 200, answer.body
        assert answer.header("Content-Type") == "application/json"
        assert answer.header("Cache-Control") == "no-store"
        page = answer.json
        assert list(page) == ["begin", "end", "data"]
        assert page["begin"] == (after or None)
        if page["end"] is None:
            assert page["data"] == []
        else:
            assert _CURSOR.fullmatch(page["end"])
        for event in page["data"]:
            _check(event)
        return page

    async def follow(self, identifier: str, after: str | None = None) -> list[Event]:
        """Return all events of an evaluation after a cursor, as they come, to the end."""
        events: list[Event] = []
        while True:
            page = await self.page(identifier, after, wait=10)
            events += page["data"]
            after = page["end"]
            if after is None:
                return events

    async def first_page(self, identifier: str) -> Any:
        """Return the first page when something is on it; no event is acknowledged."""
        while not (page := await self.page(identifier, wait=10))["data"]:
            continue
        return page

    async def printed(self, identifier: str, word: str) -> None:
        """Wait until an evaluator has printed the line `word`; no event is acknowledged."""
        while True:
            over = (await self.status(identifier))["ended"] is not None
            page = await self.page(identifier, wait=10)
            if word in text(page["data"]).split("\n"):
                return
            assert not over, f"it has ended: {page}"
            await deferLater(reactor, 0.05)


def _field(name: str) -> str:
    """Return the form's name of `repository_branch` and the like."""
    head, _, tail = name.partition("repository_")
    return name if head or not tail else f"repository[{tail}]"


def _check(event: Event) -> None:
    assert set(event) == {"type", "payload"}, event
    if event["type"] == "text":
        payload = event["payload"]
        assert payload == "\n" or (payload and "\n" not in payload), event
        assert len(payload.encode()) <= _MAX_PAYLOAD
    else:
        assert event["type"] == "data", event


def text(events: Iterable[Event]) -> str:
    """Return what was printed as text."""
    return "".join(event["payload"] for event in events if event["type"] == "text")


def data(events: Iterable[Event]) -> list[Any]:
    """Return the payloads of the data events."""
    return [event["payload"] for event in events if event["type"] == "data"]


def joined(events: Iterable[Event]) -> list[Any]:
    """Return the events' payloads, with text that was cut apart put together.

    Text is a string, data is in a list of one.
    """
    found: list[Any] = []
    for kind, group in groupby(events, itemgetter("type")):
        payloads = [event["payload"] for event in group]
        found += [[payload] for payload in payloads] if kind == "data" else ["".join(payloads)]
    return found


def failure(events: Iterable[Event], reason: str) -> dict[str, Any]:
    """Return the final event, the only one of its kind, which must be of that `reason`."""
    payloads = [event["payload"] for event in events]
    errors = [
        payload
        for payload in payloads
        if isinstance(payload, dict)
        and payload.get("type") == "evaluation_error"
        and payload["reason"] != "protocol"
    ]
    assert len(errors) == 1, payloads[-5:]
    assert errors[0] is payloads[-1]
    assert errors[0]["reason"] == reason, errors[0]
    assert errors[0]["message"]
    return errors[0]


@attrs.define
class SocketReader:
    messages: list[str] = attrs.field(factory=list)
    closed: Deferred[None] = attrs.field(factory=Deferred)

    def buildProtocol(self, url: str) -> SocketReader:
        return self

    def negotiationStarted(self, transport: object) -> None:
        pass

    def negotiationFinished(self) -> None:
        pass

    def textMessageReceived(self, message: str) -> None:
        self.messages.append(message)

    def bytesMessageReceived(self, data: bytes) -> None:
        raise AssertionError("events are text")

    def pongReceived(self, payload: bytes) -> None:
        pass

    def connectionLost(self, reason: object) -> None:
        self.closed.callback(None)
