"""Continuous integration: judge the solution of each student of a class repository.

    judge_class.py PROBLEM FOLDER

FOLDER has a folder for each student, with the student's one file. Symbolic links do not count: they
could lead to the secrets of the job. Prints a line for each student, and exits with 1 if a solution
failed. A line begins with a fixed word: GitHub runs a line as a command if it begins with `::`.
TAWEBEVAL_SERVER and TAWEBEVAL_TOKEN name the server.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tawebeval_client import Client, ClientError, EvaluationError, Text

AT_ONCE = 4  # evaluations; the server may allow fewer to each caller

client = Client(os.environ["TAWEBEVAL_SERVER"], os.environ.get("TAWEBEVAL_TOKEN"))


def judge(problem: str, folder: Path) -> tuple[bool, str]:
    """Return whether the solution of a student passed, and the last line of the evaluator."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    if len(files) != 1:
        return False, f"{len(files)} files instead of one"
    try:
        identifier = client.evaluate_problem(problem, {"source": files[0]})
        printed, error = "", ""
        for event in client.events(identifier):
            error = ""
            if isinstance(event, Text):
                printed = (printed + event.text)[-10_000:]
            elif isinstance(event, EvaluationError) and event.is_failure:
                error = f"{event.reason}: {event.message}"
    except (ClientError, OSError, ValueError) as failure:  # the latter two for the file
        return False, str(failure)
    return not error, error or next(iter(printed.strip().splitlines()[-1:]), "")


def escape(text: str) -> str:
    """Return text as one line of UTF-8."""
    line = " ".join(text.splitlines())
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


def main(problem: str, folder: str) -> int:
    """Judge all students; return the exit status."""
    entries = sorted(Path(folder).iterdir())
    students = [path for path in entries if path.is_dir() and not path.is_symlink()]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        verdicts = threads.map(judge, [problem] * len(students), students)
        passed: list[bool] = []
        for student, (good, words) in zip(students, verdicts, strict=True):
            passed.append(good)
            line = f"student {student.name}: {'passed' if good else 'FAILED'}: {words}"
            print(escape(line), flush=True)
    print(f"{sum(passed)} of {len(passed)} passed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
