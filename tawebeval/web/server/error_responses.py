"""Responses to exceptions: the status of each, and problem details (RFC 9457).

The member `message` repeats `detail`; TuringArena's clients read it.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import attrs
import orjson
from twisted.logger import Logger
from twisted.web.http_headers import Headers
from twisted.web.iweb import IRequest
from werkzeug.exceptions import HTTPException

from tawebeval import errors
from tawebeval.web.server.headers import (
    encode_general_headers,
    encode_headers,
    make_content_headers,
    set_headers,
)

_RETRY_AFTER = 60  # seconds, where the disk does not take a form

PROBLEM_DETAILS_MEDIA_TYPE = b"application/problem+json"

ERROR_STATUSES: dict[type[errors.RequestError], HTTPStatus] = {
    errors.MalformedRequest: HTTPStatus.BAD_REQUEST,
    errors.UnknownMethod: HTTPStatus.NOT_IMPLEMENTED,
    errors.InvalidField: HTTPStatus.BAD_REQUEST,
    errors.InvalidCursor: HTTPStatus.BAD_REQUEST,
    errors.ResourceMoved: HTTPStatus.PERMANENT_REDIRECT,
    errors.EvaluationNotFound: HTTPStatus.NOT_FOUND,
    errors.ProblemNotFound: HTTPStatus.NOT_FOUND,
    errors.EvaluationNotEnded: HTTPStatus.CONFLICT,
    errors.SubmissionDiscarded: HTTPStatus.GONE,
    errors.EvaluationExpired: HTTPStatus.GONE,
    errors.DiscardedCursor: HTTPStatus.GONE,
    errors.DamagedArchive: HTTPStatus.GONE,
    errors.NotAcceptable: HTTPStatus.NOT_ACCEPTABLE,
    errors.RequestTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.HeaderTooLarge: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    errors.TargetTooLong: HTTPStatus.REQUEST_URI_TOO_LONG,
    errors.RequestTooSlow: HTTPStatus.REQUEST_TIMEOUT,
    errors.UnsupportedMediaType: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.UnsupportedWebSocketVersion: HTTPStatus.UPGRADE_REQUIRED,
    errors.HTTPVersionNotSupported: HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    errors.IdempotencyKeyReused: HTTPStatus.UNPROCESSABLE_ENTITY,
    errors.Unauthorized: HTTPStatus.UNAUTHORIZED,
    errors.ForeignOrigin: HTTPStatus.FORBIDDEN,
    errors.AccessDenied: HTTPStatus.FORBIDDEN,
    errors.ServerNotReady: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.CallerQuotaExceeded: HTTPStatus.TOO_MANY_REQUESTS,
    errors.ServerBusy: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ServerStopping: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StoreError: HTTPStatus.SERVICE_UNAVAILABLE,
}

log = Logger()


def make_problem_details(status: HTTPStatus, detail: str, **members: Any) -> bytes:
    """Return a body of problem details as JSON."""
    return orjson.dumps(
        {
            "type": "about:blank",
            "title": status.phrase,
            "status": status.value,
            "detail": detail,
            "message": detail,
            **members,
        }
    )


@attrs.frozen
class ErrorResponse:
    """The response to an exception; `headers` are those that not all problems have."""

    status: HTTPStatus
    headers: dict[bytes, bytes]
    body: bytes


def make_error_response(error: BaseException | None) -> ErrorResponse:
    """Return the response to an exception.

    An exception without an entry is a defect: the response says no more than that.
    """
    members: dict[str, Any] = {}
    headers: dict[bytes, bytes] = {}
    if isinstance(error, errors.RequestError):
        status, detail = ERROR_STATUSES[type(error)], error.detail
        members.update(error.extra_members)
        if isinstance(error, errors.ServerBusy):
            headers[b"Retry-After"] = b"%d" % error.retry_after
        if isinstance(error, errors.ResourceMoved):
            headers[b"Location"] = error.location.encode()
        if isinstance(error, errors.Unauthorized):
            headers[b"WWW-Authenticate"] = b"Bearer"
        if isinstance(error, errors.NotAcceptable):
            headers[b"Vary"] = b"Accept"
    elif isinstance(error, HTTPException) and error.code is not None:
        status = HTTPStatus(error.code)
        detail = error.description or status.description or status.phrase
        for name, value in error.get_headers():
            if name == "Allow":
                headers[b"Allow"] = value.encode()
    else:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        detail = "internal error: a defect of the server; its log has the details"
    return ErrorResponse(status, headers, make_problem_details(status, detail, **members))


def encode_refusal(
    origins: Collection[str], status: HTTPStatus, detail: str, retry_after: int | None
) -> bytes:
    """Return the whole response to a malformed request, the last one of its connection."""
    again = {} if retry_after is None else {b"Retry-After": b"%d" % retry_after}
    body = make_problem_details(status, detail)
    content = make_content_headers(body, PROBLEM_DETAILS_MEDIA_TYPE)
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n%b" % (
        status,
        status.phrase.encode(),
        encode_headers({**content, b"Connection": b"close", **again}),
        encode_general_headers(origins, Headers()),
        body,
    )


def set_error_response(request: IRequest, error: BaseException | None) -> bytes:
    """Set status and headers of the response to an exception; return its body."""
    problem = make_error_response(error)
    set_headers(request, problem.headers)
    # Twisted does not know the phrases of all of them.
    request.setResponseCode(problem.status, problem.status.phrase.encode())
    request.setHeader(b"Content-Type", PROBLEM_DETAILS_MEDIA_TYPE)
    return problem.body


def report_storage_error(error: OSError, stored_object: str = "form") -> errors.ServerBusy:
    """Log a disk error, with the path; return the refusal of the request that needs the object.

    The log has no traceback: the machine is at fault, not the code.
    """
    log.error("a {what} cannot be stored: {error}", what=stored_object, error=error)
    return errors.ServerBusy(
        f"the {stored_object} cannot be stored: {error.strerror}", _RETRY_AFTER
    )
