"""Judge solutions of the maximum subarray problem, in C++ or Python.

Reads ``SUBMISSION_FILE_SOURCE`` and sends the goals ``correct`` and ``fast``.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

sys.path.insert(0, os.environ["EVALUATION_TOOLS"] + "/lib")
import segi

GOALS = ("correct", "fast")
HUGE = 10**9
LARGE_LENGTH = 400_000
LANGUAGES = {ending: segi.LANGUAGES[ending] for ending in (".cpp", ".py")}


@dataclass(frozen=True)
class Case:
    """One input, and what is special about it."""

    about: str
    numbers: list[int]


def best_sum(numbers: list[int]) -> int:
    """Return the largest sum of a non-empty run of neighbours (Kadane, 1977)."""
    best = ending_here = numbers[0]
    for number in numbers[1:]:
        ending_here = max(number, ending_here + number)
        best = max(best, ending_here)
    return best


def small_cases(generator: random.Random) -> Iterator[Case]:
    """Make the inputs of the goal ``correct``."""

    def numbers(length: int, low: int, high: int) -> list[int]:
        return [generator.randint(low, high) for _ in range(length)]

    yield Case("one number, negative", numbers(1, -100, -1))
    yield Case("all positive", numbers(10, 1, 100))
    yield Case("all negative", numbers(20, -100, -1))
    yield Case("small numbers", numbers(100, -50, 50))
    yield Case("huge numbers", numbers(100, HUGE // 2, HUGE))
    middle = [-HUGE, *numbers(20, 1, 100), -HUGE]
    yield Case("the best is in the middle", numbers(10, -9, -1) + middle + numbers(10, -9, -1))
    yield Case("500 numbers", numbers(500, -HUGE, HUGE))


def large_cases(generator: random.Random) -> Iterator[Case]:
    """Make the inputs of the goal ``fast``."""

    def numbers(low: int, high: int) -> list[int]:
        return generator.choices(range(low, high + 1), k=LARGE_LENGTH)

    yield Case(f"{LARGE_LENGTH} numbers", numbers(-HUGE, HUGE))
    yield Case(f"{LARGE_LENGTH} numbers, all negative", numbers(-HUGE, -1))
    yield Case(f"{LARGE_LENGTH} numbers, all huge", numbers(HUGE // 2, HUGE))


def judge(solution: segi.Solution, case: Case) -> bool:
    """Run one case and report on it."""
    numbers = " ".join(map(str, case.numbers))
    given = f"{len(case.numbers)}\n{numbers}\n"
    result = solution.run(given, time=2, memory=256 * segi.MIB, output=segi.MIB)
    judgement = result.fault or segi.compare_tokens(result.stdout, str(best_sum(case.numbers)))
    if judgement.is_accepted:
        print(f"ok ({result.cpu_seconds:.2f} s)")
    elif judgement.expected:
        print(f"wrong: {judgement.printed!r}, expected {judgement.expected}")
    else:
        print(judgement.message)
    return judgement.is_accepted


def main() -> None:
    """Judge the submission."""
    source = segi.find_submission("source")
    print(f"preparing {source.name} ... ", end="", flush=True)
    solution = segi.prepare(source, LANGUAGES)
    if solution.fault:
        print(f"failed\n{solution.fault.message}")
    else:
        print(f"ok ({solution.build_seconds:.2f} s)")
    generator = segi.make_random()
    passed = not solution.fault
    case_number = 0
    for goal, cases in zip(GOALS, (small_cases(generator), large_cases(generator)), strict=True):
        while passed and (case := next(cases, None)):
            case_number += 1
            print(f"case {case_number}: {case.about} ... ", end="", flush=True)
            passed = judge(solution, case)
        segi.send_goal(goal, passed)


if __name__ == "__main__":
    main()
