"""What the demonstration shows: a list of submissions, and what each must come to."""

from __future__ import annotations

from dataclasses import dataclass

from demonstration.problems import Problem

NO_SUCH_COMMIT = "0123456789" * 4


@dataclass(frozen=True)
class Step:
    """One submission. Without an ``error`` its goals must be those of ``problem.toml``."""

    about: str
    problem: str
    solution: str
    typed: bool = False
    """Send the text alone, as from a text field, without a file name."""
    commit_oid: str | None = None
    evaluator_cmd: str | None = None
    error: str | None = None
    """The reason of the error that is expected."""
    files: tuple[str, ...] = ()
    """The names of the files that the evaluator sends."""


STEPS = (
    Step("a right solution, in Python", "max_subarray", "right_linear.py"),
    Step("a right solution, in C++", "max_subarray", "right_linear.cpp"),
    Step("a wrong one (sums overflow 32 bits)", "max_subarray", "wrong_overflow.cpp"),
    Step("one that is right, but too slow", "max_subarray", "slow_quadratic.py"),
    Step("one that is broken", "max_subarray", "broken_syntax.py"),
    Step("an evaluator in bash", "word_count", "right_array.awk"),
    Step("a wrong solution (9 comes before 10)", "word_count", "wrong_order.awk"),
    Step("an evaluator in C++, built on the spot", "guess_number", "right_bisection.py"),
    Step("a wrong solution (a sum overflows)", "guess_number", "wrong_overflow.cpp"),
    Step(
        "an evaluator that sends files, for text that was typed",
        "knights_tour",
        "right_closed.txt",
        typed=True,
        files=("tour.svg", "tour.csv"),
    ),
    Step(
        "a wrong answer",
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
        "a commit that does not exist",
        "knights_tour",
        "right_open.txt",
        commit_oid=NO_SUCH_COMMIT,
        error="commit",
    ),
)


def difference(
    step: Step, problem: Problem, goals: dict[str, bool], files: list[str], error: str | None
) -> str | None:
    """Say what of an evaluation is not as expected, or ``None``."""
    expected_goals = {} if step.error else problem.expected_goals(step.solution)
    if error != step.error:
        return f"expected the error {step.error}, not {error}"
    if goals != expected_goals:
        return f"expected the goals {expected_goals}, not {goals}"
    if tuple(files) != step.files:
        return f"expected the files {step.files}, not {tuple(files)}"
    return None
