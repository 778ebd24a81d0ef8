"""Output for the daemon: text by ``print``, data by :func:`send`.

Copy this file into a problem of your own; it needs nothing but the standard
library.
"""

from __future__ import annotations

import json
import os
import sys

JUDGED = 0
CANNOT_JUDGE = 3


def send(*values: object) -> None:
    """Send each value as one data event.

    A data block starts with a line terminator that belongs to the block, so
    this works in the middle of a line, too.
    """
    lines = [
        "",
        os.environ["EVALUATION_DATA_BEGIN"],
        *(json.dumps(value, allow_nan=False) for value in values),
        os.environ["EVALUATION_DATA_END"],
        "",
    ]
    sys.stdout.write("\n".join(lines))
    sys.stdout.flush()


def send_goal(goal: str, reached: bool) -> None:
    """Send whether the submission reached a goal."""
    send({"type": "goal_result", "goal": goal, "result": reached})


def say(text: str, end: str = "\n") -> None:
    """Print text and flush it; ``end=""`` prints a part of a line."""
    print(text, end=end, flush=True)


def cannot_judge(missing: str, sentence: str) -> int:
    """Send what this machine lacks; return the exit status."""
    say(sentence)
    send({"type": "cannot_judge", "missing": missing, "message": sentence})
    return CANNOT_JUDGE
