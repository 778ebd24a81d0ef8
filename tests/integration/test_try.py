"""`tawebeval try`: a real evaluation in the real sandbox, without a daemon."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path
from subprocess import CompletedProcess

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.cases.patience import LONG_PATIENCE
from tests.integration.harness import until
from tests.integration.terminal import COMMAND, Terminal, environment, piped
from tests.integration.unprivileged import USER, temporary_folder

BY = ("--user", USER.pw_name) if USER else ()
# The last line, on a machine with cgroups and without.
USED = r"used \d+\.\d\d s(, \S+ s of processor time)?(, .* of memory|; limits\.memory .*)\n"


def groups_of_trials(pids: Collection[int]) -> list[str]:
    """Return the groups of the trials that were these processes."""
    return [
        path
        for path, _, _ in os.walk("/sys/fs/cgroup")
        if (found := re.search(r"/tawebeval-try-(\d+)", path)) and int(found[1]) in pids
    ]


class TryTests(TestCase):
    timeout = LONG_PATIENCE

    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)
        self.scratch = temporary_folder()
        self.addCleanup(shutil.rmtree, self.scratch)
        self.pids: set[int] = set()
        self.addCleanup(self._nothing_left)
        self.root = self.folder / "problem"
        (self.root / "inner").mkdir(parents=True)
        (self.root / "inner" / "secret").write_text("42\n")
        (self.root / "solution.py").write_text("print(1)\n")

    def _nothing_left(self) -> None:
        """Nothing is left, neither of what was made nor of the groups that it was in."""
        self.assertEqual(list(self.scratch.iterdir()), [])
        self.assertEqual(groups_of_trials(self.pids), [])

    async def attempt(
        self,
        command: str,
        *more: str,
        user: bool = True,
        cwd: Path | None = None,
        **variables: str,
    ) -> CompletedProcess[str]:
        source = str(self.root / "solution.py")
        options = ("--seed", "1", *more, *(BY if user else ()))
        return await piped(
            "http://127.0.0.1:9",
            "try",
            str(self.root),
            "--evaluator",
            command,
            source,
            *options,
            cwd=cwd,
            begun=self.pids.add,
            **{"TMPDIR": str(self.scratch), **variables},
        )

    async def test_files_and_seed_reach_the_evaluator_and_the_directory_is_unchanged(self) -> None:
        command = (
            'cat secret "$SUBMISSION_FILE_SOURCE"; echo x >secret; rm ../solution.py;'
            "echo $TURINGARENA_SEED; pwd"
        )
        done = await self.attempt(command, "--directory", "inner", "--seed", "5")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.splitlines()[:3], ["42", "print(1)", "5"])
        self.assertEqual((self.root / "inner" / "secret").read_text(), "42\n")
        self.assertTrue((self.root / "solution.py").exists())

    async def test_evaluator_runs_in_the_sandbox_as_an_ordinary_user(self) -> None:
        done = await self.attempt(f"id -un; ls {self.root} || ls /home /root")
        self.assertEqual(done.stdout, "evaluator\n")
        self.assertEqual(done.returncode, 1)
        self.assertIn("No such file", done.stderr)

    async def test_failure_exits_with_1_and_shows_stderr(self) -> None:
        done = await self.attempt("echo oops >&2; exit 3")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: the evaluator exited with status 3\n  oops\n", done.stderr)
        done = await self.attempt("echo hint >&2")
        nothing = "the evaluator printed nothing on stdout\n"
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, f"^{nothing}stderr:\n  hint\n{USED}$")

    async def test_limits_are_those_of_the_configuration(self) -> None:
        settings = self.folder / "tawebeval.toml"
        settings.write_text("[limits]\nwall_clock = 0.5\n")
        options = ("--config", str(settings), "--limit")
        done = await self.attempt("sleep 60", *options, "wall_clock=0.2")
        self.assertIn("it ran for over 0.2 seconds (limits.wall_clock)", done.stderr)
        done = await self.attempt("sleep 60", *options, "wall_clock=1")
        words = "limits[wall_clock]: 1 s is over the maximum, 0.5 s (limits.maximum.wall_clock)"
        self.assertEqual(done.returncode, 2)
        self.assertIn(words, " ".join(done.stderr.split()))

    async def attempt_in_terminal(self, command: str, *more: str) -> Terminal:
        """Return a trial that runs: it has printed `ready`."""
        words = ("try", str(self.root), *BY, "--evaluator", command, "x=1", *more)
        terminal = Terminal("http://127.0.0.1:9", *words, TMPDIR=str(self.scratch))
        self.pids.add(terminal.pid)
        self.addCleanup(terminal.close)
        await until(lambda: "ready" in terminal.shown, "it runs")
        return terminal

    async def test_signal_cancels_the_trial_and_sets_the_exit_status(self) -> None:
        for number, status, more in (
            (signal.SIGINT, 1, []),
            (signal.SIGINT, 1, ["--watch"]),
            (signal.SIGTERM, 143, []),
            (signal.SIGHUP, 129, []),
        ):
            terminal = await self.attempt_in_terminal("echo ready; sleep 600 & sleep 600", *more)
            terminal.interrupt(number)
            self.assertEqual(await terminal.end(), status, terminal.shown)
            self.assertIn("the evaluation was cancelled", terminal.shown)

    async def test_watch_runs_again_when_files_have_changed(self) -> None:
        command = '. "$EVALUATION_TOOLS/lib/segi.sh"; cat inner/secret; echo ready; '
        command += "segi_send_file kept inner/secret"
        secret, solution = self.root / "inner" / "secret", self.root / "solution.py"
        saved = self.root / "saved"  # changes at each run, which is none of the files
        saved.mkdir()
        saved.chmod(0o777)
        more = ("--watch", "--files", str(saved), f"source:{solution}")
        terminal = await self.attempt_in_terminal(command, *more)

        async def wait(count: int, words: str = "waiting for a change") -> None:
            await until(lambda: terminal.shown.count(words) == count, f"{words} {count} times")

        await wait(1)
        for name in ("secret~", ".secret.swp", "4913"):
            (self.root / "inner" / name).touch()
        replacement = self.root / "new.tmp"
        replacement.write_text("43\n")
        replacement.rename(secret)
        await wait(2)
        self.assertIn("changed: secret\x1b", terminal.shown)
        solution.unlink()
        await wait(3)
        self.assertIn("solution.py: No such file or directory", terminal.shown)
        solution.touch()
        await wait(4)
        self.assertEqual(terminal.shown.count("ready"), 3)
        if os.geteuid() == 0:  # the kernel hides the descriptors of `try` from its own user
            opened = Path(f"/proc/{terminal.pid}/fd").iterdir()
            targets = map(os.path.realpath, opened)
            self.assertEqual([path for path in targets if path.endswith(" (deleted)")], [])
        self.assertEqual((saved / "kept").read_text(), "43\n")
        terminal.interrupt()
        self.assertEqual(await terminal.end(), 130)

    async def test_closed_stdout_ends_the_trial(self) -> None:
        program = subprocess.Popen(
            [*COMMAND, "try", str(self.root), *BY, "--evaluator", "yes", "x=1"],
            env=environment("http://127.0.0.1:9", TMPDIR=str(self.scratch)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pids.add(program.pid)
        assert program.stdout is not None and program.stderr is not None
        self.assertEqual(await deferToThread(program.stdout.read, 2), b"y\n")
        program.stdout.close()
        said = await deferToThread(program.stderr.read)
        program.stderr.close()
        self.assertEqual(await deferToThread(program.wait), 141)
        self.assertNotIn(b"Traceback", said)
