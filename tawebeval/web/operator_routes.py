"""Routes for the operator's programs: liveness, readiness, metrics."""

from __future__ import annotations

from ipaddress import ip_address

from klein import Klein
from twisted.web.iweb import IRequest
from werkzeug.exceptions import NotFound

from tawebeval import __version__
from tawebeval.errors import AccessDenied, ServerNotReady
from tawebeval.web.auth import is_trusted_origin
from tawebeval.web.context import WebContext
from tawebeval.web.responses import cast_request, prepare_json_response, prepare_response
from tawebeval.web.server.request import ApiRequest

HEALTH, READY, METRICS = "/health", "/health/ready", "/metrics"

TOKENLESS_PATHS = tuple(path.encode() for path in (HEALTH, READY, METRICS))
"""Paths that need no caller's token; /metrics checks its readers itself."""

METRICS_MEDIA_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# What proxies tell by these is not believed; that there is one is.
_PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via")


def add_operator_routes(app: Klein, context: WebContext) -> None:
    """Add the routes to `app`."""

    @app.route(HEALTH, methods=["GET"])
    def health(request: IRequest) -> bytes:
        """Return 200: the daemon is alive."""
        return prepare_json_response(request, {"status": "ok", "version": __version__})

    @app.route(READY, methods=["GET"])
    def ready(request: IRequest) -> bytes:
        """Return 200 if the daemon takes work, else 503 with the reasons."""
        obstacles = context.operator_sources.find_obstacles()
        if obstacles:
            raise ServerNotReady(obstacles)
        return prepare_json_response(request, {"status": "ready", "version": __version__})

    @app.route(METRICS, methods=["GET"])
    def metrics(request: IRequest) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        _check_reader(context, cast_request(request))
        return prepare_response(
            request, context.operator_sources.collect_metrics(), METRICS_MEDIA_TYPE
        )


def _check_reader(context: WebContext, request: ApiRequest) -> None:
    """Raise Unauthorized, AccessDenied or NotFound if the client may not read metrics."""
    readers, headers = context.configuration.metrics.readers, request.requestHeaders
    if readers == "nobody":
        raise NotFound("metrics are disabled (metrics.readers)")
    if readers == "tokens":
        assert context.operator_sources.metrics_authentication is not None, (
            "the daemon does not start without"
        )
        context.operator_sources.metrics_authentication.identify_caller(
            headers.getRawHeaders(b"Authorization", [])
        )
    elif any(map(headers.hasHeader, _PROXY_HEADERS)) or not _is_this_machine(request):
        raise AccessDenied(
            "metrics are for programs of this machine that use no proxy; the operator can admit"
            ' others with tokens (metrics.readers = "tokens")'
        )
    else:
        _check_no_page(request)


def _is_this_machine(request: ApiRequest) -> bool:
    try:
        return ip_address(request.channel.peer.address).is_loopback
    except ValueError:  # over a UNIX socket: mostly a proxy
        return False


def _check_no_page(request: ApiRequest) -> None:
    """Raise AccessDenied for a page in a browser of this machine, unless it is the daemon's.

    A request of a page to its own origin may have no `Origin`, and its host may be an attacker's
    name that resolves to this machine.
    """
    headers = request.requestHeaders
    host = (headers.getRawHeaders(b"Host", [b""])[0]).decode("latin-1")
    origin = headers.getRawHeaders(b"Origin", [f"http://{host}".lower().encode("latin-1")])[0]
    if not is_trusted_origin(origin.decode("latin-1"), host, ()):
        raise AccessDenied(
            "metrics are for requests to localhost or a loopback address, and not for pages of"
            " another origin"
        )
