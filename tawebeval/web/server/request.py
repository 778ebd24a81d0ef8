"""HTTP below the routes: requests whose forms are spooled, and errors that Twisted makes.

What a client sends reaches it in full before it is judged only as far as it is needed: a
form is refused at the first header, field or byte that is wrong. The answer is then
written at once, while the rest of the body is read for a few seconds and thrown away,
because a connection that is closed with unread data loses its answer on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes as unquote

from twisted.internet.interfaces import IAddress, IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import datetimeToString
from twisted.web.resource import IResource
from twisted.web.server import Request, Site
from werkzeug.exceptions import HTTPException

from tawebeval.config import HttpSettings
from tawebeval.core.tokens import ANONYMOUS
from tawebeval.errors import Busy, MalformedRequest, RequestError, TooLarge
from tawebeval.web.server import problems
from tawebeval.web.server.base_path import BasePath, single_slashes
from tawebeval.web.server.channel import ApiChannel
from tawebeval.web.server.headers import SERVER, general_headers, set_headers
from tawebeval.web.server.interface import GONE, Application, FastPath, Form
from tawebeval.web.server.limits import (
    RETRY_AFTER,
    AddressResolver,
    ConnectionLimits,
    OpenConnections,
    RemoteAddress,
)
from tawebeval.web.server.timeouts import LINGER

_BODY = 64 * 1024  # bytes that are read where no body is expected

_ABSOLUTE = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)
_HOST = re.compile(rb"[A-Za-z0-9._:\[\]-]*")

_PREFLIGHT = {
    b"Access-Control-Allow-Methods": b"GET, POST, DELETE, OPTIONS",
    b"Access-Control-Allow-Headers": b"Authorization, Content-Type, Idempotency-Key,"
    b" Last-Event-ID, Prefer",
    b"Access-Control-Max-Age": b"86400",
}

log = Logger()


class ApiRequest(Request):
    """A request of which the form, if it has one, is in `form` before it is processed."""

    channel: ApiChannel
    form: Form | None = None
    caller = ANONYMOUS
    # Whether the answer is to wait for events, or for the end of an evaluation.
    waits = False
    sender: RemoteAddress
    _counted = ""  # as whose this request counts besides its connection
    _begun: float | None = None  # when there was something to answer, in seconds of the clock
    _refused = False
    _discarded = 0
    _linger: IDelayedCall | None = None

    def gotLength(self, length: int | None) -> None:
        """Judge the headers: Twisted calls this between them and the body."""
        self.content = BytesIO()
        self._begun = self.channel.clock.seconds()
        site = self.channel.site
        asking = self.requestHeaders.getRawHeaders(b"Origin", [])
        set_headers(self, general_headers(site.application.origins, asking))
        self.method, target, self.clientproto = self.channel.request_line()
        target = _origin_form(target)
        # First of all, for whatever is refused is counted and logged by its path, too.
        self.uri = site.mount.inside(target)
        self.path = self.uri.split(b"?", 1)[0]
        self.sender = RemoteAddress(self.channel.peer.address)
        try:
            self._find_sender()
            site.mount.check(target)
            self._check_target()
            if self.method != b"OPTIONS":
                self.caller = site.application.admit(self)
            self.form = site.application.receive_form(self, length)
            if self.form is None and (length or 0) > _BODY:
                raise _body_not_expected()
        except Exception as error:  # noqa: BLE001  (silence is no answer)
            self.refuse(error, body_follows=length != 0)

    def _find_sender(self) -> None:
        """Find out who asks, and whether there may be another request of his. Raises Busy."""
        site = self.channel.site
        self.sender = site.clients.asking(self.channel.peer, self.requestHeaders)
        if not site.connections.begin(self.sender.group):
            raise Busy(
                "this client has as many requests as there may be; try again later", RETRY_AFTER
            )
        self._counted = self.sender.group

    def _check_target(self) -> None:
        """Refuse what Twisted or Klein would answer in HTML. Raises MalformedRequest."""
        if not self.path.startswith(b"/") and (self.method, self.path) != (b"OPTIONS", b"*"):
            raise MalformedRequest("the target of the request is no path")
        try:
            unquote(self.path).decode()
        except UnicodeDecodeError:
            raise MalformedRequest("the path is not UTF-8") from None
        hosts = self.requestHeaders.getRawHeaders(b"Host", [])
        if not hosts and self.clientproto != b"HTTP/1.0":  # RFC 9112, section 3.2
            raise MalformedRequest("Host: is missing")
        if len(hosts) > 1:
            raise MalformedRequest("Host: stands in the request more than once")
        if not all(map(_HOST.fullmatch, hosts)):
            raise MalformedRequest("Host: names no host")

    def handleContentChunk(self, data: bytes) -> None:
        """Take a part of the body."""
        self.channel.body_received(len(data))
        try:
            if self._refused:
                return
            if self.form is not None:
                self.channel.site.application.check_open()
                self.form.feed(data)
            else:
                self._discarded += len(data)
                if self._discarded > _BODY:
                    raise _body_not_expected()
        except Exception as error:  # noqa: BLE001  (silence is no answer)
            self.refuse(error)

    def pause_body(self) -> None:
        """Read no more of the body until `resume_body`: the disk does not keep up."""
        self.channel.pause_body()

    def resume_body(self) -> None:
        """Read on."""
        self.channel.resume_body()

    def refuse(self, error: Exception, body_follows: bool = True) -> None:
        """Answer now, although the body is still coming; the first answer is the only one."""
        if self._refused:
            return
        if isinstance(error, OSError):
            error = problems.not_stored(error)
        if not isinstance(error, RequestError):
            log.failure("a request failed", Failure(error))
        self._refused = True
        self._drop_form()
        if not body_follows:
            self._write_problem(error)
            return
        # A client that waits for leave to send its body does not get it.
        self.requestHeaders.removeHeader(b"Expect")
        self.channel.persistent = False
        self.setHeader(b"Connection", b"close")
        self._write_problem(error)
        self._linger = self.channel.callLater(LINGER, self.channel.forceAbortClient)

    def _write_problem(self, error: BaseException | None) -> None:
        body = problems.answer(self, error)
        self.setHeader(b"Date", datetimeToString())
        self.setHeader(b"Content-Length", b"%d" % len(body))
        self.write(body)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Take the end of the request."""
        super().requestReceived(command, self.uri, version)

    def process(self) -> None:
        """Answer, once the whole body is there."""
        self._begun = self.channel.clock.seconds()
        if self._refused:
            self.finish()
        elif self.method == b"OPTIONS":
            set_headers(self, _PREFLIGHT)
            self.setResponseCode(HTTPStatus.NO_CONTENT)
            self.finish()
        else:
            self.path = single_slashes(self.path)
            super().process()

    def render(self, resource: Any) -> None:
        """Let the resource answer; `Server` is ours, not Twisted's."""
        self.setHeader(b"Server", SERVER)
        super().render(resource)

    def processingFailed(self, reason: Failure) -> Failure:
        """Answer what no route has caught: a host that is none, or a defect of ours."""
        if not isinstance(reason.value, HTTPException):
            log.failure("a request failed", reason)
        if not self.startedWriting:
            self._write_problem(reason.value)
        self.finish()
        return reason

    def finish(self) -> None:
        """End the answer."""
        self._drop_form()
        self._note(self.code)
        super().finish()

    def _note(self, status: int) -> None:
        """Count the request: it is over, unless its head has never come."""
        self.channel.site.connections.end(self._counted)
        self._counted = ""
        if self._begun is None:
            return
        took = self.channel.clock.seconds() - self._begun
        self.channel.site.application.answered(self, status, took)

    def connectionLost(self, reason: Failure) -> None:
        """Forget a request whose client has gone."""
        self._drop_form()
        answered = self.startedWriting or self.code == HTTPStatus.SWITCHING_PROTOCOLS
        self._note(self.code if answered else GONE)
        super().connectionLost(reason)

    def _drop_form(self) -> None:
        """Remove what a form has left on the disk, unless an evaluation has taken it over."""
        if self._linger is not None and self._linger.active():
            self._linger.cancel()
        form, self.form = self.form, None
        if form is not None:
            self.channel.resume_body()
            form.abandon(self.channel.site.application.discard)


def _origin_form(target: bytes) -> bytes:
    """Return the target of a request without scheme and host (RFC 9112, section 3.2.2)."""
    return _ABSOLUTE.sub(b"", target) or b"/"


def _body_not_expected() -> TooLarge:
    return TooLarge(f"no body of over {_BODY} bytes is expected here", limit=_BODY)


class ApiSite(Site):
    """Serves an application at `root`; `fast_path` is made for each connection."""

    # Not Twisted's own, which would speak HTTP/2 where it can: that calls `gotLength` too early.
    protocol = ApiChannel  # type: ignore[assignment]
    displayTracebacks = False

    def __init__(
        self,
        root: IResource,
        application: Application,
        fast_path: Callable[[ApiChannel], FastPath],
        settings: HttpSettings,
        reactor: Any,
    ) -> None:
        super().__init__(
            root,
            requestFactory=ApiRequest,
            timeout=None,  # the channel has deadlines of its own
            reactor=reactor,
            parsePOSTFormSubmission=False,
        )
        self.application = application
        self.clients = AddressResolver.of(settings)
        self.clock = reactor
        self.connections = ConnectionLimits(settings)
        self.mount = BasePath(settings.base_path)
        self.presence = OpenConnections(reactor)
        self._fast_path = fast_path

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """Return the channel of a new connection."""
        channel: Any = super().buildProtocol(addr)
        channel.fast_path = self._fast_path(channel)
        return channel

    def log(self, request: object) -> None:
        """Write nothing: requests are noted in other ways, the shortest among them, too."""

    def acceptableProtocols(self) -> list[bytes]:
        """Return what TLS may negotiate."""
        return [b"http/1.1"]
