"""twistd with a time of day that is set from outside: `twistd_with_clock.py FILE OPTION...`.

The file holds how many seconds it is off. The monotonic clock stays as it is, as on a machine
whose time somebody sets.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_true, _gmtime = time.time, time.gmtime
_file = Path(sys.argv.pop(1))


def _off() -> float:
    return _true() + float(_file.read_text())


if __name__ == "__main__":
    time.time = _off
    time.gmtime = lambda seconds=None: _gmtime(_off() if seconds is None else seconds)
    # Imported late: from now on this is what everybody finds.
    from twisted.scripts.twistd import run

    run()
