"""One question to the server, asked as often as it takes to get an answer."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar
from urllib.parse import urlsplit

import attrs
import msgspec
from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.error import ConnectError, ConnectionClosed, DNSLookupError
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Cooperator, deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure
from twisted.web.client import RequestTransmissionFailed, ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from tawebeval.client.errors import Unavailable, refusal
from tawebeval.client.submission import Form
from tawebeval.core.backoff import Backoff, Verdict, retry_after, verdict

_SLOWEST = 4096  # bytes per second of a form that is on its way: servers cut off what is slower
_NEVER = (501, 505)  # 5xx that say what the server is, not how it is
_JSON = b"application/json"

# What ends connections to servers that will do so the next time, too: classes by their names, for
# they are in packages that need not be there, or in Twisted's own modules.
_NO_TLS = ("OpenSSL.SSL.Error", "service_identity.exceptions.VerificationError")
_BROKEN_TLS = ("OpenSSL.SSL.SysCallError", "OpenSSL.SSL.ZeroReturnError")
_NO_HTTP = ("twisted.web._newclient.ParseError",)

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
    """What came was no answer that could be used, or nothing came; `str()` says what.

    It is `final` where nothing else is to be expected, however often the server is asked.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


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
    called before each pause, `answered()` when there is an answer after one. `is_unknown(host)`
    tells whether there is no such host.
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
    _is_unknown: Callable[[str], Awaitable[bool]]

    async def ask(
        self, question: Question, backoff: Backoff, parse: Callable[[Answer], Meaning]
    ) -> Meaning:
        """Return what `parse` makes of the answer; its ValueError says that it is none.

        Raises Refused for a question that is not worth repeating, Unavailable where all attempts
        have failed, where it shows that others would, or where the server asks for more patience
        than there is; OSError for a file of the form that cannot be read.
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
                if meaning is Verdict.REFUSED or answer.status in _NEVER:
                    raise refusal(answer.status, answer.body)
                why = str(refusal(answer.status, answer.body))
                asked = self.retry_after(answer)
            except NoAnswer as error:
                if error.final:
                    raise Unavailable(f"{self._base}: {error}") from None
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
            raise _broken(error.reasons) from None
        except DNSLookupError as error:
            host = urlsplit(self._base).hostname or ""
            raise NoAnswer(f"no connection: {error}", await self._is_unknown(host)) from None
        except (ConnectError, ConnectionClosed, PotentialDataLoss) as error:
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
    """Return what `parse` makes of an answer. Raises NoAnswer, which is final unless it was cut."""
    try:
        return parse(answer)
    except ValueError as error:
        kind = answer.header(b"Content-Type").partition(b";")[0].strip().lower()
        if kind != _JSON:
            named = kind.decode("latin-1") or "of no declared type"
            raise NoAnswer(
                f"no tawebeval answers there: the answer is {named}, not JSON; check the URL", True
            ) from None
        raise NoAnswer(str(error), _is_whole(answer.body)) from None


def _is_whole(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _broken(reasons: Iterable[Failure]) -> NoAnswer:
    """Return how a connection has ended, without an answer."""
    reasons = list(reasons)
    for reason in reasons:
        if reason.check(*_NO_TLS) and not reason.check(*_BROKEN_TLS):
            return NoAnswer(
                f"TLS has failed: {_said(reason.value)} (if the server speaks none: http://; if its"
                " certificate is of your own: SSL_CERT_FILE)",
                True,
            )
        if reason.check(*_NO_HTTP):
            return NoAnswer("the server does not speak HTTP; check the URL", True)
    return NoAnswer(f"the connection broke: {_why(reasons)}")


def _said(error: Any) -> str:
    """Return what TLS complains of; OpenSSL's errors are lists of library, function and reason."""
    match error.args:
        case ([*errors],) if errors:
            return "; ".join(str(each[-1]) for each in errors if isinstance(each, tuple))
    return str(error)


async def is_unknown(reactor: Any, host: str) -> bool:
    """Tell whether there is no such host, rather than nobody who knows just now."""
    try:
        await deferToThreadPool(reactor, reactor.getThreadPool(), socket.getaddrinfo, host, None)
    except socket.gaierror as error:
        return error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
    return False


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
