"""`sandbox.probe`: the configured sandbox, and what is said where it does not work."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LimitSettings
from tawebeval.config import SandboxSettings as Settings
from tawebeval.errors import ConfigurationError, SetupProblem
from tawebeval.linux.starter import LaunchSpec
from tawebeval.linux.starter_client import StartedProgram, StarterClient
from tawebeval.sandbox import probe as module
from tawebeval.sandbox.base import NoSandbox, Sandbox, SandboxedRun
from tawebeval.sandbox.bubblewrap import EVALUATOR_TOOLS_DIRECTORY_NAME, BubblewrapSandbox
from tawebeval.sandbox.probe import (
    DEFAULT_PROBE_DIRECTORIES,
    TREE_COPY_WARNING,
    ProbeDirectories,
    check_sandbox_and_log_problems,
    open_git_sandbox,
    open_sandbox,
    probe_bubblewrap,
    probe_overlays_or_copies,
)
from tawebeval.sandbox.workspace import Workspace, WorkspaceLauncher
from tests.fakes.sandbox import NO_CGROUPS, FakeLauncher

OTHERWISE = 'or, if you trust all callers, set sandbox.kind = "none"'

LIMITS = LimitSettings(processes=99)

MEND = (
    "make bubblewrap work as docs/security.md (Sandbox) says, in a container as docs/install.md"
    f" (Container) says, {OTHERWISE}"
)


class SandboxesTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.in_shell = shlex.quote(str(self.root))
        self.accounts = self.root / "accounts"
        self.temporary = self.root / "temporary"
        for folder in (self.root, self.accounts, self.temporary):
            folder.mkdir()
        self.patch(tempfile, "tempdir", str(self.temporary))
        self.bwrap: str | None = str(self.root / "bwrap")
        self.patch(shutil, "which", {"bwrap": self.bwrap}.get)
        self.launcher: Any = WorkspaceLauncher(self.root / "starter" / "socket")
        self.addCleanup(self.launcher.close)

    def install(self, script: str) -> None:
        """Have a bwrap that does this; what it is given is in "$@"."""
        path = self.root / "bwrap"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def open(self, kind: Any = "auto", **settings: Any) -> Sandbox:
        configuration = Configuration(sandbox=Settings(kind=kind, **settings), limits=LIMITS)
        return open_sandbox(configuration, self.accounts, NO_CGROUPS, self.launcher)

    def open_bubblewrap(self) -> BubblewrapSandbox:
        sandbox = self.open()
        assert isinstance(sandbox, BubblewrapSandbox)
        return sandbox


class OpenTests(SandboxesTestCase):
    def test_bubblewrap_is_not_needed_without_a_sandbox(self) -> None:
        self.patch(shutil, "which", lambda name: None)
        sandbox = self.open("none", readable=("/nonexistent",))
        tools = self.accounts / EVALUATOR_TOOLS_DIRECTORY_NAME
        self.assertEqual(sandbox, NoSandbox(LIMITS, NO_CGROUPS, self.launcher, tools))

    def test_bubblewrap_is_the_default_and_opened_as_configured(self) -> None:
        for kind in ("auto", "bubblewrap"):
            for network in (False, True):
                sandbox = self.open(kind, network=network, readable=("/usr", "/etc"))
                assert isinstance(sandbox, BubblewrapSandbox)
                self.assertEqual(sandbox.bwrap_path, self.bwrap)
                self.assertEqual(sandbox.has_network, network)
                self.assertEqual(sandbox.readable_paths, ("/usr", "/etc"))
                self.assertTrue(all(sandbox.filter_programs))

    def test_missing_bubblewrap_is_an_error(self) -> None:
        self.patch(shutil, "which", lambda name: None)
        for kind in ("auto", "bubblewrap"):
            error = self.assertRaises(ConfigurationError, self.open, kind)
            self.assertTrue(str(error).startswith("sandbox.kind: "))
            self.assertIn("run `apt-get install bubblewrap`, " + OTHERWISE, str(error))

    def test_missing_readable_path_is_an_error_with_its_setting(self) -> None:
        (self.root / "dangling").symlink_to("nowhere")
        for missing in ("/nonexistent", f"{self.root}/dangling"):
            error = self.assertRaises(ConfigurationError, self.open, readable=("/usr", missing))
            self.assertEqual(
                str(error),
                f"sandbox.readable[1]: {missing} does not exist; create or remove it",
            )

    def test_git_runs_in_bubblewrap_exactly_if_evaluators_do(self) -> None:
        self.assertIsNone(open_git_sandbox(self.open("none"), self.accounts).bwrap_path)
        box = open_git_sandbox(self.open_bubblewrap(), self.accounts)
        self.assertEqual(box.bwrap_path, self.bwrap)
        self.assertEqual(len(box.filter_programs), 2)


class TryTests(SandboxesTestCase):
    """A sandbox is tried out before anything relies on it."""

    def complaint(self, script: str) -> tuple[str, str]:
        self.install(script)
        return self.problem()

    def setUp(self) -> None:
        super().setUp()
        self.launcher.connect_starter()
        self.addCleanup(self.assert_nothing_left)

    def problem(self) -> tuple[str, str]:
        problem = probe_bubblewrap(self.open_bubblewrap())
        assert problem is not None
        return problem

    def assert_nothing_left(self) -> None:
        self.assertEqual(os.listdir(self.temporary), [], "the trial leaves nothing behind")
        self.assertEqual(self.launcher.starter.list_programs(), set(), "nor a program")

    def test_probe_runs_a_command_as_evaluators(self) -> None:
        self.install(
            f'printf "%s\\n" "$@" >{self.in_shell}/arguments; env >{self.in_shell}/environment\n'
            'while [ "$1" != --bind ]; do shift; done; test -d "$2" && echo sound'
        )
        self.assertIsNone(probe_bubblewrap(self.open_bubblewrap()))
        arguments = (self.root / "arguments").read_text().splitlines()
        self.assertEqual(arguments[-3:-1], ["/bin/sh", "-c"])
        self.assertTrue(arguments[-1].endswith("&& echo sound"), arguments[-1])
        environment = (self.root / "environment").read_text().split()
        self.assertEqual([line for line in environment if not line.startswith("_")], ["PWD=/"])
        written = [name for name in os.listdir(self.accounts) if not name.startswith("filter-")]
        self.assertEqual(written, [], "a trial is not what makes it work")

    def test_failed_probe_is_reported_with_a_remedy(self) -> None:
        outdated = "bwrap: Unknown option --disable-userns"
        for script, what, remedy in (
            (f"echo '{outdated}'", outdated, f"install bubblewrap 0.8.0 or newer; {OTHERWISE}"),
            ("printf 'bwrap: \\377 is new \\n\\n'; exit 1", "bwrap: \ufffd is new", MEND),
            ("exit 0", "bwrap exited with status 0", MEND),
            ("exit 8", "bwrap exited with status 8", MEND),
            ("kill -9 $$", "bwrap exited with status -9", MEND),
        ):
            self.assertEqual(self.complaint(script), (what, remedy))

    def test_full_disk_has_its_own_remedy(self) -> None:
        write_text = Path.write_text

        def write(path: Path, content: str) -> int:
            if path.name == "file":
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_text(path, content)

        said = "sh: 1: cannot create file: No space left on device"
        self.assertEqual(self.complaint(f"echo '{said}'"), (said, "free some disk space"))
        self.patch(Path, "write_text", write)
        what, remedy = self.problem()
        self.assertIn(f"{self.temporary}/tawebeval-", what)
        self.assertEqual(remedy, "free some disk space")

    def test_program_that_cannot_be_run_is_a_problem(self) -> None:
        self.assertIn("No such file", self.problem()[0])
        (self.root / "bwrap").write_text("")
        self.assertIn("Permission denied", self.problem()[0])

    def test_probe_that_hangs_is_a_problem(self) -> None:
        self.patch(module, "PROBE_TIMEOUT", 0.05)
        what, _ = self.complaint("exec sleep 600")
        self.assertEqual(what, "a sandbox without an evaluator: it did not end within 0.05 seconds")

    def test_probe_closes_what_it_has_opened(self) -> None:
        closed: list[object] = []
        close = SandboxedRun.close
        self.patch(SandboxedRun, "close", lambda cell: (closed.append(cell), close(cell)))
        for end in ("echo sound", "exit 1"):
            self.install(end)
            sandbox = self.open_bubblewrap()
            probe_bubblewrap(sandbox)  # by a connection that is kept
            before = os.listdir("/proc/self/fd")
            probe_bubblewrap(sandbox)
            self.assertEqual(os.listdir("/proc/self/fd"), before)
        self.assertEqual(len(closed), 4)

    def test_probe_succeeds_though_its_cgroup_cannot_be_removed(self) -> None:
        close = SandboxedRun.close

        def close_in_part(cell: SandboxedRun) -> None:
            close(cell)
            raise OSError(16, "Device or resource busy")

        self.patch(SandboxedRun, "close", close_in_part)
        self.install("echo sound")
        self.assertIsNone(probe_bubblewrap(self.open_bubblewrap()))


@attrs.define
class StartingLauncher(FakeLauncher):
    """Makes no trees, and starts programs all the same."""

    real: StarterClient = attrs.field(kw_only=True)

    @property
    def starter(self) -> StarterClient:
        return self.real

    def start_program(
        self, checkout: Path, workspace: Workspace, launch: LaunchSpec, *, copies_tree: bool = False
    ) -> StartedProgram:
        super().start_program(checkout, workspace, launch)
        return self.real.start_program(workspace.output_directory, launch)

    def kill_program(self, workspace: Workspace) -> None:
        self.real.forget_program_blocking(workspace.output_directory)


class TreesTests(SandboxesTestCase):
    """Overlays are tried out with the sandbox, and are what it can do without."""

    def setUp(self) -> None:
        super().setUp()
        self.launcher = StartingLauncher(real=self.launcher.connect_starter())

    def try_it(self) -> SetupProblem | None:
        for name in ("checkouts", "workspaces"):
            (self.root / name).mkdir(exist_ok=True)
        places = ProbeDirectories(self.root / "checkouts", self.root / "workspaces")
        problem = probe_overlays_or_copies(self.open_bubblewrap(), places=places)
        for place in (places.checkouts, places.workspaces):
            assert place is not None
            self.assertEqual(os.listdir(place), [])
        return problem

    def test_copies_are_used_if_overlays_fail(self) -> None:
        self.install(
            f"cd {self.in_shell}; test -e again && echo sound && exit; touch again; echo no"
        )
        self.assertIsNone(self.try_it())
        self.assertEqual(self.launcher.overlay_problem, "no")
        self.assertEqual(len(self.launcher.made), 2)

    def test_copies_are_used_if_overlays_cannot_be_mounted(self) -> None:
        self.install("echo sound")
        start = FakeLauncher.start_program

        def refuse(launcher: FakeLauncher, *arguments: Any, **options: bool) -> Any:
            started = start(launcher, *arguments, **options)
            if launcher.overlay_problem is None:
                raise OSError(22, "an overlay cannot be mounted: Invalid argument")
            return started

        self.patch(FakeLauncher, "start_program", refuse)
        self.assertIsNone(self.try_it())
        self.assertEqual(
            self.launcher.overlay_problem,
            "[Errno 22] an overlay cannot be mounted: Invalid argument",
        )
        self.assertEqual(len(self.launcher.made), 2)

    def test_probe_reports_a_sandbox_that_can_write_to_the_checkout(self) -> None:
        self.install(
            f"echo changed | tee {self.in_shell}/checkouts/*/directory/file >/dev/null; echo sound"
        )
        problem = self.try_it()
        assert problem is not None
        self.assertIn("reach the cache", problem[0])

    def test_copies_are_logged_with_their_reason(self) -> None:
        self.install("echo sound")
        for problem, said in ((None, []), ("no python", [f"{TREE_COPY_WARNING} (no python)"])):
            self.launcher.overlay_problem = problem
            with capturedLogs() as events:
                check_sandbox_and_log_problems(self.open(), DEFAULT_PROBE_DIRECTORIES)
            logged = [str(formatEvent(event)).partition("; ")[0] for event in events]
            self.assertEqual(logged, said)


class SandboxStartTests(SandboxesTestCase):
    def rely(self, sandbox: Sandbox) -> list[str]:
        with capturedLogs() as events:
            check_sandbox_and_log_problems(sandbox, DEFAULT_PROBE_DIRECTORIES)
        self.assertTrue(all(event["log_level"] is LogLevel.warn for event in events))
        return [str(formatEvent(event)) for event in events]

    def test_daemon_does_not_start_with_a_broken_sandbox(self) -> None:
        self.install("echo 'bwrap: Unknown option --json'; exit 1")
        sandbox = self.open_bubblewrap()
        message = str(self.assertRaises(SystemExit, self.rely, sandbox))
        self.assertTrue(
            message.startswith(
                "tawebeval: sandbox.kind: bubblewrap does not work here: bwrap: Unknown option"
            ),
            message,
        )
        self.assertIn("install bubblewrap 0.8.0", message)

    def test_daemon_does_not_start_without_a_starter(self) -> None:
        self.launcher = FakeLauncher(error=OSError(None, "no python"))
        for kind in ("none", "bubblewrap"):
            error = self.assertRaises(SystemExit, self.rely, self.open(kind))
            self.assertEqual(
                str(error),
                "tawebeval: no evaluator can be started: no python; install a python3 that the"
                " daemon's user can execute",
            )

    def test_daemon_without_sandbox_warns(self) -> None:
        sandbox = self.open("none")
        (warning,) = self.rely(sandbox)
        self.assertIn('sandbox.kind is "none"', warning)
        self.assertIn("the daemon's user can on this machine; run `apt-get install", warning)
        self.assertEqual(sandbox.workspace_launcher.overlay_problem, "no sandbox")
