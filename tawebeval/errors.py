"""What can go wrong, as values.

Two families, because they reach people in two ways:

- `RequestError`: a request is refused before, or instead of, an evaluation. The
  web layer turns each class into one HTTP status (`tawebeval.web.server.problems`).
- `EvaluationError`: an accepted evaluation could not be brought to a good end. It
  becomes the final event of its stream.

`ConfigurationError` stops the start of the daemon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

Reason = Literal[
    "repository",
    "commit",
    "directory",
    "exit",
    "timeout",
    "cpu",
    "memory",
    "processes",
    "disk",
    "file_size",
    "output",
    "stderr",
    "unread",
    "cancelled",
    "shutdown",
    "lost",
]
"""Why an evaluation came to a bad end, in the words of its final event."""


class TawebevalError(Exception):
    """Anything that tawebeval itself reports; `str()` is a sentence for people."""


class ConfigurationError(TawebevalError):
    """A setting is unknown, of a wrong type or out of range; names the key's path."""


class RequestError(TawebevalError):
    """A request that is refused. `members` are added to the problem document."""

    def __init__(self, detail: str, **members: str | int | Sequence[str]) -> None:
        super().__init__(detail)
        self.detail = detail
        self.members: Mapping[str, str | int | Sequence[str]] = members


class MalformedRequest(RequestError):
    """The request does not hold together as HTTP, whatever it asks for."""


class InvalidField(RequestError):
    """A field of the form is missing, repeated or broken."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}", field=field)


class InvalidCursor(RequestError):
    """`after` is no cursor of what it stands for, or lies, with `skip`, beyond the newest event."""


class DiscardedCursor(RequestError):
    """`after` is older than what was already acknowledged and discarded."""

    def __init__(self, oldest: str) -> None:
        super().__init__(
            "the events after this cursor were acknowledged by a later request and are discarded; "
            f"the oldest usable cursor is {oldest}",
            oldest=oldest,
        )


class UnknownEvaluation(RequestError):
    """The identifier was never issued by this server."""

    def __init__(self) -> None:
        super().__init__("no evaluation of this identifier was ever started here")


class EvaluationGone(RequestError):
    """The identifier was issued here, but nothing is kept of its evaluation any more.

    Which of the reasons it was nobody knows by then, but for this: `started`, when the daemon was
    (RFC 3339), tells whether it can have been a restart.
    """

    def __init__(self, started: str) -> None:
        super().__init__(
            "nothing is kept of this evaluation any more: it was read to its end, cancelled, "
            f"expired, or lost in a restart; the last start was at {started}",
            started=started,
        )


class Elsewhere(RequestError):
    """What is asked for is at another place: `location`, a path."""

    def __init__(self, location: str) -> None:
        super().__init__(f"this is at {location}")
        self.location = location


class TooLarge(RequestError):
    """The request's body, or a part of it, is over a limit (bytes or number)."""


class TooSlow(RequestError):
    """The body comes at less than the rate that it must have."""


class UnsupportedMediaType(RequestError):
    """The body is not `multipart/form-data`."""


class UnsupportedVersion(RequestError):
    """The handshake of a WebSocket is one of a version that is not known here."""


class HTTPVersionNotSupported(RequestError):
    """The answer cannot be sent by the version of HTTP that the request has."""


class KeyReused(RequestError):
    """An `Idempotency-Key` came back with another form."""


class NotAcceptable(RequestError):
    """Nothing that is offered is among what the request accepts."""


class Unauthorized(RequestError):
    """The request does not show, by a token, who calls."""


class ForeignPage(RequestError):
    """A browser asks for the page of somebody who is not known here."""


class Forbidden(RequestError):
    """This is not for whoever asks from there."""


class Busy(RequestError):
    """There is no place to queue, or the service is about to stop.

    `retry_after` is the number of seconds after which asking again makes sense.
    """

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class Stopping(Busy):
    """The service is about to stop."""

    def __init__(self) -> None:
        super().__init__("the service is about to stop; try again when it is back", 5)


class NotReady(Busy):
    """No evaluation would be accepted now, for these `reasons`."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons), 5)
        self.members = {"reasons": reasons}


class OverShare(Busy):
    """This caller has used up its share; others are still served."""


@attrs.frozen(auto_exc=True, str=False)
class EvaluationError(TawebevalError):
    """Why an evaluation did not come to a good end: its final event.

    `message` is for people; `members` are the further members of the event. If one that is `lost`
    `is_alarming`, the daemon is not ready: not where a caller can cause it.
    """

    reason: Reason
    message: str
    members: Mapping[str, str | int | float] = attrs.field(factory=dict)
    is_alarming: bool = attrs.field(default=True, kw_only=True)

    def __str__(self) -> str:
        return self.message


class ForbiddenHost(TawebevalError):
    """A URL leads to where the operator does not let callers send this machine."""


def over_limit(reason: Reason, limit: str, unit: str, value: float) -> EvaluationError:
    """Return the error of a run that was stopped by a limit: a setting of `[limits]`."""
    shown = f"{value:g}" if isinstance(value, float) else value
    return EvaluationError(
        reason,
        f"the evaluator was stopped: it went over its limit of {shown} {unit}",
        {"limit": f"limits.{limit}", "value": value},
    )


def unread(limit: float, waited: str) -> EvaluationError:
    """Return the error of a run that was stopped since its readers let it wait.

    `limit` is `evaluations.paused`, in seconds; `waited` says how long it was.
    """
    return EvaluationError(
        "unread",
        f"the evaluator was stopped: it waited for its reader {waited}",
        {"limit": "evaluations.paused", "value": limit},
    )
