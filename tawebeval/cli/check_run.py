"""Work of `tawebeval check DIRECTORY`: all reference submissions, and what is expected of them."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import attrs
import click
from msgspec import structs

from tawebeval.cli.output import Screen, escape_table_row
from tawebeval.cli.runtime import FAILED, GOOD, WRONG
from tawebeval.cli.try_run import (
    CHECKOUT_NAME,
    NULL_COMMIT_OID,
    LocalEvaluationFactory,
    check_local_options,
    open_evaluation_factory,
    run_evaluation,
    run_reactor,
    write_upload_files,
)
from tawebeval.config import ProblemSettings
from tawebeval_client.events import Data, EvaluationError, Page

JUDGE_COMMAND = "tawebeval-judge --explain"
"""The evaluator of a package."""
_PACKAGE = "package"
"""The problem whose build is that of the package."""
_FAILURES = ("memory_limit", "output_limit", "compile_error")  # as "runtime_error"
_OWN = "problem.toml"
_STATE_COLOURS = {"ok": "green", "skipped": "yellow", "unknown": None}


class UncheckablePackage(Exception):
    """A directory that cannot be checked; `str()` is the reason."""


@attrs.frozen
class Expectation:
    """A reference submission, and what is expected of it; None allows everything.

    `files` are paths in the directory, by field. `permitted_verdicts` are those that all cases may
    have, `required_verdicts` those of which at least one has to occur, `score` the lowest and the
    highest score, `goals` which goals are reached. The evaluator runs the `required_programs`.
    """

    files: Mapping[str, str]
    permitted_verdicts: Sequence[str] | None = None
    required_verdicts: Sequence[str] | None = None
    score: Sequence[float] | None = None
    goals: Mapping[str, bool] | None = None
    required_programs: Sequence[str] = ()

    @property
    def submission_name(self) -> str:
        """The path of the only file, or of the directory of all; "(inputs)" without files."""
        paths = list(self.files.values())
        if not paths:
            return "(inputs)"
        return paths[0] if len(paths) == 1 else str(Path(paths[0]).parent)

    @property
    def requires_acceptance(self) -> bool:
        """Whether all cases have to be accepted."""
        return self.permitted_verdicts == ["accepted"]

    def describe(self) -> str:
        """Return the expectation in a few words."""
        if self.goals is not None:
            return _join_goals(self.goals)
        words = [" or ".join(self.required_verdicts or self.permitted_verdicts or ())]
        if self.score is not None:
            low, high = self.score
            words.append(f"score {low:g}" if low == high else f"score {low:g} to {high:g}")
        return ", ".join(filter(None, words)) or "-"


def _join_goals(goals: Mapping[str, bool]) -> str:
    return ", ".join(goal for goal, reached in goals.items() if reached) or "no goals"


@attrs.define
class ObservedResults:
    """What an evaluation has sent."""

    verdicts: list[str] = attrs.field(factory=list)
    goals: dict[str, bool] = attrs.field(factory=dict)
    score: float | None = None
    max_case_seconds: float = 0.0
    skip_reason: str | None = None
    failure_message: str | None = None
    reference_listing: Mapping[str, Any] | None = None
    rejection_message: str = ""
    """That of the first case that is not accepted."""

    def add_page(self, page: Page) -> None:
        """Add the values of a page."""
        for event in page.events:
            if isinstance(event, EvaluationError) and event.is_failure:
                text = str(event.members.get("stderr", "")).strip()
                self.failure_message = text or event.message
            elif isinstance(event, Data):
                with suppress(ValueError, KeyError, TypeError):  # data of another kind
                    self._add_value(event.payload)

    def _add_value(self, value: Any) -> None:
        match value["type"]:
            case "case" if value["verdict"] != "skipped":
                verdict = str(value["verdict"])
                if verdict != "accepted" and self.verdict == "accepted":
                    text = f"{value['case']}: {value.get('message', '')}"
                    self.rejection_message = text.rstrip(": ")
                self.verdicts.append("runtime_error" if verdict in _FAILURES else verdict)
                self.max_case_seconds = max(self.max_case_seconds, value.get("time") or 0.0)
            case "goal_result":
                self.goals[str(value["goal"])] = value["result"]
            case "score" if "goal" not in value and "name" not in value:
                self.score = value["score"]
            case "cannot_judge":
                self.skip_reason = str(value["message"])
            case "references":
                self.reference_listing = value

    @property
    def verdict(self) -> str:
        """The first verdict that is not "accepted", if there is one."""
        return next((each for each in self.verdicts if each != "accepted"), "accepted")

    def describe(self) -> str:
        """Return what was found in a few words."""
        if self.skip_reason is not None or self.failure_message is not None:
            return "failed" if self.skip_reason is None else "-"
        if not self.verdicts:
            return _join_goals(self.goals)
        count = self.verdicts.count("accepted")
        words = f"{self.verdict}, {count}/{len(self.verdicts)}"
        return words if self.score is None else f"{words}, score {self.score:g}"

    def compare(self, expected: Expectation) -> tuple[str, str]:
        """Return "ok", "differs", "skipped" or "unknown", and why."""
        if self.skip_reason is not None:
            return "skipped", self.skip_reason
        if self.failure_message is not None:
            return "differs", self.failure_message
        if expected.goals is not None:
            return ("ok" if self.goals == expected.goals else "differs"), ""
        permitted, required = expected.permitted_verdicts, expected.required_verdicts
        score = expected.score
        if permitted is None and required is None and score is None:
            return "unknown", "the package does not say what to expect"
        verdicts = {*self.verdicts}
        fits = (
            bool(verdicts)
            and (permitted is None or verdicts <= {*permitted})
            and (required is None or not verdicts.isdisjoint(required))
        )
        if score is not None:
            low, high = score
            fits = fits and self.score is not None and low - 1e-6 <= self.score <= high + 1e-6
        return ("ok", "") if fits else ("differs", self.rejection_message)


def read_problem_toml(root: Path) -> tuple[str, list[Expectation]]:
    """Return the evaluator of a problem with `problem.toml`, and its solutions.

    Raises: UncheckablePackage.
    """
    try:
        table = tomllib.loads((root / _OWN).read_text("utf-8"))
        goals: dict[str, list[str]] = table["solutions"]
        found = {path.name for path in (root / "solutions").iterdir()}
        different = found ^ set(goals)
        if different:
            raise UncheckablePackage(
                f"{_OWN} and solutions/ differ: {', '.join(sorted(different))}"
            )
        expectations = [
            Expectation(
                {table["field"]: f"solutions/{name}"},
                goals={goal: goal in reached for goal in table["goals"]},
                required_programs=[
                    *table.get("needs", ()),
                    *(["g++"] if name.endswith(".cpp") else []),
                ],
            )
            for name, reached in goals.items()
        ]
        return table["evaluator_cmd"], expectations
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UncheckablePackage(f"{root / _OWN}: {error!r}") from None


def parse_expectations(value: Mapping[str, Any]) -> list[Expectation]:
    """Return the expectations of a value that `tawebeval-judge --list` has sent."""
    found = []
    for reference in value["references"]:
        files = reference["files"]
        names = ["source", *(f"file_{number}" for number in range(1, len(files)))]
        expected = (reference[key] for key in ("permitted", "required", "score"))
        found.append(Expectation(dict(zip(names, files, strict=True)), *expected))
    return sorted(found, key=lambda each: not each.requires_acceptance)


def compute_time_limit(slowest: float, listing: Mapping[str, Any]) -> float:
    """Return the limit for the rest from the seconds of the slowest accepted submission."""
    resolution = float(listing["resolution"])
    steps = math.ceil(slowest * float(listing["multiplier"]) / resolution)
    return max(steps, 1) * resolution


@attrs.define
class ReferenceChecker:
    """Judges the references of a directory one after the other, and prints a line for each."""

    _factory: LocalEvaluationFactory
    _screen: Screen
    _root: Path
    _seed: int
    _as_json: bool
    _problem: str | None = None  # whose build is used
    _count: int = 0
    _rows: list[dict[str, Any]] = attrs.field(factory=list)

    async def check(self, time: float | None) -> int:
        """Return the exit status. Raises: UncheckablePackage."""
        if (self._root / _OWN).is_file():
            evaluator, expectations = read_problem_toml(self._root)
            await self._check_each(evaluator, expectations)
        else:
            await self._check_package(time)
        if self._as_json:
            click.echo(json.dumps(self._rows, indent=2, ensure_ascii=False))
        differing = sum(row["state"] == "differs" for row in self._rows)
        skipped = sum(row["state"] == "skipped" for row in self._rows)
        total = f"{len(self._rows)} submissions"
        self._screen.show_message(
            f"{total}: {differing} not as expected, {skipped} skipped"
            if differing or skipped
            else f"{total}: all as expected"
        )
        return FAILED if differing else GOOD

    async def _check_package(self, time: float | None) -> None:
        listed = await self._evaluate("tawebeval-judge --list", {"source": b""})
        if listed.reference_listing is None:
            raise UncheckablePackage(
                listed.failure_message or "tawebeval-judge has listed no submissions"
            )
        listing = listed.reference_listing
        expectations = parse_expectations(listing)
        inputs = await self._evaluate(f"{JUDGE_COMMAND} --inputs", {"source": b""})
        if inputs.verdicts or inputs.failure_message:
            self._add_row(Expectation({}, permitted_verdicts=["accepted"]), inputs)
        elif not expectations:
            raise UncheckablePackage("the package has no submissions")
        self._problem = _PACKAGE
        option = f" --time {time:g}" if time is not None else ""
        accepted = [each for each in expectations if each.requires_acceptance]
        slowest = await self._check_each(JUDGE_COMMAND + option, accepted)
        if time is None and slowest and listing["multiplier"] is not None:
            option = f" --time {compute_time_limit(slowest, listing):g}"
            self._screen.show_message(
                f"time limit of the rest: {listing['multiplier']:g} times the slowest accepted"
                f" submission, rounded up: tawebeval-judge{option}"
            )
        rest = [each for each in expectations if not each.requires_acceptance]
        await self._check_each(JUDGE_COMMAND + option, rest)

    async def _check_each(self, evaluator: str, expectations: Sequence[Expectation]) -> float:
        """Check some submissions; return the seconds of the slowest case."""
        slowest = 0.0
        for expected in expectations:
            programs = expected.required_programs
            missing = next((each for each in programs if shutil.which(each) is None), None)
            if missing is None:
                files = {field: self._find(path) for field, path in expected.files.items()}
                found = await self._evaluate(evaluator, files)
            else:
                found = ObservedResults(skip_reason=f"this machine has no {missing}")
            slowest = max(slowest, found.max_case_seconds)
            self._add_row(expected, found)
        return slowest

    def _find(self, path: str) -> Path:
        """Return a file of the copy. Raises: UncheckablePackage, for a path out of the copy."""
        checkout = self._factory.scratch_directory / CHECKOUT_NAME
        found = (checkout / path).resolve()
        if not found.is_relative_to(checkout):
            raise UncheckablePackage(f"{path} is not a file of the package")
        return checkout / path

    def _add_row(self, expected: Expectation, found: ObservedResults) -> None:
        state, why = found.compare(expected)
        row = {
            "submission": expected.submission_name,
            "expected": expected.describe(),
            "found": found.describe(),
            "seconds": found.max_case_seconds,
            "state": state,
            "message": why,
        }
        self._rows.append(row)
        if not self._as_json:
            for line in format_submission_lines(row):
                click.echo(line)

    async def _evaluate(
        self, evaluator: str, fields: Mapping[str, bytes | Path]
    ) -> ObservedResults:
        self._count += 1
        name = f"submission-{self._count}"
        files = write_upload_files(fields, self._factory.scratch_directory / name)
        made = self._factory.make_evaluation(name, evaluator, self._seed, files, self._problem)
        results = ObservedResults()
        if await run_evaluation(made, results.add_page):
            raise UncheckablePackage("cancelled")
        return results


def format_submission_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a submission; what programs have printed is escaped."""
    state = row["state"]
    mark = click.style(f"{state:<8}", fg=_STATE_COLOURS.get(state, "red"))
    seconds = f"{row['seconds']:6.2f} s" if row["seconds"] else f"{'':8}"
    words = f"{row['submission']:<44} {row['expected']:<26} {seconds}  {row['found']}"
    yield f"{mark} {escape_table_row(words)}"
    if row["message"]:
        text = row["message"].strip().splitlines()[-1]
        yield f"{'':8} -> {escape_table_row(text[:200])}"


def run_check(
    screen: Screen, *, seed: int, time: float | None, as_json: bool, **options: Any
) -> NoReturn:
    """Check the references of a directory, and exit. Raises UsageError.

    `options` are those of `check_local_options`.
    """
    local_options = check_local_options("check", **options)
    package = ProblemSettings(
        "/",
        JUDGE_COMMAND,
        build=f"{JUDGE_COMMAND} --build",
        commit=NULL_COMMIT_OID,
        limits=dict(local_options.limits),
    )
    configuration = structs.replace(local_options.configuration, problems={_PACKAGE: package})
    local_options = attrs.evolve(local_options, configuration=configuration)

    async def work(reactor: Any) -> int:
        try:
            with open_evaluation_factory(local_options, screen, reactor, lambda _: None) as factory:
                checker = ReferenceChecker(factory, screen, local_options.root, seed, as_json)
                return await checker.check(time)
        except (UncheckablePackage, SystemExit) as error:
            screen.show_message(str(error).removeprefix("tawebeval: "), "red")
            return WRONG

    run_reactor(screen, work)
