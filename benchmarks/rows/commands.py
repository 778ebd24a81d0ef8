"""What the commands cost before they do anything: their processor time, and that of their children.

`tawebeval list` asks a daemon that knows no evaluation, `tawebeval try` runs `/bin/echo` in the
sandbox. There is no baseline: most of it is Python's, which imports modules. What httpx imports
where it is installed, and tawebeval does not depend on, is hidden from it.

`tawebeval try` imports Twisted, whose Deferreds import asyncio, and makes the classes of attrs. It
keeps TLS, a fifth of all, from Twisted's reactor. Where modules are not compiled, as in a checkout
with PYTHONDONTWRITEBYTECODE, compiling them takes a fifth more.
"""

from __future__ import annotations

import os
import pwd
import resource
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.daemon import COMMAND, daemon
from benchmarks.measure import CannotRun, Round, Row, interleave

_TIMES = 5  # in each round
_TAWEBEVAL = os.path.join(os.path.dirname(sys.executable), "tawebeval")
_HIDDEN = "pygments", "rich", "trio"
_TARGETS = {"--help": 0.2, "list": 0.2, "try": 0.35}


def measure(rounds: int) -> Sequence[Row]:
    """Return the rows."""
    with daemon() as ours, TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "solution").write_text("42\n")
        for package in _HIDDEN:
            (home / f"{package}.py").write_text("raise ImportError\n")
        evaluator = ["try", name, "--evaluator", COMMAND, str(home / "solution")]
        commands = {
            "--help": [_TAWEBEVAL, "--help"],
            "list": [_TAWEBEVAL, "list", "--server", f"http://127.0.0.1:{ours.port}"],
            "try": [_TAWEBEVAL, *evaluator],
        }
        samples = interleave(
            rounds, {what: partial(_spend, command, home) for what, command in commands.items()}
        )
    return [
        Row(
            f"processor time of `tawebeval {what}`",
            "s",
            samples[f"{what}.seconds"],
            target=target,
            higher_is_better=False,
        )
        for what, target in _TARGETS.items()
    ]


def _spend(command: Sequence[str], home: Path) -> Round:
    """Return the seconds of processor time that a command takes, with its children."""
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(home)}
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(_TIMES):
        try:
            subprocess.run(
                command,
                cwd=home,
                env=environment,
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[] if os.geteuid() == 0 else None,
                capture_output=True,
                check=True,
            )
        except PermissionError as error:
            raise CannotRun(f"as root: nobody cannot read the program {command[0]}") from error
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": spent / _TIMES}
