"""What the number of files in an environment costs: 10,000 beside 100.

An environment is a root file system, here with a shell, two programs, and small files besides. Each
has a daemon of its own. Time is from `POST /evaluate` to the first event.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.client import Client
from benchmarks.daemon import USUAL, Daemon, daemon
from benchmarks.measure import Row, interleave
from benchmarks.rows.start import WHAT, evaluate, in_turn, start_row
from tawebeval.sandbox.bubblewrap import SHELL_PATH
from tawebeval.sandbox.environments import PRLIMIT_PATH

_FEW, _MANY = 100, 10_000
_IN_DIRECTORY = 100
_TARGET = 1.1
_NAME = "measured"
_PRINTING = "/bin/echo"  # of the evaluator
_LIBRARY = re.compile(r"(/\S+) \(")


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows. Raises CannotRun."""
    with _daemons() as daemons:
        few, many = (f"{files}" for files in daemons)
        with ExitStack() as stack:
            ways = {
                str(files): partial(
                    evaluate,
                    ours,
                    stack.enter_context(Client(ours.port)),
                    environment=_NAME,
                )
                for files, ours in daemons.items()
            }
            samples = interleave(rounds, {"start": partial(in_turn, ways)})
    what = f"environment of {_MANY:,} files, to {_FEW}"
    return [start_row(f"{WHAT}, {what}", samples, f"start.{many}", f"start.{few}", _TARGET)]


@contextmanager
def _daemons() -> Iterator[dict[int, Daemon]]:
    """Yield daemons by the number of files in their environment."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tawebeval-benchmark-")))
        folder.chmod(0o755)
        daemons = {}
        for files in (_FEW, _MANY):
            root = folder / str(files)
            _make(root, files)
            more = f'{USUAL}[environments.{_NAME}]\nroot = "{root}"\n'
            daemons[files] = stack.enter_context(daemon("auto", more))
        yield daemons


def _make(root: Path, files: int) -> None:
    """Make a root file system of the machine's own programs, and so many files."""
    for program in (SHELL_PATH, PRLIMIT_PATH, _PRINTING):
        libraries = subprocess.check_output(["ldd", program], text=True)
        for path in (program, *_LIBRARY.findall(libraries)):
            place = root / path[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    for number in range(files):
        place = root / "usr" / "share" / str(number // _IN_DIRECTORY) / str(number)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("small\n")
