"""Baseline: `xargs -P2` that runs the sandbox's command line: `sandbox_xargs STARTS`.

Prints how many were run per second. bwrap reads some of what it is told from descriptors, which
has to be there anew for each run: a shell opens those, and becomes bwrap.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.programs.sandbox_start import cells
from tawebeval.linux.launcher_client import FIRST_DESCRIPTOR

_AT_ONCE = 2
_MOST = 1 << 20  # bytes in what is copied


def rate(starts: int, argv: Sequence[str], descriptors: Sequence[int]) -> float:
    """Return the runs per second."""
    with tempfile.TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
        opened = ""
        for number, descriptor in enumerate(descriptors, FIRST_DESCRIPTOR):
            file = Path(name, str(number))
            file.write_bytes(os.pread(descriptor, _MOST, 0))
            opened += f" {number}<>{shlex.quote(str(file))}"
        command = ["xargs", f"-P{_AT_ONCE}", "-I{}", "/bin/sh", "-c", f'exec "$@"{opened}', "sh"]
        begin = time.perf_counter()
        subprocess.run(
            [*command, *argv],
            input=b"x\n" * starts,
            stdout=subprocess.DEVNULL,
            env={},
            check=True,
        )
        return starts / (time.perf_counter() - begin)


def main() -> None:
    """Run them, and report."""
    starts = int(sys.argv[1])
    with cells() as opened:
        cell, launch = opened()
        found = rate(starts, launch.argv, launch.descriptors)
        cell.close()
    print(json.dumps({"rate": found}))


if __name__ == "__main__":
    main()
