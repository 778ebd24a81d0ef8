"""The page for a browser: the files that it is made of, as they are served.

They are read once, when this module is imported: a request costs no look at the disk, and the
daemon's user need not be able to read where tawebeval is installed. Browsers may keep them, and
ask each time whether they have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files

import attrs
from klein import Klein
from twisted.web.http import NOT_MODIFIED
from twisted.web.iweb import IRequest
from werkzeug.exceptions import NotFound
from werkzeug.http import parse_etags

from tawebeval.web.exchange import send

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


@attrs.frozen
class Asset:
    """A file of the page, and its entity tag in quotes (RFC 9110, section 8.8.3)."""

    content: bytes
    media_type: bytes
    entity_tag: str


def _load() -> dict[str, Asset]:
    """Return the files by the paths at which they are served; the page itself is at `/`."""
    found = {}
    for file in (files("tawebeval.web") / "static").iterdir():
        media_type = _MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is None:  # what an editor has left there is nobody's business
            continue
        content = file.read_bytes()
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        digest = hashlib.sha256(content).hexdigest()[:32]
        found[path] = Asset(content, media_type, f'"{digest}"')
    return found


ASSETS: Mapping[str, Asset] = _load()

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


def _serve(request: IRequest, asset: Asset) -> bytes:
    """Return the file, or say that the client has it already."""
    body = send(request, asset.content, asset.media_type)
    for name, value in HEADERS.items():
        request.setHeader(name, value)
    request.setHeader(b"Cache-Control", b"no-cache")  # to be kept, and asked for
    request.setHeader(b"ETag", asset.entity_tag.encode())
    known = request.requestHeaders.getRawHeaders(b"If-None-Match", [])
    # Weakly, for a proxy that compresses weakens the tags.
    tags = parse_etags(", ".join(value.decode("latin-1") for value in known))
    if tags.contains_weak(asset.entity_tag.strip('"')):
        request.setResponseCode(NOT_MODIFIED)
        return b""
    return body
