"""Kattis problem package format: legacy (also of ICPC and DOMjudge), 2023-07 and 2025-09.

Specification: https://www.kattis.com/problem-package-format/spec/. Not read: static validators,
input validators of Checktestdata and VIVA, visualizers, and custom graders.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tawebeval.sandbox.tools.lib import segi, segi_judge
    from tawebeval.sandbox.tools.lib.segi_yaml import read_yaml
else:
    import segi
    import segi_judge
    from segi_yaml import read_yaml

_OUTPUT = 8  # MiB of a submission's output
_ACCEPTED, _WRONG = 42, 43  # exit statuses of validators
_MOST_FEEDBACK = 64 * 1024  # bytes of a file of feedback
_SEVERITY = (
    *("judge_error", "compile_error", "runtime_error", "memory_limit"),
    *("time_limit", "output_limit", "wrong_answer"),
)
_CODES = {
    "AC": "accepted",
    "WA": "wrong_answer",
    "TLE": "time_limit",
    "RTE": "runtime_error",
}
_REFERENCES: Mapping[str, Mapping[str, Any]] = {
    "accepted": {"permitted": ["AC"]},
    "rejected": {"required": ["RTE", "TLE", "WA"]},
    "wrong_answer": {"permitted": ["AC", "WA"], "required": ["WA"]},
    "time_limit_exceeded": {"permitted": ["AC", "WA", "TLE"], "required": ["TLE"]},
    "run_time_error": {"required": ["RTE"]},
    "brute_force": {"permitted": ["AC", "RTE", "TLE"], "required": ["RTE", "TLE"]},
    "partially_accepted": {},
}
_RESULTS = {
    "CORRECT": "AC",
    "ACCEPTED": "AC",
    "WRONG_ANSWER": "WA",
    "NO_OUTPUT": "WA",
    "TIMELIMIT": "TLE",
    "TIME_LIMIT_EXCEEDED": "TLE",
}
"""Results that DOMjudge names in submissions; all others are run-time errors here."""
_EXPECTED_RESULTS = re.compile(rb"@EXPECTED_RESULTS@:([\w ,-]+)")
_INCLUDES = {".cpp": ("cpp",), ".c": ("c",), ".java": ("java",), ".js": ("javascript", "js")}
_PYTHONS = ("python3", "python2", "python")


class Case(NamedTuple):
    """A test case; `name` is its path below data, without its ending."""

    name: str
    input: Path
    answer: Path


class Outcome(NamedTuple):
    """The result of a case or a group."""

    verdict: str
    score: float

    @property
    def is_accepted(self) -> bool:
        """Whether the verdict is "accepted"."""
        return self.verdict == "accepted"


class Group(NamedTuple):
    """A directory of cases and groups, in the order in which they are judged."""

    name: str
    members: list[Any]
    settings: Mapping[str, Any]

    def list_cases_with_groups(self) -> Iterator[tuple[Group, Case]]:
        """Yield the cases of the group and of all groups in it, each with its own group."""
        for member in self.members:
            if isinstance(member, Group):
                yield from member.list_cases_with_groups()
            else:
                yield self, member

    def list_cases(self) -> Iterator[Case]:
        """Yield the cases of the group and of all groups in it."""
        return (case for _, case in self.list_cases_with_groups())


def _read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a file, an empty one without a file. Raises: PackageError."""
    try:
        found = read_yaml(path) or {}
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise segi_judge.PackageError(f"{path.name} is not a mapping")
    return found


def _words(value: Any) -> list[str]:
    """Return the words of a list, or of a string as a shell splits it; none of an empty value."""
    if isinstance(value, dict):  # of a validator with a name
        value = value.get("flags", "")
    if isinstance(value, list):
        return [str(word) for word in value]
    return [] if value is None else shlex.split(str(value))


class Problem:
    """The metadata of a package. Raises: PackageError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metadata = _read_mapping(root / "problem.yaml")
        self.is_legacy = str(self.metadata.get("problem_format_version", "legacy")).startswith(
            "legacy"
        )
        kinds = self.metadata.get("type", "pass-fail")
        validation = str(self.metadata.get("validation", "default")).split()
        self.kinds = {*_words(kinds), *validation[1:]}
        self.is_scoring = "scoring" in self.kinds
        self.limits: Any = self.metadata.get("limits") or {}
        if not isinstance(self.limits, dict):
            raise segi_judge.PackageError(f"problem.yaml: limits are {self.limits!r}, no mapping")
        self.memory = self.read_limit("memory")
        self.output = int(self.read_limit("output", _OUTPUT) * segi.MIB)
        self.passes = int(self.read_limit("validation_passes", 2))
        for pattern in ("include/**/*", "*put_validator*/**/*", "data/**/test_group.yaml"):
            self.replace_constants(root.glob(pattern))
        for kind, name in (
            ("static validators", "static_validator"),
            ("custom graders", "graders"),
        ):
            if (root / name).exists():
                raise segi_judge.PackageError(f"{kind} are not supported")

    def read_limit(self, name: str, default: Any = None) -> Any:
        """Return a number of `limits`, or the default. Raises: PackageError."""
        value = self.limits.get(name)
        return default if value is None else segi_judge.read_number(value, f"problem.yaml: {name}")

    def replace_constants(self, files: Iterable[Path]) -> None:
        """Write the values of constants into files of this evaluation's copy of the package."""
        constants = self.metadata.get("constants") or {}
        if not isinstance(constants, dict):
            raise segi_judge.PackageError(f"problem.yaml: constants are {constants!r}, no mapping")

        def find_value(found: re.Match[bytes]) -> bytes:
            value = constants.get(found[1].decode())
            if isinstance(value, dict):
                value = value.get((found[2] or b"value").decode())
            return found[0] if value is None else str(value).encode()

        for path in files if constants else ():
            if path.is_file():
                old = path.read_bytes()
                new = re.sub(rb"\{\{(\w+)(?:\.(\w+))?\}\}", find_value, old)
                if new != old:
                    path.write_bytes(new)

    @property
    def time_limit_seconds(self) -> float | None:
        """Seconds of processor time of a case; None if the package has no limit."""
        limit = self.read_limit("time_limit")
        for name, pattern in (
            ("domjudge-problem.ini", r"^\s*timelimit\s*=\s*['\"]?([0-9.]+)"),
            (".timelimit", r"^\s*([0-9.]+)"),
        ):
            path = self.root / name
            if limit is None and path.is_file():
                found = re.search(pattern, path.read_text("utf-8"), re.MULTILINE)
                limit = found and found[1]
        return None if limit is None else segi_judge.read_number(limit, "the limit of time")

    def find_output_validators(self) -> list[Path]:
        """Return the paths of the output validators, none for the default one."""
        found = []
        for name in ("output_validator", "output_validators"):
            directory = self.root / name
            if directory.is_dir():
                found += [path for path in sorted(directory.iterdir()) if path.name[0] not in "-."]
        if found and not self.is_legacy and not any(path.is_dir() for path in found):
            return [found[0].parent]  # the directory is the program
        return found

    def read_groups(self) -> Group:
        """Return the groups `sample` and `secret` as one. Raises: PackageError."""
        data = self.root / "data"
        settings = _read_mapping(data / "testdata.yaml")
        members = [
            _read_group(data / name, name, settings)
            for name in ("sample", "secret")
            if (data / name).is_dir()
        ]
        return Group("", members, settings)


def _read_group(directory: Path, name: str, inherited: Mapping[str, Any]) -> Group:
    own: dict[str, Any] = {}
    for file in ("testdata.yaml", "test_group.yaml"):
        own.update(_read_mapping(directory / file))
    # Scores are those of a group alone, where the format is not the legacy one.
    alone = ("max_score", "score_aggregation", "require_pass", "scoring")
    passed = {key: value for key, value in inherited.items() if key not in alone}
    settings = {**passed, **own}
    members: list[tuple[str, Any]] = []
    for path in directory.iterdir():
        if path.name[0] in "-.":
            continue
        if path.is_dir() and path.suffix != ".files":
            members.append((path.name, _read_group(path, f"{name}/{path.name}", settings)))
        elif path.suffix == ".in":
            case = Case(f"{name}/{path.stem}", path, path.with_suffix(".ans"))
            members.append((path.stem, case))
    members.sort(key=lambda member: member[0])
    return Group(name, [member for _, member in members], settings)


class Scoring(NamedTuple):
    """How a group makes one result of those of its members."""

    stops_at_rejection: bool
    """Whether the first rejection ends the group."""
    verdict_mode: str
    score_mode: str
    accept_score: float
    reject_score: float
    maximum: float | None
    accepts_if_any_accepted: bool


def _read_scoring(group: Group, problem: Problem) -> Scoring:
    """Return the scoring of a group. Raises: PackageError."""
    settings = group.settings
    flags = _words(settings.get("grader_flags", ""))
    if str(settings.get("grading", "default")) == "custom":
        raise segi_judge.PackageError("custom graders are not supported")
    old = settings.get("scoring")  # of drafts of 2023-07
    if isinstance(old, dict):
        settings = {"max_score": old.get("score", "unbounded"), **settings}
        settings["score_aggregation"] = old.get("aggregation", "sum")
    if problem.is_scoring and not problem.is_legacy and not _has_legacy_keys(group.settings):
        return _read_new_scoring(group, settings)
    modes = [flag for flag in flags if flag in ("worst_error", "first_error", "always_accept")]
    scores = [flag for flag in flags if flag in ("sum", "avg", "min", "max")]
    maximum = None
    if "range" in settings:
        highest = segi_judge.read_number(
            [None, *str(settings["range"]).split()][-1], "testdata.yaml: the end of range"
        )
        maximum = highest if abs(highest) < 2**53 else None
    breaks = settings.get("on_reject", "break") == "break"
    return Scoring(
        breaks or not problem.is_scoring,
        modes[-1] if modes else "worst_error",
        scores[-1] if scores else "sum",
        segi_judge.read_number(settings.get("accept_score", 1), "testdata.yaml: accept_score"),
        segi_judge.read_number(settings.get("reject_score", 0), "testdata.yaml: reject_score"),
        maximum,
        "accept_if_any_accepted" in flags,
    )


def _has_legacy_keys(settings: Mapping[str, Any]) -> bool:
    return not settings.keys().isdisjoint(
        ("grader_flags", "on_reject", "accept_score", "reject_score", "range")
    )


def _read_new_scoring(group: Group, settings: Mapping[str, Any]) -> Scoring:
    is_secret = group.name == "secret"
    has_groups = any(isinstance(member, Group) for member in group.members)
    mode = str(
        settings.get("score_aggregation", "sum" if is_secret or not group.name else "pass-fail")
    )
    most = settings.get("max_score", 100 if is_secret and "scoring" not in settings else None)
    maximum = None
    if most not in (None, "unbounded"):
        maximum = segi_judge.read_number(most, "test_group.yaml: max_score")
    share = maximum or 0.0
    if mode == "sum" and not has_groups:
        share /= max(len(list(group.list_cases())), 1)
    return Scoring(
        stops_at_rejection=mode != "sum" and not has_groups,
        # The score counts, not the verdict, but for what other groups require.
        verdict_mode="worst_error",
        score_mode="sum" if mode == "sum" else "min",
        accept_score=share,
        reject_score=0.0,
        maximum=maximum,
        accepts_if_any_accepted=has_groups or mode == "sum",
    )


def _find_maximum(group: Group, problem: Problem) -> float | None:
    """Return the highest score of a group; None if it is unknown. Raises: PackageError."""
    scoring = _read_scoring(group, problem)
    if scoring.maximum is not None or scoring.score_mode != "sum":
        return scoring.maximum
    parts = [
        _find_maximum(member, problem) if isinstance(member, Group) else None
        for member in group.members
        if not isinstance(member, Group) or member.name != "sample"
    ]
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


class Judge:
    """Judges one submission."""

    def __init__(self, problem: Problem, options: segi_judge.JudgeOptions) -> None:
        self.problem, self.options = problem, options
        self.root_group = problem.read_groups()
        self.answers: Sequence[Path] | None = None  # submitted in place of a program
        if "submit-answer" in problem.kinds:
            secret = [each for each in self.root_group.members if each.name == "secret"]
            self.root_group = self.root_group._replace(members=secret)
        cases = list(self.root_group.list_cases())
        for case in cases:
            if not case.answer.is_file():
                raise segi_judge.PackageError("a case has no answer", f"{case.name}.ans is missing")
        self.report = segi_judge.CaseReporter(len(cases), options)
        self.validators: list[segi.Solution] = []
        self.solution = segi.Solution((), ())
        limit = options.case_cpu_seconds or problem.time_limit_seconds
        self.time = limit or segi_judge.DEFAULT_CASE_CPU_SECONDS
        self.memory = segi_judge.choose_memory_limit_bytes(problem.memory)
        self.verdicts: dict[str, str] = {}  # of groups

    def run(self) -> segi_judge.TotalResult:
        """Judge all cases. Raises: PackageError, RunError."""
        files = segi_judge.find_submission_files()
        is_for_author = self.options.reveals_secret_cases
        if is_for_author:  # it may be a submission of the package, which has constants, too
            place = segi.make_directory()
            files = [Path(shutil.copyfile(file, place / file.name)) for file in files]
            self.problem.replace_constants(files)
        is_program = segi_judge.normalize_extension(files[0]) in segi_judge.LANGUAGES
        if "submit-answer" in self.problem.kinds and not (is_for_author and is_program):
            self.answers = files
        else:
            self.solution = self._build_submission(files)
        if self.solution.fault:
            cases = list(self.root_group.list_cases())
            fault = self.solution.fault
            self.report.send_build_fault(fault)
            for case in cases:
                self.report.send_case(case.name, segi.Judgement("skipped"))
            return self._make_total([Outcome(fault.verdict, 0.0)])
        self.validators = [
            segi_judge.build_package_program(path) for path in self.problem.find_output_validators()
        ]
        scoring = _read_scoring(self.root_group, self.problem)
        outcomes: list[Outcome] = []
        for group in self.root_group.members:
            if self._stops(outcomes, scoring.stops_at_rejection and not self.problem.is_scoring):
                self._skip(group)
            else:
                outcomes.append(self._judge_group(group))
        return self._make_total(outcomes)

    def prepare_submission(self) -> segi_judge.PreparedSubmission | None:
        """Build the submission to run on any input. Raises: PackageError, RunError."""
        if self.problem.kinds & {"interactive", "multi-pass", "submit-answer"}:
            return None
        self.solution = self._build_submission(segi_judge.find_submission_files())
        limits = None if self.solution.fault else self._make_limits()
        return segi_judge.PreparedSubmission(self.solution, limits)

    def _build_submission(self, files: Sequence[Path]) -> segi.Solution:
        includes = _find_includes(self.problem.root, files[0])
        return segi_judge.build_sources(files, self.options, extra=includes)

    def _make_total(self, outcomes: list[Outcome]) -> segi_judge.TotalResult:
        is_accepted = all(outcome.is_accepted for outcome in outcomes)
        if not self.problem.is_scoring:
            return segi_judge.TotalResult(is_accepted)
        # Of sample and secret only the latter counts, as with the flag ignore_sample.
        last, maximum = outcomes[-1], _find_maximum(self.root_group, self.problem)
        score = last.score if last.is_accepted else 0.0
        is_full = score >= maximum - 1e-9 if maximum else is_accepted
        return segi_judge.TotalResult(is_full, score, maximum)

    def _stops(self, outcomes: list[Outcome], breaks: bool) -> bool:
        return breaks and any(not outcome.is_accepted for outcome in outcomes)

    def _skip(self, member: Any) -> None:
        for case in member.list_cases() if isinstance(member, Group) else [member]:
            self.report.send_case(case.name, segi.Judgement("skipped"))

    def _judge_group(self, group: Group) -> Outcome:
        scoring = _read_scoring(group, self.problem)
        required = group.settings.get("require_pass", [])
        names = required if isinstance(required, list) else [required]
        outcomes: list[Outcome] = []
        if any(self.verdicts.get(str(name), "accepted") != "accepted" for name in names):
            self._skip(group)
            outcome = Outcome("skipped", 0.0)
        else:
            for member in group.members:
                if self._stops(outcomes, scoring.stops_at_rejection):
                    self._skip(member)
                elif isinstance(member, Group):
                    outcomes.append(self._judge_group(member))
                else:
                    outcomes.append(self._judge_case(member, group, scoring))
            outcome = _aggregate(outcomes, scoring)
        self.verdicts[group.name] = outcome.verdict
        if self.problem.is_scoring and group.name.count("/") == 1:
            score = outcome.score if outcome.is_accepted else 0.0
            name = group.name.removeprefix("secret/")
            if not group.name.startswith("sample/"):
                segi_judge.send_subtask_result(name, score, scoring.maximum)
        return outcome

    def _judge_case(self, case: Case, group: Group, scoring: Scoring) -> Outcome:
        own = _read_mapping(case.input.with_suffix(".yaml"))
        settings = {**group.settings, **own}
        flags = _words(self.problem.metadata.get("validator_flags", ""))
        flags += _words(
            settings.get("output_validator_args", settings.get("output_validator_flags", ""))
        )
        arguments = _words(settings.get("args", []))
        feedback = segi.make_directory()
        judgement, result = self._run_passes(case, flags, arguments, feedback)
        score = scoring.reject_score
        if judgement.is_accepted:
            score = self._read_score(feedback, scoring)
        is_secret = not case.name.startswith("sample/")
        message = _read_feedback(feedback, "teammessage.txt").strip()[:1000]
        if not judgement.message and not judgement.is_accepted:
            text = _read_feedback(feedback, "judgemessage.txt").strip()[:1000]
            judgement = judgement._replace(message=text)
        self.report.send_case(
            case.name,
            judgement,
            result,
            points=score if self.problem.is_scoring else None,
            is_secret=is_secret,
            message=message,
        )
        return Outcome(judgement.verdict, score)

    def _run_passes(
        self, case: Case, flags: list[str], arguments: list[str], feedback: Path
    ) -> tuple[segi.Judgement, segi.Result | None]:
        """Run a case until no next pass is wanted."""
        source, count = case.input, 1
        following = feedback / "nextpass.in"
        while True:
            judgement, result = self._run_pass(case, source, flags, arguments, feedback)
            if "multi-pass" not in self.problem.kinds or not following.exists():
                return judgement, result
            count += 1
            if not judgement.is_accepted:
                return judgement, result
            if count > self.problem.passes:
                return segi.Judgement("judge_error", "more passes than allowed"), result
            source = segi.make_directory() / "input"
            output = segi.read_output(following)
            if output.fault:
                return output.fault._replace(verdict="judge_error"), result
            source.write_bytes(output.content)
            following.unlink()

    def _run_pass(
        self, case: Case, source: Path, flags: list[str], arguments: list[str], feedback: Path
    ) -> tuple[segi.Judgement, segi.Result | None]:
        trusted: Any = {
            "time": self.problem.read_limit(
                "validation_time", segi_judge.PACKAGE_PROGRAM_CPU_SECONDS
            ),
            "wall": segi_judge.compute_interaction_wall_seconds(self.time),
            "read": [source, case.answer],
            "write": [feedback],
        }
        words: list[str | Path] = [source, case.answer, f"{feedback}/", *flags]
        result = None
        if self.answers is not None:
            file = _find_answer(case, self.answers)
            if file is None:
                (feedback / "teammessage.txt").write_text("its file is missing")
                return segi.Judgement("wrong_answer"), None
            printed = file.read_bytes()
        else:
            solution = self.solution._replace(command=[*self.solution.command, *arguments])
            limits = self._make_limits(case)
            if "interactive" in self.problem.kinds:
                return self._interact(solution, limits, words, trusted)
            result = solution.run(source, **limits)
            if result.fault:
                return result.fault, result
            printed = result.stdout
        if not self.validators:
            return compare_outputs(printed, case.answer.read_bytes(), flags), result
        for validator in self.validators:
            judged = _judge_by_status(
                segi.run(
                    [*validator.command, *words],
                    printed,
                    **{**trusted, "read": [*validator.files, *trusted["read"]]},
                )
            )
            if not judged.is_accepted:
                return judged, result
        return segi.ACCEPTED, result

    def _make_limits(self, case: Case | None = None) -> Any:
        """Return limits and files of the submission."""
        limits: Any = {
            "time": self.time,
            "memory": self.memory,
            "output": min(self.problem.output, segi_judge.MAX_OUTPUT_BYTES),
            "file_size": self.problem.output,
            # Where the files of the submission are, maybe with those of the case.
            "directory": self.solution.files[-1],
        }
        files = case and case.input.with_suffix(".files")
        if files and files.is_dir():
            limits["directory"] = segi.make_directory()
            for each in (self.solution.files[-1], files):
                shutil.copytree(each, limits["directory"], dirs_exist_ok=True)
            limits["read"] = [limits["directory"]]
        return limits

    def _interact(
        self, solution: segi.Solution, limits: Any, words: list[str | Path], trusted: Any
    ) -> tuple[segi.Judgement, segi.Result]:
        if not self.validators:
            raise segi_judge.PackageError("an interactive problem without output validator")
        own: Any = {**trusted, "output": None}  # it is passed on, not kept
        both = solution.interact(self.validators[0], words, own, accept=_ACCEPTED, **limits)
        judged = _judge_by_status(both.interactor)
        if both.has_interactor_ended_first and not judged.is_accepted:
            return judged, both.solution
        return both.solution.fault or judged, both.solution

    def _read_score(self, feedback: Path, scoring: Scoring) -> float:
        if not self.problem.is_scoring:
            return scoring.accept_score
        for name in ("score.txt", "score_multiplier.txt"):
            text = _read_feedback(feedback, name).strip()
            if text:
                try:
                    score = float(text)
                except ValueError:
                    raise segi_judge.PackageError(f"{name} has no number", text[:50]) from None
                return score if name == "score.txt" else score * scoring.accept_score
        return scoring.accept_score


def _aggregate(outcomes: list[Outcome], scoring: Scoring) -> Outcome:
    """Return the result of a group, as the default grader does."""
    verdicts = [outcome.verdict for outcome in outcomes if not outcome.is_accepted]
    scores = [outcome.score for outcome in outcomes]
    if (
        not verdicts
        or scoring.verdict_mode == "always_accept"
        or (scoring.accepts_if_any_accepted and len(verdicts) < len(outcomes))
    ):
        verdict = "accepted"
    elif scoring.verdict_mode == "first_error":
        verdict = verdicts[0]
    else:
        known = [each for each in _SEVERITY if each in verdicts]
        verdict = known[0] if known else verdicts[0]
    if scoring.score_mode in ("min", "max"):
        score = (min if scoring.score_mode == "min" else max)(scores, default=0.0)
    else:
        score = sum(scores)
        if scoring.score_mode == "avg" and scores:
            score /= len(scores)
    return Outcome(verdict, score)


def _judge_by_status(result: segi.Result) -> segi.Judgement:
    """Return the judgement of an output validator."""
    if result.reason is None and result.signal is None:
        if result.exit_status == _ACCEPTED:
            return segi.ACCEPTED
        if result.exit_status == _WRONG:
            return segi.Judgement("wrong_answer")
    fault = result.fault
    return segi.Judgement(
        "judge_error", f"output validator: {fault.message if fault else 'exit status 0'}"
    )


def _find_answer(case: Case, files: Iterable[Path]) -> Path | None:
    """Return the file with the longest stem that is the end of the name of the case."""
    name = case.name.replace("/", "_")
    found = [file for file in files if name.endswith(f"_{file.stem}")]
    return max(found, key=lambda file: len(file.stem), default=None)


def _read_feedback(feedback: Path, name: str) -> str:
    """Return a file of the feedback directory, "" without one; only its beginning."""
    output = segi.read_output(feedback / name, _MOST_FEEDBACK)
    return output.content.decode(errors="replace")


def compare_outputs(printed: bytes, expected: bytes, flags: list[str]) -> segi.Judgement:
    """Compare outputs as the default output validator does. Raises: PackageError."""
    tolerances: dict[str, float | None] = {"absolute": None, "relative": None}
    is_exact = keeps_spaces = False
    words = iter(flags)
    for flag in words:
        name = flag.removeprefix("--")
        if name == "case_sensitive":
            is_exact = True
        elif name == "space_change_sensitive":
            keeps_spaces = True
        elif name in ("float_tolerance", "float_absolute_tolerance", "float_relative_tolerance"):
            try:
                value = float(next(words, ""))
            except ValueError:
                raise segi_judge.PackageError(f"{name} without a number") from None
            for kind in tolerances:
                if name in ("float_tolerance", f"float_{kind}_tolerance"):
                    tolerances[kind] = value
        else:
            raise segi_judge.PackageError(f"the default validator has no flag {flag!r}")
    absolute, relative = tolerances["absolute"], tolerances["relative"]

    def are_same(one: bytes, other: bytes) -> bool:
        if one == other:
            return True
        wanted = None if absolute is None and relative is None else segi.parse_number(other)
        if wanted is not None:
            number = segi.parse_number(one)
            most = max(absolute or 0.0, (relative or 0.0) * abs(wanted))
            return number is not None and abs(number - wanted) <= most
        return not is_exact and one.lower() == other.lower()

    pattern = re.compile(rb"\s+|\S+" if keeps_spaces else rb"\S+")
    ours, theirs = ((found[0] for found in pattern.finditer(text)) for text in (printed, expected))
    return segi.compare_parts("word", ours, theirs, are_same)


def _find_includes(root: Path, source: Path) -> list[Path]:
    """Return the files that are added to a submission in the language of `source`."""
    ending = segi_judge.normalize_extension(source)
    names = ("default", *(_PYTHONS if ending == ".py" else _INCLUDES.get(ending, ())))
    directories = [root / "include" / name for name in names]
    return [
        path
        for directory in directories
        if directory.is_dir()
        for path in sorted(directory.iterdir())
    ]


def judge(root: Path, options: segi_judge.JudgeOptions) -> segi_judge.TotalResult:
    """Judge the submission. Raises: PackageError, RunError."""
    return Judge(Problem(root), options).run()


def prepare_submission(
    root: Path, options: segi_judge.JudgeOptions
) -> segi_judge.PreparedSubmission | None:
    """Build the submission to run on any input. Raises: PackageError, RunError."""
    return Judge(Problem(root), options).prepare_submission()


def build_programs(root: Path) -> None:
    """Build the output validators. Raises: PackageError, RunError."""
    for path in Problem(root).find_output_validators():
        segi_judge.build_package_program(path)


def check_inputs(root: Path) -> Iterator[tuple[str, segi.Judgement]]:
    """Yield the name of each case, and what the input validators say; not those in other languages.

    Raises: PackageError, RunError.
    """
    problem = Problem(root)
    paths = [
        path
        for name in ("input_validators", "input_format_validators")
        for path in sorted((root / name).glob("*"))
        if path.is_dir() or segi_judge.normalize_extension(path) in segi_judge.LANGUAGES
    ]
    programs = [(path.name, segi_judge.build_package_program(path)) for path in paths]
    for group, case in problem.read_groups().list_cases_with_groups() if programs else ():
        settings = {**group.settings, **_read_mapping(case.input.with_suffix(".yaml"))}
        given = settings.get("input_validator_args", settings.get("input_validator_flags", ""))
        judgement = segi.ACCEPTED
        for name, program in programs:
            flags = given
            if isinstance(given, dict):
                own = given.get("flags", "") if given.get("name") == name else ""
                flags = given.get(name, given.get(Path(name).stem, own))
            if judgement.is_accepted:
                judgement = segi_judge.run_validator(
                    program, case.input, _words(flags), accept=_ACCEPTED
                )
        yield case.name, judgement


def _read_codes(codes: Any, where: str) -> list[str]:
    """Return the verdicts of codes such as AC. Raises: PackageError."""
    for code in codes if isinstance(codes, list) else [codes]:
        if not isinstance(codes, list) or str(code) not in _CODES:
            known = ", ".join(_CODES)
            raise segi_judge.PackageError(
                f"submissions.yaml: {where} has {code!r}, not a list of {known}"
            )
    return [_CODES[code] for code in codes]


def _find_expected_results(source: Path) -> Mapping[str, Any]:
    """Return what a submission says of its own result, as DOMjudge reads it."""
    found = _EXPECTED_RESULTS.search(source.read_bytes())
    if found is None:
        return {}
    names = found[1].decode().upper().replace("-", "_").split(",")
    codes = [_RESULTS.get(name.strip(), "RTE") for name in names if name.strip()]
    if not codes:
        return {}
    return {"permitted": list(dict.fromkeys(["AC", *codes])), "required": codes}


def list_reference_submissions(root: Path) -> segi_judge.ReferenceListing:
    """Return the submissions below `submissions/`. Raises: PackageError."""
    problem = Problem(root)
    top = root / "submissions"
    known = _read_mapping(top / "submissions.yaml")
    maximum = None
    if problem.is_scoring:
        maximum = _find_maximum(problem.read_groups(), problem)
    references = []
    directories = (path for path in sorted(top.glob("*")) if path.is_dir())
    for path in (path for directory in directories for path in sorted(directory.iterdir())):
        if path.name[0] in "-.":
            continue
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else []
        given = [str(each.relative_to(root)) for each in files or [path]]
        expected = dict(_REFERENCES.get(path.parent.name, {}))
        for file in files or [path]:
            expected.update(_find_expected_results(file))
        name = f"{path.parent.name}/{path.name}"
        for pattern, value in known.items():
            if isinstance(value, dict) and (
                fnmatch.fnmatchcase(name, pattern) or pattern == path.parent.name
            ):
                expected.update(
                    {key: value[key] for key in ("permitted", "required", "score") if key in value}
                )
                entry = str(value.get("entrypoint", ""))
                given.sort(key=lambda each, entry=entry: Path(each).name != entry)  # type: ignore[misc]
        score = expected.get("score")
        if score is not None:
            limits = score if isinstance(score, list) and score else [score]
            where = f"submissions.yaml: score of {name}"
            low, high = (segi_judge.read_number(limits[at], where) for at in (0, -1))
            score = (low, high)
        elif problem.is_scoring and maximum is not None:
            score = {
                "accepted": (maximum, maximum),
                "partially_accepted": (1e-9, maximum - 1e-9),
            }.get(path.parent.name)
        permitted, required = (
            _read_codes(expected[key], f"{key} of {name}") if key in expected else None
            for key in ("permitted", "required")
        )
        references.append(segi_judge.ReferenceSubmission(given, permitted, required, score))
    margins = problem.limits.get("time_multipliers") or {}
    if not isinstance(margins, dict):
        raise segi_judge.PackageError(f"problem.yaml: time_multipliers are {margins!r}, no mapping")
    default = 5.0 if problem.is_legacy else 2.0
    margin = margins.get("ac_to_time_limit", default)
    margin = segi_judge.read_number(margin, "problem.yaml: ac_to_time_limit")
    multiplier = problem.read_limit("time_multiplier", margin)
    return segi_judge.ReferenceListing(
        references,
        multiplier if problem.time_limit_seconds is None else None,
        problem.read_limit("time_resolution", 1.0),
    )
