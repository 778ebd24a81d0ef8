"""The example problems: right solutions reach their goals, and cheats none."""

from __future__ import annotations

import sys
from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.client import data
from tests.integration.harness import CONFIGURATION, DaemonTestCase
from tests.run import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from demonstration.problems import (  # type: ignore[import-not-found]
    PROBLEMS,
    load_problems,
)

RUNS = {
    "guess_number": "right_bisection.py",
    "inversions": "right_merge.py",
    "max_subarray": "right_linear.py",
    "ring_buffer": "right_array.java",
    "sort_by_questions": "right_merge.py",
    "word_count": "right_pipeline.sh",
}
"""The problems that run programs of the submission, with a right solution each."""
# Sorts only if a run before it has left something.
STATE = b"""
import ctypes, os, socket
libc, one, count = ctypes.CDLL(None), socket.socket(socket.AF_UNIX), int(input())
paths = ["/tmp/left", "/dev/shm/left", "/evaluation/left", __file__ + "c"]
found = [*filter(os.path.exists, paths), *[1] * (libc.shmget(23, 4096, 0o600) >= 0)]
found += [1] * (one.connect_ex("\\0left") == 0)
libc.shmget(23, 4096, 0o1600)
for path in paths:
    try:
        open(path, "w").close()
    except OSError:
        pass
def lighter(x, y):
    print("?", x, y, flush=True)
    return input() == "yes"
numbers = range(1, count + 1)
order = sorted(numbers, key=lambda x: sum(lighter(y, x) for y in numbers))
print("!", *(order if found or count == 1 else []), flush=True)
if os.fork():
    os._exit(0)
os.setsid()
one.bind("\\0left")
one.listen()
libc.pause()
"""
# Prints the answer after its end.
LATE = b"""
import os, time
if os.fork():
    os._exit(0)
os.setsid()
numbers = list(map(int, open(0).read().split()))[1:]
time.sleep(0.5)
print(sum(x > y for n, y in enumerate(numbers) for x in numbers[:n]))
"""
SOLUTIONS = {
    name: (PROBLEMS / name / "solutions" / solution).read_bytes()
    for name, solution in {**RUNS, "knights_tour": "right_closed.txt"}.items()
}
CHEATS: list[tuple[str, str, bytes, list[str]]] = [
    ("knights_tour", "tail.txt", SOLUTIONS["knights_tour"] + b" " * 100_000 + b"a1 a1", []),
    ("word_count", "a:b.sh", SOLUTIONS["word_count"], ["counted", "ordered", "fast"]),
    (
        "max_subarray",
        "incbin.cpp",
        b'asm(".incbin "/evaluation/tree/max_subarray/evaluator.py"");',
        [],
    ),
    ("max_subarray", "zero.cpp", b'#include "/dev/zero"', []),
    ("sort_by_questions", "segi.py", b"x = bytearray(b'x') * 10**9", []),
    ("sort_by_questions", "digits.py", "print('? \u0661 1_0\\0\\n! 1', flush=True)".encode(), []),
    ("sort_by_questions", "state.py", STATE, []),
    ("inversions", "late.py", LATE, []),
]
"""Cheats that were tried: the problem, the file, and the goals that it reaches."""


class ExampleTests(DaemonTestCase):
    configuration = CONFIGURATION + "[limits]\nwall_clock = 600\n"

    async def setUp(self) -> None:
        await super().setUp()
        for path in sorted(PROBLEMS.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self.repository.write(str(path.relative_to(PROBLEMS)), path.read_text())
        self.commit = self.repository.commit()

    async def judge(
        self, name: str, solution: str, command: str, content: bytes | None = None
    ) -> list[tuple[str, bool]]:
        if content is None:
            content = (PROBLEMS / name / "solutions" / solution).read_bytes()
        files = [(load_problems()[name].field, solution, content)]
        values: list[Any] = data(await self.run_command(command, files=files, directory=name))
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

    async def test_script_solutions_reach_all_goals_and_cheats_none(self) -> None:
        self.assertEqual({*load_problems()} - {*RUNS}, {"knights_tour"}, "which runs no program")
        for name in ("inversions", "max_subarray", "sort_by_questions", "word_count"):
            await self.check(name)

    async def test_cpp_solution_reaches_all_goals_and_the_cheat_none(self) -> None:
        await self.check("guess_number")

    async def test_java_solution_reaches_all_goals_and_the_cheat_none(self) -> None:
        await self.check("ring_buffer")

    async def test_cheating_solutions_reach_only_the_expected_goals(self) -> None:
        for name, file, content, reached in CHEATS:
            problem = load_problems()[name]
            goals = await self.judge(name, file, problem.evaluator_cmd, content)
            self.assertEqual(goals, [(goal, goal in reached) for goal in problem.goals], file)
