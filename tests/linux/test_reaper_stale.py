"""`linux.child` with real processes, of the daemon's directories and of others."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.child import kill_stale_processes
from tests.cases.patience import PATIENCE

SLEEP = ("sleep", "60")


class LeftoversTests(SynchronousTestCase):
    """Two daemons' directories, one beside the other; the first is dead."""

    def setUp(self) -> None:
        self.around = Path(self.mktemp()).resolve()
        self.dead, self.living = self.around / "daemon", self.around / "daemon-2"
        for root in (self.dead, self.living):
            (root / "e" / "tmp").mkdir(parents=True)

    def begin(
        self,
        directory: Path | str = "/",
        argv: Sequence[str] = SLEEP,
        terminal: int | None = None,
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """Start a process; with a descriptor of a terminal, which is its own then."""
        before = () if terminal is None else ("setsid", "--ctty")
        child = subprocess.Popen(
            [*before, *argv],
            cwd=directory,
            env={"PATH": os.defpath, **environment},
            stdin=terminal,
            stdout=subprocess.PIPE,
            start_new_session=terminal is None,
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        deadline = time.monotonic() + PATIENCE
        while not Path(f"/proc/{child.pid}/environ").read_bytes():  # not yet set by execve(2)
            self.assertLess(time.monotonic(), deadline)
        return child

    def end(self) -> list[str]:
        with capturedLogs() as events:
            kill_stale_processes(self.dead)
        return [formatEvent(event) for event in events]

    def check(self, child: subprocess.Popen[bytes], *, ended: bool) -> None:
        said = self.end()
        if ended:
            self.assertEqual(child.wait(PATIENCE), -9)
            self.assertEqual(len(said), 1, said)
            self.assertIn("processes left by an earlier daemon", said[0])
            self.assertIn(str(child.pid), said[0])
        else:
            self.assertIsNone(child.poll())
            self.assertEqual(said, [])

    def test_evaluator_is_found_by_its_temporary_directory(self) -> None:
        self.check(self.begin(TEMPORARY_DIRECTORY=f"{self.dead}/e/tmp"), ended=True)

    def test_git_command_is_found_by_its_repository(self) -> None:
        self.check(self.begin(GIT_DIR=f"{self.dead}/e"), ended=True)

    def test_process_is_found_by_its_removed_working_directory(self) -> None:
        child = self.begin(self.dead / "e")
        (self.dead / "e" / "tmp").rmdir()
        (self.dead / "e").rmdir()
        self.check(child, ended=True)

    def test_descendants_are_ended_too(self) -> None:
        program = "cd /; env -i sleep 600 & echo $!; wait"
        child = self.begin(argv=("sh", "-c", program), GIT_DIR=f"{self.dead}/e")
        assert child.stdout is not None
        inner = int(child.stdout.readline())
        self.check(child, ended=True)
        deadline = time.monotonic() + PATIENCE
        while "sleep" in _name(inner):  # it was killed, and ends as soon as it has the processor
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def test_processes_of_another_daemon_are_spared(self) -> None:
        self.check(self.begin(TEMPORARY_DIRECTORY=f"{self.living}/e/tmp"), ended=False)
        self.check(self.begin(self.living / "e"), ended=False)

    def test_path_elsewhere_in_the_environment_does_not_count(self) -> None:
        self.check(self.begin(OLDPWD=f"{self.dead}/e", X_GIT_DIR=f"{self.dead}/e"), ended=False)

    def test_process_at_a_terminal_is_spared(self) -> None:
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        self.addCleanup(os.close, theirs)
        argv = ("sh", "-c", "echo there; sleep 600")
        child = self.begin(self.dead / "e", argv, terminal=theirs)
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), b"there\n")
        self.check(child, ended=False)

    def test_starter_of_the_next_daemon_is_spared(self) -> None:
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.dead / "e")
        self.assertEqual(self.end(), [])


def _name(pid: int) -> str:
    """Return a living process's name, nothing for one that is gone or dead."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().split()
    except OSError:
        return ""
    return "" if words[2] == "Z" else words[1]
