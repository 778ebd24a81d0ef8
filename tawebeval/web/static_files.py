"""Static resources: the page for browsers and the OpenAPI description.

Both stay the same until the daemon restarts. They are read at import and kept in memory: a request
needs no access to the disk, and the daemon's user needs no access to the installed files.
Clients may cache them and revalidate by entity tag. At import each is compressed, too.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files

import attrs
import orjson
from klein import Klein
from twisted.web.http import NOT_MODIFIED
from werkzeug.exceptions import NotFound

from tawebeval import __version__
from tawebeval.web.server.messages import (
    JSON_MEDIA_TYPE,
    get_header_elements,
    parse_weights,
    prepare_response,
    set_headers,
)
from tawebeval.web.server.request import ApiRequest

OPENAPI_PATH = "/openapi.json"

_MEDIA_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}

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
        return f'"{sha256(self.content).hexdigest()[:32]}"'

    def compress(self) -> StaticResource:
        """Return the same, compressed by gzip."""
        content = gzip.compress(self.content, _COMPRESSION_LEVEL, mtime=0)
        headers = {**self.headers, b"Content-Encoding": b"gzip"}
        return StaticResource(content, self.media_type, headers)

    def send_response(self, request: ApiRequest) -> bytes:
        """Answer with the content, or with 304 if the client has it (RFC 9110, section 13.1.2).

        Raises: HeaderTooLarge.
        """
        body = prepare_response(request, self.content, self.media_type)
        tag = self.entity_tag.encode()
        # It may be cached, and must be revalidated.
        set_headers(request, {b"Cache-Control": b"no-cache", b"ETag": tag})
        request.responseHeaders.addRawHeader(b"Vary", b"Accept-Encoding")
        tags = get_header_elements(request.requestHeaders, "If-None-Match")
        # A weak comparison: proxies that compress make the tags weak.
        if "*" in tags or self.entity_tag in [tag.removeprefix("W/") for tag in tags]:
            request.setResponseCode(NOT_MODIFIED)
            return b""
        set_headers(request, self.headers)
        return body


def _load_resources() -> dict[str, StaticResource]:
    """Return all static resources by path; `static/index.html` is at `/`."""
    package = files("tawebeval.web")
    document = orjson.loads((package / "openapi.json").read_bytes())
    document["info"]["version"] = __version__
    # Indented, for people read it, too.
    description = orjson.dumps(document, option=orjson.OPT_INDENT_2)
    resources = {OPENAPI_PATH: StaticResource(description)}
    for file in (package / "static").iterdir():
        media_type = _MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is None:  # an editor's backup or swap file
            continue
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        resources[path] = StaticResource(file.read_bytes(), media_type, _PAGE_HEADERS)
    return resources


STATIC_RESOURCES: Mapping[str, StaticResource] = _load_resources()

_COMPRESSED_RESOURCES = {path: found.compress() for path, found in STATIC_RESOURCES.items()}

PUBLIC_PATHS = tuple(path.encode() for path in STATIC_RESOURCES)
"""Paths that need no token: a browser has no token until it has the page."""


def _respond(request: ApiRequest, path: str) -> bytes:
    accepted = parse_weights(get_header_elements(request.requestHeaders, "Accept-Encoding"))
    is_gzip = accepted.get("gzip", accepted.get("*"))
    resource = (_COMPRESSED_RESOURCES if is_gzip else STATIC_RESOURCES).get(path)
    if resource is None:
        raise NotFound
    return resource.send_response(request)


def add_static_routes(app: Klein) -> None:
    """Add the routes of all static resources to `app`."""

    @app.route("/", methods=["GET"])
    def page(request: ApiRequest) -> bytes:
        """Return the page."""
        return _respond(request, "/")

    @app.route("/static/<name>", methods=["GET"])
    def page_file(request: ApiRequest, name: str) -> bytes:
        """Return a file that the page loads."""
        return _respond(request, f"/static/{name}")

    @app.route(OPENAPI_PATH, methods=["GET"])
    def description(request: ApiRequest) -> bytes:
        """Return the OpenAPI description."""
        return _respond(request, OPENAPI_PATH)
