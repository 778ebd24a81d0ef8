"""How long the reactor is held by a turn of each flood of `benchmarks.floods`, in milliseconds.

A turn is what happens between two looks of the reactor for something else to do. Floods come 64 KiB
at a time, to a reader who keeps up. `plain` is a read of lines of 100 bytes.

The time is the processor's own, and of each turn the least of some repetitions: what somebody else
on the machine takes is no matter of the flood.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from tawebeval.evaluations.stdout_pump import StdoutPump
from twisted.internet.task import Clock

from benchmarks.floods import FILE, VALUE, floods
from tawebeval.core.budget import RingBudget
from tawebeval.core.fileblock import FileReference
from tawebeval.core.ring import EventRing
from tawebeval.core.segi import Markers, SegiParser
from tawebeval.daemon.process_setup import keep_freed_memory

_READ = 64 * 1024
_SIZE = 2 * _READ
_CAPACITY = 4 * 1024 * 1024
_REPETITIONS = 5
_TURN = 0.001


class Turns(Clock):
    """A Clock that makes no call in the turn in which it was ordered, as a reactor."""

    def callLater(self, delay: float, *call: Any, **arguments: Any) -> Any:
        """Order a call for a later turn."""
        return super().callLater(max(delay, _TURN), *call, **arguments)


class Store:
    """Takes a flood, and has its events acknowledged as they come."""

    def __init__(self, markers: Markers) -> None:
        self.paused = False
        self._clock = Turns()
        self._ring = EventRing()
        budget = RingBudget(2**40, _CAPACITY, 1, lambda call: self._clock.callLater(0, call))
        parser = SegiParser(markers, max_value=VALUE, max_file=FILE)
        share = budget.allocate_ring(on_room=lambda: self._pump.on_ring_has_room())
        self._pump = StdoutPump(self._clock, parser, self._ring, share, self)
        self._pump.start(self)
        self._file = bytes(FILE)

    def turns(self, stdout: bytes) -> Iterator[float]:
        """Yield the processor time of each turn, in seconds."""
        for place in range(0, len(stdout), _READ):
            chunk = stdout[place : place + _READ]
            begin = time.thread_time()
            self._pump.feed(chunk)
            yield time.thread_time() - begin
            while self.paused:
                begin = time.thread_time()
                self._clock.advance(_TURN)
                yield time.thread_time() - begin
        begin = time.thread_time()
        self._pump.on_stdout_end()
        yield time.thread_time() - begin
        assert self._pump.output_stored_event.is_set

    def pauseProducing(self) -> None:
        """Give no more."""
        self.paused = True

    def resumeProducing(self) -> None:
        """Give more."""
        self.paused = False

    def on_new_events(self) -> None:
        """Acknowledge, if that is due."""
        if self._ring.line_bytes >= _CAPACITY / 2:
            self._ring.acknowledge(self._ring.end_cursor)
            self._pump.on_acknowledge()

    def on_pause_change(self, paused: bool) -> None:
        """Do nothing: no clock runs."""

    async def read_referenced_file(self, wanted: FileReference) -> bytes:
        """Return a file, a large one only once."""
        content, self._file = self._file, b"x"
        return content

    def on_lost_events(self) -> None:
        """Refuse: no figure would be true."""
        raise AssertionError("output was lost")


def main() -> None:
    """Measure, and report."""
    keep_freed_memory()  # as the daemon does at its start
    gc.disable()
    markers = Markers.generate(os.urandom)
    plain = (b"x" * 99 + b"\n") * (_SIZE // 100)
    longest = {}
    for name, stdout in {"plain": plain, **floods(markers, _SIZE)}.items():
        repetitions = [Store(markers).turns(stdout) for _ in range(_REPETITIONS)]
        longest[name] = 1000 * max(min(times) for times in zip(*repetitions, strict=True))
    print(json.dumps(longest))


if __name__ == "__main__":
    main()
