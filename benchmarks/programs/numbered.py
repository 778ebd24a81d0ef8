"""The evaluator of the soak: numbered lines, so that none can be lost or doubled unseen.

`python numbered.py NAME SIZE` prints them, about SIZE bytes, in large writes.
"""

import sys
from collections.abc import Iterator

_LINE = 1000  # bytes
_AT_ONCE = 100  # lines
_FILLER = "abcdefghijklmnopqrstuvwxyz 0123456789" * (_LINE // 37 + 1)


def blocks(name: str, size: int) -> Iterator[bytes]:
    """Yield what the evaluator of that name prints, in pieces."""
    lines = size // _LINE
    for first in range(0, lines, _AT_ONCE):
        block = "".join(
            f"{name} {number} {_FILLER}"[: _LINE - 1] + "\n"
            for number in range(first, min(first + _AT_ONCE, lines))
        )
        yield block.encode()


def main() -> None:
    """Print."""
    name, size = sys.argv[1:]
    for block in blocks(name, int(size)):
        sys.stdout.buffer.write(block)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
