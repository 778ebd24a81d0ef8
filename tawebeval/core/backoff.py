"""What the status of an answer means for who has asked, and when to ask again."""

from __future__ import annotations

import math
from calendar import timegm
from email.utils import parsedate_tz
from enum import Enum

import attrs

_TOO_SLOW, _TOO_MANY = 408, 429
_DIGITS = 9  # of the longest number of seconds that is believed: more than anybody waits


class Verdict(Enum):
    """What the other side has said by the status of its answer."""

    TAKEN = "taken"
    REFUSED = "refused"
    AGAIN = "again"


def verdict(status: int) -> Verdict:
    """Return what a status means.

    Redirects are refusals: nobody is sent on to where they did not mean to go.
    """
    if 200 <= status < 300:
        return Verdict.TAKEN
    if status >= 500 or status in (_TOO_SLOW, _TOO_MANY):
        return Verdict.AGAIN
    return Verdict.REFUSED


def retry_after(header: bytes, now: float) -> float:
    """Return what the header `Retry-After` asks for (RFC 9110, section 10.2.3), in seconds.

    That is 0 for one that is empty, of the past or unclear. `now` is in seconds since the epoch.
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
    """When to try again, by exponential delays with full jitter.

    At most `attempts` are made. The delay after the first is drawn from 0 to `first_delay`
    seconds; this range doubles each time, up to `longest_delay`. Whatever has failed for many
    at once so does not get all of them back at once. Who wants to be left alone for more than
    `longest_asked` seconds is not asked again.
    """

    attempts: int
    first_delay: float
    longest_delay: float
    longest_asked: float = math.inf

    def delay(self, made: int, chance: float, asked: float = 0) -> float | None:
        """Return the seconds to wait when `made` attempts have failed; None: there are no more.

        `chance` is drawn from 0 to 1. The other side has `asked` to be left alone for so many
        seconds; what was drawn comes on top.
        """
        if made >= self.attempts or asked > self.longest_asked:
            return None
        doublings = min(made - 1, 64)  # more would not fit into a float
        drawn = chance * min(self.longest_delay, self.first_delay * 2.0**doublings)
        return drawn + max(asked, 0)
