"""HTTP requests to one server, repeated until a usable response comes, and the form they send.

`Session.send_request` is the only place that repeats a request. Every request of the API can be
repeated: the form by its `Idempotency-Key`, all others by themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import attrs
import msgspec
from treq.client import HTTPClient
from treq.multipart import MultiPartProducer
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.endpoints import HostnameEndpoint, connectProtocol
from twisted.internet.error import (
    ConnectError,
    ConnectingCancelledError,
    ConnectionClosed,
    DNSLookupError,
)
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.interfaces import IConsumer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Cooperator, deferLater
from twisted.python.components import proxyForInterface
from twisted.python.failure import Failure
from twisted.python.url import URL
from twisted.web.client import (
    FileBodyProducer,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseFailed,
)
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IResponse

from tawebeval.client.errors import Unavailable, build_refusal
from tawebeval.core.backoff import Backoff, RequestOutcome, classify_status, parse_retry_after
from tawebeval.core.text import get_base_name

_SLOWEST = 4096  # bytes per second of an upload; the daemon cuts off slower ones
_PERMANENT = (501, 505)  # 5xx statuses that a later attempt would get as well
_JSON = b"application/json"
_SILENCE = 1.0  # seconds without an answer after which a server of https may speak plain HTTP
_PROBE = 5.0  # seconds for the answer to a probe

# Errors that the next connection would end with as well. Named, not imported: their packages are
# optional, or the modules are private to Twisted.
_OTHER_HOST = "service_identity.exceptions.VerificationError"
_NO_TLS = ("OpenSSL.SSL.Error", _OTHER_HOST)
_BROKEN_TLS = ("OpenSSL.SSL.SysCallError", "OpenSSL.SSL.ZeroReturnError")
_NO_HTTP = ("twisted.web._newclient.ParseError",)

Parsed = TypeVar("Parsed")
T = TypeVar("T")


@attrs.frozen
class Named:
    """A file of a submission: its content or path, sent under `filename`."""

    filename: str
    content: bytes | Path


Content: TypeAlias = str | bytes | Path | Named
"""The content of a field: text or bytes without a file name, a file, or a `Named` file."""


class MeteredConsumer(proxyForInterface(IConsumer)):  # type: ignore[misc]
    """A consumer that calls `on_progress(sent, total)`, in bytes, for each piece it is given."""

    def __init__(
        self, original: IConsumer, total: int, on_progress: Callable[[int, int], object]
    ) -> None:
        super().__init__(original)
        self._sent, self._total = 0, total
        self._on_progress = on_progress

    def write(self, data: bytes) -> None:
        """Pass a piece on and count it."""
        self.original.write(data)
        self._sent += len(data)
        self._on_progress(self._sent, self._total)


class FormProducer(MultiPartProducer):
    """A multipart body that can be stopped at any time, also before and after it is sent.

    A server may send a valid response before it has read the whole body. `on_progress` is that of
    `MeteredConsumer`.
    """

    on_progress: Callable[[int, int], object] = staticmethod(lambda sent, total: None)
    _producing = False

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Send the body."""
        self._producing = True
        metered = MeteredConsumer(consumer, int(self.length), self.on_progress)
        return super().startProducing(metered).addBoth(self._finish)

    def _finish(self, result: T) -> T:
        self._producing = False
        return result

    def stopProducing(self) -> None:
        """Stop sending the body."""
        if self._producing:
            self._producing = False
            super().stopProducing()


@attrs.frozen
class SubmissionForm:
    """The form of `POST /evaluate`, encoded anew for each attempt.

    `fields` and `submission` map the names of fields to their content. Raises ValueError for an
    invalid file name and for text that is not UTF-8.
    """

    fields: Mapping[str, str]
    submission: Mapping[str, Content]
    _boundary: str = attrs.field(init=False, factory=lambda: uuid4().hex)

    def __attrs_post_init__(self) -> None:
        """Check all file names and texts. Raises ValueError."""
        for name, content in self.submission.items():
            _filename(content)
            check_encodable(f"submission[{name}]", content if isinstance(content, str) else "")
        for name, text in self.fields.items():
            check_encodable(name, text)

    @property
    def content_type(self) -> str:
        """The value of the header `Content-Type`."""
        return f"multipart/form-data; boundary={self._boundary}"

    def open_body(self, cooperator: Cooperator, opened: ExitStack) -> FormProducer:
        """Open the files and return the body. Raises OSError. `opened` stops and closes it."""
        parts = [*self.fields.items(), *self._parts(cooperator, opened)]
        body = FormProducer(parts, self._boundary, cooperator)
        opened.callback(body.stopProducing)
        return body

    def _parts(self, cooperator: Cooperator, opened: ExitStack) -> Iterator[tuple[str, Any]]:
        for name, content in self.submission.items():
            field, filename = f"submission[{name}]", _filename(content)
            if isinstance(content, str):
                yield field, content
                continue
            source = opened.enter_context(_open(content))
            producer = FileBodyProducer(source, cooperator)
            yield field, (filename, "application/octet-stream", producer)


def check_encodable(name: str, text: str) -> None:
    """Raise ValueError if the name or the text of a field cannot be encoded as UTF-8."""
    try:
        f"{name}{text}".encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: must be UTF-8") from None


def _filename(content: Content) -> str | None:
    if isinstance(content, Named):
        return get_base_name(content.filename)
    return get_base_name(content.name) if isinstance(content, Path) else None


def _open(content: bytes | Path | Named) -> IO[bytes]:
    if isinstance(content, Named):
        content = content.content
    return BytesIO(content) if isinstance(content, bytes) else content.open("rb")


@attrs.frozen
class Response:
    """A response with its whole body."""

    status: int
    headers: Headers
    body: bytes

    def get_header(self, name: bytes) -> bytes:
        """Return the first value of a header, empty if it is absent."""
        value: bytes = self.headers.getRawHeaders(name, [b""])[0]
        return value


class NoResponse(Exception):
    """No response, or none that can be used; `str()` says why.

    `is_final` means that the next attempt would fail in the same way. `is_refused` means that
    nothing listens at the address, `speaks_tls` that the server has sent a certificate.
    """

    def __init__(
        self,
        message: str,
        final: bool = False,
        *,
        is_refused: bool = False,
        speaks_tls: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_final = final
        self.is_refused = is_refused
        self.speaks_tls = speaks_tls


@attrs.frozen
class Request:
    """A request that can be repeated.

    `path` includes the query. `timeout` is in seconds for each attempt; with a form, the time to
    send it at 4096 bytes per second comes on top. `can_wait_for_daemon`: repeat the request also
    if nothing listens at a loopback address and the server has not answered before.
    """

    method: str
    path: str
    headers: Mapping[str, str] = attrs.field(factory=dict)
    form: SubmissionForm | None = None
    timeout: float = 60
    can_wait_for_daemon: bool = False


@attrs.define
class Session:
    """Sends requests to the server at the URL `base`, with `headers` on each.

    `chance` draws from 0 to 1, `time` returns seconds since the epoch. `on_retry(why, seconds)` is
    called before each pause, `on_recovery()` when a response comes after one, and
    `on_upload(sent, total)` for each piece of a form, in bytes. `is_plain_http()` tells whether the
    server of an https URL answers a request without TLS.
    """

    _http: HTTPClient
    _base: str
    _headers: Mapping[str, str]
    _clock: Any
    _cooperator: Cooperator
    _chance: Callable[[], float]
    _time: Callable[[], float]
    on_retry: Callable[[str, float], object]
    on_recovery: Callable[[], object]
    on_upload: Callable[[int, int], object]
    _is_plain_http: Callable[[], Awaitable[bool]]
    _has_answered: bool = False  # whether the server has sent any response

    async def send_request(
        self, request: Request, backoff: Backoff, parse: Callable[[Response], Parsed]
    ) -> Parsed:
        """Send a request until `parse` accepts a response, and return its result.

        `parse` raises ValueError for a body that is not one of this API. Raises Refused for a
        status that a repetition would get as well; Unavailable when the attempts are used up,
        another one would be of no use, or `Retry-After` exceeds `backoff.longest_retry_after`;
        OSError for a file of the form that cannot be read.
        """
        made = 0
        while True:
            asked, refused = 0.0, False
            try:
                response = await self._attempt(request)
                meaning = classify_status(response.status)
                if meaning is RequestOutcome.ACCEPTED:
                    parsed = _parse(self._base, response, parse)
                    if made:
                        self.on_recovery()
                    return parsed
                if meaning is RequestOutcome.REFUSED or response.status in _PERMANENT:
                    raise build_refusal(response.status, response.body)
                why = f"{self._base}: {build_refusal(response.status, response.body)}"
                asked = self.parse_retry_after(response)
            except NoResponse as error:
                why, refused = str(error), error.is_refused
                can_wait = request.can_wait_for_daemon or self._has_answered
                if error.is_final or (refused and not can_wait and is_loopback(self._base)):
                    raise Unavailable(why, refused) from None
            made += 1
            pause = backoff.draw_delay(made, self._chance(), asked)
            if pause is None:
                later = f"; the server asks to retry after {asked:.0f} seconds" if asked else ""
                raise Unavailable(f"{why}{later}", refused)
            self.on_retry(why, pause)
            await deferLater(self._clock, pause)

    def parse_retry_after(self, response: Response) -> float:
        """Return the seconds that `Retry-After` asks for, 0 without the header."""
        return parse_retry_after(response.get_header(b"Retry-After"), self._time())

    async def _attempt(self, request: Request) -> Response:
        with ExitStack() as opened:
            body, timeout = None, request.timeout
            if request.form is not None:
                body = request.form.open_body(self._cooperator, opened)
                body.on_progress = self.on_upload
                timeout += int(body.length) / _SLOWEST
            attempt = Deferred.fromCoroutine(self._exchange(request, body))
            attempt.addTimeout(timeout, self._clock)
            try:
                response = await self._watch_scheme(attempt)
            except TookTooLong:
                raise NoResponse(
                    f"no answer from {self._base} within {timeout:.0f} seconds"
                ) from None
            self._has_answered = True
            return response

    async def _watch_scheme(self, attempt: Deferred[Response]) -> Response:
        """Return the result of an attempt; end it if the server of an https URL speaks plain HTTP.

        Such a server may wait a long time for the end of the TLS greeting, which it cannot read.
        """
        if self._has_answered or not self._base.startswith("https:"):
            return await attempt
        is_plain: bool | None = None  # unknown

        async def ask() -> bool:
            return await self._is_plain_http()

        def on_probe(answer: bool) -> None:
            nonlocal is_plain
            is_plain = answer
            if is_plain:
                attempt.cancel()

        probing = deferLater(self._clock, _SILENCE, lambda: Deferred.fromCoroutine(ask()))
        probing.addCallbacks(on_probe, lambda failure: failure.trap(CancelledError) and None)
        try:
            return await attempt
        except CancelledError:
            if not is_plain:
                raise
        except NoResponse as error:
            if error.speaks_tls or not (is_plain if is_plain is not None else await ask()):
                raise
        finally:
            probing.cancel()
        plain = f"http{self._base.removeprefix('https')}"
        raise NoResponse(f"{self._base} speaks plain HTTP, not TLS; use {plain}", True)

    async def _exchange(self, request: Request, body: FormProducer | None) -> Response:
        headers = {**self._headers, **request.headers}
        if request.form is not None:
            headers["Content-Type"] = request.form.content_type
        try:
            response = await self._begin(request, headers, body)
            return Response(response.code, response.headers, await _read_body(response))
        except (ResponseFailed, RequestTransmissionFailed) as error:
            if any(reason.check(CancelledError) for reason in error.reasons):
                raise CancelledError from None
            raise _broken_connection(self._base, error.reasons) from None
        except UnicodeDecodeError:
            raise NoResponse(
                f"{self._base} sends a cookie that is not ASCII, which no tawebeval server does;"
                " check the URL",
                True,
            ) from None
        except DNSLookupError:
            host = urlsplit(self._base).hostname
            # A server that has answered has a name; then the name service is down.
            raise NoResponse(
                f"cannot connect to {self._base}: no address is known for the host {host}; check"
                " the URL, and the name service (DNS) of this machine",
                not self._has_answered,
            ) from None
        except (ConnectError, ConnectionClosed, PotentialDataLoss) as error:
            raise NoResponse(
                f"cannot connect to {self._base}: {_describe_connect_error(error)}",
                is_refused=isinstance(error, ConnectionRefused),
            ) from None

    def _begin(
        self, request: Request, headers: Mapping[str, str], body: FormProducer | None
    ) -> Deferred[IResponse]:
        try:
            begun: Deferred[Any] = self._http.request(
                request.method,
                _RequestURL.from_text(self._base + request.path),
                data=body,
                headers=Headers({name: [value] for name, value in headers.items()}),
                allow_redirects=False,
                unbuffered=True,
                reactor=self._clock,
            )
        except ValueError as error:  # an invalid host name
            raise Unavailable(f"cannot connect to {self._base}: {error}; check the URL") from None
        return begun


class _RequestURL(URL):
    """The URL of a request; treq cannot convert one with an IPv6 address, which is ASCII anyway."""

    def to_uri(self) -> URL:
        """Return the URL in ASCII."""
        return self if ":" in self.host else super().to_uri()


def is_loopback(base: str) -> bool:
    """Tell whether the host of a URL is this machine."""
    host = urlsplit(base).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _parse(base: str, response: Response, parse: Callable[[Response], Parsed]) -> Parsed:
    """Return the result of `parse`. Raises NoResponse, final unless the body was cut off."""
    try:
        return parse(response)
    except ValueError as error:
        kind = response.get_header(b"Content-Type").partition(b";")[0].strip().lower()
        if kind != _JSON:
            named = kind.decode("latin-1") or "a body of no declared type"
            raise NoResponse(
                f"{base} is not a tawebeval server: it sends {named} instead of JSON; check the"
                " URL",
                True,
            ) from None
        raise NoResponse(f"{base}: {error}", _is_whole(response.body)) from None


def _is_whole(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _broken_connection(base: str, reasons: Iterable[Failure]) -> NoResponse:
    """Return why a connection ended without a response."""
    reasons = list(reasons)
    for reason in reasons:
        if reason.check(*_NO_TLS) and not reason.check(*_BROKEN_TLS):
            return _explain_tls_error(base, reason)
        if reason.check(*_NO_HTTP):
            other = base.replace("http:", "https:", 1)
            advice = f", or try {other}" if other != base else ""
            return NoResponse(f"{base} does not speak HTTP; check the URL{advice}", True)
    return NoResponse(f"the connection to {base} broke: {_describe(reasons)}")


def _explain_tls_error(base: str, reason: Failure) -> NoResponse:
    """Return the message for a TLS error; OpenSSL lists (library, function, reason)."""
    if reason.check(_OTHER_HOST):
        message = f"the certificate of {base} is for another host; check the URL"
        return NoResponse(message, True, speaks_tls=True)
    error: Any = reason.value
    match error.args:
        case ([*errors],) if errors:
            why = "; ".join(str(each[-1]) for each in errors if isinstance(each, tuple))
        case _:
            why = str(error)
    if "certificate" in why:
        message = (
            f"the certificate of {base} is not trusted ({why}); if you trust it, set SSL_CERT_FILE"
            " to the file of its authority's certificate"
        )
        return NoResponse(message, True, speaks_tls=True)
    return NoResponse(f"{base} does not speak TLS as expected ({why}); check the URL", True)


async def is_plain_http(reactor: Any, base: str, timeout: float = _PROBE) -> bool:
    """Tell whether the server of an https URL answers a request without TLS.

    `timeout` is in seconds, for the connection and for the answer.
    """
    parts = urlsplit(base)
    endpoint = HostnameEndpoint(reactor, parts.hostname or "", parts.port or 443)
    probe = _Probe()
    try:
        await connectProtocol(endpoint, probe).addTimeout(timeout, reactor)
        answer = await probe.done.addTimeout(timeout, reactor)
    except (ConnectError, ConnectingCancelledError, DNSLookupError, TookTooLong):
        return False
    finally:
        if probe.transport is not None:
            probe.transport.abortConnection()
    # Web servers answer 400 in plain HTTP where they expect TLS.
    return bool(re.match(rb"HTTP/1\.[01] (?!400)", answer))


class _Probe(Protocol):
    """A request without TLS, and the first bytes of its answer."""

    transport: Any

    def __init__(self) -> None:
        self.done: Deferred[bytes] = Deferred()

    def connectionMade(self) -> None:
        self.transport.write(b"HEAD / HTTP/1.0\r\n\r\n")

    def dataReceived(self, data: bytes) -> None:
        self._finish(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._finish(b"")

    def _finish(self, answer: bytes) -> None:
        if not self.done.called:
            self.done.callback(answer)


def _describe_connect_error(error: Exception) -> str:
    """Return why no connection could be made, in the system's words."""
    number = getattr(error, "osError", None)
    if isinstance(number, int):
        return os.strerror(number).lower()
    return _plain_words(error)


def _describe(reasons: Iterable[Failure]) -> str:
    """Return the reasons why a connection ended, each once."""
    return "; ".join(dict.fromkeys(_plain_words(reason.value) for reason in reasons))


def _plain_words(error: BaseException | None) -> str:
    """Return the words of an error of Twisted's, which are sentences and may be empty."""
    return str(error).strip(" .[]<>") or type(error).__name__


class _BodyCollector(Protocol):
    """Collects the body of a response; cancelling `done` closes the connection."""

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


async def _read_body(response: IResponse) -> bytes:
    body = _BodyCollector()
    response.deliverBody(body)
    return await body.done
