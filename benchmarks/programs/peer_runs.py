"""Baseline: isolate makes a sandbox, runs the command in it and removes it: `isolate_runs STARTS`.

Prints the median of the milliseconds of one after the other, and how many there are per second if
two run at a time. The program isolate is that of the environment variable ISOLATE, or on PATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.measure import percentile
from benchmarks.programs.sandbox_start import COMMAND

_AT_ONCE = 2


def run(isolate: str, box: int) -> float:
    """Return the seconds for one run, with its sandbox."""
    command = [isolate, f"--box-id={box}", "--silent"]
    begin = time.perf_counter()
    subprocess.run([*command, "--init"], stdout=subprocess.DEVNULL, check=True)
    done = subprocess.run(
        [*command, "--processes", "--run", "--", "/bin/sh", "-c", COMMAND],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert done.stdout == b"hello\n", done.stdout
    subprocess.run([*command, "--cleanup"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Run them, and report."""
    starts, isolate = int(sys.argv[1]), os.environ.get("ISOLATE", "isolate")
    times = [run(isolate, 1) * 1e3 for _ in range(starts)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for box in range(_AT_ONCE):
            pool.submit(lambda box=box: [run(isolate, box) for _ in range(starts)])
    rate = _AT_ONCE * starts / (time.perf_counter() - begin)
    print(json.dumps({"p50": percentile(times, 50), "rate": rate}))


if __name__ == "__main__":
    main()
