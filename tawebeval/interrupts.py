"""Signals that come while the daemon stops already: somebody is in a hurry."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def interrupts(call: Callable[[], object], reactor: Any) -> Iterator[None]:
    """Within it SIGTERM and SIGINT make a call in the reactor.

    Twisted would try to stop once more, and log a traceback since that is not possible.
    """
    before = [signal.signal(number, lambda *_: reactor.callFromThread(call)) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, known in zip(_NUMBERS, before, strict=True):
            signal.signal(number, known)
