"""Who is connected, and how all of them leave when the daemon does: no connection just drops."""

from __future__ import annotations

from typing import Protocol

import attrs
from twisted.internet.interfaces import IReactorTime

from tawebeval.deferreds import Signal, until

_LAST_REQUEST = 1.0  # seconds after which what has begun to come meanwhile has to end, too
_LEAVE = 5.0  # seconds in which clients can still take what they are told, at the end


class Guest(Protocol):
    """A connection, as far as it matters here."""

    def take_last_request(self) -> None:
        """End, unless a request is on its way, or already here."""

    def go_away(self) -> None:
        """Answer what is asked, and then end."""

    def forceAbortClient(self) -> None:
        """End now."""


@attrs.define
class Presence:
    """Those who are connected just now.

    When they are `leaving` each answer is the last one on its connection, and says so.
    """

    _clock: IReactorTime
    leaving: bool = False
    _present: dict[Guest, None] = attrs.field(factory=dict)
    _left: Signal[None] = attrs.field(factory=Signal)

    def enter(self, guest: Guest) -> None:
        """Note one more."""
        self._present[guest] = None

    def leave(self, guest: Guest) -> None:
        """Note one less."""
        del self._present[guest]
        self._left.fire(None)

    def announce(self) -> None:
        """Have nobody ask on a connection that is about to end, while others can be made."""
        self.leaving = True
        for guest in list(self._present):
            guest.take_last_request()

    async def close(self) -> None:
        """Have all go away, and return when they have; who takes too long is cut off."""
        self.announce()
        for seconds in (_LAST_REQUEST, _LEAVE - _LAST_REQUEST):
            for guest in list(self._present):
                guest.go_away()
            await until(lambda: not self._present, self._left, seconds, self._clock)
        for guest in list(self._present):
            guest.forceAbortClient()
