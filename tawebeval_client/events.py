"""Events as values: parses the bytes of a page, and places a cursor after each event.

The cursor of the last event is the server's, the `end` of the page. Any other one is the `begin`
of its page, `+`, and the number of events to skip from there: `"17+3"`, or `"+3"` on the first
page. Programs store cursors and send them back, and read nothing in them. The `time` of an event is
when the server stored it, None unless times were requested.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeAlias

import attrs
import msgspec

from tawebeval_client.documents import Results
from tawebeval_client.results import judge_evaluation

_CURSOR = re.compile(r"[A-Za-z0-9_-]+")


@attrs.frozen
class _StoredEvent:
    """What events of all kinds have; it does not count when they are compared."""

    cursor: str = attrs.field(default="", kw_only=True, eq=False)
    time: datetime | None = attrs.field(default=None, kw_only=True, eq=False, repr=False)


@attrs.frozen
class Text(_StoredEvent):
    r"""Printed text: a single `\n`, or text without line terminators."""

    text: str


@attrs.frozen
class Data(_StoredEvent):
    """Data for programs. `raw_json` is its JSON exactly as the evaluator wrote it."""

    raw_json: str

    @property
    def payload(self) -> Any:
        """The decoded value. Raises ValueError if Python cannot decode it."""
        return _value(self.raw_json)


@attrs.frozen
class File(_StoredEvent):
    """A file that the evaluator sends. `filename` is untrusted: use its last component only."""

    filename: str
    content_type: str
    content: bytes = attrs.field(repr=False)
    raw_json: str = attrs.field(repr=False, eq=False, default="")


@attrs.frozen
class EvaluationError(_StoredEvent):
    """A failed evaluation, or a broken block (`is_failure` is False) after which it goes on.

    `reason` is one of docs/api.md, `members` are the other members of the event.
    """

    reason: str
    message: str
    members: Mapping[str, Any] = attrs.field(factory=dict)
    raw_json: str = attrs.field(repr=False, eq=False, default="")

    @property
    def is_failure(self) -> bool:
        """Whether this event, if it is the last one, makes the evaluation a failure."""
        return self.reason != "protocol"


@attrs.frozen
class Unknown(_StoredEvent):
    """An event of a type that this version does not know; `raw_json` is the JSON of its payload."""

    type: str
    raw_json: str


Event: TypeAlias = Text | Data | File | EvaluationError | Unknown


@attrs.frozen
class Page:
    """Consecutive events. `begin` is None on the first page, `end` None after the last event."""

    begin: str | None
    end: str | None
    events: Sequence[Event]


@attrs.frozen
class Outcome:
    """How an evaluation has ended: the summary of its `results`, and the `error` of a failed one.

    `results` are those of its status (docs/api.md), None if the evaluator has sent none.
    """

    identifier: str
    results: Results | None
    error: EvaluationError | None = None

    @property
    def verdict(self) -> str:
        """The verdict of the page in lower case: "accepted", "wrong answer", "partly correct"."""
        reason = None if self.error is None else self.error.reason
        return judge_evaluation(reason, self.results)


_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_DEPTH = 4  # of a payload: in an event, in a list, in a page


class _WireEvent(msgspec.Struct):
    type: str
    payload: msgspec.Raw
    time: datetime | None = None


class _WirePage(msgspec.Struct):
    begin: str | None
    end: str | None
    data: list[_WireEvent]


def parse_page(body: bytes, after: str | None) -> Page:
    """Return the page in a response to a request with `after`. Raises ValueError."""
    try:
        page = _decode(body)
        if page.begin != after:
            raise ValueError(f"it begins at {page.begin!r} instead of {after!r}")
        if page.end is not None and not _CURSOR.fullmatch(page.end):
            raise ValueError(f"its end {page.end[:80]!r} is not a cursor")
        return Page(page.begin, page.end, tuple(_events(page)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"unexpected answer instead of a page of events: {error}") from None


def _decode(body: bytes) -> _WirePage:
    """Return a page with undecoded payloads. Raises ValueError, RecursionError.

    The parser's limit of nesting depends on the depth of the stack, so the daemon may have accepted
    a value that is too deep here. Its payloads are then cut out before the page is parsed.
    """
    try:
        return msgspec.json.decode(body, type=_WirePage)
    except RecursionError:
        rest, payloads = _cut_payloads(body)
    page = msgspec.json.decode(rest, type=_WirePage)
    for event in page.data:
        payload = bytes(event.payload)
        if payload.startswith(b"["):
            event.payload = msgspec.Raw(payloads[int(payload[1:-1])])
    return page


def _cut_payloads(body: bytes) -> tuple[bytes, list[bytes]]:
    """Return a page with `[index]` for each payload that is no scalar, and these payloads."""
    rest: list[bytes] = []
    payloads: list[bytes] = []
    depth = begin = end = 0
    for token in _TOKEN.finditer(body):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == _DEPTH:
                begin = token.start()
        elif token[0] in (b"]", b"}"):
            if depth == _DEPTH:
                rest += [body[end:begin], b"[%d]" % len(payloads)]
                end = token.end()
                payloads.append(body[begin:end])
            depth -= 1
    return b"".join((*rest, body[end:])), payloads


def _events(page: _WirePage) -> Iterator[Event]:
    for number, event in enumerate(page.data, 1):
        last = number == len(page.data) and page.end is not None
        cursor = page.end if last else f"{page.begin or ''}+{number}"
        yield _event(event, cursor or "")


def _event(event: _WireEvent, cursor: str) -> Event:
    raw_json = bytes(event.payload).decode()
    common: dict[str, Any] = {"cursor": cursor, "time": event.time}
    if event.type == "text":
        with suppress(ValueError):
            return Text(msgspec.json.decode(event.payload, type=str), **common)
    if event.type == "data":
        return _parse_special(raw_json, common) or Data(raw_json, **common)
    return Unknown(event.type, raw_json, **common)


def _parse_special(raw_json: str, common: dict[str, Any]) -> File | EvaluationError | None:
    """Return the file or the error that data describes; None for other data."""
    try:
        match _value(raw_json):
            case {
                "type": "file",
                "filename": str(filename),
                "content_type": str(content_type),
                "content_base64": str(content),
            }:
                content_ = b64decode(content, validate=True)
                return File(filename, content_type, content_, raw_json, **common)
            case {
                "type": "evaluation_error",
                "reason": str(reason),
                "message": str(message),
                **others,
            }:
                members = {str(name): value for name, value in others.items()}
                return EvaluationError(reason, message, members, raw_json, **common)
    except (ValueError, binascii.Error):
        pass
    return None


def _value(raw_json: str) -> Any:
    try:
        return json.loads(raw_json)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def split_cursor(cursor: str | None) -> tuple[str | None, int]:
    """Return the server's part of a cursor, and the number of events to skip from there.

    Raises ValueError for an invalid cursor.
    """
    after, plus, skip = (cursor or "").partition("+")
    if plus and not (skip.isascii() and skip.isdigit()):
        raise ValueError(
            f"{cursor!r} is not a cursor; use one that the server or the client printed"
        )
    return after or None, int(skip or 0)
