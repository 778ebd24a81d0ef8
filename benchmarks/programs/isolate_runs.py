"""Baseline: isolate runs the command: `isolate_runs STARTS`.

Prints the median of the milliseconds of one run after the other, and how many there are per second
if two run at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.daemon import COMMAND
from benchmarks.measure import percentile

_AT_ONCE = 2


def find_isolate() -> str | None:
    """Return the path of isolate: that of the environment variable ISOLATE, or on PATH."""
    return shutil.which(os.environ.get("ISOLATE", "isolate"))


def _run_isolate(program: str, box: int) -> bytes:
    """Return the output of the command in a sandbox that is made and removed for it."""
    command = [program, f"--box-id={box}", "--silent"]
    subprocess.run([*command, "--init"], stdout=subprocess.DEVNULL, check=True)
    printed = subprocess.check_output(
        [*command, "--processes", "--run", "--", "/bin/sh", "-c", COMMAND]
    )
    subprocess.run([*command, "--cleanup"], check=True)
    return printed


def main() -> None:
    """Run them, and report."""
    starts = int(sys.argv[1])
    program = find_isolate()
    assert program is not None
    run = partial(_run_isolate, program)

    def time_run(box: int) -> float:
        begin = time.perf_counter()
        printed = run(box)
        assert printed == b"hello\n", printed
        return time.perf_counter() - begin

    times = [time_run(1) * 1e3 for _ in range(starts)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda box: [time_run(box) for _ in range(starts)], range(_AT_ONCE)))
    rate = _AT_ONCE * starts / (time.perf_counter() - begin)
    print(json.dumps({"p50": percentile(times, 50), "rate": rate}))


if __name__ == "__main__":
    main()
