"""The description of the API for programs: OpenAPI 3.1, as it is served.

`openapi.json` beside this file is written by hand, and says of each operation what is its own.
What holds of every answer or every operation is not repeated there. It is added here, once, when
this module is imported: the version, the headers of all answers, the problems that any request
can meet, and HEAD wherever there is GET. In `openapi.json` headers and problems stand among the
components, by name or status.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import orjson

from tawebeval import __version__
from tawebeval.web.fixed import Fixed
from tawebeval.web.server.headers import general_headers

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


def _load() -> Fixed:
    """Return the whole description, indented, for people look at it, too."""
    source = (files("tawebeval.web") / "openapi.json").read_bytes()
    return Fixed(orjson.dumps(complete(orjson.loads(source)), option=orjson.OPT_INDENT_2))


DESCRIPTION = _load()
