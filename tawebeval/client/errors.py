"""The exceptions of the client.

`str()` of each is a sentence for people. It may quote the server, whose control characters are
escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from tawebeval.errors import TawebevalError

_LONGEST_QUOTE = 2000  # characters of a server's words in a message


class ClientError(TawebevalError):
    """The base of all errors of a request."""


class Unavailable(ClientError):
    """No usable response, after all attempts or because a repetition would be of no use.

    `is_refused_connection` tells whether nothing listens at the server's address.
    """

    def __init__(self, message: str, is_refused_connection: bool = False) -> None:
        super().__init__(message)
        self.is_refused_connection = is_refused_connection


class Refused(ClientError):
    """The server refuses the request, and would refuse it again.

    `status` is the HTTP status, `members` those of the problem document (RFC 9457), empty if the
    body is not one.
    """

    def __init__(self, status: int, message: str, members: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.members = members


class InvalidRequest(Refused):
    """A field of the request is missing, invalid or too large."""

    @property
    def field(self) -> str | None:
        """The invalid field of the form, None if the error is about none."""
        return self.members.get("field")


class Forbidden(Refused):
    """The token is missing, or the server does not accept it."""


class UnknownEvaluation(Refused):
    """The caller has never had an evaluation of this identifier on this server."""


class EvaluationGone(Refused):
    """The server has discarded the evaluation, or its events after the requested cursor.

    `status` is 404 if the server knew the evaluation before and does not any more.
    """

    @property
    def oldest(self) -> str | None:
        """The oldest usable cursor, None if the whole evaluation is discarded."""
        return self.members.get("oldest")


_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_KINDS = {401: Forbidden, 403: Forbidden, 404: UnknownEvaluation, 410: EvaluationGone}


def make_printable(text: str) -> str:
    """Return the words of a server for a message: shortened, and without control characters."""
    short = text[:_LONGEST_QUOTE] + "…" * (len(text) > _LONGEST_QUOTE)
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in short
    )


def build_refusal(status: int, body: bytes, location: str = "") -> Refused:
    """Return the exception for a response whose status is no success; `body` may be anything.

    `location` is where a redirect leads, which is not followed.
    """
    members = _members(body)
    message = members.get("message") or members.get("detail")
    if not isinstance(message, str):
        answer = f"{status} {_PHRASES.get(status, '')}".strip()
        message = f"the server answers {answer} without an explanation"
        if location:
            message = f"the server answers {answer} and names another URL, {location}"
        if 300 <= status < 400 or status in (404, 405):  # those of another server, or site
            message += "; is it a tawebeval server? Check https:// and the path of the URL"
    kind = _KINDS.get(status, InvalidRequest if 400 <= status < 500 else Refused)
    return kind(status, make_printable(message), members)


def _members(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
