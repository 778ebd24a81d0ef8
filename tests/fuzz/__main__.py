"""Try properties for longer than the suite does: `python -m tests.fuzz [TARGET...]`.

The targets share FUZZ_SECONDS equally; each processor runs a process for the target whose turn it
is. A finding is printed with its smallest example and the decorator that repeats the example. The
next run begins with what build/fuzz has of earlier findings. With FUZZ_SEED, a text, each run tries
the same examples in the same order, and no earlier findings. With FUZZ_ROUNDS each process tries
its property so many times a hundred examples, or what the property makes of them, in place of
FUZZ_SECONDS: so a run with both has the same verdict on each machine.

The exit status is 0 only if nothing was found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from unittest import TestResult

from hypothesis import HealthCheck, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from twisted.python.reflect import namedAny

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "build" / "fuzz"

TARGETS: dict[str, Sequence[str]] = {
    "stdout": (
        "tests.core.test_segi.PropertyTests.test_events_equal_the_reference_however_stdout_is_cut",
        "tests.core.test_segi.SmallStepTests.test_small_steps_produce_the_events_of_the_reference",
        "tests.core.test_segi_checkpoints.SmallStepTests.test_resumed_parser_returns_the_same_events_as_the_first_one",
        "tests.evaluations.test_run.PropertyTests.test_events_are_those_of_the_reference",
    ),
    "forms": (
        "tests.fuzz.test_forms.FormTests.test_any_body_is_parsed_as_a_form_or_refused_however_it_is_cut",
        "tests.fuzz.test_forms.FormTests.test_bytes_of_files_are_kept_whatever_they_resemble",
    ),
    "requests": (
        "tests.fuzz.test_requests.RequestTests.test_any_sequence_of_requests_gets_valid_responses_and_logs_no_error",
    ),
    "cursors": (
        "tests.fuzz.test_cursors.CursorTests.test_any_cursor_leads_to_its_place_or_is_refused",
    ),
    "configuration": (
        "tests.fuzz.test_configuration.ConfigurationTests.test_any_bytes_are_a_configuration_or_a_configuration_error",
        "tests.fuzz.test_configuration.ConfigurationTests.test_error_about_a_setting_names_its_path",
    ),
    "client": (
        "tests.fuzz.test_client.ClientTests.test_client_returns_a_result_or_a_client_error_for_any_bytes_of_a_server",
    ),
}
"""The properties of each target, as trial names them."""

_ROUND = 100  # examples, after which the time is looked at
_LONGEST = 60  # seconds for one example


class Outcome(NamedTuple):
    """Executions, processor time in seconds, and findings as they are printed."""

    executions: int
    processor: float
    findings: list[str]


def work(name: str, seconds: float, rounds: int, seeds: str) -> None:
    """Try a property, as trial names it, until it fails or the time is over; print the outcome.

    `rounds` are an end in place of the time, or 0; `seeds` chooses the examples, "" is chance.
    """
    settings.register_profile(
        "fuzz",
        max_examples=_ROUND,
        deadline=None,
        derandomize=False,
        database=DirectoryBasedExampleDatabase(EXAMPLES),
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("fuzz")  # for the properties that are imported from here on
    signal.signal(signal.SIGALRM, _interrupt)
    holder, _, method = name.rpartition(".")
    case, result, executions = namedAny(holder)(method), TestResult(), count()
    function, end = getattr(type(case), method), time.monotonic() + seconds
    inner = function.hypothesis.inner_test

    @wraps(inner)
    def watched(*arguments: Any, **named: Any) -> None:
        next(executions)
        signal.alarm(_LONGEST)
        try:
            inner(*arguments, **named)
        finally:
            signal.alarm(0)

    function.hypothesis.inner_test = watched
    with tempfile.TemporaryDirectory(prefix="tawebeval-fuzz-") as directory:
        os.chdir(directory)
        for number in range(rounds) if rounds else count():
            if seeds:
                seed(f"{seeds} {number}")(function)
            case.run(result)
            if not result.wasSuccessful() or (not rounds and time.monotonic() >= end):
                break
        os.chdir(ROOT)
    findings = [f"{name}\n{text}" for _, text in (*result.failures, *result.errors)]
    print(json.dumps(Outcome(next(executions), time.process_time(), findings)))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise AssertionError(f"one example takes over {_LONGEST} seconds")


def start_worker(name: str, seconds: float, rounds: int, seeds: str) -> Outcome:
    """Run a process that tries a property; return what it has printed."""
    command = [sys.executable, "-m", "tests.fuzz", "--work", name, str(seconds), str(rounds), seeds]
    environment = {**os.environ, "PYTHONHASHSEED": "0"} if seeds else None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    try:
        return Outcome(*json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        printed = (done.stdout + done.stderr).decode(errors="replace")
        return Outcome(0, 0, [f"{name}\nstatus {done.returncode}\n{printed}"])


def main(targets: Sequence[str]) -> int:
    """Try the targets that are named, or all; the result is the exit status."""
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        print(f"unknown targets {unknown}; there are {', '.join(TARGETS)}")
        return 2
    targets = targets or list(TARGETS)
    seconds = float(os.environ.get("FUZZ_SECONDS", "600")) / len(targets)
    rounds = int(os.environ.get("FUZZ_ROUNDS", "0"))
    processors = len(os.sched_getaffinity(0))
    seeds = os.environ.get("FUZZ_SEED", "")
    found = 0
    with ThreadPoolExecutor(processors) as threads:
        workers = {
            target: [
                threads.submit(
                    start_worker,
                    name,
                    seconds / len(TARGETS[target]),
                    rounds,
                    seeds and f"{seeds} {one}",
                )
                for name in TARGETS[target]
                for one in range(1 if rounds else processors)
            ]
            for target in targets
        }
        for target, futures in workers.items():
            outcomes = [future.result() for future in futures]
            findings = [finding for outcome in outcomes for finding in outcome.findings]
            found += len(findings)
            print(
                f"[fuzz] {target}: {sum(one.executions for one in outcomes)} executions,"
                f" {sum(one.processor for one in outcomes):.0f} s of processor time,"
                f" {len(findings)} findings",
                *(f"[fuzz] finding in {finding}" for finding in findings),
                sep="\n",
                flush=True,
            )
    print(f"[fuzz] {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        sys.exit(main(sys.argv[1:]))
