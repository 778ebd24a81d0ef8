"""Judge solutions of the maximum subarray problem, in C++ or Python.

Reads ``SUBMISSION_FILE_SOURCE`` and sends the goals ``correct`` and ``fast``.
The file ``segi.py`` says how, ``program.py`` runs the solutions.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from program import MEBIBYTE, Limits, Outcome, run
from segi import JUDGED, cannot_judge, say, send_goal

GOALS = ("correct", "fast")
HUGE = 10**9
LARGE_LENGTH = 400_000

SOLUTION_LIMITS = Limits(cpu_seconds=2, wall_seconds=10)
COMPILER_LIMITS = Limits(
    cpu_seconds=30, wall_seconds=60, file_bytes=64 * MEBIBYTE, memory_bytes=None
)

CHECK_PYTHON = """
import sys, traceback
try:
    compile(open(sys.argv[1], "rb").read(), sys.argv[2], "exec")
except (SyntaxError, ValueError) as error:
    sys.exit("".join(traceback.format_exception_only(error)))
"""


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


def show_words(words: bytes, source: Path, lines: int) -> None:
    """Show the first lines of a compiler's output, without the names of directories."""
    text = words.decode(errors="replace").replace(f"{source.parent}{os.sep}", "")
    shown = text.rstrip("\n").split("\n")
    for line in shown[:lines]:
        say(f"  {line}")
    if len(shown) > lines:
        say(f"  (and {len(shown) - lines} lines more)")


def prepare(source: Path, scratch: Path) -> list[str] | None:
    """Compile a solution; return the command that runs it, None if it is broken."""
    if source.suffix == ".cpp":
        target = scratch.with_name("solution")
        build = ["g++", "-std=c++17", "-O2", "-Wall", "-o", str(target), str(source)]
        command = [str(target)]
        say(f"compiling {source.name} ... ", end="")
    else:
        build = [sys.executable, "-I", "-c", CHECK_PYTHON, str(source), source.name]
        command = [sys.executable, "-I", "-B", str(source)]
        say(f"reading {source.name} ... ", end="")
    outcome = run(build, None, scratch, COMPILER_LIMITS)
    if outcome.status == 0:
        say(f"ok ({outcome.cpu_seconds:.2f} s)")
        return command
    say("failed")
    show_words(outcome.stderr, source, lines=20)
    return None


def objection(outcome: Outcome, expected: int) -> str | None:
    """Return what is wrong with a run; None if it is right."""
    if outcome.out_of_time:
        return f"out of time (limit {SOLUTION_LIMITS.cpu_seconds} s)"
    if outcome.status != 0:
        words = outcome.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
        return f"{outcome.ending}: {words[:100]}" if words else outcome.ending
    answer = outcome.stdout.decode(errors="replace").split()
    if answer == [str(expected)]:
        return None
    if not answer:
        return f"wrong: no answer, expected {expected}"
    shown = " ".join(answer[:3])
    return f"wrong: {shown[:40]!r}, expected {expected}"


def judge(command: list[str], case: Case, scratch: Path) -> bool:
    """Run one case and report on it."""
    input_path = scratch.with_name("input.txt")
    numbers = " ".join(map(str, case.numbers))
    input_path.write_text(f"{len(case.numbers)}\n{numbers}\n")
    outcome = run(command, input_path, scratch, SOLUTION_LIMITS)
    wrong = objection(outcome, best_sum(case.numbers))
    say(wrong or f"ok ({outcome.cpu_seconds:.2f} s)")
    return wrong is None


def main() -> int:
    """Judge the submission; return the exit status."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if "SUBMISSION_FILE_SOURCE" not in os.environ:
        return cannot_judge("source", "Nothing to judge: the field submission[source] is missing.")
    source = Path(os.environ["SUBMISSION_FILE_SOURCE"])
    if source.suffix not in (".cpp", ".py"):
        say(f"{source.name}: a solution is a file that ends in .cpp or .py")
        for goal in GOALS:
            send_goal(goal, False)
        return JUDGED
    if source.suffix == ".cpp" and shutil.which("g++") is None:
        return cannot_judge("g++", "This machine has no C++ compiler (g++): try a .py file.")

    scratch = Path(os.environ["TEMPORARY_DIRECTORY"]) / "scratch"
    scratch.mkdir()
    generator = random.Random(int(os.environ["TURINGARENA_SEED"]))
    command = prepare(source, scratch)
    case_number = 0
    passed = command is not None
    for goal, cases in zip(GOALS, (small_cases(generator), large_cases(generator)), strict=True):
        while command is not None and passed and (case := next(cases, None)):
            case_number += 1
            say(f"case {case_number}: {case.about} ... ", end="")
            passed = judge(command, case, scratch)
        send_goal(goal, passed)
    return JUDGED


if __name__ == "__main__":
    sys.exit(main())
