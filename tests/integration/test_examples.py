"""The example problems: right solutions reach their goals, and cheats none."""

from __future__ import annotations

import sys
from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.client import data
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.run import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from demonstration.problems import PROBLEMS, load_problems

RUNS = {
    "guess_number": "right_bisection.py",
    "inversions": "right_merge.py",
    "max_subarray": "right_linear.py",
    "ring_buffer": "right_array.java",
    "sort_by_questions": "right_merge.py",
    "word_count": "right_pipeline.sh",
}
"""The problems that run programs of the submission, with a right solution each."""
RUNNERS = {"py": "python3", "sh": "sh"}


class ExampleTests(DaemonTestCase):
    """The examples in a repository of the daemon."""

    configuration = CONFIGURATION + "[limits]\nwall_clock = 600\n"

    async def setUp(self) -> None:
        await super().setUp()
        for path in sorted(PROBLEMS.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self.repository.write(str(path.relative_to(PROBLEMS)), path.read_text())
        self.commit = self.repository.commit()

    async def judge(self, name: str, solution: str, command: str) -> list[tuple[str, bool]]:
        """Return the goals that an evaluator of a problem sends of a solution."""
        content = (PROBLEMS / name / "solutions" / solution).read_bytes()
        identifier = await self.client.evaluate(
            self.repository.url,
            self.commit,
            command,
            files=[("source", solution, content)],
            directory=name,
        )
        values: list[Any] = data(await self.client.follow(identifier))
        self.assertNotIn("evaluation_error", [value["type"] for value in values])
        return [
            (value["goal"], value["result"]) for value in values if value["type"] == "goal_result"
        ]

    async def check(self, name: str) -> None:
        """Hold that a right solution reaches all goals, a cheat none, and no goal comes twice."""
        problem, right = load_problems()[name], RUNS[name]
        missing = problem.missing_program(right)
        if missing is not None:
            raise SkipTest(f"{name} needs {missing}")
        (cheat,) = (each for each in problem.solutions if each.startswith("cheat."))
        for solution in (right, cheat):
            goals = await self.judge(name, solution, problem.evaluator_cmd)
            self.assertEqual(goals, [(goal, solution == right) for goal in problem.goals], name)

    async def test_scripts(self) -> None:
        """Problems that need no compiler."""
        self.assertEqual({*load_problems()} - {*RUNS}, {"knights_tour"}, "which runs no program")
        for name in ("inversions", "max_subarray", "sort_by_questions", "word_count"):
            await self.check(name)

    async def test_cpp(self) -> None:
        """The evaluator in C++."""
        await self.check("guess_number")

    async def test_java(self) -> None:
        """The solutions in Java."""
        await self.check("ring_buffer")

    async def test_undefended(self) -> None:
        """The same cheats, run by the evaluator itself, reach all goals."""
        for name, problem in load_problems().items():
            for cheat in problem.solutions:
                runner = RUNNERS.get(cheat.rpartition(".")[2], "")
                if cheat.startswith("cheat.") and runner:
                    command = f'answer=$({runner} "$SUBMISSION_FILE_SOURCE"); sleep 0.1'
                    goals = await self.judge(name, cheat, command)
                    self.assertLessEqual({(goal, True) for goal in problem.goals}, {*goals}, name)

    async def test_answers(self) -> None:
        """A cheat that the evaluator itself runs prints the expected answer."""
        command = (
            'echo secret >"$TEMPORARY_DIRECTORY/expected"; sh "$SUBMISSION_FILE_SOURCE" | tee x'
        )
        cheat = (PROBLEMS / "word_count" / "solutions" / "cheat.sh").read_bytes()
        identifier = await self.client.evaluate(
            self.repository.url,
            self.commit,
            command + "; grep -c secret x",
            files=[("source", "cheat.sh", cheat)],
        )
        events = await self.client.follow(identifier)
        self.assertIn("secret", [event["payload"] for event in events])
