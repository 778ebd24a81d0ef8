"""Gives evaluators what to print: `drummer FOLDER COUNT SECONDS`, a line a second each.

They are `cat` of the FIFOs 0, 1, ... in FOLDER, to which this writes the time (monotonic, in ns).
Each has its own moment of the second, so that all are spread over it. Run as a file, without site.
"""

import os
import sys
import time


def main() -> None:
    """Write."""
    folder, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fifos = [os.open(f"{folder}/{number}", os.O_WRONLY) for number in range(count)]
    begin = time.monotonic()
    for number in range(count * seconds):
        time.sleep(max(begin + number / count - time.monotonic(), 0))
        os.write(fifos[number % count], b"%d\n" % time.monotonic_ns())


if __name__ == "__main__":
    main()
