"""The evaluator of the stdout benchmarks: lines of one length, written 64 KiB at a time.

`python writer.py LENGTH TOTAL` writes TOTAL bytes. Run as a file, without site, for a quick start.
"""

import os
import sys

_BLOCK = 64 * 1024
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz 0123456789"


def main() -> None:
    """Write."""
    length, total = map(int, sys.argv[1:])
    line = (_ALPHABET * (length // len(_ALPHABET) + 1))[: length - 1] + b"\n"
    # So many lines that blocks may begin anywhere within the first of them.
    text = memoryview(line * (_BLOCK // length + 2))
    start = 0
    while total > 0:
        written = os.write(1, text[start : start + min(_BLOCK, total)])
        start = (start + written) % length
        total -= written


if __name__ == "__main__":
    main()
