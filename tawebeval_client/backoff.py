"""Retries of an HTTP request: the meaning of a status, `Retry-After`, exponential back-off."""

from __future__ import annotations

import math
from calendar import timegm
from email.utils import parsedate_tz
from enum import Enum

import attrs

_TOO_SLOW, _TOO_MANY = 408, 429
_DIGITS = 9  # of the longest delay in seconds that is accepted


class RequestOutcome(Enum):
    """Outcome of a request by its response status: accepted, refused for good, or to be retried."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    RETRY = "retry"


def classify_http_status(status: int) -> RequestOutcome:
    """Return the verdict for a status code.

    Redirects count as refusals: a request never reaches a server that its sender did not name.
    """
    if 200 <= status < 300:
        return RequestOutcome.ACCEPTED
    if status >= 500 or status in (_TOO_SLOW, _TOO_MANY):
        return RequestOutcome.RETRY
    return RequestOutcome.REFUSED


def parse_retry_after(header: bytes, now: float) -> float:
    """Return the delay in seconds that a `Retry-After` header asks for (RFC 9110, section 10.2.3).

    The delay is 0 for a header that is empty, malformed or in the past. `now` is the Unix time
    in seconds.
    """
    value = header.strip()
    if value.isdigit() and len(value) <= _DIGITS:
        return float(value)
    try:
        parsed = parsedate_tz(value.decode("latin-1"))
        return max(0.0, timegm(parsed[:6]) - (parsed[9] or 0) - now) if parsed else 0.0
    except (ValueError, LookupError, OverflowError, TypeError):
        return 0.0


@attrs.frozen
class Backoff:
    """Delays between attempts: exponential, with full jitter.

    At most `max_attempts` are made. The first delay is drawn from 0 to `first_delay_seconds`;
    the range doubles with each attempt, up to `max_delay_seconds`. Jitter spreads the retries of
    many requests that failed at once. A server that asks for a delay of more than
    `max_retry_after_seconds` gets no further attempt.
    """

    max_attempts: int
    first_delay_seconds: float
    max_delay_seconds: float
    max_retry_after_seconds: float = math.inf

    def draw_delay(
        self, attempts_made: int, random_fraction: float, retry_after: float = 0
    ) -> float | None:
        """Return the delay in seconds after failed attempts, or None for no further attempt.

        `random_fraction` is a random number from 0 to 1. `retry_after` is the delay in seconds that
        the server asked for; the drawn delay is added to it.
        """
        if attempts_made >= self.max_attempts or retry_after > self.max_retry_after_seconds:
            return None
        doublings = min(attempts_made - 1, 64)  # more would not fit into a float
        drawn = random_fraction * min(
            self.max_delay_seconds, self.first_delay_seconds * 2.0**doublings
        )
        return drawn + max(retry_after, 0)
