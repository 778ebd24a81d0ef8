"""The killers of `linux.child`, with real processes."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import child as module
from tawebeval.linux.child import kill_adopted_process, kill_directory_processes
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.kernel_files import read_process_stat
from tests.cases.patience import PATIENCE
from tests.cases.starters import is_alive
from tests.fakes.children import NO_PROCESS

SLEEP = ("sleep", "60")
# Its main thread ends, which proc(5) shows as a process without directory and environment.
THREAD_ALONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("there", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
DEEP = "d" * 100
GO_DEEP = f"""
import os, time
for _ in range(50):
    os.mkdir("{DEEP}")
    os.chdir("{DEEP}")
print("there", flush=True)
time.sleep(600)
"""


class ProcessCase(SynchronousTestCase):
    """Two directories, one beside the other; processes below the first are to be killed."""

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
        with contextlib.suppress(ProcessLookupError):  # its main thread has ended already
            while not Path(f"/proc/{child.pid}/environ").read_bytes():  # not yet set by execve(2)
                self.assertLess(time.monotonic(), deadline)
        return child


class FindProcessTests(ProcessCase):
    def check(self, child: subprocess.Popen[bytes], *, ended: bool) -> None:
        killed = kill_directory_processes(self.dead)
        if ended:
            self.assertIn(child.pid, killed)
            self.assertEqual(child.wait(PATIENCE), -9)
        else:
            self.assertEqual(killed, set())
            self.assertIsNone(child.poll())

    def test_evaluator_is_found_by_its_temporary_directory(self) -> None:
        self.check(self.begin(TEMPORARY_DIRECTORY=f"{self.dead}/e/tmp"), ended=True)

    def test_git_command_is_found_by_its_repository(self) -> None:
        self.check(self.begin(GIT_DIR=f"{self.dead}/e"), ended=True)

    def test_process_is_found_by_its_removed_working_directory(self) -> None:
        child = self.begin(self.dead / "e")
        (self.dead / "e" / "tmp").rmdir()
        (self.dead / "e").rmdir()
        self.check(child, ended=True)

    def test_process_in_a_very_deep_directory_does_not_hide_other_processes(self) -> None:
        for directory in (self.living, self.dead):
            self.addCleanup(remove_tree, directory / DEEP)
            argv = (sys.executable, "-c", GO_DEEP)
            deep = self.begin(directory, argv=argv, TEMPORARY_DIRECTORY=f"{directory}/e/tmp")
            assert deep.stdout is not None
            self.assertEqual(deep.stdout.readline(), b"there\n")
        self.check(self.begin(self.dead / "e"), ended=True)
        self.assertEqual(deep.wait(PATIENCE), -9)

    def test_descendants_are_killed_with_their_process(self) -> None:
        program = "cd /; env -i sleep 600 & echo $!; wait"
        child = self.begin(argv=("sh", "-c", program), GIT_DIR=f"{self.dead}/e")
        assert child.stdout is not None
        inner = int(child.stdout.readline())
        self.check(child, ended=True)
        self.assertFalse(is_alive(inner))

    def test_process_is_found_after_the_main_thread_has_ended(self) -> None:
        child = self.begin(self.dead / "e", ("/usr/bin/python3", "-c", THREAD_ALONE))
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), b"there\n")
        deadline = time.monotonic() + PATIENCE
        while read_process_stat(child.pid)[0] != b"Z":
            self.assertLess(time.monotonic(), deadline)
        self.check(child, ended=True)

    def test_processes_of_another_daemon_are_spared(self) -> None:
        self.check(self.begin(TEMPORARY_DIRECTORY=f"{self.living}/e/tmp"), ended=False)
        self.check(self.begin(self.living / "e"), ended=False)

    def test_path_elsewhere_in_the_environment_does_not_count(self) -> None:
        self.check(self.begin(OLDPWD=f"{self.dead}/e", X_GIT_DIR=f"{self.dead}/e"), ended=False)

    def test_process_at_a_terminal_is_spared_unless_it_is_an_orphan_of_the_run(self) -> None:
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        self.addCleanup(os.close, theirs)
        argv = ("sh", "-c", "echo there; sleep 600")
        child = self.begin(self.dead / "e", argv, terminal=theirs)
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), b"there\n")
        self.check(child, ended=False)
        self.assertIn(child.pid, kill_directory_processes(self.dead, parent=os.getpid()))

    def test_daemon_itself_is_spared(self) -> None:
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.dead / "e")
        self.assertEqual(kill_directory_processes(self.dead), set())

    def test_lack_of_descriptors_is_an_error(self) -> None:
        child = self.begin(self.dead / "e")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            error = self.assertRaises(OSError, kill_directory_processes, self.dead)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.assertEqual(error.errno, errno.EMFILE)
        self.check(child, ended=True)

    def test_kill_logs_a_process_that_survives(self) -> None:
        child = self.begin(self.dead / "e")
        self.patch(module, "_MAX_SECONDS", 0.05)
        self.patch(module, "send_signal", lambda pid, number: None)
        with capturedLogs() as events:
            kill_directory_processes(self.dead)
        (event,) = events
        self.assertIn(f"[{child.pid}] survive being killed", str(formatEvent(event)))


class KillProcessTests(ProcessCase):
    def test_only_a_child_of_the_given_starter_is_killed(self) -> None:
        child = self.begin()
        for pid in (child.pid, NO_PROCESS):
            kill_adopted_process(pid, NO_PROCESS)
        self.assertIsNone(child.poll())
        kill_adopted_process(child.pid, os.getpid())
        self.assertFalse(is_alive(child.pid))

    def test_process_that_hangs_is_logged(self) -> None:
        child = self.begin()
        self.patch(module, "_MAX_SECONDS", 0.05)
        self.patch(signal, "pidfd_send_signal", lambda descriptor, number: None)
        with capturedLogs() as events:
            kill_adopted_process(child.pid, os.getpid())
        (event,) = events
        self.assertEqual(formatEvent(event), f"process {child.pid} survives being killed")
