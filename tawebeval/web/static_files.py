"""Answers that stay the same until the daemon is started again.

Clients may keep them, and ask each time whether they have changed. The content is in memory: a
request costs no look at the disk, and the daemon's user need not be able to read where
tawebeval is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

import attrs
import orjson
from klein import Klein
from twisted.web.http import NOT_MODIFIED
from twisted.web.iweb import IRequest
from werkzeug.exceptions import NotFound
from werkzeug.http import parse_etags

from tawebeval import __version__
from tawebeval.web.responses import send
from tawebeval.web.server.headers import JSON, general_headers, set_headers


@attrs.frozen
class StaticResource:
    """A content, and its entity tag in quotes (RFC 9110, section 8.8.3)."""

    content: bytes = attrs.field(repr=False)
    media_type: bytes = JSON
    entity_tag: str = attrs.field(init=False)

    @entity_tag.default
    def _digest(self) -> str:
        return f'"{sha256(self.content).hexdigest()[:32]}"'

    def send(self, request: IRequest) -> bytes:
        """Answer with the content, or say that the client has it (RFC 9110, section 13.1.2)."""
        body = send(request, self.content, self.media_type)
        request.setHeader(b"Cache-Control", b"no-cache")  # to be kept, and asked for
        request.setHeader(b"ETag", self.entity_tag.encode())
        known = request.requestHeaders.getRawHeaders(b"If-None-Match", [])
        tags = parse_etags(", ".join(value.decode("latin-1") for value in known))
        # Weakly, for a proxy that compresses weakens the tags.
        if not tags.contains_weak(self.entity_tag.strip('"')):
            return body
        request.setResponseCode(NOT_MODIFIED)
        return b""


PATH = "/openapi.json"

_GENERAL = general_headers(["*"], []) | general_headers([], [])
_HEADERS = ("Cache-Control", "Date", *(name.decode() for name in _GENERAL))

_METHODS = ("get", "post", "delete")

_GET_ALONE = ("101",)
"""The statuses of GET that HEAD does not have: it becomes no WebSocket."""

_ANY = ("400", "408", "413", "414", "431", "500", "503")
"""The problems of any request, whatever it asks for."""

_WITH_TOKEN = ("401", "429")
"""Those of requests that need a token, where there are any."""


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Return a description with what all operations have in common; it is changed in place.

    Raises KeyError for a header or a problem of which the components say nothing.
    """
    document["info"]["version"] = __version__
    components = document["components"]
    headers = {name: _reference(components, "headers", name) for name in _HEADERS}
    for operation in operations(document):
        responses = operation["responses"]
        secured = operation.get("security", document["security"])
        for status in (*_ANY, *(_WITH_TOKEN if secured else ())):
            responses.setdefault(status, _reference(components, "responses", status))
        operation["responses"] = dict(sorted(responses.items()))
        for response in responses.values():
            if "$ref" not in response:
                response["headers"] = headers | response.get("headers", {})
    for response in components["responses"].values():
        response["headers"] = headers | response.get("headers", {})
    for item in document["paths"].values():
        if "get" in item:
            item["head"] = _head(item["get"], components["responses"])
    return document


def operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the operations of a description; callbacks are not among them."""
    for item in document["paths"].values():
        yield from (item[method] for method in _METHODS if method in item)


def _head(get: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the operation HEAD beside a whole GET; `known` are the responses of the components."""
    responses = (
        (status, known[response["$ref"].rpartition("/")[2]] if "$ref" in response else response)
        for status, response in get["responses"].items()
        if status not in _GET_ALONE
    )
    return get | {
        "operationId": f"{get['operationId']}Head",
        "summary": f"{get['summary']}: the headers alone",
        "description": "As GET, without the body. It waits for nothing and acknowledges nothing.",
        "responses": {
            status: {"description": response["description"], "headers": response["headers"]}
            for status, response in responses
        },
    }


def _reference(components: dict[str, Any], kind: str, name: str) -> dict[str, str]:
    """Return a reference to a component. Raises KeyError where there is none."""
    if name not in components[kind]:
        raise KeyError(f"{kind}/{name}")
    return {"$ref": f"#/components/{kind}/{name}"}


def _load_document() -> StaticResource:
    """Return the whole description, indented, for people look at it, too."""
    source = (files("tawebeval.web") / "openapi.json").read_bytes()
    return StaticResource(orjson.dumps(complete(orjson.loads(source)), option=orjson.OPT_INDENT_2))


DESCRIPTION = _load_document()


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


def _load() -> dict[str, StaticResource]:
    """Return the files by the paths at which they are served; the page itself is at `/`."""
    found = {}
    for file in (files("tawebeval.web") / "static").iterdir():
        media_type = _MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is None:  # what an editor has left there is nobody's business
            continue
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        found[path] = StaticResource(file.read_bytes(), media_type)
    return found


ASSETS: Mapping[str, StaticResource] = _load()

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


def _serve(request: IRequest, asset: StaticResource) -> bytes:
    """Return the file, or say that the client has it already."""
    set_headers(request, HEADERS)
    return asset.send(request)
