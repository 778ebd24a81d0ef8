"""Tasks of CMS in the format italy_yaml (`task.yaml`), also as task-maker reads them.

Batch tasks by stdin or files, with graders and checkers; communication with a manager; output only.
Where inputs or outputs are missing, the generator of `gen/GEN` and the official solution make them,
in each evaluation or once by `--build`. Of task-maker, `task.yaml.orig`, subtasks that depend on
others (`#STDEP:`) and controllers. Not read: TwoSteps, BatchAndOutput, and score types other than
Sum, GroupMin and GroupMul.
"""

from __future__ import annotations

import errno
import os
import re
import select
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tawebeval.sandbox.tools.lib import segi, segi_judge
    from tawebeval.sandbox.tools.lib.segi_yaml import read_yaml
else:
    import segi
    import segi_judge
    from segi_yaml import read_yaml

_HEADERS = (".h", ".hpp", ".lib")
_OFFICIAL = ("solution", "soluzione")
_OWN = ("grader", "stub", "template")
_ON_STDIN = 'in=$1 out=$2; shift 2; exec "$@" <"$in" >"$out"'
# Opened first for both, the FIFO has a writer, and its other writer may have closed it already.
_ON_FIFOS = 'in=$1 out=$2; shift 2; exec 3<>"$in" <"$in" 3>&- >"$out"; exec "$@"'
# A controller finds its ends of all FIFOs open: of pair n, descriptor 2n + 3 leads to a process of
# the submission, and 2n + 4 from it.
_OPEN_FIFOS = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
count, *words = sys.argv[1:]
for pair in words[:int(count)]:
    reader = os.open(pair + "/in", os.O_RDONLY | os.O_NONBLOCK)  # otherwise nobody could write
    writer = os.open(pair + "/in", os.O_WRONLY)
    os.dup2(writer, reader)
    os.close(writer)
    output = os.open(pair + "/out", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(output, True)
    os.set_inheritable(output, True)
os.execvp(words[int(count)], words[int(count):])
"""
_MOST_STARTS = 100  # of processes by a controller
_PAUSE = 0.02  # seconds between looks at who still waits for a program that has ended
_CHECKS = {
    "accepted": ("accepted",),
    "partial-score": ("partial",),
    "wrong-answer": ("wrong_answer",),
    "time-limit-exceeded": ("time_limit",),
    "wall-time-limit-exceeded": ("time_limit",),
    "memory-limit-exceeded": ("runtime_error",),  # as all faults without a name of their own
    "runtime-error": ("runtime_error",),
    "zero": ("wrong_answer", "time_limit", "runtime_error"),
}
"""The checks in comments of solutions, and the verdicts of which a case has to have one."""
_SAID = re.compile(rb"^(SCORE|USER_MESSAGE): ?(?! ?translate:)(.*)$", re.MULTILINE)
_CHECK = re.compile(r"@check-([a-z-]+):([^\n]*)")


class Subtask(NamedTuple):
    """Cases with common points; of one without a name the points count for each case.

    A case may belong to several subtasks.
    """

    name: str
    points: float
    cases: Sequence[int]


class InputSource(NamedTuple):
    """How to make an input: by a command of the generator, or as a copy."""

    generator_arguments: Sequence[str]
    copied_path: str = ""


class Task:
    """The files and metadata of a task. Raises: PackageError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        path = root / "task.yaml"
        # What task-maker makes `task.yaml` of has defaults of its own.
        defaults: Mapping[str, Any] = {}
        if not path.is_file():
            path = root / "task.yaml.orig"
            defaults = {"infile": "", "outfile": "", "user_io": "std_io", "public_testcases": "all"}
        found = read_yaml(path)
        self.metadata: Mapping[str, Any] = {
            **defaults,
            **(found if isinstance(found, dict) else {}),
        }
        self.name = str(self.metadata.get("name", root.name))
        self.time_limit_seconds = self.read_number("time_limit", "timeout")
        self.memory = self.read_number("memory_limit", "memlimit")
        self.processes = int(self.read_number("num_processes") or 1)
        self.is_output_only = bool(self.metadata.get("output_only", False))
        self.manager = self.find_program("check/manager", "cor/manager")
        self.controller = self.find_program("check/controller")
        self.checker = self.find_program("check/checker", "cor/correttore")
        self.generator = self.find_program("gen/generator", "gen/generatore")
        self.official = self.find_program("sol/solution", "sol/soluzione")
        self.cases: list[InputSource] = []
        self.owners: dict[int, int] = {}
        """The number of the subtask that a case is made for, from 1 on."""
        self.subtasks = self._read_subtasks()
        for number, subtask in enumerate(self.subtasks, start=1):
            for case in subtask.cases:
                self.owners.setdefault(case, number)
        for kind in ("output_only_testcases", "output_optional_testcases"):
            if self.metadata.get(kind):
                raise segi_judge.PackageError(f"{kind} is not supported")

    def read_number(self, *names: str) -> float | None:
        """Return the number of the first of these names that `task.yaml` has."""
        for name in names:
            if self.metadata.get(name) is not None:
                return segi_judge.read_number(self.metadata[name], f"task.yaml: {name}")
        return None

    def find_program(self, *stems: str) -> Path | None:
        """Return the source of a program, or a file without ending, which may be a binary."""
        for stem in stems:
            path = self.root / stem
            sources = [
                each
                for each in sorted(path.parent.glob(f"{path.name}.*"))
                if segi_judge.normalize_extension(each) in segi_judge.LANGUAGES
            ]
            # C and C++ first: of a solution in several languages, the fastest one.
            sources.sort(
                key=lambda each: segi_judge.normalize_extension(each) not in (".cpp", ".c")
            )
            if sources or path.is_file():
                return [*sources, path][0]
        return None

    def _read_subtasks(self) -> list[Subtask]:
        subtasks: list[Subtask] = []
        dependencies: dict[int, list[str]] = {}
        path = self.root / "gen" / "GEN"
        for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
            words, comment = [*line.split("#", 1), ""][:2]
            comment = comment.strip()
            if words.strip():
                self.cases.append(InputSource(shlex.split(words)))
            elif comment.startswith("COPY:"):
                self.cases.append(InputSource((), comment[5:].strip()))
            elif comment.startswith("ST:"):
                name = f"subtask {len(subtasks)}"
                points = segi_judge.read_number(comment[3:].strip(), f"gen/GEN: {name}")
                subtasks.append(Subtask(name, points, []))
                continue
            elif comment.startswith("STNAME:") and subtasks:
                subtasks[-1] = subtasks[-1]._replace(name=comment[7:].strip())
                continue
            elif comment.startswith("STDEP:") and subtasks:
                dependencies[len(subtasks) - 1] = comment[6:].split()
                continue
            else:
                continue
            if subtasks:
                last = subtasks[-1]
                subtasks[-1] = last._replace(cases=[*last.cases, len(self.cases) - 1])
                self.owners[len(self.cases) - 1] = len(subtasks)
        _add_dependencies(subtasks, dependencies)
        if not self.cases:
            count = self.read_number("n_input")
            inputs = len(list((self.root / "input").glob("input*.txt")))
            self.cases = [InputSource(())] * int(inputs if count is None else count)
        everything = range(len(self.cases))
        kind = str(self.metadata.get("score_type", ""))
        parameters = self.metadata.get("score_type_parameters")
        if kind in ("GroupMin", "GroupMul") and isinstance(parameters, list):
            if len(parameters) == len(subtasks):
                names = [subtask.name for subtask in subtasks]
            else:
                names = [f"subtask {number}" for number in range(len(parameters))]
                self.owners.clear()
            subtasks, at = [], 0
            for name, each in zip(names, parameters):  # noqa: B905  (Python 3.9)
                try:
                    points, which = (
                        (each["max_score"], each["testcases"])
                        if isinstance(each, dict)
                        else each[:2]
                    )
                except (TypeError, ValueError, KeyError):
                    raise segi_judge.PackageError(
                        f"task.yaml: score_type_parameters has {each!r}, not points and cases"
                    ) from None
                points = segi_judge.read_number(points, f"task.yaml: the points of {name}")
                cases = self._select_cases(which, at)
                at += len(cases)
                subtasks.append(Subtask(name, points, cases))
        elif kind not in ("", "Sum", "GroupMin"):
            raise segi_judge.PackageError(f"score_type {kind} is not supported")
        for subtask in subtasks:
            if subtask.points and not subtask.cases:  # all submissions would have its points
                raise segi_judge.PackageError(f"{subtask.name} has points and no cases")
        total = self.read_number("total_value")
        return subtasks or [Subtask("", 100 if total is None else total, everything)]

    def _select_cases(self, which: Any, at: int) -> Sequence[int]:
        """Return cases: a number of them from `at` on, or those whose names of 3 digits are chosen.

        Names are a list, or what a regular expression matches. Raises: PackageError.
        """
        if isinstance(which, int):
            if not 0 <= which <= len(self.cases) - at:
                raise segi_judge.PackageError(
                    f"task.yaml: a subtask has {which} cases; {len(self.cases) - at} are left"
                )
            return range(at, at + which)
        names = [f"{number:03}" for number in range(len(self.cases))]
        try:
            chosen = (
                [name for name in names if re.match(which, name)]
                if isinstance(which, str)
                else [str(name) for name in which]
            )
            cases = [names.index(name) for name in chosen]
        except (re.error, ValueError, TypeError) as error:
            raise segi_judge.PackageError(f"task.yaml: testcases {which!r}: {error}") from None
        if not cases:  # all submissions would have its points
            raise segi_judge.PackageError(f"task.yaml: testcases {which!r} are no cases")
        return cases

    def is_public_case(self, number: int) -> bool:
        """Tell whether people may see a case."""
        public = self.metadata.get("public_testcases", self.metadata.get("risultati", ""))
        words = public if isinstance(public, list) else str(public).split(",")
        return public == "all" or str(number) in [str(word).strip() for word in words]

    def list_grader_files(self, stem: str) -> list[Path]:
        """Return the graders or stubs, and the headers beside them."""
        files = sorted((self.root / "sol").glob("*"))
        return [file for file in files if file.stem == stem or file.suffix in _HEADERS]


def _add_dependencies(subtasks: list[Subtask], dependencies: Mapping[int, Sequence[str]]) -> None:
    """Add the cases of the subtasks that others depend on, by their names ("*" for all).

    Raises: PackageError.
    """
    known = {"*", *(subtask.name for subtask in subtasks)}
    for name in (name for names in dependencies.values() for name in names):
        if name not in known:
            raise segi_judge.PackageError(f"gen/GEN has no subtask {name}")
    for _ in dependencies:  # those of a subtask may have some, too
        for index, names in dependencies.items():
            needed = (each for each in subtasks if "*" in names or each.name in names)
            cases = {*subtasks[index].cases, *(case for each in needed for case in each.cases)}
            subtasks[index] = subtasks[index]._replace(cases=sorted(cases))


class Outcome(NamedTuple):
    """The judgement of a case, with a score of 0 to 1."""

    judgement: segi.Judgement
    score: float = 0.0
    result: segi.Result | None = None


class Judge:
    """Judges one submission."""

    def __init__(self, task: Task, options: segi_judge.JudgeOptions) -> None:
        self.task, self.options = task, options
        # CMS shows the outcome of a public case alone, and often all cases are public.
        self.report = segi_judge.CaseReporter(len(task.cases), options, shows_expected=False)
        limit = options.case_cpu_seconds or task.time_limit_seconds
        self.limits: Any = {
            "time": limit or segi_judge.DEFAULT_CASE_CPU_SECONDS,
            "memory": segi_judge.choose_memory_limit_bytes(task.memory),
            "output": segi_judge.MAX_OUTPUT_BYTES,
        }
        self.programs: dict[Path, segi.Solution] = {}
        self.made = segi.make_directory()  # what is made for a case takes the place of the last

    def run(self) -> segi_judge.TotalResult:
        """Judge all cases. Raises: PackageError, RunError."""
        task, files = self.task, segi_judge.find_submission_files()
        solution = None
        if not task.is_output_only:
            solution = self._build_submission(files, self.options)
            if solution.fault:
                self.report.send_build_fault(solution.fault)
        judged: dict[int, Outcome] = {}
        total = 0.0
        for subtask in task.subtasks:
            for number in subtask.cases:
                if number in judged:
                    continue
                if solution is not None and solution.fault:
                    judged[number] = Outcome(segi.Judgement("skipped"))
                elif solution is None:
                    judged[number] = self._judge_file(number, files)
                else:
                    judged[number] = self._judge_case(number, solution)
                outcome = judged[number]
                self.report.send_case(
                    f"{number:03}",
                    outcome.judgement,
                    outcome.result,
                    points=None if subtask.name else outcome.score * self._share(subtask),
                    is_secret=not task.is_public_case(number),
                )
            scores = [judged[number].score for number in subtask.cases]
            if not subtask.name:
                total += sum(scores) * self._share(subtask)
                continue
            fraction = min(scores, default=1.0)
            if task.metadata.get("score_type") == "GroupMul":
                fraction = 1.0
                for score in scores:
                    fraction *= score
            segi_judge.send_subtask_result(subtask.name, fraction * subtask.points, subtask.points)
            total += fraction * subtask.points
        maximum = sum(subtask.points for subtask in task.subtasks)
        is_accepted = total >= maximum - 1e-9
        if not maximum:  # all submissions have reached it
            is_accepted = all(each.judgement.is_accepted for each in judged.values())
        return segi_judge.TotalResult(is_accepted, total, maximum)

    def prepare_submission(self) -> segi_judge.PreparedSubmission | None:
        """Build the submission to run on any input. Raises: PackageError, RunError."""
        if self.task.is_output_only or self.task.manager or self.task.controller:
            return None
        solution = self._build_submission(segi_judge.find_submission_files(), self.options)
        return segi_judge.PreparedSubmission(solution, self.limits, *self._find_names())

    def _share(self, subtask: Subtask) -> float:
        return subtask.points / max(len(subtask.cases), 1)

    def _build_submission(
        self, files: Sequence[Path], options: segi_judge.JudgeOptions | None
    ) -> segi.Solution:
        """Build a submission with grader or stub, under the name of the task."""
        stem = "stub" if self.task.manager or self.task.controller else "grader"
        beside = self.task.list_grader_files(stem)
        place = segi.make_directory()
        named = []
        for number, file in enumerate(files):
            name = file.name if number else f"{self.task.name}{file.suffix}"
            named.append(place / name)
            shutil.copyfile(file, named[-1])
        ending = segi_judge.normalize_extension(files[0])
        mains = [
            file.name
            for file in beside
            if file.stem == stem and segi_judge.normalize_extension(file) == ending
        ]
        extra = [file for file in beside if file.suffix in _HEADERS or file.name in mains]
        main = mains[0] if mains else None
        return segi_judge.build_sources(named, options, main=main, extra=extra)

    def build_package_program(self, path: Path) -> segi.Solution:
        """Build a program of the package, once."""
        if path not in self.programs:
            if path.suffix:
                # A program in Python may import what lies beside it.
                kinds = (*_HEADERS, *([".py"] if path.suffix == ".py" else []))
                beside = [each for each in path.parent.iterdir() if each.suffix in kinds]
                self.programs[path] = segi_judge.build_sources([path], extra=beside, main=path.name)
            else:
                self.programs[path] = segi.Solution([str(path)], [path])
        return self.programs[path]

    def find_or_make_input(self, number: int) -> Path:
        """Return the input of a case, which the generator makes where the package has none."""
        task, case = self.task, self.task.cases[number]
        path = task.root / "input" / f"input{number}.txt"
        if path.is_file():
            return path
        if case.copied_path:
            path = task.root / case.copied_path
            if not path.is_file():
                why = f"gen/GEN copies {case.copied_path}, which is no file"
                raise segi_judge.PackageError(why)
            return path
        if task.generator is None:
            raise segi_judge.PackageError(f"no input/input{number}.txt and no gen/generator")
        program = self.build_package_program(task.generator)
        place = task.generator.parent
        result = segi.run(
            [*program.command, *case.generator_arguments],
            time=segi_judge.PACKAGE_PROGRAM_CPU_SECONDS,
            read=[*program.files, place],
            directory=place,
            output=segi_judge.MAX_OUTPUT_BYTES,
        )
        if result.fault:
            raise segi_judge.PackageError(f"no input {number} was made", result.fault.message)
        made = self.made / "input.txt"
        made.write_bytes(result.stdout)
        return made

    def _find_or_make_output(self, number: int, source: Path) -> Path:
        """Return the output of a case, which the official solution makes where there is none."""
        task = self.task
        path = task.root / "output" / f"output{number}.txt"
        if path.is_file():
            return path
        if task.official is None:
            raise segi_judge.PackageError(f"no output/output{number}.txt and no sol/solution")
        if task.official not in self.programs:
            self.programs[task.official] = self._build_submission([task.official], None)
        ran = self._run_batch(self.programs[task.official], source)
        if ran.fault:
            raise segi_judge.PackageError(f"no output {number} was made", ran.fault.message)
        made = self.made / "output.txt"
        made.write_bytes(ran.output)
        return made

    def _run_batch(self, solution: segi.Solution, source: Path) -> segi_judge.RunOutput:
        return segi_judge.run_with_files(solution, source, *self._find_names(), self.limits)

    def _find_names(self) -> tuple[str, str]:
        """Return the names of the files that a submission reads and writes."""
        given, printed = (
            str(self.task.metadata.get(name, default) or "")
            for name, default in (("infile", "input.txt"), ("outfile", "output.txt"))
        )
        return given, printed

    def _judge_case(self, number: int, solution: segi.Solution) -> Outcome:
        source = self.find_or_make_input(number)
        if self.task.manager is not None:
            return self._run_manager(number, solution, source)
        if self.task.controller is not None:
            return self._run_controller(self.task.controller, solution, source)
        ran = self._run_batch(solution, source)
        if ran.fault:
            return Outcome(ran.fault, result=ran.result)
        return self._compare(number, source, ran.output)._replace(result=ran.result)

    def _judge_file(self, number: int, files: Sequence[Path]) -> Outcome:
        """Judge the file of an output-only task for a case."""
        names = (f"output_{number:03}.txt", f"output{number}.txt")
        file = next((each for each in files if each.name in names), None)
        if file is None:
            return Outcome(segi.Judgement("wrong_answer", f"{names[0]} is missing"))
        return self._compare(number, self.find_or_make_input(number), file.read_bytes())

    def _compare(self, number: int, source: Path, printed: bytes) -> Outcome:
        expected = self._find_or_make_output(number, source)
        if self.task.checker is None:
            judgement = segi.compare_exact(_strip(printed), _strip(expected.read_bytes()))
            return Outcome(judgement, float(judgement.is_accepted))
        checker = self.build_package_program(self.task.checker)
        output = segi.make_directory() / "output"
        output.write_bytes(printed)
        result = segi_judge.run_checker(checker, [source, expected, output])
        output.unlink()  # of many cases, outputs would fill the disk
        return _read_score(result, "checker")

    def _run_manager(self, number: int, solution: segi.Solution, source: Path) -> Outcome:
        """Run the manager beside all processes of the submission.

        Each process has a directory with two FIFOs, which it can neither remove nor replace. Nobody
        else writes to them: who closes one lets the other side read its end.
        """
        task = self.task
        assert task.manager is not None, "a communication task"
        manager, place = self.build_package_program(task.manager), segi.make_directory()
        shutil.copyfile(source, place / "input.txt")
        count = task.processes
        has_stub = any(file.stem == "stub" for file in task.list_grader_files("stub"))
        kind = str(task.metadata.get("user_io", "fifo_io" if has_stub else "std_io"))
        fifos = []
        for _ in range(count):
            pair = segi.make_directory()
            fifos.append((pair / "in", pair / "out"))
            for fifo in fifos[-1]:
                os.mkfifo(fifo)
        # A process can open and write its output before the manager reads it.
        held = [os.open(output, os.O_RDONLY | os.O_NONBLOCK) for _, output in fifos]
        has_ended = threading.Event()

        def let_go(index: int) -> None:
            """Let nobody wait in open(2) for a program that has ended."""
            for fifo in fifos[index]:
                os.close(os.open(fifo, os.O_RDWR))

        limits = {**self.limits, "wall": 5 * self.limits["time"] + 5}
        results: dict[int, segi.Result] = {}
        failures: list[segi.RunError] = []
        with segi.start(
            [*manager.command, *(path for pair in fifos for path in reversed(pair))],
            time=segi_judge.PACKAGE_PROGRAM_CPU_SECONDS,
            wall=limits["wall"] + 10,
            read=[*manager.files, *(pair[0].parent for pair in fifos)],
            write=[place],
            directory=place,
        ) as running:

            def run_process(index: int) -> None:
                words: list[str | Path] = [*fifos[index]]
                command = [*solution.command]
                if kind == "std_io":
                    command = ["sh", "-c", _ON_STDIN, "sh", *map(str, words), *command]
                    words = []
                if count > 1:
                    words.append(str(index))
                own = solution._replace(command=[*command, *map(str, words)])
                try:
                    results[index] = own.run(b"", **{**limits, "read": [fifos[index][0].parent]})
                except segi.RunError as error:
                    failures.append(error)
                if failures or results[index].fault:
                    running.kill()  # it may wait for the process
                while not has_ended.wait(_PAUSE):
                    let_go(index)

            threads = [threading.Thread(target=run_process, args=[each]) for each in range(count)]
            for thread in threads:
                thread.start()
            try:
                running.write(source.read_bytes())
                result = running.finish()
            finally:
                has_ended.set()
                for descriptor in held:
                    os.close(descriptor)
                for index, thread in enumerate(threads):
                    while thread.is_alive():
                        let_go(index)
                        thread.join(_PAUSE)
                (place / "input.txt").unlink(missing_ok=True)
        if failures:
            raise failures[0]
        worst = max(results.values(), key=lambda each: each.cpu_seconds)
        faults = [each.fault for each in results.values() if each.fault]
        if faults:
            return Outcome(faults[0], result=worst)
        return _read_score(result, "manager")._replace(result=worst)

    def _run_controller(self, path: Path, solution: segi.Solution, source: Path) -> Outcome:
        """Run a controller of task-maker, which asks for processes of the submission one by one.

        Each has a directory with two FIFOs. The judge keeps the ends of a process open until it has
        ended: so the controller reads the end then, and not before the process is started.
        """
        task, place, fifos = self.task, segi.make_directory(), segi.make_directory()
        shutil.copyfile(source, place / str(task.metadata.get("infile") or "input.txt"))
        most = int(task.read_number("controller_process_limit") or _MOST_STARTS)
        pairs = [fifos / str(number) for number in range(min(most, _MOST_STARTS))]
        for pair in pairs:
            pair.mkdir()
            for name in ("in", "out"):
                os.mkfifo(pair / name)
        controller = self.build_package_program(path)
        wall = 5 * self.limits["time"] + 5
        programs: list[segi.Program] = []
        threads: list[threading.Thread] = []
        results: list[segi.Result] = []
        faults: list[segi.Judgement] = []
        failures: list[segi.RunError] = []

        def begin(pair: Path) -> bool:
            """Start a process; return False if the controller does not read from it any more."""
            try:  # without waiting for a controller that has ended
                outputs = os.open(pair / "out", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return False
            inputs = os.open(pair / "in", os.O_RDONLY | os.O_NONBLOCK)
            poll = select.poll()
            poll.register(outputs, select.POLLERR)  # the controller has ended, or reads no more
            command = ["sh", "-c", _ON_FIFOS, "sh", f"{pair}/in", f"{pair}/out", *solution.command]
            own = solution._replace(command=command)

            def finish(program: segi.Program) -> None:
                try:
                    ended = program.finish()
                    results.append(ended)
                    if ended.fault and not poll.poll(0):
                        faults.append(ended.fault)
                except segi.RunError as error:
                    failures.append(error)
                finally:
                    os.close(inputs)
                    os.close(outputs)

            programs.append(own.start(**{**self.limits, "wall": wall, "read": [pair]}))
            threads.append(threading.Thread(target=finish, args=programs[-1:]))
            threads[-1].start()
            return True

        words = [sys.executable, "-IS", "-c", _OPEN_FIFOS, str(len(pairs)), *map(str, pairs)]
        cpu, memory = map(task.read_number, ("controller_time_limit", "controller_memory_limit"))
        with segi.start(
            [*words, *controller.command],
            time=cpu or segi_judge.PACKAGE_PROGRAM_CPU_SECONDS,
            wall=wall + segi_judge.PACKAGE_PROGRAM_CPU_SECONDS,
            memory=segi_judge.choose_memory_limit_bytes(memory),
            read=[*controller.files, fifos],
            write=[place],
            directory=place,
        ) as running:
            try:
                while (line := running.read_line()) == "START_SOLUTION" and pairs[len(programs) :]:
                    number = len(programs)
                    if not begin(pairs[number]):
                        line = None  # its own result says why
                        break
                    running.write(f"{2 * number + 3} {2 * number + 4}\n")
                if line is not None:
                    running.kill()
                result = running.finish()
            finally:
                for program in programs:
                    program.kill()
                for thread in threads:
                    thread.join()
                shutil.rmtree(place)
                shutil.rmtree(fifos)
        if failures:
            raise failures[0]
        if line is not None:
            return Outcome(segi.Judgement("judge_error", f"controller: unexpected {line[:50]!r}"))
        worst = max(results, key=lambda each: each.cpu_seconds, default=None)
        if faults:
            return Outcome(faults[0], result=worst)
        if not result.fault:
            said = dict(_SAID.findall(result.stderr))
            score, text = said.get(b"SCORE", b""), said.get(b"USER_MESSAGE", b"")
            result = result._replace(stdout=score, stderr=text)
        return _read_score(result, "controller")._replace(result=worst)


def _strip(text: bytes) -> bytes:
    """Return a text with single spaces, none at the ends of lines, and no empty lines at its end.

    A list of lines or words of a long text would need much memory.
    """
    text = text.translate(bytes.maketrans(b"\t\r\v\f", b"    "))
    while b"  " in text:
        text = text.replace(b"  ", b" ")
    return text.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ").rstrip()


def _read_score(result: segi.Result, name: str) -> Outcome:
    """Return what a checker or manager says: a score of 0 to 1 on stdout, words on stderr."""
    if result.signal == signal.SIGPIPE or b"\nBrokenPipeError: " in result.stderr:
        early = f"ended before the {name} had written all"
        return Outcome(segi.Judgement("wrong_answer", early))
    if result.fault:
        return Outcome(segi.Judgement("judge_error", f"{name}: {result.fault.message}"))
    words = result.stdout.split()
    try:
        score = float(words[0])
    except (IndexError, ValueError):
        return Outcome(segi.Judgement("judge_error", f"{name}: no score on stdout"))
    score = min(max(score, 0.0), 1.0)
    message = result.stderr.decode(errors="replace").strip()[:200]
    if score >= 1:
        return Outcome(segi.Judgement("accepted", message), score)
    if score > 0:
        return Outcome(segi.Judgement("partial", message), score)
    return Outcome(segi.Judgement("wrong_answer", message))


def judge(root: Path, options: segi_judge.JudgeOptions) -> segi_judge.TotalResult:
    """Judge the submission. Raises: PackageError, RunError."""
    return Judge(Task(root), options).run()


def prepare_submission(
    root: Path, options: segi_judge.JudgeOptions
) -> segi_judge.PreparedSubmission | None:
    """Build the submission to run on any input. Raises: PackageError, RunError."""
    return Judge(Task(root), options).prepare_submission()


def build_programs(root: Path) -> None:
    """Build checker and manager, and make missing inputs and outputs.

    Raises: PackageError, RunError.
    """
    task = Task(root)
    judge = Judge(task, segi_judge.JudgeOptions(None, reveals_secret_cases=False))
    place = Path(os.environ["TEMPORARY_DIRECTORY"])
    for program in (task.checker, task.manager, task.controller):
        if program is not None:
            judge.build_package_program(program)
    for number in range(len(task.cases)):
        files = {f"input/input{number}.txt": judge.find_or_make_input(number)}
        if task.manager is None and task.controller is None:
            source = files[f"input/input{number}.txt"]
            files[f"output/output{number}.txt"] = judge._find_or_make_output(number, source)
        for name, made in files.items():
            if made.is_relative_to(place):
                (root / name).parent.mkdir(exist_ok=True)
                made.rename(root / name)


def check_inputs(root: Path) -> Iterator[tuple[str, segi.Judgement]]:
    """Yield each case of each subtask, and what the validator of `gen/` says of its input.

    The arguments of the validator are the file and the number of the subtask, from 1 on. Raises:
    PackageError, RunError.
    """
    task = Task(root)
    path = task.find_program("gen/validator", "gen/valida")
    if path is None:
        return
    judge = Judge(task, segi_judge.JudgeOptions(None, reveals_secret_cases=True))
    for case, number in sorted(task.owners.items()):
        program, source = judge.build_package_program(path), judge.find_or_make_input(case)
        found = segi_judge.run_validator(program, source, [str(number)], by_path=True)
        yield f"{case:03}", found


def list_reference_submissions(root: Path) -> segi_judge.ReferenceListing:
    """Return the programs of `sol/`: official solutions, and what comments of others say."""
    task = Task(root)
    maximum = sum(subtask.points for subtask in task.subtasks)
    references = []
    files = sorted((root / "sol").glob("*"))
    if task.is_output_only:
        given = [
            str(path.relative_to(root))
            for number in range(len(task.cases))
            for path in sorted((root / "output").glob(f"output{number}.txt"))
        ]
        full = (maximum, maximum)
        reference = segi_judge.ReferenceSubmission(given, ["accepted"], None, full)
        return segi_judge.ReferenceListing([reference])
    for file in files:
        # Also those in languages that the judge does not know, which `check` skips.
        is_program = file.suffix and file.suffix not in _HEADERS and file.is_file()
        if not is_program or file.stem in _OWN or file.name.startswith("."):
            continue
        permitted = required = reached = None
        if file.stem in _OFFICIAL:
            permitted, reached = ["accepted"], (maximum, maximum)
        checks = _CHECK.findall(file.read_text("utf-8", "replace"))
        if checks and not permitted:
            required = sorted({each for kind, _ in checks for each in _CHECKS.get(kind, ())})
            names = [
                (kind, subtask)
                for kind, words in checks
                for subtask in task.subtasks
                if any(fnmatchcase(subtask.name, word) for word in words.split())
            ]
            passed = {task.subtasks.index(each) + 1 for kind, each in names if kind == "accepted"}
            least = sum(
                subtask.points
                for subtask in task.subtasks
                if passed.issuperset(task.owners[each] for each in subtask.cases)
            )
            has_partial = any(kind == "partial-score" for kind, _ in checks)
            reached = (least, maximum if has_partial else least)
        references.append(
            segi_judge.ReferenceSubmission(
                [str(file.relative_to(root))], permitted, required, reached
            )
        )
    return segi_judge.ReferenceListing(references)
