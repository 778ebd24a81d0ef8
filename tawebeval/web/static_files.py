"""The page for a browser: the files that it is made of, as they are served.

They are read once, when this module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from klein import Klein
from twisted.web.iweb import IRequest
from werkzeug.exceptions import NotFound

from tawebeval.web.fixed import Fixed
from tawebeval.web.server.headers import set_headers

_MEDIA_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}

HEADERS = {
    # Nothing but these files is run or shown, and nobody is talked to but this daemon. Images may
    # be data: a file that an evaluator has sent is shown as one, and has no origin then.
    b"Content-Security-Policy": b"default-src 'none'; script-src 'self'; style-src 'self';"
    b" img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'",
    b"Referrer-Policy": b"no-referrer",
}
"""What is said with each file, besides what is said of it and with every answer."""


def _load() -> dict[str, Fixed]:
    """Return the files by the paths at which they are served; the page itself is at `/`."""
    found = {}
    for file in (files("tawebeval.web") / "static").iterdir():
        media_type = _MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is None:  # what an editor has left there is nobody's business
            continue
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        found[path] = Fixed(file.read_bytes(), media_type)
    return found


ASSETS: Mapping[str, Fixed] = _load()

PATHS = frozenset(path.encode() for path in ASSETS)
"""Where they are: they are open to everybody, for a browser has no token until it has the page."""


def add_routes(app: Klein) -> None:
    """Add the files to the application."""

    @app.route("/", methods=["GET"])
    def page(request: IRequest) -> bytes:
        """Return the page."""
        return _serve(request, ASSETS["/"])

    @app.route("/static/<name>", methods=["GET"])
    def part(request: IRequest, name: str) -> bytes:
        """Return a file that the page is made of."""
        asset = ASSETS.get(f"/static/{name}")
        if asset is None:
            raise NotFound
        return _serve(request, asset)


def _serve(request: IRequest, asset: Fixed) -> bytes:
    """Return the file, or say that the client has it already."""
    set_headers(request, HEADERS)
    return asset.send(request)
