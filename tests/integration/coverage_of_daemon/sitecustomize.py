"""Put on a daemon's PYTHONPATH, this measures its coverage.

twistd ends by sending itself the signal that it was ended with, so nothing that Python
runs at its exit is run. What was measured is saved just before that.
"""

import os
from typing import Any

import coverage

# Where coverage starts itself in every process, it has done so already.
_measured: Any = coverage.process_startup() or coverage.Coverage.current()
_kill = os.kill


def _save_and_kill(pid: int, number: int) -> None:
    if pid == os.getpid() and _measured is not None:
        _measured.stop()
        _measured.save()
    _kill(pid, number)


os.kill = _save_and_kill
