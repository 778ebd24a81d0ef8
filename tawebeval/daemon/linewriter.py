"""Lines written to a file that may be slow, or full, or read by nobody.

A write to a pipe blocks as long as nobody reads it, and one to a file as long as the disk takes. So
lines wait in a queue of bounded size, and a thread of their own writes them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from threading import Condition, RLock, Thread
from typing import IO, Any

import attrs
from twisted.logger import Logger

QUEUE = 2**20
"""Bytes of memory that the lines may take which are not written yet."""

# Seconds: to wake a thread for each line doubles what a line costs.
_PAUSE = 0.05  # between two writes, on the average
_BURST = 1.0  # for which no pause has to be made after a time of rest

log = Logger()


@attrs.frozen
class _Line:
    """A line; where `missing` others are lost before it, it is two lines and says so."""

    text: str
    missing: int


_Queue = Sequence[_Line | Callable[[], object]]


class LineWriter:
    """Writes lines to `file`: at once at first, and by a thread after `start`.

    From then on nothing here waits for the file. A line that the queue has no room for is lost, as
    is one that the file does not take; `lost` counts both. Before the next line that is taken
    stands what `gap` makes of how many are missing there.
    """

    def __init__(self, file: IO[Any], gap: Callable[[int], str]) -> None:
        self._file = file
        self._gap = gap
        self.lost = 0
        self._missing = 0  # lines lost since one was taken
        self._queue: list[_Line | Callable[[], object]] = []
        self._size = 0  # bytes of memory that these take
        self._idle = False  # whether the thread waits for a line
        self._writing = False
        self._thread: Thread | None = None
        # In seconds of the monotonic clock.
        self._patient_until = 0.0
        self._paced_until = 0.0
        # The handler of a signal may log, in the midst of what the same thread does here.
        self._changed = Condition(RLock())

    def start(self) -> None:
        """Leave the writing to a thread from now on. Raises RuntimeError where there is none."""
        thread = Thread(target=self._work, name="log", daemon=True)
        thread.start()
        self._thread = thread

    def write(self, text: str) -> None:
        """Write a line, which has no terminator at its end. Raises nothing."""
        with self._changed:
            size = sys.getsizeof(text)
            if self._size + size > QUEUE:
                self._lose(1, 1)
                return
            missing, self._missing = self._missing, 0
            if missing:
                text = f"{self._gap(missing)}\n{text}"
            self._size += size
            self._put(_Line(text, missing))
        self._wait_at_the_end()

    def call(self, action: Callable[[], object]) -> None:
        """Call `action` between the lines before and those after it, by whoever writes them."""
        with self._changed:
            self._put(action)

    def finish(self, seconds: float) -> None:
        """Wait until all is written, from now on with each line: for so many seconds in all."""
        self._patient_until = time.monotonic() + seconds
        self._wait_at_the_end()

    def _wait_at_the_end(self) -> None:
        left = self._patient_until - time.monotonic()
        if left > 0:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._queue and not self._writing, left)

    def _put(self, item: _Line | Callable[[], object]) -> None:
        self._queue.append(item)
        if self._thread is None:
            self._write_all(self._take())
        elif self._idle or self._is_urgent():
            self._changed.notify_all()

    def _take(self) -> _Queue:
        queue, self._queue, self._size = self._queue, [], 0
        return queue

    def _lose(self, lost: int, missing: int) -> None:
        self.lost += lost
        self._missing += missing

    def _is_urgent(self) -> bool:
        """Whether the thread is to make no pause: the queue gets full, or somebody waits."""
        return self._size > QUEUE // 2 or time.monotonic() < self._patient_until

    def _pause(self) -> float:
        """Return for how many seconds the thread leaves what comes in the queue."""
        now = time.monotonic()
        self._paced_until = max(self._paced_until, now) + _PAUSE
        return max(0.0, self._paced_until - now - _BURST)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(self._is_urgent, self._pause())
                self._idle = True
                self._changed.wait_for(lambda: self._queue)
                self._idle = False
                queue = self._take()
                self._writing = True
            self._write_all(queue)

    def _write_all(self, queue: _Queue) -> None:
        lines: list[_Line] = []
        for item in queue:
            if isinstance(item, _Line):
                lines.append(item)
                continue
            self._write_lines(lines)
            lines = []
            try:
                item()
            except Exception:  # noqa: BLE001  (the lines behind it are written all the same)
                log.failure("the log: {action} has failed", action=item)
        self._write_lines(lines)

    def _write_lines(self, lines: Sequence[_Line]) -> None:
        """Write lines by one call, for each call is a change of threads. Blocks."""
        if not lines:
            return
        try:
            self._file.write("".join(f"{line.text}\n" for line in lines))
            self._file.flush()
        except Exception:  # noqa: BLE001  (there is no other place to complain)
            with self._changed:
                self._lose(len(lines), sum(1 + line.missing for line in lines))
