"""Run the tests under trial: `python tests/run.py [NAME...]`, all of them without a NAME.

Without a NAME trial is run for each long module of `tests.integration` by itself, for a few
short ones at a time, once for the tests of the core, and once for all other tests, six at a
time: real daemons wait a lot. The tests of the core alone have to cover all its branches. The
output of each trial is shown when it has ended, with its processor time. Properties are tried on
a few examples, the same ones every time; with a NAME, on more, and on others. The exit status is 0
only if tests ran and everything is well; with CI in the environment a test that was skipped is
not, unless it needs a kernel with cgroups of version 2 (`NEEDS_CGROUPS`).

A few tests that failed beside others are run once more, alone, and this run counts: `unsteady:
NAME` before the last line then says so. If more than a few have failed, none is run again.

The last line is always `N passed, N failed, N skipped`; the tests that failed stand before it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# What only computes, and what signs. The tests of these modules have to take every branch.
CORE = (
    "tawebeval_client/backoff",
    "tawebeval_client/events",
    "tawebeval_client/http",
    "tawebeval_client/operations",
    "tawebeval_client/results",
    "tawebeval/core/*",
    "tawebeval/config",
    "tawebeval/errors",
    "tawebeval/webhooks/signing",
)

# The modules of tests.integration that are run by one trial, the longest first.
_TOGETHER = (
    # So that a browser starts only once.
    ("page", "page_class", "page_tokens", "page_languages"),
    ("lti", "documented_site", "documented_clients", "page_results", "page_problems"),
    # So that tawebeval is installed only once.
    ("hardening", "install", "systemd"),
    # So that a daemon starts only once.
    (
        *("budget_attacks", "call_attacks", "disk_attacks", "limit_attacks", "view_attacks"),
        "network_attacks",
    ),
    ("cli", "fetching", "streams", "toolchains"),
    ("runaways", "writable_trees", "killed"),
)

# Others that take long, the longest first.
_LONG = (
    *("slurm", "packages", "lasting_rounds", "description", "image", "packaging"),
    *("documented_commands", "try", "proxies", "libraries", "submissions", "examples"),
    *("git_attacks", "privileges", "demo", "full_disk", "page_http2", "lasting", "verdicts"),
)

_SHORT_TOGETHER = 5
"""How many of the shortest modules one trial runs: its start takes a second of processor time."""

_EXAMPLES = "25"
"""On how many examples properties are tried without TAWEBEVAL_EXAMPLES: `make fuzz` has more."""

_AT_ONCE = 6

_RUN_AGAIN = 3
"""How many tests may be run again after they failed: chance does not strike more of them."""

NEEDS_CGROUPS = "needs cgroups of version 2: "
"""What begins the reason to skip a test where the kernel gives version 1 alone.

`make test-machine` attacks the same limits, under the kernels of Debian, and runs these tests with
`ONLY=cgroups`.
"""

# Of a test, where a part that ended without a word is named by its first module.
_TEST = re.compile(r"\.[A-Z]\w*\.\w+$")

_SUMMARY = re.compile(rb"(PASSED|FAILED)(?: \((.*)\))?\s*")


class Outcome(NamedTuple):
    """How many tests came to what. What trial calls an error is a failure here.

    `names` are those that failed, as far as trial says; `left` those that were skipped because
    `make test-machine` has them.
    """

    passed: int
    failed: int
    skipped: int
    names: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read_summary(line: bytes) -> Outcome | None:
    """Return what trial's last line says, None if the line is another one."""
    found = _SUMMARY.fullmatch(line)
    if found is None:
        return None
    counts = {}
    for count in (found[2] or b"").decode().split(", "):
        name, _, number = count.partition("=")
        counts[name] = int(number or 0)
    failed = sum(counts.get(name, 0) for name in ("failures", "errors", "unexpectedSuccesses"))
    if found[1] == b"FAILED":
        failed = max(failed, 1)
    passed = counts.get("successes", 0) + counts.get("expectedFailures", 0)
    return Outcome(passed, failed, counts.get("skips", 0))


def find_names(printed: bytes, *beginnings: bytes) -> tuple[str, ...]:
    """Return names of tests from the sections, with one of `beginnings`, that trial prints last."""
    sections = printed.split(b"\n" + b"=" * 79 + b"\n")[1:]
    return tuple(
        name.decode()
        for each in sections
        if each.startswith(beginnings)
        for name in re.findall(rb"(?m)^tests(?:\.\w+)*\.[A-Z]\w*\.\w+$", each)
    )


def find_core_tests() -> list[str]:
    """Return the names of the tests of the core."""
    patterns = (re.sub("^tawebeval[/_](.*/)?", r"\1test_", module) for module in CORE)
    return [name for pattern in patterns for name in _find(f"{pattern}.py")]


def parts() -> Sequence[Sequence[str]]:
    """Return the names of all tests, in parts that do not disturb one another.

    The longest come first, so that none of them runs alone in the end; those of many short modules
    are among them.
    """
    names = _find("**/test_*.py")
    core = find_core_tests()
    units = [name for name in names if not name.startswith("tests.integration.")]
    others = [name for name in units if name not in core]
    long = [[name] for name in _LONG]
    together, alone = (
        [[f"tests.integration.test_{name}" for name in part] for part in some]
        for some in (_TOGETHER, long)
    )
    first = [others, core, *together]
    short = [name for name in names if name not in chain(*first, *alone)]
    count = len(short) // _SHORT_TOGETHER
    return [*first, *(short[at::count] for at in range(count)), *alone]


def _find(pattern: str) -> list[str]:
    """Return the names of the tests whose paths below `tests` match a pattern, sorted."""
    found = (ROOT / "tests").glob(pattern)
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found)


def run_trial(names: Sequence[str], python: Sequence[str], *, at_once: bool = True) -> Outcome:
    """Run tests, show what trial prints, `at_once` or in the end, and return how it ended."""
    command = [*python, "-m", "twisted.trial", *names]
    began = time.monotonic()
    outcome = None
    shown, printed = [], []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as trial:
        assert trial.stdout is not None
        line = b""
        while some := trial.stdout.read(65536):
            shown.append(some)
            printed.append(some)
            if at_once:
                _show(shown)
            *lines, line = (line + some).splitlines(keepends=True)
            for each in (*lines, line):
                outcome = read_summary(each) or outcome
        _, status, used = os.wait4(trial.pid, 0)
        trial.returncode = os.waitstatus_to_exitcode(status)
    if outcome is None:
        shown.append(b"trial ended with status %d and without a summary\n" % trial.returncode)
        outcome = Outcome(0, 1, 0)
    elif trial.returncode and not outcome.failed:
        shown.append(b"trial ended with status %d\n" % trial.returncode)
        outcome = outcome._replace(failed=1)
    if outcome.failed:
        failed = find_names(b"".join(printed), b"[FAIL]\n", b"[ERROR]\n")
        outcome = outcome._replace(names=failed or tuple(names[:1]))
    left = find_names(b"".join(printed), b"[SKIPPED]\n" + NEEDS_CGROUPS.encode())
    outcome = outcome._replace(left=left)
    took = used.ru_utime + used.ru_stime, time.monotonic() - began
    name = " ".join(names[:1]) + " and others" * (len(names) > 1)
    shown.append(b"%s: %.1f s of processor time in %.1f s\n" % (name.encode(), *took))
    _show(shown)
    return outcome


def _show(shown: list[bytes]) -> None:
    """Show what was kept, in one piece that nothing else comes between."""
    sys.stdout.buffer.write(b"".join(shown))
    sys.stdout.flush()
    shown.clear()


def run_parts(
    parts: Sequence[Sequence[str]], core: Sequence[str] = (), python: Sequence[str] = ()
) -> tuple[Outcome, Sequence[str]]:
    """Run the parts of the tests, some at a time; the part `core` by another Python, a command.

    Return what they come to together, and the names of tests that passed only when run again.
    """
    pythons = [python if part == core else [sys.executable] for part in parts]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        outcomes = list(threads.map(partial(run_trial, at_once=False), parts, pythons))
    passed, failed, skipped = map(sum, zip(*(each[:3] for each in outcomes), strict=True))
    names = tuple(chain.from_iterable(outcome.names for outcome in outcomes))
    left = tuple(chain.from_iterable(outcome.left for outcome in outcomes))
    return run_again(Outcome(passed, failed, skipped, names, left))


def run_again(outcome: Outcome) -> tuple[Outcome, Sequence[str]]:
    """Run the few tests that failed again, alone.

    Return what all tests come to with that, and the names of those that passed now.
    """
    names = [*dict.fromkeys(outcome.names)]
    are_tests = all(_TEST.search(name) for name in names)
    if not are_tests or len(outcome.names) < outcome.failed or not 0 < len(names) <= _RUN_AGAIN:
        return outcome, ()
    print(f"\nRunning {' '.join(names)} again, alone", flush=True)
    again = run_trial(names, [sys.executable])
    passed, skipped = outcome.passed + again.passed, outcome.skipped + again.skipped
    total = Outcome(passed, again.failed, skipped, again.names, outcome.left)
    return total, [name for name in names if name not in again.names]


def run_covered() -> tuple[Outcome, Sequence[str], bool]:
    """Run all tests; return how they ended, which are unsteady, and if they cover the core."""
    coverage = [sys.executable, "-m", "coverage"]
    core = ",".join(f"{module}.py" for module in CORE)
    with tempfile.TemporaryDirectory(prefix="tawebeval-coverage-") as directory:
        os.environ["COVERAGE_FILE"] = os.path.join(directory, "data")
        # Whoever changes something is to learn of that, and not of what was there before.
        os.environ["TAWEBEVAL_SAME_EXAMPLES"] = "yes"
        os.environ.setdefault("TAWEBEVAL_EXAMPLES", _EXAMPLES)
        outcome, unsteady = run_parts(parts(), find_core_tests(), [*coverage, "run"])
        print("\nBranch coverage of the core:\n", flush=True)
        report = [*coverage, "report", f"--include={core}", "--no-skip-covered"]
        covered = subprocess.run([*report, "--fail-under=100"], cwd=ROOT).returncode == 0
    return outcome, unsteady, covered


def main(names: Sequence[str]) -> int:
    """Run the tests that are named, or all; the result is the exit status."""
    # Without it a fifth of the processor time is spent on compiling what each daemon imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    unsteady: Sequence[str] = ()
    covered = True
    if names:
        print(f"Running {' '.join(names)} under trial", flush=True)
        outcome, unsteady = run_again(run_trial(names, [sys.executable]))
    else:
        print("Running all tests under trial", flush=True)
        outcome, unsteady, covered = run_covered()
    well = outcome.failed == 0
    print()
    if not covered:
        print("The core is not covered in all its branches.")
        well = False
    if outcome.passed + outcome.failed == 0:
        print("No test ran.")
        well = False
    if outcome.skipped > len(outcome.left) and os.environ.get("CI"):
        print("With CI set, no test may be skipped.")
        well = False
    for name in outcome.left:
        print(f"{NEEDS_CGROUPS}{name}")
    if unsteady:
        print(f"unsteady: {', '.join(unsteady)} failed beside others, and passed alone")
    for name in outcome.names:
        print(f"failed: {name}")
    print(outcome)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
