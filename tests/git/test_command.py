"""`git.command`: arguments, environment, limits and results of git commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError, EvaluationFailure
from tawebeval.git import command
from tawebeval.git.command import GitResult, GitRunner
from tawebeval.git.remotes import Login
from tawebeval.sandbox.bubblewrap import READ_ONLY_ACCESS, SandboxAccess
from tests.fakes.world import FakeSpawner

REPOSITORY = Path("/cache/x.git")
BEFORE = 4
"""Number of arguments before the sandbox: the shell that sets limits."""


class GitTestCase(SynchronousTestCase):
    """A git whose process is a fake."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.spawn = FakeSpawner(self.clock)
        self.git = GitRunner(self.clock, self.spawn, ("https", "ssh"), 77777777)

    def run_git(self, *arguments: str, **settings: Any) -> Deferred[GitResult]:
        return Deferred.fromCoroutine(self.git.run_command(REPOSITORY, *arguments, **settings))

    def end(self, status: int = 0, number: int | None = None) -> None:
        self.spawn.child.end(status, number)
        self.clock.pump([0] * 3)


class CommandTests(GitTestCase):
    def start(self, *arguments: str, **settings: Any) -> Any:
        self.patch(os, "environ", {"SECRET": "x", "GIT_DIR": "/x", "PATH": "/x", "HOME": "/x"})
        self.run_git(*arguments, **settings)
        self.addCleanup(self.end)
        return self.spawn.child

    def test_environment_hardens_git_and_has_nothing_of_the_daemon(self) -> None:
        self.assertEqual(
            self.start("status", environment={"GIT_INDEX_FILE": "/x"}).environment,
            {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "LC_ALL": "C",
                "HOME": "/nonexistent",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_ATTR_NOSYSTEM": "1",
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
                "GIT_ALLOW_PROTOCOL": "https:ssh",
                "GIT_PROTOCOL_FROM_USER": "0",
                "GIT_NO_REPLACE_OBJECTS": "1",
                "GIT_NO_LAZY_FETCH": "1",
                "GIT_DIR": "/cache/x.git",
                "GIT_INDEX_FILE": "/x",
            },
        )

    def test_git_arguments_begin_with_repository_and_settings(self) -> None:
        arguments = ("fetch", "--quiet", "--end-of-options", "https://example.org/a b", "$(x)")
        argv = list(self.start(*arguments).argv)
        self.assertEqual(argv[BEFORE : BEFORE + 2], ["git", f"--git-dir={REPOSITORY}"])
        self.assertEqual(tuple(argv[-len(arguments) :]), arguments)
        self.assertEqual(self.spawn.child.directory, "/")

    def test_following_commands_are_in_the_shell_script_after_the_first(self) -> None:
        child = self.start("fetch", "$(x)", next_commands=(("log", "a'b"), ("ls-tree",)))
        argv = list(child.argv)[BEFORE:]
        script = argv[argv.index("-c") + 1]
        self.assertEqual(argv[:2], ["sh", "-c"])
        self.assertNotIn("$(x)", script)
        self.assertEqual(argv[3:6], ["sh", "git", f"--git-dir={REPOSITORY}"])
        self.assertEqual(argv[-2:], ["fetch", "$(x)"])
        settings = shlex.join(argv[6:-2])
        git = f"git --git-dir={REPOSITORY} {settings}"
        self.assertEqual(
            script.split(" && "),
            ['"$@"', r"printf '\0'", f"""{git} log 'a'"'"'b'""", r"printf '\0'", f"{git} ls-tree"],
        )

    def test_only_first_command_asks_for_password(self) -> None:
        login = LoginTests.login
        argv = list(self.start("fetch", next_commands=(("log",),), login=login).argv)[BEFORE:]
        self.assertNotIn("git.example.org", argv[2])
        self.assertIn("git.example.org", " ".join(argv[3:]))

    def run_shell(self, command: str, **settings: Any) -> list[str]:
        """Return the lines that a shell command prints in the place of git."""
        before = self.start("fetch", **settings).argv[:BEFORE]
        path = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [*before, "sh", "-c", command], env=path, capture_output=True, text=True
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.splitlines()

    def test_memory_core_dumps_and_file_sizes_are_limited(self) -> None:
        command = "ulimit -d; ulimit -H -d; ulimit -H -c; ulimit -H -f"
        kib = str(77777777 // 1024)
        self.assertEqual(self.run_shell(command, max_file_size=5000), [kib, kib, "0", "10"])
        self.assertEqual(self.run_shell(command)[:3], [kib, kib, "0"])

    def test_oom_score_of_git_lets_the_kernel_kill_git_before_the_daemon(self) -> None:
        own = int(Path("/proc/self/oom_score_adj").read_text())
        self.assertEqual(self.run_shell("cat /proc/self/oom_score_adj"), [str(max(own, 500))])

    def test_command_enters_its_cgroup(self) -> None:
        group = Path(self.mktemp()).absolute() / "a b"
        group.parent.mkdir()
        self.git = GitRunner(self.clock, self.spawn, (), entry=[str(group)], niceness=10)
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
        self.assertEqual(self.run_shell("nice"), [str(nice)])
        self.assertEqual(group.read_text(), "0\n")
        group.unlink()
        group.mkdir()
        self.assertEqual(self.run_shell("echo began"), ["began"])

    def test_error_of_first_shell_is_no_fault_of_repository(self) -> None:
        requested = self.run_git("fetch")
        before = [*self.spawn.child.argv[:BEFORE], "/nonexistent/git"]
        done = subprocess.run(before, capture_output=True, env={"PATH": "/usr/bin:/bin"})
        self.spawn.child.complain(done.stderr)
        self.end(done.returncode)
        self.assertEqual(self.failureResultOf(requested, EvaluationFailure).value.reason, "lost")


class LoginTests(GitTestCase):
    login = Login("https://git.example.org", "judge", "s3cr:t@")

    def setUp(self) -> None:
        super().setUp()
        self.answers: list[bytes] = []
        self.requested = self.fetch()

    def fetch(self) -> Deferred[GitResult]:
        """Start a fetch with a login, and read the login as its child would."""

        def spawn(*arguments: Any, descriptors: Sequence[int] = ()) -> Any:
            self.descriptors = descriptors
            for descriptor in descriptors:
                self.answers.append(Path(f"/proc/self/fd/{descriptor}").read_bytes())
            return self.spawn(*arguments)

        git = GitRunner(self.clock, spawn, ("https",))
        return Deferred.fromCoroutine(git.run_command(REPOSITORY, "fetch", "url", login=self.login))

    def test_git_reads_login_from_pipe(self) -> None:
        self.assertEqual(self.answers, [b"username=judge\npassword=s3cr:t@\n"])
        child = self.spawn.child
        self.assertNotIn("s3cr", str((child.argv, child.environment)))
        (descriptor,) = self.descriptors
        self.assertRaises(OSError, os.fstat, descriptor)
        self.end()

    def test_credential_helper_is_configured_for_one_server_only(self) -> None:
        argv = list(self.spawn.child.argv)
        (helper,) = (one for one in argv if "/proc/self/fd/" in one)
        self.assertTrue(helper.startswith("credential.https://git.example.org.helper=!"))
        self.assertLess(argv.index("credential.helper="), argv.index(helper))
        self.assertLess(argv.index(helper), argv.index("fetch"))
        self.end()

    def test_pipe_is_closed_if_git_cannot_be_started(self) -> None:
        self.end()
        self.spawn.error = FileNotFoundError(2, "no git")
        before = len(os.listdir("/proc/self/fd"))
        self.failureResultOf(self.fetch(), FileNotFoundError)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_password_that_server_repeats_is_removed_from_stderr(self) -> None:
        self.spawn.child.complain(b"remote: you said s3cr:t@ and anVkZ2U6czNjcjp0QA==\n")
        self.end(128)
        stderr = self.successResultOf(self.requested).stderr
        self.assertEqual(stderr, "remote: you said *** and ***")

    def test_truncated_stderr_has_no_part_of_the_password(self) -> None:
        for before in range(8150, 8250):
            requested = self.fetch()
            self.spawn.child.complain(b"s3cr:t@" * 20 + b"." * before)
            self.end(128)
            stderr = self.successResultOf(requested).stderr
            self.assertEqual(stderr.strip(".*"), "", before)
            self.assertLessEqual(len(stderr), 8192)
        self.end()


class GitSandboxTests(GitTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.entered: list[tuple[Path | None, SandboxAccess]] = []
        self.killed: list[Any] = []
        self.git = GitRunner(self.clock, self.spawn, ("https",), box=self)

    @contextmanager
    def open_command_prefix(
        self, repository: Path | None, reach: SandboxAccess
    ) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
        self.entered.append((repository, reach))
        yield ("box", "--"), (9, 10)

    def kill_command(self, child: Any) -> None:
        self.killed.append(child)

    def test_sandbox_is_started_after_the_shell_that_sets_the_limits(self) -> None:
        reach = SandboxAccess(has_network=True)
        self.run_git("fetch", reach=reach)
        self.run_git("log")
        first, second = self.spawn.children
        for child in (first, second):
            self.assertEqual(list(child.argv)[BEFORE : BEFORE + 3], ["box", "--", "git"])
            self.assertEqual(list(child.descriptors), [9, 10])
            child.end()
        self.assertEqual(self.entered, [(REPOSITORY, reach), (REPOSITORY, READ_ONLY_ACCESS)])

    def test_timeout_cancellation_and_refused_output_kill_through_the_sandbox(self) -> None:
        self.run_git("fetch", timeout=60)
        self.clock.advance(60)
        self.end(137)
        self.run_git("fetch").addErrback(lambda failure: None).cancel()
        self.end(137)

        def refuse(chunk: bytes) -> None:
            raise EvaluationFailure("repository", "too much")

        requested = self.run_git("ls-tree", on_stdout=refuse)
        self.spawn.child.print(b"x")
        self.end(137)
        self.failureResultOf(requested, EvaluationFailure)
        self.assertEqual(self.killed, self.spawn.children)

    def test_sandbox_that_cannot_be_made_is_no_fault_of_repository(self) -> None:
        requested = self.run_git("fetch")
        self.spawn.child.complain(b"bwrap: No permissions to create new namespace\n")
        self.end(1)
        error = self.failureResultOf(requested, EvaluationFailure).value
        self.assertEqual(error.reason, "lost")
        self.assertIn("namespace", error.extra_members["stderr"])


class ResultTests(GitTestCase):
    def get(
        self, printed: bytes = b"", status: int = 0, number: int | None = None, **settings: Any
    ) -> GitResult:
        """Return the result of a command that prints this on stderr."""
        requested = self.run_git("fetch", **settings)
        self.spawn.child.complain(printed)
        self.assertNoResult(requested)
        self.end(status, number)
        return self.successResultOf(requested)

    def refuse(
        self, printed: bytes = b"", status: int = 128, number: int | None = None, **settings: Any
    ) -> EvaluationFailure:
        """Return the error of a command that prints this on stderr."""
        requested = self.run_git("fetch", **settings)
        self.spawn.child.complain(printed)
        self.end(status, number)
        return self.failureResultOf(requested, EvaluationFailure).value

    def test_result_has_status_or_signal_and_the_output(self) -> None:
        for ended, status in (((0, None), 0), ((128, None), 128), ((0, signal.SIGSEGV), -11)):
            requested = self.run_git("status")
            self.spawn.child.print(b"on stdout\n")
            self.spawn.child.complain(b"  on stderr\n")
            self.end(*ended)
            expected = GitResult(status, "on stdout\n", "on stderr")
            self.assertEqual(self.successResultOf(requested), expected)

    def test_last_64_kib_of_stdout_and_8_kib_of_stderr_are_kept(self) -> None:
        requested = self.run_git("status")
        for number in range(100):
            self.spawn.child.print(b"%01000d" % number)
            self.spawn.child.complain(b"%01000d" % number)
        self.end()
        result = self.successResultOf(requested)
        self.assertEqual((len(result.stdout), len(result.stderr)), (65536, 8192))
        for printed in (result.stdout, result.stderr):
            self.assertTrue(printed.endswith("99"))

    def test_stderr_is_whole_characters_of_utf_8(self) -> None:
        for printed, expected in (
            ("😀".encode() * 3000 + b"a", "😀" * 2047 + "a"),
            (b"\xff", "\ufffd"),
            (b"\xff" * 10_000, "\ufffd" * 2730),
            (
                b"to 'https://user:pass@a.example/': https://token@a.example/ ssh://git@a.example",
                "to 'https://a.example/': https://a.example/ ssh://a.example",
            ),
            (b"to http://a.example/c@d", "to http://a.example/c@d"),
            (b"fatal: bad config in /cache/x.git/config", "fatal: bad config in x.git/config"),
        ):
            self.assertEqual(self.get(printed, 128).stderr, expected)

    def test_git_without_memory_is_refused_with_the_memory_limit(self) -> None:
        for printed, source in (
            (b"fatal: Out of memory, malloc failed (tried to allocate 9 bytes)", None),
            (b"remote: fatal: Out of memory, malloc failed", "/srv/x"),
        ):
            error = self.refuse(printed, source=source)
            limit = {"limit": "repositories.memory", "value": 77777777}
            self.assertEqual(error.reason, "repository")
            self.assertEqual(error.extra_members, {**limit, "stderr": printed.decode()})

    def test_git_errors_that_a_server_or_path_can_forge_are_no_daemon_faults(self) -> None:
        sandbox = b"bwrap: No permissions to create new namespace"
        for printed, source, is_alarming in (
            (sandbox, None, True),
            (sandbox, "/srv/x", False),
            (b"fatal: remote error: x\nfatal: No space left on device", None, False),
        ):
            error = self.refuse(printed, source=source)
            self.assertEqual((error.reason, error.is_daemon_fault), ("lost", is_alarming))
            self.assertEqual(error.extra_members["stderr"], printed.decode())

    def test_server_can_make_the_kept_stderr_begin_with_bwrap(self) -> None:
        for before in (b"remote: ", b"x" * 8192):
            result = self.get(before + b"bwrap: " + b"y" * (8192 - len(b"bwrap: ")), 128)
            self.assertTrue(result.stderr.startswith("bwrap: "))

    def test_git_killed_by_the_kernel_is_lost_and_no_fault_of_the_daemon(self) -> None:
        reader = b"fatal: fetch-pack: invalid index-pack output"
        for printed, *ended in ((b"", 137), (b"", 0, signal.SIGKILL), (reader, 128)):
            error = self.refuse(printed, *ended, timeout=60)
            self.assertEqual((error.reason, error.is_daemon_fault), ("lost", False))
            self.assertIn("git was killed", error.message)
            self.assertEqual(error.extra_members["stderr"], printed.decode())

    def test_descendants_that_git_has_left_are_killed(self) -> None:
        requested = self.run_git("fetch")
        self.spawn.child.exit(0)
        self.assertEqual(self.spawn.child.group_signals, [signal.SIGKILL])
        self.clock.pump([0] * 3)
        self.assertEqual(self.successResultOf(requested).status, 0)

    def test_oserror_of_a_missing_shell_is_raised(self) -> None:
        self.spawn.error = FileNotFoundError(2, "no git")
        self.failureResultOf(self.run_git("status", timeout=5), FileNotFoundError)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class KillTests(GitTestCase):
    def check_killed(self, requested: Deferred[GitResult]) -> None:
        """Check that git is killed, with its descendants, and let it end."""
        self.assertEqual(self.spawn.child.group_signals, [signal.SIGKILL])
        self.assertNoResult(requested)
        self.end(number=signal.SIGKILL)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_endless_messages_of_a_server_are_the_fault_of_the_repository(self) -> None:
        requested = self.run_git("fetch")
        for _ in range(4):
            self.spawn.child.complain(b"x" * 2**20)
        self.assertEqual(self.spawn.child.group_signals, [])
        self.spawn.child.complain(b"x")
        self.spawn.child.complain(b"x")
        self.check_killed(requested)
        error = self.failureResultOf(requested, EvaluationFailure).value
        self.assertEqual(error.reason, "repository")
        self.assertIn("4 MiB of messages", error.message)

    def test_git_is_killed_if_the_reader_of_stdout_raises(self) -> None:
        chunks = []

        def read(chunk: bytes) -> None:
            chunks.append(chunk)
            if len(chunks) == 2:
                raise EvaluationFailure("repository", "too much")

        requested = self.run_git("ls-tree", on_stdout=read)
        for chunk in (b"a", b"b", b"c"):
            self.spawn.child.print(chunk)
        self.assertEqual(chunks, [b"a", b"b"])
        self.check_killed(requested)
        self.assertEqual(
            self.failureResultOf(requested, EvaluationFailure).value.message, "too much"
        )

    def test_after_timeout_git_is_killed(self) -> None:
        requested = self.run_git("fetch", timeout=60)
        self.clock.advance(59.9)
        self.assertEqual(self.spawn.child.group_signals, [])
        self.clock.advance(0.1)
        self.check_killed(requested)
        result = self.successResultOf(requested)
        self.assertEqual((result.is_timed_out, result.status), (True, -signal.SIGKILL))


class VersionTests(SynchronousTestCase):
    def install(self, script: str) -> None:
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "git").chmod(0o755)
        self.patch(command, "GIT_SEARCH_PATH", str(folder))

    def test_2_37_and_later_versions_are_accepted(self) -> None:
        for version in ("2.37.0", "2.37.0-rc1", "2.39.5 (Apple Git-154)", "2.100.1", "3.0"):
            self.install(f"echo 'git version {version}'")
            self.assertEqual(command.check_git_version(), f"git version {version}")

    def test_older_versions_other_programs_and_no_program_are_refused(self) -> None:
        for script, words in (
            *(
                (f"echo 'git version {version}'", f"git version {version} is too old")
                for version in ("2.36.9", "2.9.0", "1.99")
            ),
            ("echo hello", "'hello'"),
            ("exit 3", "status 3"),
            (None, "git does not run"),
        ):
            if script is None:
                self.patch(command, "GIT_SEARCH_PATH", "/nonexistent")
            else:
                self.install(script)
            error = self.assertRaises(ConfigurationError, command.check_git_version)
            self.assertIn(words, str(error))
            self.assertIn("install git 2.37", str(error))
