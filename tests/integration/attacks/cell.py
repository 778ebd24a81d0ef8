"""A cell of the product without a daemon around it, from which a defence can be taken away."""

from __future__ import annotations

import base64
import os
import resource
import shutil
import signal
import subprocess
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LimitSettings, SandboxSettings
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.child import Spawner
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.linux.starter import FIRST_PASSED_DESCRIPTOR
from tawebeval.sandbox.bubblewrap import BROKER_SOCKET_NAME, write_sandbox_files
from tawebeval.sandbox.probe import open_bubblewrap
from tawebeval.sandbox.workspace import Workspace
from tests.cases.patience import PATIENCE
from tests.fakes.sandbox import FakeTrees
from tests.integration.attacks.case import CPU, DISK, DISK_FILES, FILE_SIZE, MEMORY, PROCESSES
from tests.integration.client import python
from tests.integration.unprivileged import USER, give, temporary_folder

Change = Callable[[list[str]], list[str]]

# All that `--unshare-all` stands for, as far as one of it can be left out.
_ALL = ("user", "ipc", "pid", "net", "uts", "cgroup")

UNSHARE = ("/usr/bin/unshare", "--user", "--map-current-user", "--")

# What tells bwrap the numbers of its descriptors.
_OPENED = ("--args", "--json-status-fd", "--add-seccomp-fd")


def as_it_is(argv: list[str]) -> list[str]:
    """Take nothing away."""
    return argv


def without(*arguments: str) -> Change:
    """Take away arguments that follow one another, wherever they stand: first and only once."""

    def change(argv: list[str]) -> list[str]:
        for at in range(len(argv)):
            if tuple(argv[at : at + len(arguments)]) == arguments:
                return argv[:at] + argv[at + len(arguments) :]
        raise AssertionError(f"{arguments} are not in {argv}")

    return change


def without_option(name: str) -> Change:
    """Take away an option, with its value, either way of writing both."""

    def change(argv: list[str]) -> list[str]:
        for at, argument in enumerate(argv):
            if argument.startswith(f"{name}="):
                return argv[:at] + argv[at + 1 :]
            if argument == name:
                return argv[:at] + argv[at + 2 :]
        raise AssertionError(f"{name} is not in {argv}")

    return change


def instead(old: str, *new: str) -> Change:
    """Put others in the place of an argument."""

    def change(argv: list[str]) -> list[str]:
        at = argv.index(old)
        return [*argv[:at], *new, *argv[at + 1 :]]

    return change


def sharing(namespace: str) -> Change:
    """Take away one of the namespaces."""
    kept = [f"--unshare-{name}" for name in _ALL if name not in (namespace, "user")]
    return instead("--unshare-all", *kept)


def showing(path: str, inside: str = "", how: str = "--ro-bind") -> Change:
    """Show something more of the machine."""

    def change(argv: list[str]) -> list[str]:
        at = len(argv) - argv[::-1].index("--dev")  # after which come the workspace's places
        return [*argv[: at + 1], how, path, inside or path, *argv[at + 1 :]]

    return change


def all_of(*changes: Change) -> Change:
    """Take away several things."""

    def change(argv: list[str]) -> list[str]:
        for one in changes:
            argv = one(argv)
        return argv

    return change


class NoTrees:
    """In place of a starter, which starts nothing here."""

    pid = os.getpid()

    @property
    def starter(self) -> NoTrees:
        """This."""
        return self

    def forget_program(self, _: Workspace) -> None:
        """Do nothing."""


class CellTestCase(SynchronousTestCase):
    """Runs programs in a cell of the product, with or without all of its defences.

    There are no groups here, and no daemon that looks at limits.
    """

    settings: ClassVar[SandboxSettings] = SandboxSettings()

    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        accounts = self.folder / "accounts"
        accounts.mkdir()
        write_sandbox_files(accounts)
        limits = LimitSettings(
            cpu=CPU,
            memory=MEMORY,
            processes=PROCESSES,
            file_size=FILE_SIZE,
            disk=DISK,
            disk_files=DISK_FILES,
        )
        orphans = OrphanReaper(Clock(), Spawner(Clock()))  # which nobody asks for here
        self.trees: Any = FakeTrees()  # only says what would be started
        self.sandbox = open_bubblewrap(
            Configuration(limits=limits, sandbox=self.settings),
            accounts,
            CgroupManager({}),
            orphans,
            self.trees,
        )
        for descriptor in self.sandbox.filter_descriptors:
            self.addCleanup(os.close, descriptor)
        solution = self.folder / "upload" / "submission" / "solution" / "solution.txt"
        solution.parent.mkdir(parents=True)
        solution.write_text("42\n")
        self.workspace = Workspace(self.folder / "evaluation")
        self.workspace.create_directories(
            self.folder / "upload", self.workspace.make_sandboxed_view(Path("/evaluation"))
        )
        self.workspace.output_directory.mkdir()  # as the client of a starter does
        self.solution = self.workspace.submission_directory / "solution" / "solution.txt"
        self.checkout = self.folder / "checkout"
        self.checkout.mkdir()
        for folder, folders, names in os.walk(self.folder):
            for name in (*folders, *names):
                give(Path(folder, name))
        self.cell = self.sandbox.make_run(
            self.workspace,
            Checkout(Commit("", ""), self.checkout, lambda: None),
            self.sandbox.limits,
        )
        self.addCleanup(self.cell.close)
        limits_of_cell: Any = self.cell.run_limits
        limits_of_cell.make_cgroup("cell")  # of which there is nothing here

    def start(
        self,
        command: str,
        change: Change = as_it_is,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> subprocess.Popen[str]:
        """Start a command in the cell, less what `change` takes away."""
        variables = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/evaluation/home",
            "TEMPORARY_DIRECTORY": "/evaluation/tmp",
            "SUBMISSION_FILE_SOLUTION": "/evaluation/submission/solution/solution.txt",
            "EVALUATION_DATA_BEGIN": "begin",
            **(environment or {}),
        }
        (self.workspace.root / BROKER_SOCKET_NAME).touch()  # what the starter makes
        self.cell.launch.start_evaluator(command, variables, self.workspace.tree_directory)
        launch = self.trees.launched[-1]
        with ExitStack() as opened:
            given = [_open_descriptor(each, opened) for each in launch.descriptors]
            argv = [*_limit(launch.rlimits), *_renumber(launch.argv, given)]
            process = subprocess.Popen(
                change(argv),
                env=launch.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(*given, *descriptors),
                start_new_session=True,
                user=USER.pw_uid if USER else None,
                group=USER.pw_gid if USER else None,
                extra_groups=() if USER else None,
            )
        self.addCleanup(_end, process)
        return process

    def open(self, described: Mapping[str, str]) -> int:
        """Return a descriptor of a launch, as the starter opens it."""
        if "append" in described:
            self.workspace.output_directory.mkdir(exist_ok=True)
            descriptor = os.open(described["append"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        else:
            descriptor = os.memfd_create("given")
            os.pwrite(descriptor, b64decode(described["base64"]), 0)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def say(self, command: str, change: Change = as_it_is, **more: object) -> str:
        """Return what a command prints in the cell."""
        process = self.start(command, change, **more)  # type: ignore[arg-type]
        return process.communicate(timeout=PATIENCE)[0]

    def run_program(
        self, program: str, *arguments: str, change: Change = as_it_is, **more: object
    ) -> str:
        """Return what a Python program prints in the cell."""
        return self.say(python(program, *arguments), change, **more)


def _open_descriptor(described: Mapping[str, str], opened: ExitStack) -> int:
    """Return a descriptor of a `LaunchSpec`, as the starter opens it; `opened` closes it."""
    if "append" in described:
        descriptor = os.open(described["append"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    else:
        descriptor = os.memfd_create("given")
        os.pwrite(descriptor, base64.b64decode(described["base64"]), 0)
    opened.callback(os.close, descriptor)
    return descriptor


def _renumber(argv: Sequence[str], given: Sequence[int]) -> list[str]:
    """Return arguments with the numbers that descriptors have here.

    The first process cannot note anything, for it has a number of its own for that.
    """
    return [
        str(given[int(word) - FIRST_PASSED_DESCRIPTOR]) if before in _OPENED else word
        for before, word in zip(["", *argv], argv, strict=False)
    ]


def _limit(rlimits: Mapping[int, tuple[int, int]]) -> list[str]:
    """Return what sets limits as the starter does, where processes are counted apart."""
    names = {number: name for name, number in vars(resource).items() if name[:7] == "RLIMIT_"}
    options = (
        f"--{names[number][7:].lower()}={soft}:{'unlimited' if hard < 0 else hard}"
        for number, (soft, hard) in rlimits.items()
    )
    return [*UNSHARE, "/usr/bin/prlimit", *options, "--"]


def _end(process: subprocess.Popen[str]) -> None:
    """End what may be left of a process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
