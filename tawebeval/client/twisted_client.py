"""The client for Twisted programs: needs a running reactor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as TookTooLong
from twisted.internet.error import ConnectError, ConnectionClosed, DNSLookupError
from twisted.internet.error import ConnectionRefusedError as ConnectionRefused
from twisted.internet.interfaces import IConsumer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import CooperativeTask, Cooperator, TaskStopped, deferLater
from twisted.python.failure import Failure as TwistedFailure
from twisted.python.url import URL
from twisted.web.client import (
    Agent,
    ContentDecoderAgent,
    GzipDecoder,
    HTTPConnectionPool,
    RequestGenerationFailed,
    RequestTransmissionFailed,
    ResponseDone,
    ResponseFailed,
)
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgent, IBodyProducer, IResponse
from zope.interface import implementer

from tawebeval.client.async_client import AsyncMethods
from tawebeval.client.http import (
    MAX_RESPONSE_BODY,
    FailureKind,
    FormBody,
    HttpRequest,
    RequestFailure,
    Response,
)
from tawebeval.client.operations import Pause, RequestResult

T = TypeVar("T")

# Errors that the next connection would end with as well. Named, not imported: their packages are
# optional, or the modules are private to Twisted.
_OTHER_HOST = "service_identity.exceptions.VerificationError"
_NO_TLS = ("OpenSSL.SSL.Error", _OTHER_HOST)
_BROKEN_TLS = ("OpenSSL.SSL.SysCallError", "OpenSSL.SSL.ZeroReturnError")
_NO_HTTP = ("twisted.web._newclient.ParseError",)


def _get_reactor() -> Any:
    from twisted.internet import reactor

    return reactor


@attrs.define(eq=False, slots=False)
class TwistedClient(AsyncMethods):
    """The client of one server for Twisted programs. Connections are kept until `close`.

    `reactor` and `agent` are used instead of Twisted's reactor, and of connections of the client's
    own. For all other arguments see `ClientSettings`.
    """

    reactor: Any = attrs.field(factory=_get_reactor, kw_only=True, repr=False)
    agent: IAgent | None = attrs.field(default=None, kw_only=True, repr=False)
    _pool: HTTPConnectionPool | None = attrs.field(default=None, init=False, repr=False)
    _cooperator: Cooperator = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.agent is None:
            self._pool = HTTPConnectionPool(self.reactor)
        self._cooperator = Cooperator(scheduler=lambda call: self.reactor.callLater(0, call))

    async def __aenter__(self) -> TwistedClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all idle connections."""
        if self._pool is not None:
            await self._pool.closeCachedConnections()

    async def execute_step(self, step: HttpRequest | Pause) -> RequestResult | None:
        """Do a step of an operation. Raises OSError for a file that cannot be read."""
        if isinstance(step, Pause):
            await deferLater(self.reactor, step.seconds)
            return None
        with ExitStack() as opened:
            producer, length = None, 0
            if step.form is not None:
                body = step.form.open_body(opened)
                length = body.length
                producer = FormProducer(body, self._cooperator)
                opened.callback(producer.stopProducing)
            timeout = step.get_timeout(length)
            exchange = Deferred.fromCoroutine(self._exchange(step, producer))
            exchange.addTimeout(timeout, self.reactor)
            try:
                return await exchange
            except TookTooLong:
                return RequestFailure(FailureKind.TIMED_OUT, f"{timeout:.0f}")
            except CancelledError:
                if producer is not None and producer.error is not None:
                    raise producer.error from None
                raise

    async def _exchange(self, send: HttpRequest, producer: FormProducer | None) -> RequestResult:
        headers = Headers({name: [value] for name, value in send.headers.items()})
        try:
            url = _RequestURL.from_text(send.url).to_uri().to_text().encode("ascii")
            agent = self.agent or Agent(
                self.reactor, connectTimeout=send.connect_timeout, pool=self._pool
            )
            decoder = ContentDecoderAgent(agent, [(b"gzip", _decode_once)])
            response = await decoder.request(send.method.encode(), url, headers, producer)
            body = await _read_body(response)
            return Response(response.code, _first_values(response.headers), body)
        except (ResponseFailed, RequestGenerationFailed, RequestTransmissionFailed) as error:
            if producer is not None and producer.error is not None:
                raise producer.error from None
            if any(reason.check(CancelledError) for reason in error.reasons):
                raise CancelledError from None
            return _classify(error.reasons)
        except _BodyTooLarge:
            return RequestFailure(FailureKind.TOO_LARGE)
        except DNSLookupError:
            return RequestFailure(FailureKind.UNKNOWN_HOST)
        except ConnectionRefused:
            return RequestFailure(FailureKind.CONNECTION_REFUSED)
        except (ConnectError, ConnectionClosed, PotentialDataLoss) as error:
            return RequestFailure(FailureKind.UNREACHABLE, _describe_connect_error(error))
        except ValueError as error:  # an invalid host name
            return RequestFailure(FailureKind.INVALID_URL, str(error))


class _RequestURL(URL):
    """The URL of a request; an IPv6 address, which `to_uri` cannot convert, is ASCII anyway."""

    def to_uri(self) -> URL:
        """Return the URL in ASCII."""
        return self if ":" in self.host else super().to_uri()


def _decode_once(response: IResponse) -> IResponse:
    """Decode gzip, but not within gzip: 1 KiB compressed twice may be 1 GiB."""
    return response if isinstance(response, GzipDecoder) else GzipDecoder(response)


def _first_values(headers: Headers) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): values[0].decode("latin-1")
        for name, values in headers.getAllRawHeaders()
    }


@implementer(IBodyProducer)
class FormProducer:
    """A form that can be stopped at any time, also before and after it is sent.

    A server may send a valid response before it has read the whole form. `error` is why a file
    could not be read.
    """

    def __init__(self, body: FormBody, cooperator: Cooperator) -> None:
        self.length = body.length
        self.error: OSError | None = None
        self._body, self._cooperator = body, cooperator
        self._task: CooperativeTask[Any] | None = None

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        """Send the form."""
        self._task = self._cooperator.cooperate(self._send(consumer))
        return self._task.whenDone().addCallbacks(lambda _: None, self._on_error)

    def _send(self, consumer: IConsumer) -> Iterator[None]:
        for piece in self._body.iterate_pieces():
            consumer.write(piece)
            yield None
        self._task = None

    def _on_error(self, failure: TwistedFailure) -> Deferred[None] | TwistedFailure:
        if failure.check(TaskStopped):
            return Deferred()  # who has stopped it does not wait
        self._task = None
        if isinstance(failure.value, OSError):
            self.error = failure.value
        return failure

    def pauseProducing(self) -> None:
        """Pause."""
        if self._task is not None:
            self._task.pause()

    def resumeProducing(self) -> None:
        """Go on after a pause."""
        if self._task is not None:
            self._task.resume()

    def stopProducing(self) -> None:
        """Stop sending the form."""
        if self._task is not None:
            task, self._task = self._task, None
            task.stop()


def _classify(reasons: Iterable[TwistedFailure]) -> RequestFailure:
    """Return why a connection ended without a response."""
    reasons = list(reasons)
    for reason in reasons:
        if reason.check(*_NO_TLS) and not reason.check(*_BROKEN_TLS):
            return _classify_tls_error(reason)
        if reason.check(*_NO_HTTP):
            return RequestFailure(FailureKind.NOT_HTTP)
    words = dict.fromkeys(_plain_words(reason.value) for reason in reasons)
    return RequestFailure(FailureKind.BROKEN_CONNECTION, "; ".join(words))


def _classify_tls_error(reason: TwistedFailure) -> RequestFailure:
    """Return the failure of TLS; OpenSSL lists (library, function, reason)."""
    if reason.check(_OTHER_HOST):
        return RequestFailure(FailureKind.WRONG_HOST_CERTIFICATE)
    error: Any = reason.value
    match error.args:
        case ([*errors],) if errors:
            why = "; ".join(str(each[-1]) for each in errors if isinstance(each, tuple))
        case _:
            why = str(error)
    return RequestFailure(
        FailureKind.UNTRUSTED_CERTIFICATE if "certificate" in why else FailureKind.NOT_TLS, why
    )


def _describe_connect_error(error: Exception) -> str:
    """Return why no connection could be made, in the system's words."""
    number = getattr(error, "osError", None)
    if isinstance(number, int):
        return os.strerror(number).lower()
    return _plain_words(error)


def _plain_words(error: BaseException | None) -> str:
    """Return the words of an error of Twisted's, which are sentences and may be empty."""
    return str(error).strip(" .[]<>") or type(error).__name__


class _BodyTooLarge(Exception):
    """A body of more than `MAX_RESPONSE_BODY` bytes."""


class _BodyCollector(Protocol):
    """Collects the body of a response; cancelling `done` closes the connection."""

    transport: Any

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._room = MAX_RESPONSE_BODY
        self.done: Deferred[bytes] = Deferred(lambda _: self.transport.stopProducing())

    def dataReceived(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room >= 0:
            self._pieces.append(data)
        elif not self.done.called:
            self.transport.stopProducing()
            self.done.errback(_BodyTooLarge())

    def connectionLost(self, reason: TwistedFailure = connectionDone) -> None:
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
