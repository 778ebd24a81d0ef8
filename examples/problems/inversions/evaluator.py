"""Judge programs that count inversions, by subtasks with points, in C++ or Python.

Reads ``SUBMISSION_FILE_SOURCE``; sends a case for each input, a goal for each
subtask, and the score.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

LANGUAGES = {ending: segi.LANGUAGES[ending] for ending in (".cpp", ".py")}
SUBTASKS = {"small": (100, 20), "medium": (1_000, 30), "large": (200_000, 50)}
"""Of each subtask the most numbers of an input, and the points."""
CASES = 3


def count_inversions(numbers: list[int]) -> int:
    """Return how many pairs are not in ascending order, for numbers of 0 to `len(numbers)`."""
    tree = [0] * (len(numbers) + 2)  # of Fenwick: how many of the numbers so far are smaller
    inversions = 0
    for seen, number in enumerate(numbers):
        place, smaller = number + 1, 0
        while place > 0:
            smaller += tree[place]
            place &= place - 1
        inversions += seen - smaller
        place = number + 1
        while place < len(tree):
            tree[place] += 1
            place += place & -place
    return inversions


def judge(solution: segi.Solution, name: str, numbers: list[int]) -> bool:
    """Run one case and send its verdict."""
    given = f"{len(numbers)}\n{' '.join(map(str, numbers))}\n"
    result = solution.run(given, time=2, memory=256 * segi.MIB)
    expected = str(count_inversions(numbers))
    judgement = result.fault or segi.compare_tokens(result.stdout, expected)
    segi.send_case(name, judgement, result)
    return judgement.is_accepted


def main() -> None:
    """Judge the submission."""
    solution = segi.prepare(segi.find_submission("source"), LANGUAGES)
    draw = segi.make_random()
    passed, done, score = not solution.fault, 0, 0
    total = CASES * len(SUBTASKS)
    for subtask, (most, points) in SUBTASKS.items():
        for number in range(1, CASES + 1):
            name = f"{subtask} {number}"
            numbers = draw.choices(range(most + 1), k=most)
            if passed:
                passed = judge(solution, name, numbers)
            else:
                fault = None if done else solution.fault
                segi.send_case(name, fault or segi.Judgement("skipped"))
            done += 1
            segi.send_progress(done, total)
        score += points if passed else 0
        segi.send_goal(subtask, passed)
    segi.send_score(score, sum(points for _, points in SUBTASKS.values()))


if __name__ == "__main__":
    main()
