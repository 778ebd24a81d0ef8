"""Who is connected, and how all of them leave when the daemon does: no connection just drops."""

from __future__ import annotations

from typing import Protocol

import attrs
from twisted.internet.interfaces import IReactorTime

from tawebeval.signals import Signal, until

_LEAVE = 5.0  # seconds in which clients can still take what they are told, at the end


class Guest(Protocol):
    """A connection, as far as it matters here."""

    def go_away(self) -> None:
        """Answer what is asked, and then end."""

    def forceAbortClient(self) -> None:
        """End now."""


@attrs.define
class Presence:
    """Those who are connected just now."""

    _clock: IReactorTime
    _present: dict[Guest, None] = attrs.field(factory=dict)
    _left: Signal[None] = attrs.field(factory=Signal)

    def enter(self, guest: Guest) -> None:
        """Note one more."""
        self._present[guest] = None

    def leave(self, guest: Guest) -> None:
        """Note one less."""
        del self._present[guest]
        self._left.fire(None)

    async def close(self) -> None:
        """Have all go away, and return when they have; who takes too long is cut off."""
        for guest in list(self._present):
            guest.go_away()
        await until(lambda: not self._present, self._left, _LEAVE, self._clock)
        for guest in list(self._present):
            guest.forceAbortClient()
