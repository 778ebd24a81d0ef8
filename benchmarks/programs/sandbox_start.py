"""A command in the sandbox, started by the starter: `sandbox_start STARTS [MOUNTS]`.

Prints the median of the milliseconds from the start until the output has been read. Of root it
becomes nobody first, as the daemon does. The machine has `MOUNTS` more mounts, as hosts of
containers have.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import percentile
from tawebeval.config import Configuration
from tawebeval.core.evaluations import Checkout, Commit
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.starter import enter_user_namespace
from tawebeval.sandbox.base import SandboxedRun
from tawebeval.sandbox.bubblewrap import BROKER_SOCKET_NAME, write_sandbox_files
from tawebeval.sandbox.probe import open_sandbox
from tawebeval.sandbox.workspace import Workspace, WritableTrees

COMMAND = "/bin/echo hello"
_PATIENCE = 20.0  # seconds
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


@contextmanager
def _runs() -> Iterator[tuple[Callable[[], SandboxedRun], WritableTrees]]:
    """Become who evaluators are, and let runs be made for the command; close them yourself."""
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(*[nobody.pw_gid] * 3)
        os.setresuid(*[nobody.pw_uid] * 3)
    with tempfile.TemporaryDirectory(prefix="tawebeval-benchmark-") as name:
        accounts, upload = Path(name, "accounts"), Path(name, "upload")
        accounts.mkdir()
        write_sandbox_files(accounts)
        trees = WritableTrees(Path(name, "starter", "socket"))
        sandbox = open_sandbox(Configuration(), accounts, CgroupManager({}), trees)
        trees.connect_starter()
        (upload / "submission").mkdir(parents=True)
        workspace = Workspace(Path(name).resolve() / "workspace")
        workspace.create_directories(upload, workspace.make_sandboxed_view(Path("/")))
        checkout = Path(name).resolve() / "checkout"
        checkout.mkdir()

        def opened() -> SandboxedRun:
            tree = Checkout(Commit("", ""), checkout, lambda: None)
            return sandbox.make_run(workspace, tree, sandbox.limits)

        try:
            yield opened, trees
        finally:
            trees.close()


def add_mounts(count: int) -> None:
    """Enter a mount namespace, if need be of a user namespace, with so many mounts more."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    if os.geteuid():
        enter_user_namespace()
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    for place in ["/mnt", *(f"/mnt/{number}" for number in range(count))]:
        Path(place).mkdir(exist_ok=True)
        check(libc.mount(b"none", place.encode(), b"tmpfs", 0, None))


def _start(run: SandboxedRun, trees: WritableTrees) -> float:
    """Start the command as evaluators are; return the seconds until it was waited for."""
    begin = time.perf_counter()
    run.start_evaluator(COMMAND, {}, run.workspace.tree_directory)
    status, printed = trees.starter.wait_for_program(run.workspace.output_directory, _PATIENCE)
    seconds = time.perf_counter() - begin
    assert (status, printed) == (0, b"hello\n"), printed
    return seconds


def main() -> None:
    """Start one after the other, and report."""
    times = []
    if len(sys.argv) > 2:
        add_mounts(int(sys.argv[2]))
    with _runs() as (opened, trees):
        for _ in range(int(sys.argv[1])):
            run = opened()
            times.append(_start(run, trees) * 1e3)
            run.close()
            remove_tree(run.workspace.overlay_work_directory)
            (run.workspace.root / BROKER_SOCKET_NAME).unlink()
    print(json.dumps({"p50": percentile(times, 50)}))


if __name__ == "__main__":
    main()
