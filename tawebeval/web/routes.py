"""The Klein app of the API (docs/api.md) and its site; the page and the API description.

The page's files and the description stay the same until the daemon restarts. They are read and
compressed at import and kept in memory: a request needs no access to the disk, and the daemon's
user needs no access to the installed files. Clients may cache them and revalidate by entity tag, or
keep them for ever by a URL that names their version (`bundle`).
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote_to_bytes, urlencode

import attrs
import orjson
from klein import Klein
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import NO_CONTENT, NOT_MODIFIED
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound

from tawebeval import __version__
from tawebeval.config import Configuration
from tawebeval.core.tokens import ANONYMOUS_CALLER, ANONYMOUS_TOKEN
from tawebeval.errors import (
    AccessDenied,
    EvaluationExpired,
    InvalidField,
    ServerNotReady,
)
from tawebeval.evaluations.reading import is_filter_parameter
from tawebeval.evaluations.service import EvaluationRegistry
from tawebeval.evaluations.store import format_rfc3339_time
from tawebeval.sandbox.environments import list_environments
from tawebeval.web.auth import (
    CROSS_ORIGIN_WRITE_REFUSAL,
    EVALUATE_PROBLEM_ROUTE,
    EVALUATION_LIST_ROUTE,
    EVALUATION_STATUS_ROUTE,
    EVENTS_ROUTE,
    LINKS_ROUTE,
    READ_PROBLEM_ROUTE,
    RERUN_ROUTE,
    SAFE_METHODS,
    STANDINGS_ROUTE,
    SUBMISSION_ROUTE,
    Authenticator,
    EvaluationLinks,
    check_link_access,
    check_listing_access,
    check_origin,
    check_problem_open,
    check_token_access,
    find_link,
    parse_link_lifetime,
)
from tawebeval.web.bundle import bundle_static_files, compute_content_version
from tawebeval.web.events import parse_event_query, prepare_event_page, send_events
from tawebeval.web.lists import EvaluationLists, list_problems
from tawebeval.web.server.channel import ApiRequest
from tawebeval.web.server.messages import (
    JSON_MEDIA_TYPE,
    UNKNOWN_ROUTE,
    collapse_slashes,
    decode_path,
    get_header_elements,
    get_header_values,
    get_query_argument,
    get_query_arguments,
    parse_qvalues,
    prepare_json_response,
    prepare_response,
    set_headers,
)
from tawebeval.web.statements import ProblemStatements
from tawebeval.web.streams import StreamScheduler, send_body
from tawebeval.web.upload import FormReceiver, FormReceiverFactory

log = Logger()

MAX_METRICS_AGE_SECONDS = 1.0
"""Seconds for which metrics are not collected again: with many evaluations that takes some ms."""

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_EVENTS_PATH = re.compile(rb"/evaluation/([A-Za-z0-9-]+)/events")
_LANGUAGE = re.compile("[a-z]{2,3}(?![a-z])")


@attrs.define
class HealthAndMetrics:
    """Sources of /health/ready and /metrics.

    `find_unreadiness_reasons` returns the reasons why the daemon takes no work, empty if it does.
    `collect_metrics` returns the text format of Prometheus. `metrics_authenticator` authenticates
    readers of metrics; None if programs of this machine read them.
    """

    find_unreadiness_reasons: Callable[[], Sequence[str]] = tuple
    collect_metrics: Callable[[], bytes] = bytes
    metrics_authenticator: Authenticator | None = None
    _collected: tuple[float, bytes] | None = None  # when, in seconds of the clock

    def read_metrics(self, now: float) -> bytes:
        """Return metrics that are at most `MAX_METRICS_AGE_SECONDS` old."""
        if self._collected is None or now - self._collected[0] >= MAX_METRICS_AGE_SECONDS:
            self._collected = now, self.collect_metrics()
        return self._collected[1]


@attrs.define(eq=False)
class WebContext:
    """The dependencies of the routes.

    `clock` is for deadlines; `evaluation_links` are the links that only read one evaluation.
    """

    registry: EvaluationRegistry
    authenticator: Authenticator
    clock: IReactorTime
    form_receiver_factory: FormReceiverFactory
    evaluation_lists: EvaluationLists
    evaluation_links: EvaluationLinks
    health_and_metrics: HealthAndMetrics = attrs.field(factory=HealthAndMetrics)
    stream_scheduler: StreamScheduler = attrs.Factory(
        lambda self: StreamScheduler(self.clock), takes_self=True
    )

    @property
    def configuration(self) -> Configuration:
        """The configuration of the evaluations, which a reload replaces."""
        return self.registry.context.configuration


OPENAPI_PATH = "/openapi.json"

_PAGE_PATHS = {"index.html": "/", "docs.html": "/docs"}

_MEDIA_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}

_STYLES = ("style.css", "evaluation.css", "problems.css", "class.css")
"""Style sheets of the page, in the order in which later ones win."""

_PAGE_HEADERS = {
    # The page loads scripts and styles from this daemon only, and connects to nothing else. Images
    # may be data: URLs: the page shows files of an evaluator so, without an origin of their own.
    b"Content-Security-Policy": b"default-src 'none'; script-src 'self'; style-src 'self';"
    b" img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'",
    b"Referrer-Policy": b"no-referrer",
}

_COMPRESSION_LEVEL = 6  # of 9, which takes a third longer for 0.2 per cent


@attrs.frozen
class StaticResource:
    """A content with its headers and its entity tag in quotes (RFC 9110, section 8.8.3)."""

    content: bytes = attrs.field(repr=False)
    media_type: bytes = JSON_MEDIA_TYPE
    headers: Mapping[bytes, bytes] = attrs.field(factory=dict, repr=False)
    entity_tag: str = attrs.field(init=False)

    @entity_tag.default
    def _make_entity_tag(self) -> str:
        return f'"{compute_content_version(self.content)}"'

    @property
    def version(self) -> str:
        """The version that URLs may name."""
        return self.entity_tag.strip('"')

    def compress(self) -> StaticResource:
        """Return the same, compressed by gzip."""
        content = gzip.compress(self.content, _COMPRESSION_LEVEL, mtime=0)
        headers = {**self.headers, b"Content-Encoding": b"gzip"}
        return StaticResource(content, self.media_type, headers)

    def prepare_response(self, request: ApiRequest, *, is_versioned: bool = False) -> bytes:
        """Set the headers, return the content; or 304 if the client has it (RFC 9110, 13.1.2).

        `is_versioned` tells that the URL names this content, which never changes then.
        Raises: HeaderTooLarge.
        """
        body = prepare_response(request, self.content, self.media_type)
        tag = self.entity_tag.encode()
        caching = b"public, max-age=31536000, immutable" if is_versioned else b"no-cache"
        set_headers(request, {b"Cache-Control": caching, b"ETag": tag})
        request.responseHeaders.addRawHeader(b"Vary", b"Accept-Encoding")
        tags = get_header_elements(request.requestHeaders, "If-None-Match")
        # A weak comparison: proxies that compress make the tags weak.
        if "*" in tags or self.entity_tag in [tag.removeprefix("W/") for tag in tags]:
            request.setResponseCode(NOT_MODIFIED)
            return b""
        set_headers(request, self.headers)
        return body


def _load_resources() -> dict[str, StaticResource]:
    """Return all static resources by path; an HTML file is a page at a path of its own."""
    package = files("tawebeval.web")
    document = orjson.loads((package / "openapi.json").read_bytes())
    document["info"]["version"] = __version__
    # Indented, for people read it, too.
    description = orjson.dumps(document, option=orjson.OPT_INDENT_2)
    resources = {OPENAPI_PATH: StaticResource(description)}
    contents = {
        file.name: file.read_text("utf-8")
        for file in (package / "static").iterdir()
        if _get_media_type(file.name)  # no editor's backup or swap file
    }
    tables = {
        file.name.removesuffix(".json"): file.read_text("utf-8")
        for file in (package / "messages").iterdir()
        if file.name.endswith(".json")
    }
    for name, text in {**contents, **bundle_static_files(contents, _STYLES, tables)}.items():
        path = _PAGE_PATHS.get(name, f"/static/{name}")
        resources[path] = StaticResource(text.encode(), _get_media_type(name), _PAGE_HEADERS)
    return resources


def _get_media_type(name: str) -> bytes:
    return _MEDIA_TYPES.get(name.rpartition(".")[2], b"")


STATIC_RESOURCES: Mapping[str, StaticResource] = _load_resources()

_COMPRESSED_RESOURCES = {path: found.compress() for path, found in STATIC_RESOURCES.items()}


def add_static_routes(app: Klein, scheduler: StreamScheduler) -> None:
    """Add the routes of all static resources to `app`; `scheduler` paces large ones."""

    @app.route("/", methods=["GET"])
    @app.route("/docs", methods=["GET"])
    @app.route("/static/<name>", methods=["GET"])
    @app.route(OPENAPI_PATH, methods=["GET"])
    async def static_resource(request: ApiRequest, name: str = "") -> bytes:
        """Return a page, a file that it loads, or the OpenAPI description."""
        accepted = parse_qvalues(get_header_elements(request.requestHeaders, "Accept-Encoding"))
        is_gzip = accepted.get("gzip", accepted.get("*"))
        resources = _COMPRESSED_RESOURCES if is_gzip else STATIC_RESOURCES
        resource = resources.get(f"/static/{name}" if name else decode_path(request.path))
        if resource is None:
            raise NotFound
        version = get_query_argument(request.query, "v")
        is_versioned = name != "" and version == STATIC_RESOURCES[f"/static/{name}"].version
        body = resource.prepare_response(request, is_versioned=is_versioned)
        return await send_body(request, body, scheduler)


EVALUATE_ROUTE = "/evaluate"
HEALTH, READY, METRICS = "/health", "/health/ready", "/metrics"

METRICS_MEDIA_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Clients of 2018 give up after about 16 empty pages: 20 seconds make five minutes.
_OLDER_CLIENT_WAIT = 20
# Paths that need no caller's token: a browser has none until it has the page, and /metrics checks
# its readers itself.
_OPEN_PATHS = frozenset(path.encode() for path in (HEALTH, READY, METRICS, *STATIC_RESOURCES))

# What proxies tell by these is not believed; that there is one is.
_PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via")

_CANNOT_READ_METRICS = "cannot read metrics; they are for requests to localhost or its addresses"


def make_app(context: WebContext) -> Klein:
    """Return the Klein app over `context`."""
    app = Klein()
    app.url_map.merge_slashes = False  # `%2f` in a path is no slash to join
    registry, base_path = context.registry, context.configuration.http.base_path
    statements = ProblemStatements(registry.context)

    @app.route(EVALUATE_ROUTE, methods=["POST"])
    @app.route(EVALUATE_PROBLEM_ROUTE, methods=["POST"])
    @app.route(RERUN_ROUTE, methods=["POST"])
    async def evaluate(request: ApiRequest, **_parameters: str) -> bytes:
        """Begin the evaluation of a form, of which `make_form_receiver` knows the route."""
        form = request.form
        if not isinstance(form, FormReceiver):
            raise NotFound  # another spelling of the path, for which no form was received
        form.finish_parsing()
        caller = request.caller
        identifier = registry.find_evaluation_by_idempotency_key(
            form.idempotency_key, form.compute_digest(), caller
        )
        if identifier is None:
            received, trace = await form.wait_until_stored(), None
            if registry.context.tracer is not None:
                headers = request.requestHeaders.getRawHeaders(b"traceparent", ())
                trace = registry.context.tracer.begin_trace(headers)
            identifier = registry.accept_form(received, caller, trace)
            request.form = None  # from now on its files are the evaluation's
        await registry.wait_until_stored(identifier)  # also the one of an earlier request
        set_headers(request, {b"Location": f"{base_path}/evaluation/{identifier}".encode()})
        # Older clients read `id`.
        return prepare_json_response(request, {"evaluation_id": identifier, "id": identifier})

    @app.route("/problems", methods=["GET"])
    def list_problem_page(request: ApiRequest) -> bytes:
        """Return a page of the problems that the caller may use."""
        listing = list_problems(
            context.configuration,
            get_query_argument(request.query, "after"),
            request.token.permitted_problems,
        )
        add_next_link(request, "/problems", listing["end"])
        return prepare_json_response(request, listing)

    def add_next_link(request: ApiRequest, path: str, end: str | None, **query: str) -> None:
        """Name the next page of a list, unless the page ends the list."""
        if end is not None:
            target = f"{base_path}{path}?{urlencode({'after': end, **query})}"
            set_headers(request, {b"Link": f'<{target}>; rel="next"'.encode()})

    @app.route("/whoami", methods=["GET"])
    def whoami(request: ApiRequest) -> bytes:
        """Return what the request's token permits."""
        token = request.token
        permitted = token.permitted_problems
        document = {
            "caller": token.caller or None,
            "read_only": token.is_read_only,
            "shared": token.is_shared,
            "problems": None if permitted is None else sorted(permitted),
            "group": token.group,
            "supervises": context.authenticator.find_supervised_members(token),
        }
        return prepare_json_response(request, document)

    @app.route(READ_PROBLEM_ROUTE, methods=["GET"])
    async def read_problem(request: ApiRequest, name: str) -> bytes:
        """Return the document of a problem, with the statement in the reader's language."""
        check_problem_open(registry.context, request.token, name, for_reading=True)
        accepted = parse_qvalues(get_header_elements(request.requestHeaders, "Accept-Language"))
        first = max(accepted, key=accepted.__getitem__, default="")
        language = _LANGUAGE.match(first)
        document = await statements.read_problem_json(
            name, language[0] if language else "", request.caller
        )
        body = prepare_response(request, document)
        return await send_body(request, body, context.stream_scheduler)

    @app.route(SUBMISSION_ROUTE, methods=["GET"])
    async def submission(request: ApiRequest, identifier: str) -> bytes:
        """Return the submitted files of an evaluation."""
        files = await registry.read_submission(identifier, request.caller)
        return prepare_json_response(request, {"files": files})

    @app.route(EVENTS_ROUTE, methods=["GET"])
    def events(request: ApiRequest, identifier: str) -> bytes | Coroutine[Any, Any, bytes]:
        """Return a page of events, or a stream."""
        return send_events(registry, context.stream_scheduler, request, identifier)

    @app.route(EVALUATION_LIST_ROUTE, methods=["GET"])
    async def evaluations(request: ApiRequest) -> bytes:
        """Return a page of the evaluations that the token permits."""
        lists = context.evaluation_lists
        return await send_list(request, EVALUATION_LIST_ROUTE, lists.list_evaluations)

    @app.route(STANDINGS_ROUTE, methods=["GET"])
    async def standings(request: ApiRequest) -> bytes:
        """Return a page of what callers have reached in problems."""
        return await send_list(request, STANDINGS_ROUTE, context.evaluation_lists.list_standings)

    async def send_list(
        request: ApiRequest,
        path: str,
        make_list: Callable[[ApiRequest, Collection[str]], Awaitable[dict[str, Any]]],
    ) -> bytes:
        if context.authenticator.is_token_optional:
            check_listing_access(request.requestHeaders, context.configuration.callers)
        permitted = context.authenticator.find_permitted_callers(request.token)
        listing = await make_list(request, permitted)
        given = get_query_arguments(request.query, is_filter_parameter)
        add_next_link(request, path, listing["end"], **given)
        return prepare_json_response(request, listing)

    @app.route("/environments", methods=["GET"])
    def environments(request: ApiRequest) -> bytes:
        """Return the environments that a request may choose."""
        listed = list_environments(context.configuration.environments)
        return prepare_json_response(request, {"data": listed})

    add_legacy_routes(app, context)
    add_static_routes(app, context.stream_scheduler)
    _add_operator_routes(app, context)

    @app.route(EVALUATION_STATUS_ROUTE, methods=["GET"])
    async def status(request: ApiRequest, identifier: str) -> bytes:
        """Return the status document of an evaluation."""
        document = await registry.read_status(identifier, request.caller)
        return prepare_json_response(request, document)

    @app.route(LINKS_ROUTE, methods=["POST"])
    async def make_link(request: ApiRequest, identifier: str) -> bytes:
        """Make a link that only reads an evaluation."""
        lifetime = parse_link_lifetime(request, context.configuration.callers)
        caller = request.caller
        await registry.read_status(identifier, caller)  # it is there, and is the caller's
        link, expires = await context.evaluation_links.make_link(identifier, caller, lifetime)
        document = {"link": link, "expires": format_rfc3339_time(expires)}
        return prepare_json_response(request, document)

    @app.route(LINKS_ROUTE, methods=["DELETE"])
    async def revoke_links(request: ApiRequest, identifier: str) -> bytes:
        """Revoke all links of an evaluation, also of one that is forgotten."""
        with suppress(EvaluationExpired):
            registry.get_status(identifier, request.caller)
        await context.evaluation_links.revoke_links(identifier)
        request.setResponseCode(NO_CONTENT)
        return b""

    @app.route(EVALUATION_STATUS_ROUTE, methods=["DELETE"])
    async def cancel(request: ApiRequest, identifier: str) -> bytes:
        """Cancel an evaluation; respond once it has ended."""
        request.waits_for_evaluation = True
        await registry.cancel_evaluation(identifier, request.caller)
        request.setResponseCode(NO_CONTENT)
        return b""

    @app.handle_errors(Exception)
    def failed(request: Any, failure: Failure) -> bytes | None:
        """Answer a request error; log a defect."""
        error = failure.value
        if isinstance(error, NotFound) and error.description == NotFound.description:
            path = decode_path(request.path)
            error.description = f"no resource at {path!r:.200}; GET /openapi.json lists all paths"
        elif isinstance(error, MethodNotAllowed):
            allowed = ", ".join(sorted(error.valid_methods or ()))
            method = request.method.decode("latin-1")
            error.description = f"method {method!r:.40} is not allowed here; allowed: {allowed}"
        body: bytes | None = request.prepare_failure_response(failure)
        return body

    return app


class KleinApplication(Resource):
    """The API as the site uses it (`server.channel.Application`).

    It answers GET of events itself, and passes the rest to Klein: most requests are polls, of which
    Klein takes more time than all other code together.
    """

    isLeaf = True  # noqa: N815  (Twisted's name)

    def __init__(self, context: WebContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.context = context
        self.app = make_app(context)
        self._klein = self.app.resource()

    def render(self, request: Any) -> Any:
        """Answer a request."""
        found = _EVENTS_PATH.fullmatch(request.path)
        if found is None or request.method not in (b"GET", b"HEAD"):
            request.prepath = []
            request.postpath = [unquote_to_bytes(part) for part in request.path[1:].split(b"/")]
            return self._klein.render(request)
        request.route = request.method.decode(), EVENTS_ROUTE
        registry, scheduler = self.context.registry, self.context.stream_scheduler
        request.send_response(send_events(registry, scheduler, request, found[1].decode()))
        return NOT_DONE_YET

    def identify_caller(self, request: ApiRequest) -> str:
        """Return the name of the caller; ANONYMOUS_CALLER for open paths.

        Raises: Unauthorized, CallerQuotaExceeded, ForeignOrigin, AccessDenied.
        """
        if request.path in _OPEN_PATHS:
            return ANONYMOUS_CALLER
        authorization = get_header_values(request.requestHeaders, "Authorization")
        link = find_link(request.query, authorization)
        if link is not None:
            return self._identify_link_reader(request, link)
        authenticator = self.context.authenticator
        if authenticator.is_token_optional:
            callers = self.context.configuration.callers
            if request.method not in SAFE_METHODS and not callers.open:
                check_origin(request.requestHeaders, callers.origins, CROSS_ORIGIN_WRITE_REFUSAL)
        token = authenticator.authenticate_request(authorization, request.method)
        request.token, request.is_read_only = token, token.is_read_only
        if token.permitted_problems is None and not (token.is_shared or token.supervised_groups):
            return token.caller
        method, route, parameters = self._match_request(request)
        check_token_access(token, method, route, parameters)
        identifier = parameters.get("identifier")
        if identifier is None or not token.supervised_groups:
            return token.caller
        permitted = authenticator.find_permitted_callers(token)
        owner = self.context.registry.records.find_owner(identifier, permitted) or token.caller
        # A supervisor takes no events from a member.
        request.is_read_only |= owner != token.caller
        return owner

    def match_route(self, method: bytes, path: bytes) -> tuple[str, str, Mapping[str, Any]]:
        """Return method and route of a request, each may be `UNKNOWN_ROUTE`, and parameters.

        For counters, and for what is checked before the body arrives.
        """
        named = method.decode("latin-1")
        named = named if named in _METHODS else UNKNOWN_ROUTE
        mapper = self.app.url_map.bind("")
        try:
            rule, parameters = mapper.match(decode_path(path), named, return_rule=True)
        except HTTPException:  # which answers that there is none
            return named, UNKNOWN_ROUTE, {}
        return named, rule.rule, parameters

    def list_routes(self) -> Iterator[tuple[str, str]]:
        """Yield each pair of a method and a route that `match_route` may return."""
        for rule in self.app.url_map.iter_rules():
            for method in sorted(_METHODS & (rule.methods or _METHODS)):
                yield method, rule.rule
        for method in sorted(_METHODS | {UNKNOWN_ROUTE}):
            yield method, UNKNOWN_ROUTE

    def is_still_permitted(self, request: ApiRequest) -> bool:
        """Return whether a reload of the tokens has left the request what it reads."""
        return (
            request.uses_link
            or request.token is ANONYMOUS_TOKEN
            or self.context.authenticator.is_owner_permitted(request.token, request.caller)
        )

    def _identify_link_reader(self, request: ApiRequest, link: str) -> str:
        """Count a request by a link; return the caller of the link's evaluation."""
        method, route, parameters = self._match_request(request)
        check_link_access(method, route)
        links = self.context.evaluation_links
        caller = links.add_reader(
            request, parameters["identifier"], link, request.channel.forceAbortClient
        )
        request.notifyFinish().addBoth(lambda _: links.remove_reader(request))
        request.uses_link = request.is_read_only = True
        return caller

    def _match_request(self, request: ApiRequest) -> tuple[str, str, Mapping[str, Any]]:
        """Return the method, the route and its parameters, with which a form is received."""
        path = collapse_slashes(unquote_to_bytes(request.path))
        return self.match_route(request.method, path.replace(b"%", b"%25"))

    def make_form_receiver(self, request: ApiRequest, length: int | None) -> FormReceiver | None:
        """Return the receiver of a form that begins an evaluation. Raises: RequestError."""
        if request.method != b"POST":
            return None
        _, route, parameters = self._match_request(request)
        if route not in (EVALUATE_ROUTE, EVALUATE_PROBLEM_ROUTE, RERUN_ROUTE):
            return None
        return self.context.form_receiver_factory.make_receiver(
            request, length, parameters.get("name"), parameters.get("identifier")
        )

    def check_not_stopping(self) -> None:
        """Raise ServerStopping once the registry is closed."""
        self.context.registry.check_not_stopping()


def add_legacy_routes(app: Klein, context: WebContext) -> None:
    """Add /evaluation_events to `app`, for TuringArena's clients of 2018 (docs/api.md).

    They give up after about 30 seconds of empty pages, and poll fast at first. So a poll waits
    although the client does not ask for that.
    """

    @app.route("/evaluation_events", methods=["GET"])
    def older_events(request: ApiRequest) -> bytes | Coroutine[Any, Any, bytes]:
        """Return a page of events; wait some seconds also if the client names none."""
        identifier = get_query_argument(request.query, "evaluation")
        if not identifier:
            raise InvalidField("evaluation", "is required")
        wait = min(_OLDER_CLIENT_WAIT, context.configuration.polls.wait)
        query = parse_event_query(request.raw_query)
        return prepare_event_page(context.registry, request, identifier, query, wait)


def _add_operator_routes(app: Klein, context: WebContext) -> None:
    """Add the routes for the operator's programs: liveness, readiness, metrics."""

    @app.route(HEALTH, methods=["GET"])
    def health(request: ApiRequest) -> bytes:
        """Return 200: the daemon is alive."""
        return prepare_json_response(request, {"status": "ok", "version": __version__})

    @app.route(READY, methods=["GET"])
    def ready(request: ApiRequest) -> bytes:
        """Return 200 if the daemon takes work, else 503 with the reasons."""
        obstacles = context.health_and_metrics.find_unreadiness_reasons()
        if obstacles:
            raise ServerNotReady(obstacles)
        return prepare_json_response(request, {"status": "ready", "version": __version__})

    @app.route(METRICS, methods=["GET"])
    def metrics(request: ApiRequest) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        _check_reader(context, request)
        text = context.health_and_metrics.read_metrics(context.clock.seconds())
        return prepare_response(request, text, METRICS_MEDIA_TYPE)


def _check_reader(context: WebContext, request: ApiRequest) -> None:
    """Raise Unauthorized or AccessDenied if the client may not read metrics."""
    headers = request.requestHeaders
    authenticator = context.health_and_metrics.metrics_authenticator
    if authenticator is not None:
        authenticator.authenticate_request(get_header_values(headers, "Authorization"))
    elif any(map(headers.hasHeader, _PROXY_HEADERS)) or not _is_this_machine(request):
        raise AccessDenied(
            "metrics are for programs of this machine that use no proxy; the operator can admit"
            " others with tokens (metrics.tokens)"
        )
    else:
        check_origin(headers, (), _CANNOT_READ_METRICS, is_host_checked=True)


def _is_this_machine(request: ApiRequest) -> bool:
    try:
        return ip_address(request.channel.peer_address).is_loopback
    except ValueError:  # over a UNIX socket: mostly a proxy
        return False
