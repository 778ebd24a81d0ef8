"""The description of the API, as it is served, and answers held against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from twisted.web.http_headers import Headers

from tawebeval.web.routes import OPENAPI_PATH, STATIC_RESOURCES
from tests.fakes.clients import Answer

DOCUMENT: dict[str, Any] = json.loads(STATIC_RESOURCES[OPENAPI_PATH].content)

METHODS = ("get", "post", "delete")

# What HTTP says of any message, and what the document says in words of all responses; treq adds
# the content's encoding.
COMMON_HEADERS = {
    *("connection", "content-type", "content-length", "transfer-encoding", "content-encoding"),
    *("cache-control", "date", "server", "vary", "x-content-type-options"),
    *("access-control-allow-origin", "access-control-expose-headers"),
}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and operation of all that is described; callbacks are not among it."""
    for path, item in DOCUMENT["paths"].items():
        for method in METHODS:
            if method in item:
                yield method.upper(), path, item[method]


def resolve(value: dict[str, Any]) -> dict[str, Any]:
    """Return what is meant by a reference, or what is none as it is."""
    while "$ref" in value:
        found: Any = DOCUMENT
        for name in value["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        value = found
    return value


def closed(value: Any) -> Any:
    """Return a schema, or several in lists and dictionaries, in which no member may be unknown.

    Clients have to pass over members that they do not know, so the description does not say so.
    """
    if isinstance(value, list):
        return [closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {name: closed(each) for name, each in value.items()}
    if isinstance(value.get("properties"), dict) and value.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


_COMPONENTS = {"components": {"schemas": closed(DOCUMENT["components"]["schemas"])}}


def complaints(schema: dict[str, Any], value: Any) -> list[str]:
    """Return what is wrong with a value that should be of this schema."""
    errors = _validator(json.dumps(schema)).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({**closed(json.loads(schema)), **_COMPONENTS})


def merged(headers: Headers) -> dict[str, str]:
    """Return headers by their names in lower case, with all the values of one put together."""
    return {
        name.decode().lower(): b", ".join(values).decode()
        for name, values in headers.getAllRawHeaders()
    }


def check(method: str, target: str, answer: Answer) -> None:
    """Raise AssertionError where the description does not have this answer to this request.

    That of HEAD is described as that of GET, but for the body.
    """
    method = "GET" if method == "HEAD" else method
    path = re.sub("/+", "/", target.partition("?")[0])
    for described, template, operation in operations():
        if described == method and re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
            _check(operation, answer)
            return
    assert answer.status >= 400 or method == "OPTIONS", f"{method} {path} is not described"


def _check(operation: dict[str, Any], answer: Answer) -> None:
    name = f"{operation['operationId']}, {answer.status}"
    assert str(answer.status) in operation["responses"], name
    response = resolve(operation["responses"][str(answer.status)])
    wrong = list(_wrong_headers(response.get("headers", {}), answer))
    if answer.body and answer.status != 101:  # behind that comes no body, but a WebSocket
        media_type = answer.headers["content-type"].partition(";")[0]
        is_json = media_type.endswith(("/json", "+json"))
        value = json.loads(answer.body) if is_json else str(answer.body)
        wrong += complaints(response["content"][media_type]["schema"], value)
    assert not wrong, f"{name}: {wrong}"


def _wrong_headers(described: dict[str, Any], answer: Answer) -> Iterator[str]:
    headers = {name.lower(): resolve(each) for name, each in described.items()}
    given = {name.lower() for name in answer.headers} - COMMON_HEADERS
    yield from (f"{name} is not described" for name in given - set(headers))
    for name, header in headers.items():
        if name in given:
            value: Any = answer.headers[name]
            if header["schema"]["type"] == "integer":
                value = int(value)
            yield from (f"{name}{each}" for each in complaints(header["schema"], value))
        elif header.get("required"):
            yield f"{name} is missing"
