"""What a server may say instead of what it was asked for, as exceptions.

`str()` of each is a sentence for people. It may have a server's words in it, and is to be escaped
before a terminal gets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import responses
from typing import Any

from tawebeval.errors import TawebevalError


class ClientError(TawebevalError):
    """Anything because of which a question to a server has come to nothing."""


class Unavailable(ClientError):
    """There was no answer, or none but "later", however often the server was asked.

    Or it was asked once, and what came shows that there is no tawebeval.
    """


class Refused(ClientError):
    """The server will not do it, and would not the next time either.

    `status` is that of HTTP, `members` are those of the problem document (RFC 9457), none where
    the answer was of somebody else.
    """

    def __init__(self, status: int, message: str, members: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.members = members


class InvalidRequest(Refused):
    """The request is wrong: a field is missing or broken, or something in it is too large."""

    @property
    def field(self) -> str | None:
        """The field of the form that is at fault, if it is one."""
        return self.members.get("field")


class Forbidden(Refused):
    """There is no token, or not one that counts here."""


class UnknownEvaluation(Refused):
    """No such evaluation was ever begun there by this caller."""


class EvaluationGone(Refused):
    """Nothing is kept of the evaluation any more, or nothing from that cursor on.

    `status` is 404 where the server has known it before, and knows none of that name any more.
    """

    @property
    def oldest(self) -> str | None:
        """The oldest cursor that can be used; None where nothing at all is kept."""
        return self.members.get("oldest")


_KINDS = {401: Forbidden, 403: Forbidden, 404: UnknownEvaluation, 410: EvaluationGone}


def refusal(status: int, body: bytes) -> Refused:
    """Return what the answer of a status that is neither success nor "later" means."""
    members = _members(body)
    message = members.get("message") or members.get("detail")
    if not isinstance(message, str):
        answer = f"{status} {responses.get(status, '')}".strip()
        message = f"the server answers {answer}, and does not say why"
    kind = _KINDS.get(status, InvalidRequest if 400 <= status < 500 else Refused)
    return kind(status, message, members)


def _members(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
