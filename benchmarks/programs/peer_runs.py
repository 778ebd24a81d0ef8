"""Baseline: another sandbox runs the command: `peer_runs PEER STARTS`.

The peer is `isolate` or `nsjail`, as `find_program` finds it. Prints the median of the milliseconds
of one run after the other, and how many there are per second if two run at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.measure import percentile
from benchmarks.programs.sandbox_start import COMMAND

_AT_ONCE = 2
_NOBODY = 65534


def find_program(peer: str) -> str | None:
    """Return the path of a peer: that of the environment variable, such as ISOLATE, or on PATH."""
    return shutil.which(os.environ.get(peer.upper(), peer))


def _run_isolate(program: str, box: int) -> bytes:
    """Return the output of the command in a sandbox that is made and removed for it."""
    command = [program, f"--box-id={box}", "--silent"]
    subprocess.run([*command, "--init"], stdout=subprocess.DEVNULL, check=True)
    printed = subprocess.check_output(
        [*command, "--processes", "--run", "--", "/bin/sh", "-c", COMMAND]
    )
    subprocess.run([*command, "--cleanup"], check=True)
    return printed


def _run_nsjail(program: str, _: int) -> bytes:
    """Return the output of the command in a sandbox with the system read-only; of root, nobody."""
    mapped = f"{_NOBODY}:{_NOBODY if os.geteuid() == 0 else ''}"
    options = ["--really_quiet", "--nice_level=0", "--chroot=/", "--tmpfsmount=/tmp"]
    options += [f"--user={mapped}", f"--group={mapped}"]
    return subprocess.check_output([program, *options, "--", "/bin/sh", "-c", COMMAND])


RUNS: Mapping[str, Callable[[str, int], bytes]] = {"isolate": _run_isolate, "nsjail": _run_nsjail}
"""How each peer runs the command: its program, and the number of one of its sandboxes."""


def main() -> None:
    """Run them, and report."""
    peer, starts = sys.argv[1], int(sys.argv[2])
    program = find_program(peer)
    assert program is not None, peer
    run = partial(RUNS[peer], program)

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
