"""The sandbox's command line, run by hand, and the command alone: `sandbox_start STARTS`.

Prints percentiles of the milliseconds from the start until the output has been read. Of root
it becomes nobody first, as the daemon does.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import percentile
from tawebeval.config import Configuration
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.linux.cgroups.group import CgroupManager
from tawebeval.linux.child import Spawner
from tawebeval.linux.launcher_client import FIRST_DESCRIPTOR, LaunchSpec
from tawebeval.linux.privileges import ProcessCredentials, find_privileges
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.bubblewrap import write_sandbox_files
from tawebeval.sandbox.probe import open_bubblewrap
from tawebeval.sandbox.seccomp import make_filter
from tawebeval.sandbox.submissions import SOCKET_NAME
from tawebeval.sandbox.workspace import Workspace

COMMAND = "/bin/echo hello"
_PERCENTILES = (10, 50, 90)


def run_by_hand(argv: Sequence[str], keep: Sequence[int] = ()) -> float:
    """Run a command; return the seconds until its output has been read and it was waited for.

    It gets the descriptors `keep` as evaluators do.
    """
    begin = time.perf_counter()
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    # Above all numbers that they are to have.
    given = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR + len(keep)) for one in keep]
    actions += [
        (os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(given, FIRST_DESCRIPTOR)
    ]
    pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions)
    for one in (writing, *given):
        os.close(one)
    while os.read(reading, 4096):
        pass
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    assert status == 0, argv
    return time.perf_counter() - begin


@contextmanager
def cells() -> Iterator[Callable[[], tuple[SandboxedRun, LaunchSpec]]]:
    """Become who evaluators are, and let cells be made for the command; close them yourself."""
    os.close(make_filter(internet=False))  # which imports what nobody may not be able to read
    find_privileges("nobody" if os.geteuid() == 0 else "", ProcessCredentials()).become_user()
    with tempfile.TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
        accounts, upload = Path(name, "accounts"), Path(name, "upload")
        accounts.mkdir()
        write_sandbox_files(accounts)
        sandbox = open_bubblewrap(
            Configuration(), accounts, CgroupManager([], {}, {}), OrphanReaper(None, Spawner(None))
        )
        (upload / "submission").mkdir(parents=True)
        workspace = Workspace(Path(name).resolve() / "workspace")
        workspace.create_directories(upload, workspace.make_sandboxed_view(Path("/")))
        (workspace.root / SOCKET_NAME).touch()  # what `start` makes
        checkout = Path(name).resolve() / "checkout"
        checkout.mkdir()

        def opened() -> tuple[SandboxedRun, LaunchSpec]:
            tree = Checkout(Commit("", ""), checkout, lambda: None)
            cell = sandbox.make_run(workspace, tree, sandbox.limits)
            return cell, cell.make_launch_spec(COMMAND, {}, workspace.tree_directory)

        yield opened


def main() -> None:
    """Start both in turn, and report."""
    times: dict[str, list[float]] = {"sandbox": [], "plain": []}
    with cells() as opened:
        for _ in range(int(sys.argv[1])):
            cell, launch = opened()
            times["sandbox"].append(run_by_hand(launch.argv, launch.descriptors) * 1e3)
            cell.close()
            times["plain"].append(run_by_hand(["/bin/sh", "-c", COMMAND]) * 1e3)
    print(
        json.dumps(
            {
                f"{way}.{percent}": percentile(samples, percent)
                for way, samples in times.items()
                for percent in _PERCENTILES
            }
        )
    )


if __name__ == "__main__":
    main()
