"""The description of the API, as it is served, and answers held against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from tawebeval.web.description import DESCRIPTION
from tests.fake_clients import Answer

DOCUMENT: dict[str, Any] = json.loads(DESCRIPTION.content)

METHODS = ("get", "post", "delete")

# What HTTP says of any message, which no description of an API tells; treq adds the last.
_FRAMING = {
    *("content-type", "content-length", "connection", "transfer-encoding"),
    "content-encoding",
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


def check(method: str, target: str, answer: Answer) -> None:
    """Raise AssertionError where the description does not have this answer to this request."""
    path = re.sub("/+", "/", target.partition("?")[0])
    method = "GET" if method == "HEAD" else method
    for described, template, operation in operations():
        if described == method and re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
            _check(operation, answer)
            return
    assert answer.status >= 400 or method == "OPTIONS", f"{method} {path} is not described"


def _check(operation: dict[str, Any], answer: Answer) -> None:
    responses = operation["responses"]
    assert str(answer.status) in responses, f"{operation['operationId']}: {answer.status}"
    response = resolve(responses[str(answer.status)])
    headers = {name.lower(): resolve(each) for name, each in response["headers"].items()}
    unknown = set(answer.headers) - _FRAMING - set(headers)
    assert not unknown, f"{operation['operationId']}, {answer.status}: {unknown}"
    for name, header in headers.items():
        assert name in answer.headers or not header.get("required"), name
    if answer.body:
        media_type = answer.headers["content-type"].partition(";")[0]
        content = response["content"][media_type]
        value = (
            json.loads(answer.body)
            if media_type.endswith(("/json", "+json"))
            else answer.body.decode()
        )
        wrong = complaints(content["schema"], value)
        assert not wrong, f"{operation['operationId']}, {answer.status}: {wrong}"
