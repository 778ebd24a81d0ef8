"""Log lines written by a thread, through a queue of bounded size.

A write to a full pipe blocks until somebody reads it, a write to a file as long as the disk takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from threading import Condition, RLock, Thread
from typing import IO, Any

import attrs
from twisted.logger import Logger

QUEUE_BYTES = 2**20
"""Maximum memory of the lines that are not written yet, in bytes."""

# Seconds. Waking the thread for each line doubles the cost of a line.
_PAUSE = 0.05  # average pause between two writes
_BURST = 1.0  # duration without pauses after an idle time

log = Logger()


@attrs.frozen
class _Line:
    """A line. If `missing` lines were lost before it, the text begins with a line that says so."""

    text: str
    missing: int


_Queue = Sequence[_Line | Callable[[], object]]


class LineWriter:
    """Writer of lines to `file`: directly at first, by a thread after `start`.

    With the thread no call waits for the file, except after `flush`. Lines are lost if the queue is
    full or the write fails; `lost_lines` counts them. `format_gap` formats the line that reports
    the number of lost lines, written before the next line.
    """

    def __init__(self, file: IO[Any], format_gap: Callable[[int], str]) -> None:
        self._file = file
        self._format_gap = format_gap
        self.lost_lines = 0
        self._missing = 0  # lines lost since the last queued one
        self._queue: list[_Line | Callable[[], object]] = []
        self._size = 0  # of the queue, in bytes of memory
        self._is_idle = False  # whether the thread waits for a line
        self._is_writing = False
        self._thread: Thread | None = None
        # In seconds of the monotonic clock.
        self._flush_deadline = 0.0
        self._paced_until = 0.0
        # Reentrant: a signal handler may log while the same thread is in here.
        self._changed = Condition(RLock())

    def start(self) -> None:
        """Start the thread. Raises: RuntimeError, if none can be started."""
        thread = Thread(target=self._run, name="log", daemon=True)
        thread.start()
        self._thread = thread

    def write_line(self, text: str) -> None:
        """Write a line, given without a line terminator. Raises nothing."""
        with self._changed:
            size = sys.getsizeof(text)
            if self._size + size > QUEUE_BYTES:
                self._count_lost(1, 1)
                return
            missing, self._missing = self._missing, 0
            if missing:
                text = f"{self._format_gap(missing)}\n{text}"
            self._size += size
            self._put(_Line(text, missing))
        self._wait_until_written()

    def call_in_order(self, action: Callable[[], object]) -> None:
        """Call `action` after the lines so far, before later ones, in the writing thread."""
        with self._changed:
            self._put(action)

    def flush(self, timeout: float) -> None:
        """Wait until all lines are written, and for each later line: `timeout` seconds in all."""
        self._flush_deadline = time.monotonic() + timeout
        self._wait_until_written()

    def _wait_until_written(self) -> None:
        """Wait until all lines are written or the deadline of `flush` has passed."""
        left = self._flush_deadline - time.monotonic()
        if left > 0:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._queue and not self._is_writing, left)

    def _put(self, item: _Line | Callable[[], object]) -> None:
        self._queue.append(item)
        if self._thread is None:
            self._write_all(self._take_queue())
        elif self._is_idle or self._is_urgent():
            self._changed.notify_all()

    def _take_queue(self) -> _Queue:
        queue, self._queue, self._size = self._queue, [], 0
        return queue

    def _count_lost(self, lost: int, missing: int) -> None:
        self.lost_lines += lost
        self._missing += missing

    def _is_urgent(self) -> bool:
        """Return whether to skip the pause: the queue fills up, or `flush` waits."""
        return self._size > QUEUE_BYTES // 2 or time.monotonic() < self._flush_deadline

    def _compute_pause(self) -> float:
        """Return the seconds until the thread takes lines from the queue."""
        now = time.monotonic()
        self._paced_until = max(self._paced_until, now) + _PAUSE
        return max(0.0, self._paced_until - now - _BURST)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(self._is_urgent, self._compute_pause())
                self._is_idle = True
                self._changed.wait_for(lambda: self._queue)
                self._is_idle = False
                queue = self._take_queue()
                self._is_writing = True
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
            except Exception:  # noqa: BLE001  (the lines after it have to be written)
                log.failure("defect: {action} of the log has failed", action=item)
        self._write_lines(lines)

    def _write_lines(self, lines: Sequence[_Line]) -> None:
        """Write lines in one call, because each call switches threads. Blocks."""
        if not lines:
            return
        try:
            self._file.write("".join(f"{line.text}\n" for line in lines))
            self._file.flush()
        except Exception:  # noqa: BLE001  (an error of the log cannot be logged)
            with self._changed:
                self._count_lost(len(lines), sum(1 + line.missing for line in lines))
