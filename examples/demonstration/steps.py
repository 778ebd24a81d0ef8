"""The submissions of the demo, with their expected results."""

from __future__ import annotations

from dataclasses import dataclass

from demonstration.problems import Problem

NO_SUCH_COMMIT = "0123456789" * 4


@dataclass(frozen=True)
class Step:
    """One submission. Without an ``error``, ``problem.toml`` has the expected goals."""

    about: str
    problem: str
    solution: str
    typed: bool = False
    """Whether to send the text without a file name, like a text field of a form."""
    commit_oid: str | None = None
    evaluator_cmd: str | None = None
    error: str | None = None
    """The reason of the expected error."""
    files: tuple[str, ...] = ()
    """The names of the files that the evaluator sends."""
    cheats: bool = False
    """Whether the solution is harmless only in a sandbox."""


STEPS = (
    Step("a right solution, in Python", "max_subarray", "right_linear.py"),
    Step("a right solution, in C++", "max_subarray", "right_linear.cpp"),
    Step("a wrong solution (sums overflow 32 bits)", "max_subarray", "wrong_overflow.cpp"),
    Step("a right solution, but too slow", "max_subarray", "slow_quadratic.py"),
    Step("a solution with a syntax error", "max_subarray", "broken_syntax.py"),
    Step(
        "a cheater, who looks for the answers and forges goals",
        "max_subarray",
        "cheat.py",
        cheats=True,
    ),
    Step("half of the points", "inversions", "slow_pairs.cpp"),
    Step("a conversation with a right solution", "sort_by_questions", "right_merge.py"),
    Step("a class in Java that forgets a case", "ring_buffer", "wrong_full.java"),
    Step("a right solution, judged in bash", "word_count", "right_array.awk"),
    Step("a wrong solution (9 comes before 10)", "word_count", "wrong_order.awk"),
    Step("a right solution, judged by a C++ program", "guess_number", "right_bisection.py"),
    Step("a wrong solution (a sum overflows)", "guess_number", "wrong_overflow.cpp"),
    Step(
        "a right answer from a text field; the evaluator sends a drawing",
        "knights_tour",
        "right_closed.txt",
        typed=True,
        files=("tour.svg", "tour.csv"),
    ),
    Step(
        "a wrong answer (a jump that no knight can do)",
        "knights_tour",
        "wrong_jump.txt",
        files=("tour.svg", "tour.csv"),
    ),
    Step(
        "an evaluator that fails",
        "knights_tour",
        "right_open.txt",
        evaluator_cmd="echo 'opening the table ...'; echo 'no such table' >&2; exit 3",
        error="exit",
    ),
    Step(
        "a version of the problem (commit) that does not exist",
        "knights_tour",
        "right_open.txt",
        commit_oid=NO_SUCH_COMMIT,
        error="commit",
    ),
)


def difference(
    step: Step, problem: Problem, goals: dict[str, bool], files: list[str], error: str | None
) -> str | None:
    """Return how a result differs from the expected one, None if it does not."""
    expected_goals = {} if step.error else problem.expected_goals(step.solution)
    if error != step.error:
        return f"expected the error {step.error}, not {error}"
    if goals != expected_goals:
        return f"expected the goals {expected_goals}, not {goals}"
    if tuple(files) != step.files:
        return f"expected the files {step.files}, not {tuple(files)}"
    return None
