"""`daemon.startup`: nothing begins before all that it needs has been checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    CallbackSettings,
    CallerSettings,
    Configuration,
    CredentialSettings,
    EnvironmentSettings,
    MetricsSettings,
    RepositoryFetchSettings,
    SandboxSettings,
)
from tawebeval.daemon import startup as module
from tawebeval.daemon.configuration import check_sandbox_paths
from tawebeval.daemon.startup import StartupChecks
from tawebeval.errors import ConfigurationError
from tawebeval.evaluations.starting import InheritedResources
from tawebeval.evaluations.store import EvaluationDetails, RunRow
from tawebeval.linux.daemon_limits import PROCESS_LIMIT_REMEDY
from tawebeval.sandbox.probe import ProbeDirectories
from tawebeval.sandbox.workspace import derive_directory_name
from tests.cases.roots import make_root

EVALUATIONS, REPOSITORIES = Path("/state/evaluations"), Path("/cache/repositories")
BEGUN = ["connect_starter", "list_programs", "kill"]
CLEARED = ["remove_orphan_cgroups", "move_leftovers_to_trash"]
STARTED = [*BEGUN, *CLEARED, "git", "sandbox", "start", "start", "empty_trash"]
KERNEL = "the kernel's files of processes and devices"


class StartupTests(SynchronousTestCase):
    """`parts` are directories, cgroups, starter and threads at once."""

    def setUp(self) -> None:
        accounts = Path(self.mktemp())
        accounts.mkdir()
        self.parts = Mock(
            sandbox_files_directory=accounts,
            repositories=REPOSITORIES,
            evaluations=EVALUATIONS,
            unenforced_resources=(),
        )
        self.parts.connect_starter.return_value = self.parts
        self.parts.list_programs.return_value = ()
        self.parts.kill.return_value = set()
        self.parts.sandbox.side_effect = self.note_accounts
        self.sandbox: Any = SimpleNamespace(workspace_launcher=self.parts)
        self.left = InheritedResources()
        for name, part in (
            ("kill_directory_processes", self.parts.kill),
            ("check_git_version", self.parts.git),
            ("check_sandbox_and_log_problems", self.parts.sandbox),
            ("Thread", lambda target, name, daemon: SimpleNamespace(start=target)),
        ):
            self.patch(module, name, part)
        self.startup = self.make()

    def note_accounts(self, *_: object) -> None:
        """Note what there is of the accounts when the sandbox is checked."""
        self.accounts = {path.name for path in self.parts.sandbox_files_directory.glob("*")}

    def make(self) -> StartupChecks:
        parts: Any = self.parts
        return StartupChecks(parts, parts, self.sandbox, (parts, parts), self.left)

    @property
    def done(self) -> list[str]:
        return [each[0] for each in self.parts.mock_calls]

    def refused(self) -> str:
        return str(self.assertRaises(SystemExit, self.startup.startService))

    def test_start_removes_leftovers_first_and_stop_gives_cgroups_back_last(self) -> None:
        with capturedLogs() as events:
            self.startup.startService()
        self.assertEqual(self.done, STARTED)
        self.assertEqual(list(events), [])
        self.assertTrue(self.startup.running)
        self.assertIs(self.startup.directories, self.parts)
        self.parts.kill.assert_called_once_with(REPOSITORIES, EVALUATIONS)
        places = ProbeDirectories(REPOSITORIES, EVALUATIONS)
        self.parts.sandbox.assert_called_once_with(self.sandbox, places)
        # The sandbox's users are there before it is tried.
        self.assertGreaterEqual(self.accounts, {"group", "passwd", "init"})
        self.parts.reset_mock()
        self.startup.stopService()
        self.assertEqual(self.done, ["stop", "stop", "close", "remove_all_cgroups"])
        self.assertFalse(self.startup.running)

    def test_sandbox_files_of_an_earlier_daemon_are_kept_only_for_slurm_jobs(self) -> None:
        files = {"init-0"}
        (self.parts.sandbox_files_directory / "init-0").touch()
        description = {"kind": "slurm", "job_name": "tawebeval-1"}
        run = RunRow(7, 7, "/checkout", None, sandbox_description=description)
        for left in ([EvaluationDetails("a", b"", 0, 1, run=run)], []):
            self.left = InheritedResources(left)
            self.make().startService()
            self.assertEqual(files & self.accounts, files if left else set())

    def test_failure_ends_the_start_with_a_remedy(self) -> None:
        left = PermissionError(1, "Not permitted", "/state/evaluations/x")
        full = OSError(28, "No space left on device", "/state/x")
        threads = OSError(11, "threads: can't start new thread")
        starter = TimeoutError(110, "the starter of evaluators does not answer")
        for name, error, said in (
            ("connect_starter", starter, "the starter of evaluators does not answer"),
            ("move_leftovers_to_trash", left, "/state/evaluations/x: Not permitted"),
            (
                "move_leftovers_to_trash",
                full,
                "/state/x: No space left on device; free some disk space",
            ),
            ("git", ConfigurationError("git is older; than that"), "git is older; than that"),
            ("sandbox", SystemExit("tawebeval: no sandbox"), "no sandbox"),
            ("start", threads, f"threads: can't start new thread; {PROCESS_LIMIT_REMEDY}"),
        ):
            self.parts.reset_mock()
            part = getattr(self.parts, name)
            part.side_effect = error
            self.assertEqual(self.refused(), f"tawebeval: {said}")
            self.assertEqual(self.done, STARTED[: STARTED.index(name) + 1])
            part.side_effect = None

    def test_start_removes_programs_and_cgroups_that_belong_to_no_live_evaluation(self) -> None:
        run = RunRow(7, 7, "/checkout", None, sandbox_description={"group": "evaluation-a"})
        self.left = InheritedResources([EvaluationDetails("a", b"", 0, 1, run=run)])
        kept = EVALUATIONS / derive_directory_name("a") / "output"
        strays = [EVALUATIONS / "stray" / "output", Path("/elsewhere/x")]
        self.parts.list_programs.return_value = (kept, *strays)
        self.make().startService()
        self.assertEqual(
            self.done, [*BEGUN, *["forget_program_blocking"] * 2, *STARTED[len(BEGUN) :]]
        )
        self.assertEqual(self.parts.forget_program_blocking.call_args_list, list(map(call, strays)))
        (groups,) = self.parts.remove_orphan_cgroups.call_args.args
        self.assertEqual(set(groups), {"evaluation-a"})
        self.parts.kill.assert_called_once_with(REPOSITORIES)  # the starter has the evaluators

    def test_failed_removal_of_trash_is_logged(self) -> None:
        self.parts.empty_trash.side_effect = OSError(5, "Input/output error", "/state/trash/x")
        with capturedLogs() as events:
            self.startup.startService()
        self.assertIn("/state/trash/x: Input/output error", formatEvent(events[0]))

    def test_start_fails_if_the_trash_thread_cannot_start(self) -> None:
        self.patch(module, "Thread", Mock(side_effect=RuntimeError("can't start new thread")))
        self.assertEqual(self.refused(), f"tawebeval: threads; {PROCESS_LIMIT_REMEDY}")

    def test_resources_without_a_cgroup_limit_are_reported_in_one_line(self) -> None:
        self.parts.unenforced_resources = ("memory", "{problem}")
        with capturedLogs() as events:
            self.startup.startService()
        ((warning, level),) = [(formatEvent(event), event["log_level"]) for event in events]
        self.assertIn("limits: no cgroup limits memory, {problem} of an evaluation: ", warning)
        self.assertEqual(level, LogLevel.warn)


class PrivateTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        private = "lib/state lib/cache etc tokens handed git ssh hooks readers"
        for name in [*private.split(), "free/x"]:
            (self.root / name).mkdir(parents=True)
        self.environment = {
            "STATE_DIRECTORY": f"{self.root}/lib/state",
            "CACHE_DIRECTORY": f"{self.root}/lib/cache",
            "CREDENTIALS_DIRECTORY": f"{self.root}/handed",
        }
        self.file: Path | None = self.root / "etc/tawebeval.toml"

    def configure(self, *readable: str, kind: Any = "auto", root: str = "") -> Configuration:
        """Return a configuration that shows these, and this root."""
        key, known = f"{self.root}/ssh/id", "/etc/ssh/known"
        entries = (
            CredentialSettings("a", "a", password_file=f"{self.root}/git/password"),
            CredentialSettings("b", "b", key_file=key, known_hosts_file=known),
            CredentialSettings("c", "c", password_file="handed"),
        )
        return Configuration(
            sandbox=SandboxSettings(kind, readable=readable),
            callers=CallerSettings(tokens=f"{self.root}/tokens/file"),
            callbacks=CallbackSettings(secrets=f"{self.root}/hooks/secrets"),
            metrics=MetricsSettings(f"{self.root}/readers/file"),
            repositories=RepositoryFetchSettings(credentials=entries),
            environments={"x": EnvironmentSettings(root)} if root else {},
        )


class EnvironmentTests(PrivateTestCase):
    def refuse(self, path: str, words: str) -> None:
        error = self.assertRaises(ConfigurationError, self.check, path)
        self.assertTrue(str(error).startswith(f"environments.x.root: {words}"))

    def check(self, root: str) -> None:
        check_sandbox_paths(self.configure(root=root), self.file, self.environment)

    def test_root_directory_with_private_directories_or_secrets_is_refused(self) -> None:
        for path, what in (
            ("/", "a credential"),
            (f"{self.root}/lib", "the state directory"),
            (f"{self.root}/lib/state/evaluations/x", "the state directory"),
            (f"{self.root}/lib/state/environments", "the state directory"),
            (f"{self.root}/lib/state/environments/x/y", "the state directory"),
            (f"{self.root}/hooks", "the secrets of callbacks"),
        ):
            self.refuse(path, f"{path} would show evaluators {what if path != '/' else ''}")

    def test_root_directory_without_bin_sh_is_refused(self) -> None:
        check_sandbox_paths(self.configure(), self.file, self.environment)
        self.check(str(make_root(self.root / "lib/state/environments/sha256-0")))
        self.check(str(make_root(self.root / "srv/root")))
        self.refuse(f"{self.root}/free", f"{self.root}/free has no program /bin/sh; use")

    def test_readable_path_below_a_symbolic_link_of_a_root_directory_is_refused(self) -> None:
        root = make_root(self.root / "srv/root")
        (root / "data").symlink_to("/opt")
        configuration = self.configure("/data/cases", root=str(root))
        error = self.assertRaises(
            ConfigurationError, check_sandbox_paths, configuration, self.file, self.environment
        )
        start = f"environments.x.root: {root}/data is a symbolic link"
        self.assertTrue(str(error).startswith(start))


class ReadableTests(PrivateTestCase):
    def check(self, *readable: str, kind: Any = "auto") -> None:
        configuration = self.configure(*readable, kind=kind)
        check_sandbox_paths(configuration, self.file, self.environment)

    def refuse(self, path: str, what: str) -> None:
        """Hold that a path, below the root of the test, is refused, and why."""
        path = str(self.root / path)
        said = str(self.assertRaises(ConfigurationError, self.check, f"{self.root}/free", path))
        start = f"sandbox.readable[1]: {path} would show evaluators {what} ("
        self.assertTrue(said.startswith(start), said)

    def test_private_paths_their_content_and_their_parents_are_refused(self) -> None:
        for what, paths in (
            ("the state directory", "lib/state lib/state/evaluations/x lib /"),
            ("the cache directory", "lib/cache lib/cache/repositories"),
            ("the configuration", "etc etc/tawebeval.toml"),
            ("the tokens", "tokens tokens/file"),
            ("the secrets of callbacks", "hooks/secrets"),
            ("the metrics' tokens", "readers"),
            ("a credential", "git/password ssh"),
            ("systemd's credentials", "handed handed/other"),
            (KERNEL, "/proc /proc/self/fd /sys /sys/fs/cgroup /dev /dev/shm"),
        ):
            for path in paths.split():
                self.refuse(path, what)

    def test_link_in_or_to_a_private_path_is_refused(self) -> None:
        (self.root / "free/link").symlink_to(self.root / "lib/state")
        (self.root / "free/kernel").symlink_to("/proc/1")
        (self.root / "lib/cache/out").symlink_to(self.root / "free")
        self.refuse("free/link/uploads", "the state directory")
        self.refuse("free/kernel", KERNEL)
        self.refuse("lib/cache/out", "the cache directory")
        (self.root / "elsewhere").mkdir()
        (self.root / "lib/state").rmdir()
        (self.root / "lib/state").symlink_to(self.root / "elsewhere")
        self.refuse("elsewhere", "the state directory")
        self.refuse("lib/state", "the state directory")

    def test_other_paths_may_be_readable(self) -> None:
        self.check()
        self.check("/usr/share", "/opt/x", f"{self.root}/lib/state2", f"{self.root}/tokens/file2")
        self.check(f"{self.root}/free/x", "/etc/ssh/known", "/device", f"{self.root}/ssh/id.pub")
        self.check("/proc", kind="none")  # without a sandbox nothing is shown in particular
        # Without these there is less to hide; relative names are no folder's.
        self.file = None
        del self.environment["CREDENTIALS_DIRECTORY"]
        self.check(f"{self.root}/etc", f"{self.root}/handed")
