"""The commands of README.md on a bare Debian: `python -m tests.machine.bare [SUITE]`.

Runs `make demo`, the unit tests and some quick tests of `tests.integration` in a root file system
with the packages that README.md names. Root runs them, in a copy of this checkout below `/root`,
which only root can read; its path has a space and a letter that is not in ASCII. The kernel is this
machine's; there is no network, and no cgroup.

The exit status is 0 only if both commands succeed, so not if no test ran or one was skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.machine import package, roots

QUICK = ("privileges", "readme", "startup")
"""The modules of `tests.integration` that are run: what root and newcomers begin with."""

_HOME, _CHECKOUT = "/root", "/root/für alle/tawebeval"
# With CI set, no test may be skipped. A property holds or not whatever the machine has: `make test`
# outside tries the examples.
_VARIABLES = {
    "HOME": _HOME,
    "CI": "yes",
    "TAWEBEVAL_SAME_EXAMPLES": "yes",
    "TAWEBEVAL_EXAMPLES": "4",
}
_TEST = """
tests=$(find tests -name 'test_*.py' ! -path 'tests/integration/*' ! -path 'tests/fuzz/*' | sort)
exec make test TESTS="$(echo $tests | sed 's:/:.:g; s:[.]py::g') $*"
"""


def find_problem() -> str:
    """Return why there can be no bare Debian here, "" if there can."""
    if os.geteuid():
        return "only root can run daemons as another user"
    missing = [program for program in ("mmdebstrap", "bwrap") if shutil.which(program) is None]
    return f"{', '.join(missing)} cannot be found" if missing else ""


def run_commands(suite: str, work: Path) -> bool:
    """Run the commands, which print as they go; tell whether all have succeeded. Blocks."""
    home, temporary = work / "root", work / "tmp"
    home.mkdir(0o700)
    temporary.mkdir()
    temporary.chmod(0o1777)
    source = work / _CHECKOUT.removeprefix("/")
    source.parent.mkdir()
    package.copy_checkout(source)
    quick = [f"tests.integration.test_{name}" for name in QUICK]
    variables = {**package.OFFLINE, **_VARIABLES}
    succeeded = True
    with roots.bare(suite) as root, package.wheels(suite, root, source) as wheels:
        options = ["--unshare-net", "--ro-bind", str(wheels), package.WHEELS]
        options += ["--bind", str(temporary), "/tmp", "--bind", str(home), _HOME]
        options += ["--chdir", _CHECKOUT]
        for what, command in (
            ("make demo", ("make", "demo")),
            ("make test", ("sh", "-euc", _TEST, "sh", *quick)),
        ):
            began = time.monotonic()
            argv = package.build_argv(root, source, options, command, variables)
            status = subprocess.run(argv, stdin=subprocess.DEVNULL).returncode
            verdict = f"FAILED with status {status}" if status else "ok"
            print(f"{suite}: {what}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
            succeeded = succeeded and not status
    return succeeded


def main() -> int:
    """Read the command line, and return the exit status."""
    suite = sys.argv[1] if len(sys.argv) > 1 else "bookworm"
    problem = find_problem()
    if problem:
        print(f"no bare Debian can be had here: {problem}")
        return 1
    work = Path(tempfile.mkdtemp(prefix="tawebeval-bare-"))
    try:
        return 0 if run_commands(suite, work) else 1
    except subprocess.CalledProcessError as error:
        print((error.stdout or b"").decode(errors="replace")[-4000:])
        print(f"{suite}: FAILED: {str(error)[-200:]}")
        return 1
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
