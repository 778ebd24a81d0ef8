"""Judge a knight's tour, given as a list of squares, and draw it.

Reads ``SUBMISSION_FILE_TOUR``. Sends the goals ``legal``, ``complete`` and
``closed``, and two files: a drawing by its content, a table by its path.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

from drawing import SIDE, Square, draw

sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

MOST_BYTES = 100_000


def parse_square(word: str) -> Square | None:
    """Parse a square such as ``e4``; return None if it is not on the board."""
    if len(word) != 2 or word[0] not in "abcdefgh" or word[1] not in "12345678":
        return None
    return "abcdefgh".index(word[0]), "12345678".index(word[1])


def is_knights_move(begin: Square, end: Square) -> bool:
    """Return whether a knight can jump from one square to the other."""
    return sorted((abs(begin[0] - end[0]), abs(begin[1] - end[1]))) == [1, 2]


def follow(words: list[str]) -> tuple[list[Square], Square | None, str | None]:
    """Follow a tour up to its first fault.

    Return the squares before the fault, the square of the fault or None, and
    what is wrong or None.
    """
    tour: list[Square] = []
    for number, word in enumerate(words, start=1):
        square = parse_square(word.lower())
        if square is None:
            return tour, None, f"word {number} is no square: {word[:20]!r}"
        if square in tour:
            return tour, square, f"square {number}, {word}, was visited before"
        if tour and not is_knights_move(tour[-1], square):
            return tour, square, f"a knight cannot jump from {words[number - 2]} to {word}"
        tour.append(square)
    return tour, None, None if tour else "there are no squares at all"


def write_table(tour: list[Square], path: Path) -> None:
    """Write the squares in the order of the tour as comma-separated values."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "column", "row"])
        for number, (column, row) in enumerate(tour, start=1):
            writer.writerow([number, "abcdefgh"[column], row + 1])


def main() -> None:
    """Judge the submission."""
    with segi.find_submission("tour").open("rb") as file:
        content = file.read(MOST_BYTES + 1)

    print("following the knight ... ", end="", flush=True)
    tour, fault, wrong = follow(content.decode("ascii", errors="replace").split())
    if len(content) > MOST_BYTES:
        wrong = f"the text is over {MOST_BYTES} bytes"
    print(wrong or f"ok, {len(tour)} of {SIDE * SIDE} squares")
    legal = wrong is None
    complete = legal and len(tour) == SIDE * SIDE
    closed = complete and is_knights_move(tour[-1], tour[0])
    for goal, reached in {"legal": legal, "complete": complete, "closed": closed}.items():
        segi.send_goal(goal, reached)

    segi.send_file("tour.svg", draw(tour, fault, closed), "image/svg+xml")
    table = segi.make_directory() / "tour.csv"
    write_table(tour, table)
    segi.send_file("tour.csv", table, "text/csv")


if __name__ == "__main__":
    main()
