"""Judge every solution of every problem by ``tawebeval try``, without a daemon.

    .venv/bin/python examples/check_problems.py [PROBLEM...]

Compares the goals with those that each ``problem.toml`` promises, and exits
with 0 only if all agree. What needs a program that is not here is skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from demonstration.problems import Problem, load_problems
from demonstration.unprivileged import user_options

DEADLINE_SECONDS = 120


def judge(problem: Problem, solution: str, seed: int) -> tuple[int, dict[str, bool]]:
    """Run the evaluator on a solution: the exit status and the goals."""
    command = [str(Path(sys.executable).with_name("tawebeval")), "try", ".", *user_options()]
    command += ["--evaluator", problem.evaluator_cmd]
    command += ["--seed", str(seed), "--events", f"{problem.field}:solutions/{solution}"]
    finished = subprocess.run(
        command,
        cwd=problem.directory,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    goals: dict[str, bool] = {}
    for event in map(json.loads, finished.stdout.splitlines()):
        value = event["payload"]
        if isinstance(value, dict) and value.get("type") == "goal_result":
            goals[value["goal"]] = value["result"] or goals.get(value["goal"], False)
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
