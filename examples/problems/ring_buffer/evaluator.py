"""Judge a class in Java: ``RingBuffer``, which a program of the problem uses.

Reads ``SUBMISSION_FILE_SOURCE`` and sends the goals ``correct`` and ``full``. The
class cannot cheat by ``Main.java``, which knows no expected output.
"""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from pathlib import Path

sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

MAIN = Path("Main.java").absolute()
LANGUAGES = {
    ".java": segi.Language(
        ("javac", "-d", "{build}", str(MAIN), "{source}"),
        ("java", "-XX:+UseSerialGC", "-Xmx128m", "-cp", "{build}", "Main"),
    )
}
GOALS = {"correct": (1000, 0.5), "full": (5, 0.7)}
"""Of each goal the buffer's capacity, and the share of `add` in the operations."""


def make_case(draw: random.Random, capacity: int, share: float) -> tuple[str, str]:
    """Return operations on a ring buffer, and what is to be printed."""
    buffer: deque[int] = deque(maxlen=capacity)
    operations, expected = [f"{capacity}"], []
    for number in range(1000):
        if draw.random() < share:
            buffer.append(number)
            operations.append(f"add {number}")
        else:
            expected.append(str(buffer.popleft()) if buffer else "empty")
            operations.append("remove")
    return "\n".join(operations), "\n".join(expected)


def main() -> None:
    """Judge the submission."""
    source = segi.find_submission("source")
    print(f"compiling {source.name} ... ", end="", flush=True)
    solution = segi.prepare(source, LANGUAGES, read=[MAIN])
    print(f"failed\n{solution.fault.message}" if solution.fault else "ok")
    passed = not solution.fault
    draw = segi.make_random()
    for goal, (capacity, share) in GOALS.items():
        given, expected = make_case(draw, capacity, share)
        if passed:
            result = solution.run(given, time=5)
            judgement = result.fault or segi.compare_tokens(result.stdout, expected)
            print(f"capacity {capacity}: {judgement.message or 'ok'}")
            passed = judgement.is_accepted
        segi.send_goal(goal, passed)


if __name__ == "__main__":
    main()
