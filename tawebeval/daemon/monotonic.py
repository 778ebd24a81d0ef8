"""Time that only goes on: what timers, deadlines and expiry are reckoned by.

Twisted's reactor counts by the time of day. When somebody sets that, all timers would be due at
once, and every evaluation over its time; or, set back, none would come for as long. So the reactor
is given the monotonic clock. Whatever needs the time of day asks for that itself.
"""

from __future__ import annotations

import time
from typing import Any


def count_monotonically(reactor: Any) -> None:
    """Let a reactor's `seconds`, and all its timers, follow the monotonic clock.

    Timers that there are already keep what is left of their time.
    """
    pending = [(call, call.getTime() - reactor.seconds()) for call in reactor.getDelayedCalls()]
    reactor.seconds = time.monotonic
    for call, left in pending:
        call.seconds = time.monotonic
        call.reset(max(0.0, left))
