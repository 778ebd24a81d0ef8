"""How fast the writer is: a loop that reads its pipe and throws away what it reads."""

from __future__ import annotations

import fcntl
import os
import subprocess

from benchmarks.programs.stopwatch import Stopwatch, arguments


def main() -> None:
    """Run the writer, read, and report."""
    argv, total = arguments()
    stopwatch = Stopwatch()
    with subprocess.Popen(argv, env={}, stdout=subprocess.PIPE, bufsize=0) as writer:
        assert writer.stdout is not None
        fcntl.fcntl(writer.stdout, fcntl.F_SETPIPE_SZ, 256 * 1024)
        while chunk := os.read(writer.stdout.fileno(), 64 * 1024):
            stopwatch.count(len(chunk))
    stopwatch.report(total)


if __name__ == "__main__":
    main()
