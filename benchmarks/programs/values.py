"""An evaluator that prints data values: `values COUNT`. Run by `-c`, without site."""

import os
import sys

_AT_ONCE = 500


def main() -> None:
    """Print."""
    begin, end = os.environ["EVALUATION_DATA_BEGIN"], os.environ["EVALUATION_DATA_END"]
    value = '{"type": "case", "case": "sample 1", "verdict": "accepted", "seconds": 0.125}'
    block = f"{begin}\n{value}\n{end}\n" * _AT_ONCE
    for _ in range(int(sys.argv[1]) // _AT_ONCE):
        sys.stdout.write(block)


if __name__ == "__main__":
    main()
