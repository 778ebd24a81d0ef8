"""How long the reactor is held by a turn of each flood of `benchmarks.floods`, in milliseconds.

A turn is what happens between two looks of the reactor for something else to do. Floods come 64 KiB
at a time, to a reader who keeps up.

The time is the processor's own, and of each turn the least of some repetitions: what somebody else
on the machine takes is no matter of the flood.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.floods import FILE, floods
from tawebeval.core.events import (
    EventLog,
    EventMemory,
)
from tawebeval.core.segi import Markers
from tawebeval.daemon.process import keep_freed_memory
from tawebeval.evaluations.eventlog import EventFiles, RecordedStdout

_READ = 64 * 1024
_SIZE = 2 * _READ
_CAPACITY = 4 * 1024 * 1024
_REPETITIONS = 5


def measure_turns(markers: Markers, stdout: bytes, folder: Path) -> Iterator[float]:
    """Yield the processor time of each turn of the parser, in seconds; events are acknowledged."""
    log = EventLog(EventMemory(_CAPACITY))
    recorded = RecordedStdout(log, EventFiles(folder), markers, time.time)
    file = bytes(FILE)  # a large one only once
    for place in range(0, len(stdout), _READ):
        steps: list[Callable[[], object]] = [partial(recorded.feed, stdout[place : place + _READ])]
        while steps:
            begin = time.thread_time()
            steps.pop()()
            log.acknowledge(log.end_cursor)
            yield time.thread_time() - begin
            if recorded.parser.awaited_file is not None:
                recorded.store_referenced_file(file)
                steps.append(partial(recorded.supply_or_refuse_file, file))
                file = b"x"
            elif recorded.parser.has_pending_input:
                steps.append(recorded.parse_pending)
    begin = time.thread_time()
    recorded.finish()
    yield time.thread_time() - begin
    recorded.close_files()


def main() -> None:
    """Measure, and report."""
    keep_freed_memory()  # as the daemon does at its start
    gc.disable()
    markers = Markers.generate(os.urandom)
    longest = {}
    for name, stdout in floods(markers, _SIZE).items():
        with ExitStack() as made:
            folders = [
                Path(made.enter_context(tempfile.TemporaryDirectory())) / "output"
                for _ in range(_REPETITIONS)
            ]
            repetitions = [measure_turns(markers, stdout, folder) for folder in folders]
            longest[name] = 1000 * max(min(times) for times in zip(*repetitions, strict=True))
    print(json.dumps(longest))


if __name__ == "__main__":
    main()
