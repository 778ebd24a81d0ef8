"""The problems of ``examples/problems``, and their copy in a git repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
PROBLEMS = EXAMPLES / "problems"


@dataclass(frozen=True)
class Problem:
    """The contents of a ``problem.toml``."""

    directory: Path
    title: str
    evaluator_cmd: str
    field: str
    goals: tuple[str, ...]
    needs: tuple[str, ...]
    """Programs that the evaluator runs."""
    solutions: Mapping[str, tuple[str, ...]]
    """The goals that each file of ``solutions`` reaches."""

    @property
    def name(self) -> str:
        """The name of the problem's directory."""
        return self.directory.name

    def solution(self, name: str) -> Path:
        """Return the path of a solution."""
        return self.directory / "solutions" / name

    def expected_goals(self, solution: str) -> dict[str, bool]:
        """Return for each goal whether a solution reaches it."""
        return {goal: goal in self.solutions[solution] for goal in self.goals}

    def missing_program(self, solution: str) -> str | None:
        """Return a program that the evaluation needs and this machine lacks, None without one."""
        needs = [*self.needs, *(["g++"] if solution.endswith(".cpp") else [])]
        return next((need for need in needs if shutil.which(need) is None), None)


def load_problem(directory: Path) -> Problem:
    """Read the ``problem.toml`` of a directory."""
    table = tomllib.loads((directory / "problem.toml").read_text())
    return Problem(
        directory=directory,
        title=table["title"],
        evaluator_cmd=table["evaluator_cmd"],
        field=table["field"],
        goals=tuple(table["goals"]),
        needs=tuple(table["needs"]),
        solutions={name: tuple(goals) for name, goals in table["solutions"].items()},
    )


def load_problems() -> dict[str, Problem]:
    """Read all problems, and return them by the names of their directories."""
    problems = (load_problem(path.parent) for path in sorted(PROBLEMS.glob("*/problem.toml")))
    return {problem.name: problem for problem in problems}


def make_repository(target: Path) -> str:
    """Make a git repository of the problems, and return its commit.

    Author, date and configuration are fixed, so the same problems always give
    the same commit.
    """
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "evaluator")
    shutil.copytree(PROBLEMS, target, symlinks=True, ignore=unwanted)
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(target.parent),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "A Teacher",
        "GIT_AUTHOR_EMAIL": "teacher@example.org",
        "GIT_AUTHOR_DATE": "2018-09-01T12:00:00Z",
        "GIT_COMMITTER_NAME": "A Teacher",
        "GIT_COMMITTER_EMAIL": "teacher@example.org",
        "GIT_COMMITTER_DATE": "2018-09-01T12:00:00Z",
    }

    def git(*arguments: str) -> str:
        finished = subprocess.run(
            ["git", *arguments],
            cwd=target,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return finished.stdout.strip()

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "The problems of the examples")
    return git("rev-parse", "HEAD")
