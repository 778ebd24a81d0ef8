"""Judge for problem packages as they are: what `tawebeval-judge` runs, and what all formats share.

Each module of a format has five functions: `judge` builds the submission, runs the cases and
returns a `TotalResult`; `prepare_submission` builds it to run on an input of its author's own;
`build_programs` builds what `judge` needs of the package, which `--build` keeps;
`list_reference_submissions` returns the submissions of the package and what it says of each;
`check_inputs` yields what the package's validators say of its inputs. Programs of the package
(validators, checkers, interactors) run in sandboxes of their own, too: apart from the submission,
and without the markers of the evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from tawebeval.sandbox.tools.lib import segi
else:
    import segi

FORMATS = (
    ("problem.yaml", "segi_kattis", "Kattis problem package format (ICPC, DOMjudge)"),
    ("problem.xml", "segi_polygon", "Polygon"),
    ("task.yaml", "segi_cms", "CMS (italy_yaml)"),
    ("task.yaml.orig", "segi_cms", "task-maker"),
)
"""The file that shows the format of a package, the module, and the name of the format."""
DEFAULT_CASE_CPU_SECONDS = 10.0
"""Seconds of processor time of a case, if neither the package nor --time says how many."""
MAX_OUTPUT_BYTES = 64 * segi.MIB
"""Bytes that the judge holds in its memory of what a submission has printed."""
_MOST_SHOWN = 64 * 1024  # bytes of each output of a run on an own input
_BUILT = ".tawebeval-build"  # the directory of a package with what `--build` has built
_programs: dict[str, segi.Solution] = {}  # those of the package, by path
PACKAGE_PROGRAM_CPU_SECONDS = 60.0
"""Seconds of processor time of a program of the package."""

_C = ("-O2", "-w", "-o", "{build}/solution", "{source}", "-lm")
LANGUAGES: Mapping[str, segi.Language] = {
    **segi.LANGUAGES,
    ".c": segi.Language(("gcc", "-std=gnu17", "-x", "c", *_C), ("{build}/solution",)),
    ".cpp": segi.Language(("g++", "-std=gnu++20", "-x", "c++", *_C), ("{build}/solution",)),
    # The programs of a package import modules beside them, which -I would forbid.
    ".py": segi.LANGUAGES[".py"]._replace(run=("python3", "-E", "-s", "-B", "{source}")),
    ".js": segi.Language(("node", "--check", "{source}"), ("node", "{source}")),
}
"""The languages of submissions and of programs of a package."""
_MAIN_OF_JAVA = re.compile(rb"\bstatic\s+(?:final\s+)?void\s+main\s*\(")


class PackageError(Exception):
    """A package that cannot be judged, without a fault of the submission; `str()` says why.

    `detail` is what programs of the package have printed: for its authors alone.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class JudgeOptions(NamedTuple):
    """What the command line says."""

    case_cpu_seconds: float | None
    """Seconds of processor time of a case, in place of the package's."""
    reveals_secret_cases: bool
    """Whether to send messages and excerpts of secret cases, too."""


class TotalResult(NamedTuple):
    """The result of all cases; `score` is None if the problem has none."""

    is_accepted: bool
    score: float | None = None
    maximum: float | None = None


class ReferenceSubmission(NamedTuple):
    """A submission of a package, and which verdicts the package lets its cases have.

    Verdicts are accepted, wrong_answer, time_limit and runtime_error, which also stands for the
    verdicts without a name of their own. None allows all.
    """

    files: Sequence[str]
    """Paths in the package."""
    permitted: Sequence[str] | None = None
    """What all cases have to be among."""
    required: Sequence[str] | None = None
    """What at least one case has to be among."""
    score: tuple[float, float] | None = None
    """The lowest and the highest score."""


class ReferenceListing(NamedTuple):
    """The reference submissions of a package.

    If the package has no limit of time, `multiplier` is the number by which to multiply the time of
    the slowest submission of `accepted`; the limit is rounded up to a multiple of `resolution`.
    """

    references: Sequence[ReferenceSubmission]
    multiplier: float | None = None
    resolution: float = 1.0


class CaseReporter:
    """Sends the cases of a submission, and keeps what is secret.

    `shows_expected` says whether the expected output of a case that is not secret is sent, too.
    Raises: PackageError, without a case.
    """

    def __init__(self, total: int, options: JudgeOptions, *, shows_expected: bool = True) -> None:
        # Without any, all submissions would be accepted.
        if not total:
            raise PackageError("the package has no cases")
        self._total, self._done = total, 0
        self._reveals_secret_cases = options.reveals_secret_cases
        self._shows_expected = shows_expected or options.reveals_secret_cases

    def send_case(
        self,
        name: str,
        judgement: segi.Judgement,
        result: segi.Result | None = None,
        *,
        points: float | None = None,
        is_secret: bool = True,
        message: str = "",
    ) -> None:
        """Send a case. Of a secret one only `message`, which is for the author of the submission.

        Messages of programs may quote the input or the answer. Raises: PackageError, for a
        judgement that is an error of the package.
        """
        points = judgement.points if points is None else points
        shown = judgement
        if is_secret and not self._reveals_secret_cases:
            shown = segi.Judgement(judgement.verdict, message)
        segi.send_case(name, shown, result, points=points, show_expected=self._shows_expected)
        self._done += 1
        segi.send_progress(self._done, self._total)
        if judgement.verdict == "judge_error":
            why = shown.message or "run `tawebeval check` to see why"
            raise PackageError(f"the package cannot judge the case {name}: {why}")

    def send_build_fault(self, fault: segi.Judgement) -> None:
        """Send why the submission was not built; that is no case of the package."""
        segi.send_case("build", fault)


def send_subtask_result(name: str, score: float, maximum: float | None) -> None:
    """Send a subtask: its score, and the goal to reach its maximum."""
    segi.send({"type": "score", "goal": name, "score": score, "maximum": maximum})
    if maximum:  # without points, all submissions would reach it
        segi.send_goal(name, score >= maximum - 1e-9)


def read_number(value: Any, name: str) -> float:
    """Return a number of the package; `name` has its file. Raises: PackageError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise PackageError(f"{name} is {value!r}, not a number")
    return number


def find_submission_files() -> list[Path]:
    """Return all files of the submission, that of the field `source` first; exit without one."""
    prefix = "SUBMISSION_FILE_"
    names = sorted(name for name in os.environ if name.startswith(prefix))
    names.sort(key=lambda name: name != f"{prefix}SOURCE")
    if not names:
        segi.find_submission("source")
    return [Path(os.environ[name]) for name in names]


def normalize_extension(path: Path) -> str:
    """Return the key of `LANGUAGES` for a file, or its own ending, in lower case."""
    return ".cpp" if path.suffix == ".C" else segi.find_ending(path)


def build_sources(
    files: Sequence[Path],
    options: JudgeOptions | None = None,
    *,
    main: str | None = None,
    extra: Iterable[Path] = (),
) -> segi.Solution:
    """Build one program of all files of the main file's language, beside each other.

    One of the package may have been built by `--build`.

    The main file is that of the name `main`; without one, in this order: what is named main or, in
    Java, has `main`, and the first one. `extra` are files that replace those of the same name. With
    `options` the program is a submission, otherwise one of the package. Raises: PackageError.
    """
    if options is None and files:
        return _reuse(files[0], lambda: _build(files, None, main, extra))
    return _build(files, options, main, extra)


def _reuse(path: Path, build: Callable[[], segi.Solution]) -> segi.Solution:
    """Return the program of the package at `path`, which is built unless it has been."""
    name = os.path.relpath(path)
    if name not in _programs:
        _programs[name] = build()
    return _programs[name]


def _build(
    files: Sequence[Path], options: JudgeOptions | None, main: str | None, extra: Iterable[Path]
) -> segi.Solution:
    place = segi.make_directory()
    for file in (*files, *extra):
        target = place / file.name
        if file.is_dir():
            shutil.copytree(file, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copyfile(file, target)
    # The names of the submission come first; a file of `extra` may be the main one, too.
    names = list(dict.fromkeys(file.name for file in (*files, *extra)))
    sources = [place / name for name in names if normalize_extension(place / name) in LANGUAGES]
    if not any(normalize_extension(file) in LANGUAGES for file in files):
        found = ", ".join(file.name for file in files)
        if options is None:
            raise PackageError(f"{found}: no file is in a known language")
        if options.reveals_secret_cases:
            segi.cannot_judge(
                Path(names[0]).suffix, f"tawebeval-judge does not know the language of {found}"
            )
        return segi.prepare(place / names[0], LANGUAGES)
    if main is None:
        mains = [
            each
            for each in sources
            if each.stem.lower() in ("main", "__main__")
            or (each.suffix == ".java" and _MAIN_OF_JAVA.search(each.read_bytes()))
        ]
        source = (mains or sources)[0]
    else:
        source = place / main
    ending = normalize_extension(source)
    if ending == ".py" and re.match(rb"#!.*python2", source.read_bytes()):
        segi.cannot_judge("python2", f"This machine has no Python 2 for {source.name}.")
    language = LANGUAGES[ending]
    same = (each for each in sources if normalize_extension(each) == ending)
    others = [_escape(each) for each in same if each != source]
    if ending in (".c", ".cpp"):
        at = language.build.index("{source}")
        words = (*language.build[:at], *others, f"-I{_escape(place)}", *language.build[at:])
        language = language._replace(build=words)
    elif ending == ".java":
        language = language._replace(build=(*language.build, *others))
    built = segi.prepare(source, {source.suffix: language}, read=_list_others(place, source))
    if built.fault and options is None:
        raise PackageError(f"{source.name} cannot be built", built.fault.message)
    # All files of the directory, and the build: a directory in a directory cannot be given twice.
    return built._replace(files=[*(path for path in built.files if path != source), place])


def _escape(path: Path) -> str:
    return str(path).replace("{", "{{").replace("}", "}}")


def _list_others(place: Path, source: Path) -> list[Path]:
    return [path for path in place.iterdir() if path != source or source.suffix == ".java"]


def build_package_program(path: Path, extra: Iterable[Path] = ()) -> segi.Solution:
    """Build a program of the package: a file, or a directory, maybe with scripts `build` and `run`.

    Raises: PackageError.
    """
    if not path.is_dir():
        return build_sources([path], extra=extra)
    if not (path / "build").exists() and not (path / "run").exists():
        return build_sources(sorted(path.iterdir()), extra=extra)
    return _reuse(path, lambda: _build_by_script(path))


def _build_by_script(path: Path) -> segi.Solution:
    place = segi.make_directory() / path.name
    shutil.copytree(path, place)
    if (place / "build").exists():
        own: Any = {"directory": place, "write": [place], "output": segi.MIB}
        result = segi.run(["./build"], time=PACKAGE_PROGRAM_CPU_SECONDS, **own)
        if result.fault:
            text = result.stderr.decode(errors="replace")[-1000:]
            raise PackageError(f"{path.name}/build failed", f"{result.fault.message}\n{text}")
    if not os.access(place / "run", os.X_OK):
        raise PackageError(f"{path.name} has no executable file `run`")
    return segi.Solution([str(place / "run")], [place])


class RunOutput(NamedTuple):
    """What a submission has printed or written, unless `fault` says why not."""

    output: bytes
    fault: segi.Judgement | None
    result: segi.Result


def run_with_files(
    solution: segi.Solution, source: Path, input_name: str, output_name: str, run_options: Any
) -> RunOutput:
    """Run a submission that reads and writes files of these names; "" is stdin or stdout."""
    if not input_name and not output_name:
        result = solution.run(source, **run_options)
        return RunOutput(result.stdout, result.fault, result)
    place = segi.make_directory()
    if input_name:
        shutil.copyfile(source, place / input_name)
    own: Any = {**run_options, "write": [place], "directory": place}
    result = solution.run(b"" if input_name else source, **own)
    if result.fault or not output_name:
        return RunOutput(result.stdout, result.fault, result)
    output = segi.read_output(place / output_name, MAX_OUTPUT_BYTES)
    for name in (input_name, output_name):  # of many cases, they would fill the disk
        with suppress(OSError):
            (place / name).unlink()
    return RunOutput(output.content, output.fault, result)


class PreparedSubmission(NamedTuple):
    """A submission, with its options and the names of its files as `run_with_files` has them."""

    solution: segi.Solution
    run_options: Any
    input_name: str = ""
    output_name: str = ""


def run_on_own_input(module: Any, root: Path, options: JudgeOptions, source: Path) -> None:
    """Run the submission on an input of its author's own, and print its output; judge nothing.

    Raises: PackageError, RunError.
    """
    prepared: PreparedSubmission | None = module.prepare_submission(root, options)
    if prepared is None:
        raise PackageError("submissions for this package do not run on an input alone")
    if prepared.solution.fault:
        return segi.send_case("build", prepared.solution.fault)
    ran = run_with_files(
        prepared.solution, source, prepared.input_name, prepared.output_name, prepared.run_options
    )
    parts = [ran.output or ran.result.stdout, ran.result.stderr]
    if ran.fault:
        parts.append(f"{ran.fault.verdict.replace('_', ' ')}: {ran.fault.message}".encode())
    for part in (part[:_MOST_SHOWN].strip(b"\n") for part in parts if part):
        sys.stdout.buffer.write(part + b"\n")
    return None


def run_checker(checker: segi.Solution, files: Sequence[Path]) -> segi.Result:
    """Run a checker of the package, whose arguments are files that it reads. Raises: RunError."""
    words: list[str | Path] = [*checker.command, *files]
    return segi.run(words, time=PACKAGE_PROGRAM_CPU_SECONDS, read=[*checker.files, *files])


def compute_interaction_wall_seconds(time: float) -> float:
    """Return the seconds for an interactor and a submission that has `time` seconds of its own."""
    return 5 * time + PACKAGE_PROGRAM_CPU_SECONDS + 10


def run_validator(
    program: segi.Solution,
    source: Path,
    arguments: Sequence[str] = (),
    *,
    accept: int = 0,
    by_path: bool = False,
) -> segi.Judgement:
    """Let a validator judge an input on its stdin, or `by_path` as its first argument."""
    given = [source] if by_path else []
    words: list[str | Path] = [*program.command, *given, *arguments]
    files = [*program.files, *given]
    stdin = b"" if by_path else source
    result = segi.run(words, stdin, time=PACKAGE_PROGRAM_CPU_SECONDS, read=files)
    if result.reason is None and result.exit_status == accept:
        return segi.ACCEPTED
    text = (result.stdout + b" " + result.stderr).decode(errors="replace").strip()
    return segi.Judgement("wrong_answer", text[-200:] or f"exit status {result.exit_status}")


def read_memory_limit_bytes() -> int | None:
    """Return how many bytes a program may use in this evaluation; None if nothing says it.

    A run without a limit of memory finds it in the limits of its processes.
    """
    result = segi.run(["sh", "-c", "ulimit -d; ulimit -s"])
    data, stack = [*result.stdout.split(), b"unlimited", b"unlimited"][:2]
    for size, least in ((data, 0), (stack, 8192)):
        if size.isdigit() and int(size) > least:
            return int(size) * 1024
    return None


def choose_memory_limit_bytes(wanted: float | None) -> int | None:
    """Return the limit of a program that wants so many MiB; None for that of the evaluation.

    A limit above that of the evaluation would end the evaluation in place of the program.
    """
    if wanted is None:
        return None
    most = read_memory_limit_bytes()
    memory = int(wanted * segi.MIB)
    return memory if most is None else min(memory, most)


def _load_programs(root: Path) -> None:
    """Find what `--build` has built, perhaps below another path: without a sandbox."""
    with suppress(FileNotFoundError):
        kept = json.loads((root / _BUILT / "programs").read_bytes())
        for name, words in kept["programs"].items():
            command, files = (
                [word.replace(kept["root"], str(root)) for word in each] for each in words
            )
            _programs[name] = segi.Solution(command, files)


def _build_programs(root: Path, module: Any) -> None:
    """Build and keep the programs of the package. Raises: PackageError, RunError."""
    place = root / _BUILT
    place.mkdir(exist_ok=True)
    os.environ["TEMPORARY_DIRECTORY"] = str(place)
    with suppress(SystemExit):  # a compiler is missing, as each evaluation tells
        module.build_programs(root)
    programs = {
        name: [list(map(str, words)) for words in (program.command, program.files)]
        for name, program in _programs.items()
    }
    (place / "programs").write_text(json.dumps({"root": str(root), "programs": programs}))


_OPTIONS = {
    "--explain": "send messages and excerpts of secret cases, too: for authors of a package alone",
    "--list": "send the submissions and what the package says of them, and judge nothing",
    "--inputs": "let validators check the inputs, send the results as cases, and judge nothing",
    "--build": "build the programs of the package for later runs in copies of this directory, and"
    " judge nothing",
}


def exit_with_error(message: str) -> NoReturn:
    """End the evaluator with an error."""
    sys.stdout.flush()
    sys.exit(f"tawebeval-judge: {message}")


def load_format_module(root: Path) -> Any:
    """Return the module of the format of a package. Raises: PackageError."""
    for name, module, _ in FORMATS:
        if (root / name).is_file():
            return import_module(module)
    known = "; ".join(f"{name} ({title})" for name, _, title in FORMATS)
    raise PackageError(f"no package in {root}: it has none of {known}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="tawebeval-judge",
        description="Judge the submission by the problem package in the current directory.",
        epilog="Formats: " + "; ".join(f"{title}: {name}" for name, _, title in FORMATS) + ".",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--time",
        type=float,
        metavar="S",
        help="limit the processor time of a case, in place of the package's limit",
    )
    for option, text in _OPTIONS.items():
        parser.add_argument(option, action="store_true", help=text)
    words = parser.parse_args()
    root = Path.cwd()
    try:
        module = load_format_module(root)
        if words.build:
            _build_programs(root, module)
            return
        _load_programs(root)
        if words.inputs:
            for name, judgement in module.check_inputs(root):
                segi.send_case(name, judgement)
            return
        if words.list:
            listing: ReferenceListing = module.list_reference_submissions(root)
            references = [reference._asdict() for reference in listing.references]
            segi.send({"type": "references", **listing._asdict(), "references": references})
            return
        options = JudgeOptions(words.time, words.explain)
        if own_input := os.environ.pop("SUBMISSION_FILE_OWN_INPUT", None):
            run_on_own_input(module, root, options, Path(own_input))
            return
        total: TotalResult = module.judge(root, options)
    except PackageError as error:
        shows = words.explain or words.inputs
        why = error.detail if shows else "run `tawebeval check` to see why"
        exit_with_error(f"{error}: {why}" if error.detail else str(error))
    except (segi.RunError, OSError, ValueError, ArithmeticError, RecursionError) as error:
        exit_with_error(str(error))
    segi.send_goal("accepted", total.is_accepted)
    if total.score is not None:
        if total.maximum is not None:
            segi.send_score(total.score, total.maximum)
        else:
            segi.send({"type": "score", "score": total.score})
