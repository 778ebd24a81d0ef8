"""What 1,000,000 events of 10-byte lines take in a ring: `ring_memory CHUNK`, bytes per read.

Prints the growth of the process's resident memory, and the bytes of the events' JSON Lines.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from tawebeval.core.events import EventRing
from tawebeval.core.segi import Markers, SegiParser
from tawebeval.daemon.process import keep_freed_memory

_EVENTS = 1_000_000
_LINE = b"123456789\n"


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    """Fill a ring, and report."""
    keep_freed_memory()  # as the daemon does at its start
    chunk = int(sys.argv[1])
    text = _LINE * (chunk // len(_LINE) + 1)
    parser, ring = SegiParser(Markers.generate(os.urandom)), EventRing()
    position = 0
    before = resident()
    while ring.end_cursor < _EVENTS:
        ring.append_batch(parser.feed(text[position : position + chunk]), 0)
        assert not parser.has_pending_input, "such a read is parsed in one turn"
        position = (position + chunk) % len(_LINE)
    print(json.dumps({"memory": resident() - before, "payload": ring.total_line_bytes}))


if __name__ == "__main__":
    main()
