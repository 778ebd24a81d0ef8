"""One question to the server, asked as often as it takes to get an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import attrs
from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.error import ConnectError, ConnectionClosed, DNSLookupError
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Cooperator, deferLater
from twisted.python.failure import Failure
from twisted.web.client import RequestTransmissionFailed, ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from tawebeval.backoff import Backoff, Verdict, retry_after, verdict
from tawebeval.client.errors import Unavailable, refusal
from tawebeval.client.submission import Form

_SLOWEST = 4096  # bytes per second of a form that is on its way: servers cut off what is slower

Meaning = TypeVar("Meaning")


@attrs.frozen
class Answer:
    """An answer, read to its end."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes:
        """Return a header's value, empty if it is absent."""
        value: bytes = self.headers.getRawHeaders(name, [b""])[0]
        return value


class NoAnswer(Exception):
    """What came was no answer that could be used, or nothing came; `str()` says what."""


@attrs.frozen
class Question:
    """A request that can be repeated.

    `timeout` is in seconds, for each attempt; a form may take longer, by its length.
    """

    method: str
    path: str
    headers: Mapping[str, str] = attrs.field(factory=dict)
    form: Form | None = None
    timeout: float = 60


@attrs.frozen
class Exchange:
    """Asks the server at the URL `base`.

    `chance` draws from 0 to 1, `time` is in seconds since the epoch. `told(why, seconds)` is
    called before each pause, `answered()` when there is an answer after one.
    """

    _http: HTTPClient
    _base: str
    _headers: Mapping[str, str]
    _clock: Any
    _cooperator: Cooperator
    _chance: Callable[[], float]
    _time: Callable[[], float]
    _told: Callable[[str, float], object]
    _answered: Callable[[], object]

    async def ask(
        self, question: Question, backoff: Backoff, parse: Callable[[Answer], Meaning]
    ) -> Meaning:
        """Return what `parse` makes of the answer; its ValueError says that it is none.

        Raises Refused for a question that is not worth repeating, Unavailable where all attempts
        have failed or the server asks for more patience than there is, OSError for a file of the
        form that cannot be read.
        """
        made = 0
        while True:
            asked = 0.0
            try:
                answer = await self._attempt(question)
                meaning = verdict(answer.status)
                if meaning is Verdict.TAKEN:
                    parsed = _parsed(answer, parse)
                    if made:
                        self._answered()
                    return parsed
                if meaning is Verdict.REFUSED:
                    raise refusal(answer.status, answer.body)
                why = str(refusal(answer.status, answer.body))
                asked = self.retry_after(answer)
            except NoAnswer as error:
                why = str(error)
            made += 1
            pause = backoff.delay(made, self._chance(), asked)
            if pause is None:
                later = f" (it asks for {asked:.0f} seconds of patience)" if asked else ""
                raise Unavailable(f"{self._base}: {why}{later}")
            self._told(why, pause)
            await deferLater(self._clock, pause)

    def retry_after(self, answer: Answer) -> float:
        """Return for how many seconds the server asks to be left alone."""
        return retry_after(answer.header(b"Retry-After"), self._time())

    async def _attempt(self, question: Question) -> Answer:
        with ExitStack() as opened:
            body, timeout = None, question.timeout
            if question.form is not None:
                body = question.form.body(self._cooperator, opened)
                timeout += int(body.length) / _SLOWEST
            attempt = Deferred.fromCoroutine(self._request(question, body))
            try:
                return await attempt.addTimeout(timeout, self._clock)
            except TookTooLong:
                raise NoAnswer(f"no answer came within {timeout:.0f} seconds") from None

    async def _request(self, question: Question, body: Any) -> Answer:
        headers = {**self._headers, **question.headers}
        if question.form is not None:
            headers["Content-Type"] = question.form.content_type
        try:
            response = await self._begin(question, headers, body)
            return Answer(response.code, response.headers, await _read(response))
        except (ResponseFailed, RequestTransmissionFailed) as error:
            if any(reason.check(CancelledError) for reason in error.reasons):
                raise CancelledError from None
            raise NoAnswer(f"the connection broke: {_why(error.reasons)}") from None
        except (ConnectError, ConnectionClosed, DNSLookupError, PotentialDataLoss) as error:
            raise NoAnswer(f"no connection: {error}") from None

    def _begin(
        self, question: Question, headers: Mapping[str, str], body: Any
    ) -> Deferred[IResponse]:
        try:
            begun: Deferred[Any] = self._http.request(
                question.method,
                self._base + question.path,
                data=body,
                headers=Headers({name: [value] for name, value in headers.items()}),
                allow_redirects=False,
                unbuffered=True,
                reactor=self._clock,
            )
        except ValueError as error:  # the host's name can be none
            raise Unavailable(f"{self._base}: {error}") from None
        return begun


def _parsed(answer: Answer, parse: Callable[[Answer], Meaning]) -> Meaning:
    """Return what `parse` makes of an answer. Raises NoAnswer."""
    try:
        return parse(answer)
    except ValueError as error:
        raise NoAnswer(str(error)) from None


def _why(reasons: Iterable[Failure]) -> str:
    """Return what a connection ended by, each reason once."""
    named = (str(reason.value).strip(" .[]<>") or type(reason.value).__name__ for reason in reasons)
    return "; ".join(dict.fromkeys(named))


class _Body(Protocol):
    """Gathers a body; who cancels `done` ends the connection."""

    transport: Any

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.done: Deferred[bytes] = Deferred(lambda _: self.transport.stopProducing())

    def dataReceived(self, data: bytes) -> None:
        self._pieces.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.done.called:
            return
        if reason.check(ResponseDone):
            self.done.callback(b"".join(self._pieces))
        else:
            self.done.errback(reason)


async def _read(response: IResponse) -> bytes:
    body = _Body()
    response.deliverBody(body)
    return await body.done
