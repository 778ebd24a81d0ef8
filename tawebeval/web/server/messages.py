"""HTTP messages: headers, targets and queries of requests; heads, bodies and log of responses.

Clients without a token choose every byte of a header, and the reactor waits for the parser. So all
code reads headers by `get_header_values` and the functions over it: a header has at most
`MAX_BYTES_PER_HEADER`, and no pattern here backtracks.

Exceptions become problem details (RFC 9457), whose status is in `ERROR_STATUSES`. The member
`message` repeats `detail`; TuringArena's clients read it.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes as unquote

import attrs
import orjson
from twisted.logger import Logger
from twisted.web.http import Request, datetimeToString, parse_qs
from twisted.web.http_headers import Headers
from twisted.web.iweb import IRequest
from werkzeug.exceptions import HTTPException

from tawebeval import __version__, errors
from tawebeval.core.evaluations import IDENTIFIER_PATTERN, SHORT_DURATION_BUCKETS, Histogram
from tawebeval.errors import (
    HeaderTooLarge,
    MalformedRequest,
    TargetTooLong,
    UnknownHTTPMethod,
    format_size,
)
from tawebeval.sandbox.workspace import derive_log_pseudonym

MAX_BYTES_PER_HEADER = 1024
"""Maximum of bytes of a header that the daemon reads, in all its lines together."""

_ELEMENT = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*+"?)++')  # of a list; quotes may have commas
_WEIGHT = re.compile(r"0(?:\.[0-9]*)?|1(?:\.0*)?|\.[0-9]+")  # Java writes .2 (RFC 9110: 0.2)


def get_header_values(headers: Headers, name: str) -> Sequence[bytes]:
    """Return the values of a header, one for each line of it. Raises: HeaderTooLarge."""
    values: Sequence[bytes] | None = headers.getRawHeaders(name.encode())
    if values is None:
        return ()
    size = sum(map(len, values))
    if size > MAX_BYTES_PER_HEADER:
        raise HeaderTooLarge(
            f"{name}: the header has {format_size(size)}; the limit is"
            f" {format_size(MAX_BYTES_PER_HEADER)}"
        )
    return values


def get_header_elements(headers: Headers, name: str) -> list[str]:
    """Return the elements of a header that is a list, without empty ones. Raises: HeaderTooLarge.

    The list may be in one line or in several (RFC 9110, section 5.3).
    """
    values = get_header_values(headers, name)
    return split_header_elements(b",".join(values)) if values else []


def split_header_elements(joined: bytes) -> list[str]:
    """Return the elements of a list, without empty ones."""
    found = _ELEMENT.findall(joined.decode("latin-1"))
    return [stripped for each in found if (stripped := each.strip(" \t"))]


def parse_qvalues(elements: Sequence[str]) -> Mapping[str, float]:
    """Return the weights of the elements of `Accept` and its like, by lower-case name (RFC 9110).

    Parameters other than `q` are ignored, and elements with an invalid weight. Of a repeated
    element the highest weight counts.
    """
    weights: dict[str, float] = {}
    for element in elements:
        name, *parameters = (part.strip(" \t").lower() for part in element.split(";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.rstrip(" \t") == "q":
                value = value.lstrip(" \t")
                weight = float(value) if _WEIGHT.fullmatch(value) else -1
        if weight >= 0:
            weights[name] = max(weight, weights.get(name, 0))
    return weights


MAX_PATH_BYTES = 1024
"""Bytes of a path, at most."""

_MAX_PARAMETERS = 100  # of a query
_SHORT_QUERY = 128  # bytes
_ABSOLUTE = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)
_NAME = rb"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_HOST = re.compile(rb"(?:%b|\[[0-9A-Fa-f:.]+\])?(?::[0-9]*)?" % _NAME)
_SLASHES = re.compile(rb"/+")

T = TypeVar("T")


def cache_short_queries(parse: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Return `parse`, which remembers short queries: clients that wait repeat theirs."""
    parse_short = lru_cache(256)(parse)
    return lambda query: parse_short(query) if len(query) < _SHORT_QUERY else parse(query)


@cache_short_queries
def parse_query(query: bytes) -> Mapping[bytes, Sequence[bytes]]:
    """Return the parameters of a query by name. Raises: TargetTooLong."""
    if query.count(b"&") + query.count(b";") >= _MAX_PARAMETERS:
        raise TargetTooLong(f"the query has over {_MAX_PARAMETERS} parameters")
    parameters: dict[bytes, list[bytes]] = parse_qs(query, True)
    return parameters


def check_method_and_path(method: bytes, path: bytes) -> None:
    """Refuse what Twisted or Klein answer in HTML, or take for something else.

    Raises: MalformedRequest, TargetTooLong, UnknownHTTPMethod.
    """
    if method != method.upper():  # which Klein would take for that in upper case
        raise UnknownHTTPMethod(
            f"method {method.decode('latin-1')!r:.40}: methods are case-sensitive;"
            f" send {method.upper().decode('latin-1'):.40}"
        )
    if len(path) > MAX_PATH_BYTES:
        raise TargetTooLong(
            f"the path has {format_size(len(path))}; the limit is {format_size(MAX_PATH_BYTES)}"
        )
    if not path.startswith(b"/") and (method, path) != (b"OPTIONS", b"*"):
        raise MalformedRequest("the request target is not a path such as /evaluate")
    if b"%" in path or not path.isascii():
        try:
            unquote(path).decode()
        except UnicodeDecodeError:
            raise MalformedRequest("the path is not UTF-8") from None


def check_host_headers(hosts: Sequence[bytes], version: bytes) -> None:
    """Check the headers `Host` (RFC 9112, section 3.2). Raises: MalformedRequest."""
    if not hosts and version != b"HTTP/1.0":
        raise MalformedRequest("Host: the header is required")
    if len(hosts) > 1:
        raise MalformedRequest("Host: the header is repeated; send it once")
    if not all(map(_HOST.fullmatch, hosts)):
        raise MalformedRequest("Host: not a host name")


def collapse_slashes(path: bytes) -> bytes:
    """Return a path with one slash in place of several: clients join paths carelessly."""
    return _SLASHES.sub(b"/", path) if b"//" in path else path


def split_target(target: bytes, base_path: bytes) -> tuple[bytes, bytes]:
    """Return the path of a request target, and its query.

    The path has no scheme and host (RFC 9112, section 3.2.2), one slash in place of several, and no
    base path, unless it is only that: requests may lack it, since some proxies remove it.
    """
    if not target.startswith(b"/"):
        target = _ABSOLUTE.sub(b"", target) or b"/"
    path, _, query = target.partition(b"?")
    path = collapse_slashes(path)
    return path.removeprefix(base_path) if path.startswith(base_path + b"/") else path, query


def decode_path(path: bytes) -> str:
    """Return a path decoded, as the routes are written."""
    return unquote(path).decode("utf-8", "replace")


JSON_MEDIA_TYPE = b"application/json"

_FIRST_HEADERS = (b"Content-Length", b"Transfer-Encoding", b"Content-Type")

PREFLIGHT_HEADERS = {
    b"Access-Control-Allow-Methods": b"GET, POST, DELETE, OPTIONS",
    b"Access-Control-Allow-Headers": b"Authorization, Content-Type, Idempotency-Key,"
    b" Last-Event-ID, Prefer, traceparent",
    b"Access-Control-Max-Age": b"86400",
}
"""Headers of the response to OPTIONS (CORS)."""


def make_content_headers(body: bytes, content_type: bytes = JSON_MEDIA_TYPE) -> dict[bytes, bytes]:
    """Return the headers that stand first in a response (`encode_head`)."""
    return {b"Content-Length": b"%d" % len(body), b"Content-Type": content_type}


def encode_headers(headers: Mapping[bytes, bytes]) -> bytes:
    """Return headers as they are sent."""
    return b"".join([b"%b: %b\r\n" % header for header in headers.items()])


_GENERAL_HEADERS = encode_headers(
    {
        b"Server": b"tawebeval/" + __version__.encode(),
        b"Access-Control-Expose-Headers": b"Location, Link, Preference-Applied, Retry-After",
        b"X-Content-Type-Options": b"nosniff",
    }
)


def encode_general_headers(origins: Collection[str], request_headers: Headers) -> bytes:
    """Return the headers of any response as they are sent.

    With `*` in `origins` any page may read it. Otherwise only a page of a listed origin may, and
    caches must keep responses apart by origin.
    """
    headers = _encode_date(int(time.time())) + _GENERAL_HEADERS
    if "*" in origins:
        return headers + b"Access-Control-Allow-Origin: *\r\n"
    headers += b"Vary: Origin\r\n"
    given = request_headers.getRawHeaders(b"Origin", ())
    if len(given) == 1 and given[0].decode("latin-1") in origins:
        headers += b"Access-Control-Allow-Origin: %b\r\n" % given[0]
    return headers


@lru_cache(1)
def _encode_date(seconds: int) -> bytes:
    return b"Date: %b\r\n" % datetimeToString(seconds)


def encode_head(request: Request, first_headers: bytes, origins: Collection[str]) -> bytes:
    """Return the head of the response to `request`; `first_headers` are encoded already.

    Those stand first that say where the body ends. Some clients take a response with a truncated
    head for a complete one without a body (curl 7.88). They report the truncation if they know by
    then that a body follows, curl 8.14 only if it also knows the length of the body.
    """
    headers = sorted(request.responseHeaders.getAllRawHeaders(), key=_find_header_place)
    return b"%b %d %b\r\n%b%b%b\r\n" % (
        request.clientproto,
        request.code,
        request.code_message,
        first_headers,
        b"".join([b"%b: %b\r\n" % (name, value) for name, values in headers for value in values]),
        encode_general_headers(origins, request.requestHeaders),
    )


def _find_header_place(header: tuple[bytes, Sequence[bytes]]) -> int:
    return _FIRST_HEADERS.index(header[0]) if header[0] in _FIRST_HEADERS else len(_FIRST_HEADERS)


def set_headers(request: IRequest, headers: Mapping[bytes, bytes]) -> None:
    """Set headers of the response to `request`."""
    for name, value in headers.items():
        request.setHeader(name, value)


_RETRY_AFTER = 60  # seconds, where the disk does not take a form

PROBLEM_DETAILS_MEDIA_TYPE = b"application/problem+json"

ERROR_STATUSES: dict[type[errors.RequestError], HTTPStatus] = {
    errors.MalformedRequest: HTTPStatus.BAD_REQUEST,
    errors.UnknownHTTPMethod: HTTPStatus.NOT_IMPLEMENTED,
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
    errors.ProblemClosed: HTTPStatus.FORBIDDEN,
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


def make_error_response(
    error: BaseException | None,
) -> tuple[HTTPStatus, dict[bytes, bytes], bytes]:
    """Return status, headers that not all problems have, and body of the response to an exception.

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
    return status, headers, make_problem_details(status, detail, **members)


def encode_refusal(origins: Collection[str], error: errors.RequestError) -> bytes:
    """Return the whole response to a malformed request, the last one of its connection."""
    status, headers, body = make_error_response(error)
    content = make_content_headers(body, PROBLEM_DETAILS_MEDIA_TYPE)
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n%b" % (
        status,
        status.phrase.encode(),
        encode_headers({**content, b"Connection": b"close", **headers}),
        encode_general_headers(origins, Headers()),
        body,
    )


def report_storage_error(error: OSError, stored_object: str = "form") -> errors.ServerBusy:
    """Log a disk error, with the path; return the refusal of the request that needs the object.

    The log has no traceback: the machine is at fault, not the code.
    """
    log.error("a {what} cannot be stored: {error}", what=stored_object, error=error)
    return errors.ServerBusy(
        f"the {stored_object} cannot be stored: {error.strerror}", _RETRY_AFTER
    )


Query: TypeAlias = Mapping[bytes, Sequence[bytes]]
"""The parameters of a query by name."""

NO_STORE_HEADERS = {b"Cache-Control": b"no-store"}

MAX_NUMBER_DIGITS = 15
"""Maximum of digits of a whole number; every JSON library keeps that many exactly."""

WHOLE_NUMBER_REGEX = re.compile(rf"[0-9]{{1,{MAX_NUMBER_DIGITS}}}")
# In quotes or not, the same.
_SECONDS = re.compile(rf'[ \t]*("?)({WHOLE_NUMBER_REGEX.pattern})\1[ \t]*')


def prepare_response(
    request: IRequest, body: bytes, content_type: bytes = JSON_MEDIA_TYPE
) -> bytes:
    """Set the headers of a response with this body, and return the body."""
    set_headers(request, {**make_content_headers(body, content_type), **NO_STORE_HEADERS})
    return body


def prepare_error_response(request: IRequest, error: BaseException | None) -> bytes:
    """Set status and headers of the response to an exception; return its body."""
    status, headers, body = make_error_response(error)
    set_headers(request, headers)
    # Twisted does not know the phrases of all of them.
    request.setResponseCode(status, status.phrase.encode())
    return prepare_response(request, body, PROBLEM_DETAILS_MEDIA_TYPE)


def prepare_json_response(request: IRequest, value: Any) -> bytes:
    """Return a response of JSON."""
    return prepare_response(request, orjson.dumps(value))


def get_header(headers: Headers, name: str) -> str | None:
    """Return a header; None if it is absent.

    Raises: MalformedRequest, if it is repeated; HeaderTooLarge.
    """
    values = get_header_values(headers, name)
    if len(values) > 1:
        raise MalformedRequest(f"{name}: the header is repeated; send it once")
    try:
        return values[0].decode() if values else None
    except UnicodeDecodeError:
        raise MalformedRequest(f"{name}: not UTF-8") from None


def get_query_argument(query: Query, name: str) -> str | None:
    """Return a query parameter; None if it is absent. Raises: MalformedRequest."""
    values = query.get(name.encode(), ())
    if len(values) > 1:
        raise MalformedRequest(f"{name}: the query parameter is repeated; send it once")
    return values[0].decode("utf-8", "replace") if values else None


def get_query_arguments(query: Query, is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """Return the query parameters whose names are wanted, by name. Raises: MalformedRequest."""
    names = (name.decode("utf-8", "replace") for name in query)
    return {name: get_query_argument(query, name) or "" for name in names if is_wanted(name)}


def get_query_number(query: Query, name: str) -> int | None:
    """Return a query parameter that is a whole number; None if absent. Raises: MalformedRequest."""
    text = get_query_argument(query, name)
    if text is not None and not WHOLE_NUMBER_REGEX.fullmatch(text):
        raise MalformedRequest(
            f"{name}: {text[:80]!r} is not a whole number of up to {MAX_NUMBER_DIGITS} digits"
        )
    return None if text is None else int(text)


def parse_prefer_wait(headers: Headers) -> int | None:
    """Return the seconds of `Prefer: wait=N` (RFC 7240); None if absent.

    The first of several counts. Parameters behind a `;` are ignored. Raises: HeaderTooLarge.
    """
    for preference in get_header_elements(headers, "Prefer"):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip(" \t").lower() == "wait":
            seconds = _SECONDS.fullmatch(value)
            return None if seconds is None else int(seconds[2])
    return None


UNKNOWN_ROUTE = "other"
"""Route or method of a request that has none of the API's: clients can send any number of others.
"""

_IDENTIFIER = re.compile(IDENTIFIER_PATTERN)
_MAX_LOGGED_PATH = 200  # characters


@attrs.define(eq=False)
class RequestLog:
    """Counts responses and their durations; logs each response if `is_enabled`.

    `response_counts` counts by method, route and status; `response_durations` has the durations by
    route. A response that waits for events or for the end of an evaluation counts without a
    duration.
    """

    is_enabled: bool = False
    response_counts: Counter[tuple[str, str, int]] = attrs.field(factory=Counter)
    response_durations: defaultdict[str, Histogram] = attrs.field(
        factory=lambda: defaultdict(lambda: Histogram(SHORT_DURATION_BUCKETS))
    )

    def record_response(
        self, request: Any, method: str, route: str, status: int, seconds: float
    ) -> None:
        """Count and log the response to a request of the API, which took `seconds` seconds."""
        # HTTPStatus is equal, and hashes otherwise.
        self.response_counts[method, route, int(status)] += 1
        if not request.waits_for_evaluation:
            self.response_durations[route].record_value(seconds)
        if self.is_enabled:
            caller, path = request.caller, decode_path(request.path)
            if request.uses_link:
                caller = f"link of {caller}"
            elif request.token.caller != caller:
                caller = f"{request.token.caller} for {caller}"
            size = request.sentLength
            self._write_line(request.client_address, method, path, status, caller, size, seconds)

    def record_refusal(self, status: int, address: str) -> None:
        """Count and log the refusal of a connection or of a malformed request."""
        self.response_counts[UNKNOWN_ROUTE, UNKNOWN_ROUTE, status] += 1
        if self.is_enabled:
            self._write_line(address, UNKNOWN_ROUTE, "-", status)

    def _write_line(
        self,
        client: str,
        method: str,
        path: str,
        status: int,
        caller: str = "",
        size: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Write a line. The path has no query; log names replace identifiers in it."""
        path = _IDENTIFIER.sub(lambda found: derive_log_pseudonym(found[0]), path)
        log.info(
            "{client} {caller!r} {method} {path} {status} {size} {took:.6f}",
            client=client or "-",
            caller=caller,
            method=method,
            path=path[:_MAX_LOGGED_PATH],
            status=status,
            size=size,
            took=seconds,
        )
