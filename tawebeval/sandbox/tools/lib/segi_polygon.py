"""Packages of Polygon (`problem.xml`), with programs that use testlib.

A full package has all tests; in a standard one `doall.sh` makes them. Without points and groups a
submission stops at its first fault. Not read: problems with several runs of a submission.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tawebeval.sandbox.tools.lib import segi, segi_judge
else:
    import segi
    import segi_judge

_REJECTED = ("wrong_answer", "time_limit", "runtime_error", "partial")
_FAULTS = {
    "rejected": _REJECTED,
    "failed": _REJECTED,
    "wrong-answer": ("wrong_answer", "partial"),
    "presentation-error": ("wrong_answer", "partial"),
    "time-limit-exceeded": ("time_limit",),
    "memory-limit-exceeded": ("runtime_error",),
    "time-limit-exceeded-or-memory-limit-exceeded": ("time_limit", "runtime_error"),
}
"""What at least one case of a solution with a tag has to be."""
_HEADERS = (".h", ".hpp", ".inc")


class Test(NamedTuple):
    """A test, with its group ("" without one) and its points (None without points)."""

    name: str
    input: Path
    answer: Path
    group: str
    points: float | None
    is_sample: bool


class Group(NamedTuple):
    """A group of tests: its points count together or for each test, and after other groups."""

    points: float
    is_all_or_nothing: bool
    dependencies: Sequence[str]


class Problem:
    """What `problem.xml` says. Raises: PackageError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            # A package is as trusted as any evaluator.
            self.tree = ET.parse(root / "problem.xml").getroot()  # noqa: S314
        except ET.ParseError as error:
            raise segi_judge.PackageError(f"problem.xml: {error}") from None
        judging = self.tree.find("judging")
        testsets = [] if judging is None else judging.findall("testset")
        if judging is None or not testsets:
            raise segi_judge.PackageError("problem.xml has no testset")
        if judging.get("run-count", "1") != "1":
            raise segi_judge.PackageError("several runs of a submission are not supported")
        self.input_name = judging.get("input-file", "")
        self.output_name = judging.get("output-file", "")
        testset = next((each for each in testsets if each.get("name") == "tests"), testsets[0])
        self.time_limit_seconds = float(testset.findtext("time-limit", "10000")) / 1000
        self.memory = float(testset.findtext("memory-limit", "268435456")) / segi.MIB
        self.tests = self._read_tests(testset)
        self.groups = {
            str(each.get("name")): Group(
                float(each.get("points", 0)),
                each.get("points-policy") != "each-test",
                [str(one.get("group")) for one in each.iter("dependency")],
            )
            for each in testset.iter("group")
        }

    def _read_tests(self, testset: ET.Element) -> list[Test]:
        tests = []
        patterns = [
            testset.findtext(f"{kind}-path-pattern", default)
            for kind, default in (("input", "tests/%02d"), ("answer", "tests/%02d.a"))
        ]
        for number, each in enumerate(testset.iterfind("tests/test"), start=1):
            given, answer = (self.root / (pattern % number) for pattern in patterns)
            points = each.get("points")
            tests.append(
                Test(
                    str(number),
                    given,
                    answer,
                    each.get("group", ""),
                    None if points is None else float(points),
                    each.get("sample") == "true",
                )
            )
        return tests

    def find_source(self, path: str) -> Path | None:
        """Return the file of a program that `problem.xml` names; None if it names none."""
        source = self.tree.find(f"assets/{path}/source")
        return None if source is None else self.root / str(source.get("path"))

    def list_resources(self, *, for_solution: bool) -> list[Path]:
        """Return headers that are compiled with programs, or all files of the submission."""
        found = []
        for file in self.tree.iterfind("files/resources/file"):
            path = self.root / str(file.get("path"))
            assets = {str(asset.get("name")).lower() for asset in file.iter("asset")}
            if "solution" in assets if for_solution else path.suffix in _HEADERS:
                found.append(path)
        return [path for path in found if path.is_file()]

    def check_test_files(self) -> None:
        """Check that the package has all tests. Raises: PackageError."""
        missing = [
            path for test in self.tests for path in (test.input, test.answer) if not path.exists()
        ]
        if missing or not self.tests:
            first = missing[0].relative_to(self.root) if missing else "test"
            raise segi_judge.PackageError(
                f"the package has no {first}: download the full package, or run its doall.sh"
            )


class Judge:
    """Judges one submission."""

    def __init__(self, problem: Problem, options: segi_judge.JudgeOptions) -> None:
        self.problem, self.options = problem, options
        problem.check_test_files()
        self.report = segi_judge.CaseReporter(len(problem.tests), options)
        self.limits: Any = {
            "time": options.case_cpu_seconds or problem.time_limit_seconds,
            "memory": segi_judge.choose_memory_limit_bytes(problem.memory),
            "output": segi_judge.MAX_OUTPUT_BYTES,
        }
        self.solution = segi.Solution((), ())
        self.checker = segi.Solution((), ())
        self.interactor: segi.Solution | None = None

    def run(self) -> segi_judge.TotalResult:
        """Judge all tests. Raises: PackageError, RunError."""
        problem = self.problem
        self.solution = self._build_submission()
        if self.solution.fault:
            self.report.send_build_fault(self.solution.fault)
        else:
            self.checker, self.interactor = _build_own(problem)
        has_points = any(test.points is not None for test in problem.tests) or any(
            group.points for group in problem.groups.values()
        )
        groups: dict[str, list[Test]] = {}
        for test in problem.tests:
            groups.setdefault(test.group, []).append(test)
        passed: set[str] = set()
        score = maximum = 0.0
        is_accepted = not self.solution.fault
        for name, tests in groups.items():
            group = problem.groups.get(name, Group(0, bool(name), ()))
            runs = not self.solution.fault and passed.issuperset(group.dependencies)
            stops = group.is_all_or_nothing if has_points else True
            earned, is_passed = self._judge_tests(
                tests, runs=runs and (has_points or is_accepted), stops=stops and bool(name)
            )
            if is_passed:
                passed.add(name)
            is_accepted = is_accepted and is_passed
            most = sum(test.points or 0 for test in tests) or group.points
            if name and group.is_all_or_nothing:
                earned = most if is_passed else 0.0
            if name and has_points:
                segi_judge.send_subtask_result(f"group {name}", earned, most)
            score, maximum = score + earned, maximum + most
        if has_points:
            return segi_judge.TotalResult(is_accepted, score, maximum)
        return segi_judge.TotalResult(is_accepted, score or None)

    def _build_submission(self) -> segi.Solution:
        return segi_judge.build_sources(
            segi_judge.find_submission_files(),
            self.options,
            extra=self.problem.list_resources(for_solution=True),
        )

    def prepare_submission(self) -> segi_judge.PreparedSubmission | None:
        """Build the submission to run on any input. Raises: PackageError, RunError."""
        problem = self.problem
        if problem.find_source("interactor") is not None:
            return None
        names = problem.input_name, problem.output_name
        return segi_judge.PreparedSubmission(self._build_submission(), self.limits, *names)

    def _judge_tests(self, tests: Sequence[Test], *, runs: bool, stops: bool) -> tuple[float, bool]:
        """Judge tests, if it `runs` any; return the points, and whether all are accepted."""
        score, is_passed = 0.0, True
        for test in tests:
            if not runs:
                self.report.send_case(test.name, segi.Judgement("skipped"))
                is_passed = False
                continue
            judgement, result = self._judge_test(test)
            points = judgement.points
            if points is None and test.points is not None:
                points = test.points if judgement.is_accepted else 0.0
            self.report.send_case(
                test.name, judgement, result, points=points, is_secret=not test.is_sample
            )
            score += points or 0.0
            is_passed = is_passed and judgement.is_accepted
            has_failed = not judgement.is_accepted and judgement.verdict != "partial"
            runs = not has_failed or (test.points is not None and not stops)
        return score, is_passed

    def _judge_test(self, test: Test) -> tuple[segi.Judgement, segi.Result]:
        place = segi.make_directory()
        output = place / "output"
        if self.interactor is not None:
            trusted: Any = {
                "time": segi_judge.PACKAGE_PROGRAM_CPU_SECONDS,
                "wall": segi_judge.compute_interaction_wall_seconds(self.limits["time"]),
                "output": None,
                "read": [test.input, test.answer],
                "write": [place],
            }
            both = self.solution.interact(
                self.interactor, [test.input, output, test.answer], trusted, **self.limits
            )
            judgement = segi.judge_by_checker(both.interactor)
            fault = both.solution.fault
            if fault and (judgement.is_accepted or not both.has_interactor_ended_first):
                return fault, both.solution
            if not judgement.is_accepted or not output.exists():
                return judgement, both.solution
            result = both.solution
        else:
            ran = segi_judge.run_with_files(
                self.solution,
                test.input,
                self.problem.input_name,
                self.problem.output_name,
                self.limits,
            )
            result = ran.result
            if ran.fault:
                return ran.fault, result
            output.write_bytes(ran.output)
        checked = segi_judge.run_checker(self.checker, [test.input, output, test.answer])
        output.unlink()  # of many cases, outputs would fill the disk
        return segi.judge_by_checker(checked), result


def judge(root: Path, options: segi_judge.JudgeOptions) -> segi_judge.TotalResult:
    """Judge the submission. Raises: PackageError, RunError."""
    return Judge(Problem(root), options).run()


def prepare_submission(
    root: Path, options: segi_judge.JudgeOptions
) -> segi_judge.PreparedSubmission | None:
    """Build the submission to run on any input. Raises: PackageError, RunError."""
    return Judge(Problem(root), options).prepare_submission()


def _build_own(problem: Problem) -> tuple[segi.Solution, segi.Solution | None]:
    """Return checker and interactor. Raises: PackageError, RunError."""
    checker, interactor = problem.find_source("checker"), problem.find_source("interactor")
    headers = problem.list_resources(for_solution=False)
    if checker is None:
        raise segi_judge.PackageError("problem.xml names no checker")
    built = segi_judge.build_sources([checker], extra=headers)
    if interactor is None:
        return built, None
    return built, segi_judge.build_sources([interactor], extra=headers)


def build_programs(root: Path) -> None:
    """Build checker and interactor. Raises: PackageError, RunError."""
    _build_own(Problem(root))


def check_inputs(root: Path) -> Iterator[tuple[str, segi.Judgement]]:
    """Yield the name of each test, and what the validators say. Raises: PackageError, RunError."""
    problem = Problem(root)
    sources = problem.tree.findall("assets/validators/validator/source")
    headers = problem.list_resources(for_solution=False)
    validators = [
        segi_judge.build_sources([root / str(source.get("path"))], extra=headers)
        for source in sources
    ]
    for test in problem.tests if validators else ():
        words = ["--testset", "tests", *(["--group", test.group] if test.group else [])]
        found = (segi_judge.run_validator(each, test.input, words) for each in validators)
        refused = (judgement for judgement in found if not judgement.is_accepted)
        yield test.name, next(refused, segi.ACCEPTED)


def list_reference_submissions(root: Path) -> segi_judge.ReferenceListing:
    """Return the solutions that `problem.xml` names, with what their tags say."""
    problem = Problem(root)
    references = []
    for solution in problem.tree.iterfind("assets/solutions/solution"):
        tag, source = solution.get("tag", ""), solution.find("source")
        if source is None or tag == "do-not-run":
            continue
        permitted = None
        if tag in ("main", "accepted"):
            permitted = ["accepted"]
        elif tag == "time-limit-exceeded-or-accepted":
            permitted = ["accepted", "time_limit"]
        references.append(
            segi_judge.ReferenceSubmission([str(source.get("path"))], permitted, _FAULTS.get(tag))
        )
    return segi_judge.ReferenceListing(references)
