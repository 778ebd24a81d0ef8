"""Check the package on machines: `python -m tests.machine [--prepare] [--only WORDS] [SUITE]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cases.links import leading_nowhere, links
from tests.machine import cache, package, qemu, roots

SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
PATIENCE = 7200.0
"""Seconds for one machine, which takes a quarter of an hour, and far longer beside others."""

_GUEST = Path(__file__).with_name("guest")
# What the machine prints of a check; all else explains a failure.
_VERDICT = re.compile(r"(ok|FAILED) ")
_ALL = "all checks were run"
_CUT = "the power is cut"
_CGROUP_TESTS = "cgroups of an ordinary user"
"""The check that is made only by its name, for it takes a quarter of an hour."""
_UNIT_TESTS = "unit tests, with this machine's kernel"
_POLICY = "policy of packages"
_LINTIAN_OPTIONS = (
    *("--allow-root", "--no-cfg", "--fail-on=error,warning"),
    # As only packages for these machines are (`package.Workshop.build`).
    *(f"--suppress-tags=uses-no-compression-for-{part}-tarball" for part in ("control", "data")),
)
_SHARED = (
    "man/man1/tawebeval.1.gz",
    "bash-completion/completions/tawebeval",
    "zsh/vendor-completions/_tawebeval",
    "fish/vendor_completions.d/tawebeval.fish",
)
"""Files of the package below /usr/share."""


def _programs() -> dict[str, str]:
    """Return the suite's own attacks by their names."""
    # Not before it is known that there can be machines: this needs libseccomp, as QEMU does.
    from tests.integration.attacks import bombs, fillers

    found = {**vars(bombs), **vars(fillers)}
    return {name: value for name, value in found.items() if name.isupper()}


def find_cgroup_tests() -> list[str]:
    """Return the names of the tests that `needs_cgroups` skips without cgroups."""
    found = []
    for path in sorted((package.ROOT / "tests/integration").glob("test_*.py")):
        # A class comes first, so that each test is found with the last one before it.
        words = r"(?m)^class (\w+)|^    @needs_cgroups\n    (?:async )?def (\w+)"
        case = ""
        for name, test in re.findall(words, path.read_text()):
            case = name or case
            if test:
                found.append(f"tests.integration.{path.stem}.{case}.{test}")
    return found


def _stopwatch() -> Callable[[], str]:
    """Return what tells the seconds since it was asked last, "12 s"."""
    last = time.monotonic()

    def took() -> str:
        nonlocal last
        before, last = last, time.monotonic()
        return f"{last - before:.0f} s"

    return took


class Suite:
    """The checks on one suite; `failed` and `passed` count them."""

    def __init__(self, name: str, only: str, prepare: bool) -> None:
        self._name = name
        self._only = only
        self._prepare = prepare
        self.passed = self.failed = 0

    def say(self, line: str) -> None:
        print(f"{SUITES[self._name]}: {line}", flush=True)

    def judge(self, line: str) -> None:
        """Print a line, which may be the verdict of a check."""
        self.say(line)
        found = _VERDICT.match(line)
        if found:
            self.passed += found[1] == "ok"
            self.failed += found[1] == "FAILED"

    def explain(self, printed: bytes) -> None:
        for line in printed.decode(errors="replace").splitlines()[-60:]:
            self.say(f"    {line}")

    def run(self) -> None:
        work = Path(tempfile.mkdtemp(prefix="tawebeval-qemu-"))
        try:
            self._run(work)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.judge(f"FAILED {str(error)[-200:]}")  # commands are long
            self.explain(getattr(error, "stdout", None) or b"")
        finally:
            shutil.rmtree(work)

    def _run(self, work: Path) -> None:
        took = _stopwatch()
        with (
            roots.machine(self._name) as folder,
            package.workshop(self._name, work) as workshop,
            ThreadPoolExecutor(1) as beside,
        ):
            self.say(f"the root file systems are there ({took()})")
            if self._prepare:
                self.passed += 1
                return
            built = workshop.build()
            self.say(f"the package was built ({took()})")
            given = work / "given.d"
            shutil.copytree(_GUEST, given)
            (given / "programs.json").write_text(json.dumps(_programs()))
            shutil.copyfile(built, given / "tawebeval.deb")
            (given / "only").write_text(self._only)
            if self._only and _CGROUP_TESTS.startswith(self._only):
                shutil.copytree(workshop.install(), given / "checkout", symlinks=True)
                (given / "cgroup_tests").write_text("\n".join(find_cgroup_tests()))
            examining = testing = None
            if _POLICY.startswith(self._only):
                examining = beside.submit(self._examine, built, work / "files")
            if workshop.has_other_python() and _UNIT_TESTS.startswith(self._only):
                testing = beside.submit(self._test, workshop)
            last = self._boot(folder, given, work, took)
            if last == _CUT:
                last = self._boot(folder, given, work, took)
            if last != _ALL:
                self.judge("FAILED the machine was off before all checks were run; its console:")
                self.explain((work / "console").read_bytes())
            for each in filter(None, (examining, testing)):
                self.judge(each.result())

    def _boot(self, folder: Path, given: Path, work: Path, took: Callable[[], str]) -> str:
        """Boot the machine, and print what its checks print; return the last line."""
        last = ""
        for line in qemu.boot(folder, given, work, PATIENCE):
            if not last:
                self.say(f"the machine was booted ({took()})")
            self.judge(line)
            last = line
        return last

    def _examine(self, built: Path, files: Path) -> str:
        """Look at the files of the package, and let lintian(1) of its suite; return the verdict."""
        try:
            roots.run("dpkg-deb", "--extract", built, files)
            share = files / "usr" / "share"
            faults = [path for path in _SHARED if not (share / path).exists()]
            documents = share / "doc" / "tawebeval"
            if len(list(links(documents))) <= 50:
                faults.append(f"the documents are not in /usr/share/doc/{documents.name}")
            faults += leading_nowhere(documents)
            if platform.freedesktop_os_release().get("VERSION_CODENAME") == self._name:
                if shutil.which("lintian"):
                    faults += roots.run("lintian", *_LINTIAN_OPTIONS, built).splitlines()
                elif os.environ.get("CI"):
                    faults.append("with CI set, lintian is not skipped")
        except subprocess.CalledProcessError as error:
            self.explain(error.stdout)
            return f"FAILED {_POLICY}"
        return f"FAILED {_POLICY}: {faults}" if faults else f"ok {_POLICY}"

    def _test(self, workshop: package.Workshop) -> str:
        """Run the unit tests with the suite's Python, bubblewrap and git; return the verdict."""
        took = _stopwatch()
        try:
            outcome = workshop.test()
        except subprocess.CalledProcessError as error:
            self.explain(error.stdout)
            return f"FAILED {_UNIT_TESTS}"
        return f"ok {_UNIT_TESTS}: {outcome} ({took()})"


def stop(*_: object) -> None:
    """End the programs that are at work: with them the suites end, and tidy up."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            # All but this one have nothing to tidy up themselves.
            asked = Path(f"/proc/{child}/comm").read_text() == "mmdebstrap\n"
            os.kill(int(child), signal.SIGTERM if asked else signal.SIGKILL)


def main() -> int:
    """Read the command line, and check the suites side by side; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.machine")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--only", default="", help="run the checks with these words in their names")
    parser.add_argument("--prepare", action="store_true", help="only make what is slow to make")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - set(SUITES)
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such suite (there are {', '.join(SUITES)})")
    reason = qemu.missing()
    if reason:
        print(f"No machine can be had here: {reason}")
        if os.environ.get("CI"):
            print("With CI set, this is not skipped.")
            return 1
        print("0 passed, 0 failed, 1 skipped")
        return 0
    signal.signal(signal.SIGTERM, stop)
    # What a shell has started in the background ignores it, with all children; but it is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    took = _stopwatch()
    print(f"Machines in QEMU ({qemu.accelerator()}); what is slow to make is in {cache.FOLDER}")
    names = arguments.suites or SUITES
    suites = [Suite(name, arguments.only, arguments.prepare) for name in names]
    with ThreadPoolExecutor(len(suites)) as threads:
        list(threads.map(Suite.run, suites))
    passed = sum(suite.passed for suite in suites)
    failed = sum(suite.failed for suite in suites)
    print(took())
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
