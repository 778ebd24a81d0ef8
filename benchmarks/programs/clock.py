"""The evaluator of the latency benchmark: `python clock.py COUNT` prints when it prints.

A line of time.monotonic_ns() each 5 ms. Run as a file, without site, for a quick start.
"""

import os
import sys
import time


def main() -> None:
    """Print."""
    for _ in range(int(sys.argv[1])):
        time.sleep(0.005)
        os.write(1, b"%d\n" % time.monotonic_ns())


if __name__ == "__main__":
    main()
