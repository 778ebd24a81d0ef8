"""The routes of the API (contract, sections 2, 3 and 7)."""

from __future__ import annotations

import re
from typing import Any, cast

import orjson
from klein import Klein
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import NO_CONTENT
from twisted.web.iweb import IRequest
from werkzeug.exceptions import HTTPException, NotFound
from werkzeug.http import parse_dict_header

from tawebeval import __version__
from tawebeval.errors import MalformedRequest, RequestError
from tawebeval.web import problems
from tawebeval.web.api import Api
from tawebeval.web.site import ApiRequest

log = Logger()

_SECONDS = re.compile(r"[0-9]{1,9}")


def make_app(api: Api) -> Klein:
    """Return the Klein application over `api`."""
    app = Klein()
    registry = api.registry

    @app.route("/evaluate", methods=["POST"])
    def evaluate(request: IRequest) -> bytes:
        """Begin an evaluation with the form that has arrived."""
        received = cast(ApiRequest, request)
        if received.form is None:
            raise NotFound  # another spelling of the path, for which no form was received
        identifier = registry.accept(received.form.finish(), received.caller)
        received.form = None  # from now on its files are the evaluation's
        request.setHeader(b"Location", b"/evaluation/" + identifier.encode())
        return _json(request, {"evaluation_id": identifier})

    @app.route("/evaluation/<identifier>/events", methods=["GET"])
    async def events(request: IRequest, identifier: str) -> bytes:
        """Return a page of events, waiting for some if the client prefers that."""
        after = _argument(request, b"after")
        wait = min(_wait(request), int(api.configuration.polls.wait))
        page = await registry.next_page(identifier, after, wait, _caller(request))
        if wait:
            request.setHeader(b"Preference-Applied", b"wait=%d" % wait)
        return _send(request, page.encode())

    @app.route("/evaluation/<identifier>", methods=["GET"])
    def status(request: IRequest, identifier: str) -> bytes:
        """Return the status document."""
        return _json(request, registry.status(identifier, _caller(request)))

    @app.route("/evaluation/<identifier>", methods=["DELETE"])
    async def cancel(request: IRequest, identifier: str) -> bytes:
        """End an evaluation, and answer when it has ended."""
        await registry.cancel(identifier, _caller(request))
        request.setResponseCode(NO_CONTENT)
        return b""

    @app.route("/health", methods=["GET"])
    def health(request: IRequest) -> bytes:
        """Say that the daemon is alive."""
        return _json(request, {"status": "ok", "version": __version__})

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


def _caller(request: IRequest) -> str:
    return cast(ApiRequest, request).caller


def _send(request: IRequest, body: bytes, content_type: bytes = b"application/json") -> bytes:
    request.setHeader(b"Content-Type", content_type)
    request.setHeader(b"Content-Length", b"%d" % len(body))
    request.setHeader(b"Cache-Control", b"no-store")
    return body


def _json(request: IRequest, value: Any) -> bytes:
    return _send(request, orjson.dumps(value))


def _send_problem(request: IRequest, failure: Failure) -> bytes:
    body = problems.answer(cast(ApiRequest, request), failure.value)
    return _send(request, body, problems.CONTENT_TYPE.encode())


def _argument(request: IRequest, name: bytes) -> str | None:
    """Return a parameter of the query, None if it is absent. Raises MalformedRequest."""
    values = cast(ApiRequest, request).args.get(name, [])
    if len(values) > 1:
        raise MalformedRequest(f"{name.decode()}: stands in the query more than once")
    return values[0].decode("utf-8", "replace") if values else None


def _wait(request: IRequest) -> int:
    """Return the seconds that the client would wait: `?wait=N`, or `Prefer: wait=N` (RFC 7240)."""
    argument = _argument(request, b"wait")
    if argument is not None:
        if not _SECONDS.fullmatch(argument):
            raise MalformedRequest(f"wait: {argument[:80]!r} is no whole number of seconds")
        return int(argument)
    for header in request.requestHeaders.getRawHeaders(b"Prefer", []):
        preference = parse_dict_header(header.decode("latin-1")).get("wait") or ""
        if _SECONDS.fullmatch(preference):
            return int(preference)
    return 0
