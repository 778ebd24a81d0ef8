"""Phases and deadlines of a connection, and the least rate of a body."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from tawebeval.config import HttpSettings
from tawebeval.errors import RequestTooSlow, format_size


class ConnectionPhase(Enum):
    """The phases of a connection."""

    NEW = "the first byte at all"
    IDLE = "the next request"
    HEAD = "the end of a head"
    BODY = "the end of a body"
    RESPONSE = "a response, and the client to take it"
    CLOSED = "the end"  # received bytes are dropped

    def __init__(self, _: str) -> None:
        # Whether nothing of a request has arrived. No property, for each line of a head asks.
        self.is_idle = self.name in ("NEW", "IDLE")


@attrs.define(eq=False)
class Deadline:
    """A call that is due unless something happens before; a new one replaces it.

    A call of the reactor stays when its deadline is cancelled or put off, and serves the next one:
    each request has two.
    """

    clock: IReactorTime
    _call: IDelayedCall | None = None
    _due: float = 0.0  # in seconds of the clock
    _call_due: float = 0.0  # when the reactor calls
    _on_timeout: Callable[[], object] | None = None

    @property
    def is_set(self) -> bool:
        """Whether a call is due."""
        return self._on_timeout is not None

    def is_for(self, on_timeout: Callable[[], object]) -> bool:
        """Whether that call is due."""
        return self._on_timeout == on_timeout

    def set(self, seconds: float, on_timeout: Callable[[], object]) -> None:
        """Call `on_timeout` in `seconds` seconds."""
        self._due = self.clock.seconds() + seconds
        if self._call is None or self._call_due > self._due:
            self.close()
            self._call_in(seconds)
        self._on_timeout = on_timeout

    def _call_in(self, seconds: float) -> None:
        self._call_due = self._due
        self._call = self.clock.callLater(seconds, self._on_due)

    def cancel(self) -> None:
        """Call nothing."""
        self._on_timeout = None

    def close(self) -> None:
        """Call nothing, and leave nothing to the reactor."""
        self._on_timeout = None
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _on_due(self) -> None:
        self._call = None
        left = self._due - self.clock.seconds()
        on_timeout = self._on_timeout
        if on_timeout is not None and left > 0:  # it was put off
            self._call_in(left)
        elif on_timeout is not None:
            self._on_timeout = None
            on_timeout()


@attrs.define(eq=False)
class BodyRate:
    """The least rate at which a body has to arrive, measured over a window.

    `deadline` is that of the connection. `on_too_slow(error)` is called once too little has
    arrived.
    """

    _settings: HttpSettings
    _deadline: Deadline
    _on_too_slow: Callable[[RequestTooSlow], object]
    _size: int = 0  # bytes that have arrived in this window
    _end: float = 0.0  # of the window, in seconds of the clock
    _paused_at: float | None = None  # in seconds of the clock

    def begin(self) -> None:
        """Begin with a body."""
        self._size = 0
        self._begin_window(self._settings.rate_window_seconds)

    def count(self, size: int) -> None:
        """Count received bytes of the body, without its chunked framing."""
        self._size += size

    def pause(self) -> bool:
        """Let no time pass; return whether time has passed until now."""
        if self._paused_at is not None:
            return False
        self._paused_at = self._deadline.clock.seconds()
        self._deadline.cancel()
        return True

    def resume(self, *, is_complete: bool) -> bool:
        """Go on after a pause, unless the body is complete; return whether there was a pause."""
        if self._paused_at is None:
            return False
        left, self._paused_at = self._end - self._paused_at, None
        if not is_complete:
            self._begin_window(left)
        return True

    def _begin_window(self, seconds: float) -> None:
        self._end = self._deadline.clock.seconds() + seconds
        self._deadline.set(seconds, self._check)

    def _check(self) -> None:
        settings = self._settings
        if self._size >= settings.rate_window_seconds * settings.min_bytes_per_second:
            self.begin()
        else:
            self._on_too_slow(
                RequestTooSlow(
                    "the request body arrives too slowly; the minimum is"
                    f" {format_size(settings.min_bytes_per_second)} per second, measured"
                    f" over {settings.rate_window_seconds:g} s"
                )
            )
