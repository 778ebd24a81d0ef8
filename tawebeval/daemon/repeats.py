"""Events that come again and again: one of them is enough for a while.

Without descriptors Twisted logs three lines for each connection that it closes, and clients come
back at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
from twisted.logger import LogEvent, Logger

_SILENCE = 60.0  # seconds
_OF_ACCEPTING = ("EMFILE", "Re-reserving EMFILE", "Could not accept new connection")

log = Logger()


@attrs.define
class Repeats:
    """Hides what Twisted says of connections that it cannot accept, and says it once a minute."""

    _time: Callable[[], float] = time.monotonic
    _told: float | None = None

    def hide(self, event: LogEvent) -> bool:
        """Tell whether an event is not to be seen; a new one may be logged in its place."""
        if not (
            event.get("log_namespace", "").startswith("twisted.internet.")
            and (event.get("log_format") or "").startswith(_OF_ACCEPTING)
        ):
            return False
        now = self._time()
        if self._told is None or now - self._told > _SILENCE:
            self._told = now
            log.error(
                "connections are closed unanswered: there are no more file descriptors "
                "(LimitNOFILE in the unit, or ulimit -n); this is said once a minute"
            )
        return True
