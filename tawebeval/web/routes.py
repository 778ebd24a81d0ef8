"""The routes of the API (contract, sections 2, 3 and 7)."""

from __future__ import annotations

from collections.abc import Collection
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
from werkzeug.exceptions import HTTPException, NotFound

from tawebeval.core.tokens import ANONYMOUS
from tawebeval.errors import RequestError
from tawebeval.web import legacy, operations, static_files
from tawebeval.web.access_log import Routes, readable
from tawebeval.web.context import WebContext
from tawebeval.web.events import send_events
from tawebeval.web.fastpath import PollFastPath
from tawebeval.web.responses import argument, received, send, send_json
from tawebeval.web.server import problems
from tawebeval.web.server.base_path import single_slashes
from tawebeval.web.server.request import ApiSite
from tawebeval.web.upload import FormReceiver, receive_form

OPEN_PATHS = frozenset([*operations.PATHS, static_files.PATH.encode(), *static_files.PATHS])
"""Paths that need no caller's token."""

log = Logger()


def make_app(api: WebContext) -> Klein:
    """Return the Klein application over `api`."""
    app = Klein()
    registry, base_path = api.registry, api.configuration.http.base_path

    @app.route("/evaluate", methods=["POST"])
    async def evaluate(request: IRequest) -> bytes:
        """Begin an evaluation with the form that has arrived."""
        form = received(request).form
        if not isinstance(form, FormReceiver):
            raise NotFound  # another spelling of the path, for which no form was received
        identifier = registry.accept(await form.finish(), received(request).caller)
        received(request).form = None  # from now on its files are the evaluation's
        request.setHeader(b"Location", f"{base_path}/evaluation/{identifier}".encode())
        return send_json(request, legacy.answer_to_form(identifier))

    @app.route("/evaluation/<identifier>/events", methods=["GET"])
    async def events(request: IRequest, identifier: str) -> bytes:
        """Return a page of events, or all of them as they come."""
        return await send_events(api, received(request), identifier)

    @app.route("/evaluations", methods=["GET"])
    def evaluations(request: IRequest) -> bytes:
        """Return the caller's own evaluations, some at a time."""
        api.check_listing(request.requestHeaders)
        listing = registry.list_evaluations(argument(request, "after"), received(request).caller)
        if listing.end is not None:
            target = f"{base_path}/evaluations?after={listing.end}"
            request.setHeader(b"Link", f'<{target}>; rel="next"'.encode())
        return send_json(request, attrs.asdict(listing))

    legacy.add_routes(app, api)
    static_files.add_routes(app)
    operations.add_routes(app, api)

    @app.route("/evaluation/<identifier>", methods=["GET"])
    def status(request: IRequest, identifier: str) -> bytes:
        """Return the status document."""
        return send_json(request, registry.get_status(identifier, received(request).caller))

    @app.route("/evaluation/<identifier>", methods=["DELETE"])
    async def cancel(request: IRequest, identifier: str) -> bytes:
        """End an evaluation, and answer when it has ended."""
        received(request).waits = True
        await registry.cancel(identifier, received(request).caller)
        request.setResponseCode(NO_CONTENT)
        return b""

    @app.route(static_files.PATH, methods=["GET"])
    def describe(request: IRequest) -> bytes:
        """Return the description of the API."""
        return static_files.DESCRIPTION.send(request)

    @app.handle_errors(RequestError, HTTPException)
    def refused(request: IRequest, failure: Failure) -> bytes:
        """Answer what a client has done wrong."""
        return _send_problem(request, failure)

    @app.handle_errors(Exception)
    def failed(request: IRequest, failure: Failure) -> bytes:
        """Answer what is wrong with us."""
        log.failure("a request failed", failure)
        return _send_problem(request, failure)

    return app


def _send_problem(request: IRequest, failure: Failure) -> bytes:
    body = problems.answer(received(request), failure.value)
    return send(request, body, problems.CONTENT_TYPE)


class KleinApplication:
    """The API as `ApiSite` uses it (`server.interface.Application`): the Klein app and `api`."""

    def __init__(self, api: WebContext) -> None:
        self.api = api
        self.app = make_app(api)
        self.routes = Routes(self.app)

    @property
    def origins(self) -> Collection[str]:
        """The origins whose pages may read responses."""
        return self.api.configuration.callers.origins

    def admit(self, request: IRequest) -> str:
        """Return the name of the caller; open paths have none.

        Raises Unauthorized, OverShare, ForeignPage.
        """
        if single_slashes(received(request).path) in OPEN_PATHS:
            return ANONYMOUS
        return self.api.admit(request.method, request.requestHeaders)

    def receive_form(self, request: IRequest, length: int | None) -> FormReceiver | None:
        """Return the receiver of the form of POST /evaluate. Raises RequestErrors."""
        asked = received(request)
        path = single_slashes(unquote_to_bytes(asked.path))
        if (asked.method, path) != (b"POST", b"/evaluate"):
            return None
        return receive_form(self.api, asked.requestHeaders, length, asked.caller, asked)

    def check_open(self) -> None:
        """Raise Stopping when the registry is closed."""
        self.api.registry.check_open()

    def discard(self, directory: Path, size: int) -> None:
        """Remove an abandoned upload of `size` bytes."""
        self.api.registry.discard_upload(directory, size)

    def answered(self, request: IRequest, status: int, seconds: float) -> None:
        """Count a request by its route; log it if that is configured."""
        done, traffic = received(request), self.api.traffic
        method, route = self.routes.of(done.method, done.path)
        traffic.answered(method, route, status, None if done.waits else seconds)
        if traffic.logged:
            path, client = readable(done.path), done.sender.address
            traffic.write_line(client, done.caller, method, path, status, done.sentLength, seconds)

    def refused(self, status: int, address: str) -> None:
        """Count what was no request."""
        self.api.traffic.refused(status, address)


def make_site(application: KleinApplication, reactor: Any) -> ApiSite:
    """Return the site of the API."""
    api = application.api
    return ApiSite(
        application.app.resource(),
        application,
        partial(PollFastPath, api),
        api.configuration.http,
        reactor,
    )
