"""Judge every solution of every problem by hand, without the daemon.

    python examples/check_problems.py [PROBLEM...]

Compares the goals with those that each ``problem.toml`` promises, and exits
with 0 only if all agree. What needs a program that is not here is skipped.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import time

from demonstration.problems import EXAMPLES, Problem, load_problems

RUN_BY_HAND = EXAMPLES / "run-by-hand"
MARKERS: dict[str, str] = runpy.run_path(str(RUN_BY_HAND))["MARKERS"]
DEADLINE_SECONDS = 120


def data_of(output: str) -> list[object]:
    """Give the values in the data blocks of an evaluator's output."""
    values: list[object] = []
    inside = False
    for line in output.splitlines():
        if line in (MARKERS["EVALUATION_DATA_BEGIN"], MARKERS["EVALUATION_DATA_END"]):
            inside = line == MARKERS["EVALUATION_DATA_BEGIN"]
        elif inside:
            values.append(json.loads(line))
    return values


def judge(problem: Problem, solution: str, seed: int) -> tuple[int, dict[str, bool]]:
    """Run the evaluator on a solution: its exit status and the goals."""
    finished = subprocess.run(
        [
            sys.executable,
            str(RUN_BY_HAND),
            f"--seed={seed}",
            str(problem.directory),
            problem.evaluator_cmd,
            f"{problem.field}:{problem.solution(solution)}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=DEADLINE_SECONDS,
    )
    goals: dict[str, bool] = {}
    for value in data_of(finished.stdout):
        if isinstance(value, dict) and value.get("type") == "goal_result":
            goals[value["goal"]] = value["result"]
    return finished.returncode, goals


def check(problem: Problem, solution: str, seed: int) -> bool:
    """Judge a solution and print a line about it."""
    print(f"{problem.name}/{solution} ... ", end="", flush=True)
    missing = problem.missing_program(solution)
    if missing is not None:
        print(f"skipped: this machine has no {missing}")
        return True
    begun = time.monotonic()
    status, goals = judge(problem, solution, seed)
    seconds = time.monotonic() - begun
    if (status, goals) != (0, problem.expected_goals(solution)):
        print(f"NOT as promised: exit status {status}, goals {goals}")
        return False
    reached = [goal for goal, result in goals.items() if result]
    print(f"{', '.join(reached) or 'no goals'} ({seconds:.1f} s)")
    return True


def is_complete(problem: Problem) -> bool:
    """Say whether ``problem.toml`` names exactly the solutions that there are."""
    found = {path.name for path in (problem.directory / "solutions").iterdir()}
    difference = found ^ set(problem.solutions)
    if difference:
        print(f"{problem.name}/problem.toml and its solutions differ: {sorted(difference)}")
    return not difference


def main() -> int:
    """Check what the command line names; the result is the exit status."""
    problems = load_problems()
    parser = argparse.ArgumentParser(description="Judge every solution of every problem.")
    parser.add_argument("--seed", type=int, default=1, help="TURINGARENA_SEED (default: 1)")
    parser.add_argument("problem", nargs="*", help=f"one of {', '.join(problems)} (default: all)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.problem) - set(problems))
    if unknown:
        parser.error(f"no such problem: {', '.join(unknown)}")
    results = [is_complete(problems[name]) for name in arguments.problem or problems]
    results += [
        check(problems[name], solution, arguments.seed)
        for name in arguments.problem or problems
        for solution in problems[name].solutions
    ]
    print("all as promised" if all(results) else "NOT all as promised")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
