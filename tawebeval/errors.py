"""Exceptions of tawebeval.

Two families, because they reach people in two ways:

- `RequestError`: a request is refused. The web layer maps each class to an HTTP status
  (`tawebeval.web.server.messages`).
- `EvaluationFailure`: an accepted evaluation failed. It becomes the final event of its stream.

`ConfigurationError` stops the start of the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import attrs

FailureReason = Literal[
    "repository",
    "commit",
    "directory",
    "build",
    "exit",
    "timeout",
    "cpu",
    "memory",
    "processes",
    "disk",
    "file_size",
    "output",
    "stderr",
    "node",
    "preempted",
    "revoked",
    "cancelled",
    "shutdown",
    "lost",
]
"""Reason of a failed or cancelled evaluation, as its final event has it."""


def format_size(size: float) -> str:
    """Return a size in bytes for a message, such as "1.5 MiB"; rounded up to a tenth."""
    for bits, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << bits:
            return f"{math.ceil(size * 10 / (1 << bits)) / 10:g} {unit}"
    return f"{size:g} bytes"


class TawebevalError(Exception):
    """Base of all exceptions of tawebeval; `str()` is a message for people."""


class SetupProblem(NamedTuple):
    """A fault or a weakness of the daemon's surroundings, and its remedy, if one is known.

    Checks yield the problems with which the daemon starts, and raise `ConfigurationError` for the
    others. The start logs the former; `tawebeval doctor` lists both.
    """

    description: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return the problem as one line."""
        return "; ".join(filter(None, self))


class ConfigurationError(TawebevalError):
    """An unknown setting, or a value of a wrong type or out of range; names the key's path.

    Without a `remedy` of its own the remedy is the part of `what` after the first semicolon.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        self.problem = (
            SetupProblem(what, remedy) if remedy else SetupProblem(*what.partition("; ")[::2])
        )
        super().__init__(str(self.problem))


class RequestError(TawebevalError):
    """A refused request. `extra_members` are added to the problem document (RFC 9457)."""

    def __init__(self, detail: str, **members: str | float | Sequence[str]) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra_members: Mapping[str, str | float | Sequence[str]] = members


class MalformedRequest(RequestError):
    """A request that is malformed as HTTP."""


class UnknownHTTPMethod(RequestError):
    """A request with a method that is not in upper case: methods are case-sensitive."""


class InvalidField(RequestError):
    """A form field that is missing, repeated, malformed, or beyond a `limit`."""

    def __init__(self, field: str, detail: str, **members: float) -> None:
        super().__init__(f"{field}: {detail}", field=field, **members)


class InvalidCursor(RequestError):
    """A cursor that is malformed or, with `skip`, beyond the newest event."""


class EvaluationNotEnded(RequestError):
    """A request for which the evaluation must have ended."""

    def __init__(self) -> None:
        super().__init__("the evaluation has not ended; wait for its end, or cancel it")


class SubmissionDiscarded(RequestError):
    """A rerun of an evaluation whose files are no longer kept."""

    def __init__(self) -> None:
        super().__init__(
            "the files of the evaluation are discarded (limits.uploads); send the submission again"
        )


class DiscardedCursor(RequestError):
    """A cursor before events that were acknowledged and discarded."""

    def __init__(self, oldest: str) -> None:
        super().__init__(
            "the events after this cursor are discarded: a later request acknowledged them; "
            f"the oldest usable cursor is {oldest}",
            oldest=oldest,
        )


class EvaluationNotFound(RequestError):
    """An identifier that this server never issued to this caller; it may be `malformed`."""

    def __init__(self, *, malformed: bool = False) -> None:
        super().__init__(
            "no such evaluation: an identifier ends in 40 characters of a-z and 2-7; copy the whole"
            " `evaluation_id` from the answer to POST /evaluate"
            if malformed
            else "no such evaluation: this server did not issue the identifier to this caller;"
            " check its spelling, the server's address and the token"
        )


class ProblemNotFound(RequestError):
    """A name that is no problem of the configuration."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no such problem: {name[:80]!r}; GET /problems lists the problems")


class EvaluationExpired(RequestError):
    """An identifier issued here, of an evaluation that is no longer kept, for whatever reason."""

    def __init__(self) -> None:
        super().__init__(
            "the evaluation is over and its events are discarded: they were read to the end or have"
            " expired (evaluations.retain)"
        )


class DamagedArchive(RequestError):
    """An archived evaluation whose file is damaged."""

    def __init__(self) -> None:
        super().__init__(
            "the file of the evaluation in the archive is damaged; the daemon's log has the reason"
        )


class ResourceMoved(RequestError):
    """A resource that has moved to the path `location`."""

    def __init__(self, location: str) -> None:
        super().__init__(f"moved to {location}")
        self.location = location


class HeaderTooLarge(RequestError):
    """The headers of a request, or one of them, over a limit of size or number."""


class TargetTooLong(RequestError):
    """A request line, or the path in it, that is too long; or too many query parameters."""


class RequestTooLarge(RequestError):
    """A request body, or a part of it, over a limit of size or number."""


class RequestTooSlow(RequestError):
    """A request whose headers take too long, or whose body arrives below the minimum rate."""


class UnsupportedMediaType(RequestError):
    """A request body that is not `multipart/form-data`."""


class UnsupportedWebSocketVersion(RequestError):
    """A WebSocket handshake of an unsupported version."""


class HTTPVersionNotSupported(RequestError):
    """A response that the request's version of HTTP cannot carry."""


class IdempotencyKeyReused(RequestError):
    """An `Idempotency-Key` repeated with a different form."""


class NotAcceptable(RequestError):
    """An `Accept` header that matches no available media type."""


class Unauthorized(RequestError):
    """A request without a valid token."""


class ForeignOrigin(RequestError):
    """A browser's request from a page of an origin that is not allowed."""


class AccessDenied(RequestError):
    """A request from an address, or with a token, that may not make it."""


class ProblemClosed(AccessDenied):
    """A submission outside of the time in which its problem accepts any."""


class ServerBusy(RequestError):
    """A full queue or another exhausted bound of the server.

    `retry_after` is the delay in seconds after which a retry makes sense.
    """

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class ServerStopping(ServerBusy):
    """The daemon is about to stop."""

    def __init__(self) -> None:
        super().__init__("the daemon is stopping; try again in 5 seconds", 5)


class ServerNotReady(ServerBusy):
    """The daemon accepts no evaluation now, for these `reasons`."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons), 5)
        self.extra_members = {"reasons": reasons}


class StoreError(ServerBusy):
    """An evaluation that cannot be stored or found: the disk of the store is full or fails."""

    def __init__(self) -> None:
        super().__init__(
            "the server cannot write or read its list of evaluations: its disk is full or fails;"
            " try again later",
            60,
        )


class CallerQuotaExceeded(ServerBusy):
    """The caller has used up its share; other callers are still served."""


@attrs.frozen(auto_exc=True, str=False)
class EvaluationFailure(TawebevalError):
    """The failure of an evaluation: its final event (docs/api.md).

    `message` is for people; `extra_members` are further members of the event. `is_daemon_fault`
    makes the daemon not ready; it is set for failures `lost` that no caller can cause.
    """

    reason: FailureReason
    message: str
    extra_members: Mapping[str, str | int | float] = attrs.field(factory=dict)
    is_daemon_fault: bool = attrs.field(default=True, kw_only=True)

    def __str__(self) -> str:
        return self.message


class ForbiddenURLHost(TawebevalError):
    """A URL whose host the operator's rules forbid."""


def make_limit_failure(
    reason: FailureReason, setting: str, what: str, value: float
) -> EvaluationFailure:
    """Return the error of a run stopped by a limit.

    `setting` is a setting of `[limits]`, `value` its value; `what` says what the evaluator did.
    """
    return EvaluationFailure(
        reason,
        f"the evaluator was stopped: it {what} (limits.{setting})",
        {"limit": f"limits.{setting}", "value": value},
    )
