"""An evaluator that prints more lines than a buffer holds."""

from __future__ import annotations

from typing import Any

from tests.integration.client import Event, joined, python

COUNT = 14_000  # lines, which as events are more than a buffer holds
LINE = "line %d · of a great many, so that they are more than any buffer holds\n"

# Lines; now and then a data block, or a line that comes in two parts.
EVALUATOR = python(
    r"""
import os, sys, time
begin, end = os.environ["EVALUATION_DATA_BEGIN"], os.environ["EVALUATION_DATA_END"]
write = sys.stdout.write
for number in range(int(sys.argv[2])):
    write(sys.argv[1] % number)
    if number % 400 == 0:
        write("\n%s\n{}\n[%d, 1.50]\n%s\n" % (begin, number, end))
    if number % 2000 == 0:
        write("half of a line, ")
        sys.stdout.flush()
        time.sleep(0.04)
        write("and the rest\n")
""",
    LINE,
    str(COUNT),
)


def printed() -> list[Any]:
    """Return what the evaluator prints, as `joined` has it."""
    events: list[Event] = []
    for number in range(COUNT):
        events.append({"type": "text", "payload": LINE % number})
        if number % 400 == 0:
            events += ({"type": "data", "payload": value} for value in ({}, [number, 1.5]))
        if number % 2000 == 0:
            events.append({"type": "text", "payload": "half of a line, and the rest\n"})
    return joined(events)
