"""The Klein app of the API (contract, sections 2, 3 and 7) and its site."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import attrs
from klein import Klein
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import NO_CONTENT
from twisted.web.iweb import IRequest
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from tawebeval.core.tokens import ANONYMOUS
from tawebeval.errors import RequestError
from tawebeval.web import legacy, operations, static_files
from tawebeval.web.access_log import Routes, decode_path
from tawebeval.web.context import WebContext
from tawebeval.web.events import send_events
from tawebeval.web.fastpath import PollFastPath
from tawebeval.web.responses import cast_request, get_argument, send, send_json
from tawebeval.web.server import problems
from tawebeval.web.server.base_path import collapse_slashes
from tawebeval.web.server.request import ApiRequest, ApiSite
from tawebeval.web.upload import FormReceiver, receive_form

_OPEN_PATHS = frozenset(operations.OPEN_PATHS + static_files.OPEN_PATHS)
"""Paths that need no caller's token."""

log = Logger()


def make_app(context: WebContext) -> Klein:
    """Return the Klein app over `context`."""
    app = Klein()
    registry, base_path = context.registry, context.configuration.http.base_path

    @app.route("/evaluate", methods=["POST"])
    async def evaluate(request: IRequest) -> bytes:
        """Accept the form that has arrived."""
        form = cast_request(request).form
        if not isinstance(form, FormReceiver):
            raise NotFound  # another spelling of the path, for which no form was received
        identifier = registry.accept(await form.finish(), cast_request(request).caller)
        cast_request(request).form = None  # from now on its files are the evaluation's
        request.setHeader(b"Location", f"{base_path}/evaluation/{identifier}".encode())
        return send_json(request, legacy.make_evaluate_response(identifier))

    @app.route("/evaluation/<identifier>/events", methods=["GET"])
    async def events(request: IRequest, identifier: str) -> bytes:
        """Return a page of events, or a stream."""
        return await send_events(context, cast_request(request), identifier)

    @app.route("/evaluations", methods=["GET"])
    def evaluations(request: IRequest) -> bytes:
        """Return a page of the caller's evaluations."""
        context.check_listing(request.requestHeaders)
        listing = registry.list_evaluations(
            get_argument(request, "after"), cast_request(request).caller
        )
        if listing.end is not None:
            target = f"{base_path}/evaluations?after={listing.end}"
            request.setHeader(b"Link", f'<{target}>; rel="next"'.encode())
        return send_json(request, attrs.asdict(listing))

    legacy.add_routes(app, context)
    static_files.add_routes(app)
    operations.add_routes(app, context)

    @app.route("/evaluation/<identifier>", methods=["GET"])
    def status(request: IRequest, identifier: str) -> bytes:
        """Return the status document of an evaluation."""
        return send_json(request, registry.get_status(identifier, cast_request(request).caller))

    @app.route("/evaluation/<identifier>", methods=["DELETE"])
    async def cancel(request: IRequest, identifier: str) -> bytes:
        """Cancel an evaluation; respond once it has ended."""
        cast_request(request).is_waiting = True
        await registry.cancel(identifier, cast_request(request).caller)
        request.setResponseCode(NO_CONTENT)
        return b""

    paths = tuple(rule.rule for rule in app.url_map.iter_rules())

    @app.handle_errors(RequestError, HTTPException)
    def refused(request: IRequest, failure: Failure) -> bytes:
        """Answer a request error."""
        _explain(failure.value, paths, base_path, cast_request(request))
        return _send_problem(request, failure)

    @app.handle_errors(Exception)
    def failed(request: IRequest, failure: Failure) -> bytes:
        """Log a defect and answer 500."""
        log.failure("defect: a request failed", failure)
        return _send_problem(request, failure)

    return app


def _send_problem(request: IRequest, failure: Failure) -> bytes:
    body = problems.set_problem(cast_request(request), failure.value)
    return send(request, body, problems.CONTENT_TYPE)


def _explain(
    error: BaseException | None, paths: Collection[str], base_path: str, request: ApiRequest
) -> None:
    """Replace the description of a wrong path or method by one that names the right ones."""
    path = decode_path(request.path)
    if isinstance(error, NotFound) and error.description == NotFound.description:
        first, *names = path[1:].split("/")
        pattern = "/".join(["", first, *(names and ["<identifier>"]), *names[1:]])
        near = get_close_matches(pattern if first == "evaluation" else path, paths, 1)
        known = near[0].replace("<identifier>", "ID") if near else ""
        hint = f"did you mean {base_path}{known}?" if near else "GET /openapi.json lists all paths"
        error.description = f"no resource at {path!r:.200}; {hint}"
    elif isinstance(error, MethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        method = request.method.decode("latin-1")
        error.description = f"method {method!r:.40} is not allowed here; allowed: {allowed}"


class KleinApplication:
    """The API as the site uses it (`server.interface.Application`)."""

    def __init__(self, context: WebContext) -> None:
        self.context = context
        self.app = make_app(context)
        self.routes = Routes(self.app)

    @property
    def origins(self) -> Collection[str]:
        """The origins whose pages may read responses."""
        return self.context.configuration.callers.origins

    def admit(self, request: IRequest) -> str:
        """Return the name of the caller; ANONYMOUS for open paths.

        Raises: Unauthorized, OverShare, ForeignPage.
        """
        if collapse_slashes(cast_request(request).path) in _OPEN_PATHS:
            return ANONYMOUS
        return self.context.admit(request.method, request.requestHeaders)

    def receive_form(self, request: IRequest, length: int | None) -> FormReceiver | None:
        """Return the receiver of the form of POST /evaluate. Raises: RequestError."""
        asked = cast_request(request)
        path = collapse_slashes(unquote_to_bytes(asked.path))
        if (asked.method, path) != (b"POST", b"/evaluate"):
            return None
        return receive_form(self.context, asked.requestHeaders, length, asked.caller, asked)

    def check_open(self) -> None:
        """Raise Stopping once the registry is closed."""
        self.context.registry.check_open()

    def discard(self, directory: Path, size: int) -> None:
        """Remove an abandoned upload of `size` bytes."""
        self.context.registry.discard_upload(directory, size)

    def record_answer(self, request: IRequest, status: int, seconds: float) -> None:
        """Count a response by its route; log it if the access log is enabled."""
        done, request_log = cast_request(request), self.context.request_log
        method, route = self.routes.match(done.method, done.path)
        request_log.record_answer(method, route, status, None if done.is_waiting else seconds)
        if request_log.is_enabled:
            path, client = decode_path(done.path), done.remote_address.address
            request_log.write_line(
                client, done.caller, method, path, status, done.sentLength, seconds
            )

    def record_refusal(self, status: int, address: str) -> None:
        """Count the refusal of a connection or of a malformed request."""
        self.context.request_log.record_refusal(status, address)


def make_site(application: KleinApplication, reactor: Any) -> ApiSite:
    """Return the site of the API, with the fast path for polls."""
    context = application.context
    return ApiSite(
        application.app.resource(),
        application,
        partial(PollFastPath, context),
        context.configuration.http,
        reactor,
    )
