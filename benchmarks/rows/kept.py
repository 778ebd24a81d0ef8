"""From a pipe to a protocol by way of a memfd, so that another process can go on with it.

Both ways are those of the daemon, in a fresh process, and all that was delivered is discarded at
once. Copying 64 KiB into new pages of a memfd and freeing these takes 50 µs, six times as long as
copying into pages that are there; a memfd that only grows has no others.

Tried without success: holes of 256 KiB and 1 MiB in place of 64 KiB; read(2) and pwrite(2) in place
of splice(2), which are no faster, and lose bytes if the process is killed between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Row, interleave
from benchmarks.running import figures

_LENGTH = 100
_TOTAL = 200_000_000
_MB = 1_000_000
_TARGET = 0.8


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    samples = interleave(
        rounds,
        {
            way: partial(figures, "stdout_spliced", way, _LENGTH, _TOTAL)
            for way in ("memfd", "pipe")
        },
    )
    rates = {name: [rate / _MB for rate in each] for name, each in samples.items()}
    what = "stdout by way of a memfd, to `PipeReader`"
    return [
        Row(what, "MB/s", rates["memfd.rate"], rates["pipe.rate"], _TARGET),
        Row(
            "… by processor time",
            "MB/s",
            rates["memfd.processor_rate"],
            rates["pipe.processor_rate"],
        ),
    ]
