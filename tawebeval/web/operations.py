"""What the operator's programs ask: is it alive, would it take work, what does it count."""

from __future__ import annotations

from ipaddress import ip_address

from klein import Klein
from twisted.web.iweb import IRequest
from werkzeug.exceptions import NotFound

from tawebeval import __version__
from tawebeval.errors import AccessDenied, NotReady
from tawebeval.web.context import WebContext
from tawebeval.web.exposure import is_ours
from tawebeval.web.responses import received, send, send_json
from tawebeval.web.server.request import ApiRequest

HEALTH, READY, METRICS = "/health", "/health/ready", "/metrics"

PATHS = tuple(path.encode() for path in (HEALTH, READY, METRICS))
"""For these nobody needs a token of a caller; who may have the last one is looked at here."""

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# What proxies tell by these is not believed; that there is one is.
_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via")


def add_routes(app: Klein, api: WebContext) -> None:
    """Add the routes to the application."""

    @app.route(HEALTH, methods=["GET"])
    def health(request: IRequest) -> bytes:
        """Say that the daemon is alive."""
        return send_json(request, {"status": "ok", "version": __version__})

    @app.route(READY, methods=["GET"])
    def ready(request: IRequest) -> bytes:
        """Say whether it would take work."""
        obstacles = api.operations.obstacles()
        if obstacles:
            raise NotReady(obstacles)
        return send_json(request, {"status": "ready", "version": __version__})

    @app.route(METRICS, methods=["GET"])
    def metrics(request: IRequest) -> bytes:
        """Return the figures."""
        check_reader(api, received(request))
        return send(request, api.operations.metrics(), METRICS_TYPE)


def check_reader(api: WebContext, request: ApiRequest) -> None:
    """Raise Unauthorized, Forbidden or NotFound for those who may not read the figures."""
    readers, headers = api.configuration.metrics.readers, request.requestHeaders
    if readers == "nobody":
        raise NotFound("there are no metrics here ([metrics] readers)")
    if readers == "tokens":
        assert api.operations.readers is not None, "the daemon does not start without"
        api.operations.readers.admit(headers.getRawHeaders(b"Authorization", []))
    elif any(map(headers.hasHeader, _OF_PROXIES)) or not _is_this_machine(request):
        raise AccessDenied(
            "these figures are for programs of this machine, and for no proxy; the operator can"
            ' let others have them ([metrics] readers = "tokens")'
        )
    else:
        _check_no_page(request)


def _is_this_machine(request: ApiRequest) -> bool:
    try:
        return ip_address(request.channel.peer.address).is_loopback
    except ValueError:  # over a UNIX socket: mostly a proxy
        return False


def _check_no_page(request: ApiRequest) -> None:
    """Raise Forbidden for a page in a browser of this machine, unless it is our own.

    For its own origin a page may send no `Origin`, and its host may be a stranger's name that
    leads here.
    """
    headers = request.requestHeaders
    host = (headers.getRawHeaders(b"Host", [b""])[0]).decode("latin-1")
    origin = headers.getRawHeaders(b"Origin", [f"http://{host}".lower().encode("latin-1")])[0]
    if not is_ours(origin.decode("latin-1"), host, ()):
        raise AccessDenied(
            "these figures are for programs that ask for a loopback address or localhost, and for"
            " no page of another origin"
        )
