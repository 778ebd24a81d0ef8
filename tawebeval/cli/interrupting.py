"""Ctrl-C, and what else asks a command to end: the first one is heeded with care."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import attrs

_PRESSING = (signal.SIGINT, signal.SIGTERM)
_NUMBERS = (*_PRESSING, signal.SIGHUP)
"""Of SIGHUP both the shell and the kernel may send one, so that a second one means nothing."""


@attrs.define(eq=False)
class Interruption:
    """What becomes of signals; `heard` is the number of the first."""

    _call: Callable[[], object]
    _reactor: Any
    _again: Callable[[], object] | None
    heard: int | None = None
    _called: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._called:
            if self._again is not None and number in _PRESSING:
                self._reactor.callFromThread(self._again)
            return
        self._called = True
        self.heard = self.heard or number
        if self._again is None:  # also where the reactor does not come to it
            for pressing in _PRESSING:
                signal.signal(pressing, signal.SIG_DFL)
        self._reactor.callFromThread(self._call)

    def status(self, otherwise: int) -> int:
        """Return the exit status: as shells have it where somebody else than Ctrl-C wanted it."""
        if self.heard in (None, signal.SIGINT):
            return otherwise
        return 128 + self.heard


@contextmanager
def interrupted(
    call: Callable[[], object], reactor: Any, again: Callable[[], object] | None = None
) -> Iterator[Interruption]:
    """Within it the first of Ctrl-C, SIGTERM and SIGHUP makes a call in the reactor.

    The next one calls `again`, or without that ends the program. What is ignored, as by nohup(1),
    stays so. Who has this around them knows later what was heard.
    """
    interruption = Interruption(call, reactor, again)
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    heeded = [number for number in _NUMBERS if before[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, interruption)
    try:
        yield interruption
    finally:
        for number in heeded:
            signal.signal(number, before[number])
            around = before[number]
            if isinstance(around, Interruption):
                around.heard = around.heard or interruption.heard


@contextmanager
def unwinding() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _NUMBERS}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def hold_out() -> None:
    """Ignore all that, to the end of `unwinding`: what is being tidied up is soon done."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)
