"""`linux.launcher_client` with real processes; those that mount are in the integration tests."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import launcher_client as module
from tawebeval.linux.child import wait_for_exit
from tawebeval.linux.launcher import MAX_PROGRAM_DESCRIPTORS
from tawebeval.linux.launcher_client import (
    FIRST_PASSED_DESCRIPTOR,
    LauncherClient,
    LauncherProcess,
    LaunchSpec,
    MountedOverlay,
    OverlayLayers,
    OverlayMountError,
    start_launcher,
)
from tawebeval.linux.privileges import User
from tawebeval.linux.reaper import list_children
from tests.cases.children import LOOK, PATH, descriptors
from tests.cases.own_python import run_script
from tests.cases.patience import PATIENCE

NOBODY = User("nobody", 65534, 65534, frozenset(), "/") if os.geteuid() == 0 else None
"""Whom root becomes."""


class LaunchingTestCase(SynchronousTestCase):
    """A launcher that mounts nothing."""

    def setUp(self) -> None:
        self.launching = LauncherClient()
        self.before = set(list_children(os.getpid()))
        self.addCleanup(self.end)

    def end(self) -> None:
        """Let nothing be left of it."""
        self.launching.close()
        for pid in set(list_children(os.getpid())) - self.before:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def processes(self) -> list[int]:
        """Return the launcher and its spare, once it has one."""
        self.launching.start_launcher()
        while True:
            ours = [pid for pid in list_children(os.getpid()) if pid not in self.before]
            found = [pid for pid in ours if module.LAUNCHER_PROCESS_NAME in command_line(pid)]
            if len(found) == 2:
                return found

    def launcher(self) -> LauncherProcess:
        """Return the launcher, which runs."""
        self.launching.start_launcher()
        held = self.launching.launcher
        assert held is not None
        return held

    def run_it(
        self,
        *argv: str,
        environment: Mapping[str, str] = PATH,
        directory: str = "/",
        **more: Any,
    ) -> tuple[int, bytes]:
        """Start a program; return how it ends, and what it prints."""
        started, overlay = self.launching.start_program(
            LaunchSpec(argv, environment, directory, **more)
        )
        self.assertIsNone(overlay)
        return wait_for_exit(started, PATIENCE)

    def shell(self, command: str, **more: Any) -> tuple[int, bytes]:
        """Start a shell command."""
        return self.run_it("/bin/sh", "-c", command, **more)


def command_line(pid: int) -> str:
    """Return what a process was started as; nothing if it has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


class InheritanceTests(LaunchingTestCase):
    """What a program finds itself in: what was ordered, and nothing else."""

    def look(self, *arguments: str, **more: Any) -> dict[str, Any]:
        """Return what a program sees."""
        status, printed = self.run_it(sys.executable, "-S", "-c", LOOK, *arguments, **more)
        self.assertEqual(status, 0, printed)
        seen: dict[str, Any] = json.loads(printed)
        return seen

    def test_to_the_letter(self) -> None:
        """Arguments, environment and directory are those that were ordered."""
        directory = os.path.realpath(self.mktemp())
        os.mkdir(directory)
        arguments = ["", "a b", "$HOME", "--", "ü", "'\"\n"]
        given = {"A": "1 = 2", "EMPTY": "", "UMLAUT": "ü \n x", "LC_ALL": "C.UTF-8"}
        seen = self.look(*arguments, environment=given, directory=directory)
        self.assertEqual(seen["argv"], arguments)
        self.assertEqual(seen["environment"], given)
        self.assertEqual(seen["directory"], directory)

    def test_of_its_own(self) -> None:
        """It leads a session; stdin is at its end, umask and signals are as usual."""
        seen = self.look()
        self.assertEqual((seen["session"], seen["group"]), (seen["pid"], seen["pid"]))
        self.assertEqual((seen["stdin"], seen["umask"], seen["blocked"]), ("", 0o022, []))
        for name in ("PIPE", "XFSZ"):
            status, _ = self.shell(f"kill -{name} $$")
            self.assertEqual(status, -signal.Signals[f"SIG{name}"])

    def test_blocked_signals(self) -> None:
        """None is blocked, whatever is in the thread that starts the launcher."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
        self.addCleanup(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        self.assertEqual(self.look()["blocked"], [])

    def test_descriptors(self) -> None:
        """It has no descriptors but those that are for it, from 3 on, in their order."""
        self.assertEqual(self.look()["descriptors"], [0, 1, 2])
        files = [os.memfd_create(f"file {number}") for number in range(5)]
        for number, file in enumerate(files):
            self.addCleanup(os.close, file)
            os.set_inheritable(file, True)
            os.write(file, b"%d" % number)
        given = [files[3], files[0], files[4]]
        self.assertEqual(self.look(descriptors=given)["descriptors"], [0, 1, 2, 3, 4, 5])
        command = "for number in 3 4 5; do cat /proc/self/fd/$number; done"
        self.assertEqual(self.shell(command, descriptors=given), (0, b"304"))

    def test_most_descriptors(self) -> None:
        """As many as there can be do not get in one another's way."""
        count = MAX_PROGRAM_DESCRIPTORS - 2  # besides stdout and stderr
        files = [os.memfd_create(f"file {number}") for number in range(count)]
        for number, file in enumerate(files):
            self.addCleanup(os.close, file)
            os.write(file, b"%d " % number)
        command = "for file; do cat /proc/self/fd/$file; done"
        numbers = [
            str(number)
            for number in range(FIRST_PASSED_DESCRIPTOR, FIRST_PASSED_DESCRIPTOR + count)
        ]
        told = self.run_it("/bin/sh", "-c", command, "sh", *numbers, descriptors=files)
        self.assertEqual(told, (0, b"".join(b"%d " % number for number in range(count))))

    def test_outputs(self) -> None:
        """Stdout and stderr are two pipes, which end with the program and those it has left."""
        started, _ = self.launching.start_program(
            LaunchSpec(["/bin/sh", "-c", "printf out; printf err >&2"], PATH, "/")
        )
        os.set_blocking(started.stdout, True)
        os.set_blocking(started.stderr, True)
        with open(started.stdout, "rb") as stdout, open(started.stderr, "rb") as stderr:
            self.assertEqual((stdout.read(), stderr.read()), (b"out", b"err"))
        os.close(started.pidfd)
        os.waitpid(started.pid, 0)

    def test_limits(self) -> None:
        """Its limits are those that were ordered, soft and hard."""
        limits = {
            resource.RLIMIT_CPU: (30, 31),
            resource.RLIMIT_NOFILE: (99, 99),
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_DATA: (2**26, 2**26),
        }
        _, told = self.run_it("/bin/cat", "/proc/self/limits", rlimits=limits)
        for name, *values in (
            ("Max cpu time", "30", "31"),
            ("Max open files", "99", "99"),
            ("Max core file size", "0", "0"),
            ("Max data size", str(2**26), str(2**26)),
        ):
            line = next(line for line in told.decode().splitlines() if line.startswith(name))
            self.assertEqual(line[len(name) :].split()[:2], values, name)

    def test_counted_apart(self) -> None:
        """Each has a user namespace of its own if that was ordered, and is the same user there."""
        script = "readlink /proc/self/ns/user; id -u; id -g"
        seen = [os.readlink("/proc/self/ns/user")]
        for apart in (False, True, True):
            status, told = self.shell(script, has_own_process_limit=apart, environment=PATH)
            self.assertEqual(status, 0)
            namespace, user, group = told.decode().split()
            self.assertEqual((int(user), int(group)), (os.geteuid(), os.getegid()))
            seen.append(namespace)
        self.assertEqual(seen[0], seen[1])
        self.assertEqual(len({*seen}), 3)

    def test_inherited(self) -> None:
        """The kernel kills it before the daemon, and it has no memory in its core dumps."""
        own, score = os.getpriority(os.PRIO_PROCESS, 0), Path("/proc/self/oom_score_adj")
        files = (str(score), "/proc/self/coredump_filter")
        told = self.run_it("/bin/cat", *files)
        expected = max(int(score.read_text()), 500)
        self.assertEqual(told, (0, b"%d\n00000000\n" % expected))
        for niceness in (0, 3):
            told = self.run_it("/usr/bin/nice", niceness=niceness)
            self.assertEqual(told, (0, b"%d\n" % min(own + niceness, 19)))

    def test_groups(self) -> None:
        """It goes into each group by itself, whatever the path, before it begins."""
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        entries = [root / name for name in ("procs", "with a space", "$HOME;'\"*")]
        for entry in entries:
            entry.touch()
        self.shell("true", cgroup_procs_files=[str(entry) for entry in entries])
        self.assertEqual([entry.read_text() for entry in entries], ["0"] * 3)

    def test_many_words(self) -> None:
        """There may be more words than fit into a message."""
        words = dict.fromkeys("ABCD", "x" * 100_000)
        test = '[ "$A$B$C$D" = "$1$1$1$1" ]'
        self.assertEqual(
            self.run_it("/bin/sh", "-c", test, "sh", words["A"], environment=words), (0, b"")
        )


class LauncherTests(LaunchingTestCase):
    """What the launcher itself finds."""

    def test_environment(self) -> None:
        """Of the daemon's environment there is nothing in its, nor in its spare's."""
        for pid in self.processes():
            with contextlib.suppress(PermissionError):  # to ordinary users it is not shown at all
                self.assertEqual(Path(f"/proc/{pid}/environ").read_bytes(), b"")

    def test_session(self) -> None:
        """It is in no session or group of the daemon's, which a terminal would end as a whole."""
        pid = self.launcher().process.pid
        self.assertEqual((os.getsid(pid), os.getpgid(pid)), (pid, pid))


class ChildTests(LaunchingTestCase):
    """Whose the program is."""

    def test_ours(self) -> None:
        """It is this process's child, though the launcher starts it."""
        _, told = self.shell("echo $PPID")
        self.assertEqual(int(told), os.getpid())

    def test_closed_to_others(self) -> None:
        """Before it begins nobody of its user can read its memory, or trace it."""
        self.launching = LauncherClient(user=NOBODY)
        self.addCleanup(self.launching.close)
        for pid in self.processes():
            self.assertNotEqual(os.stat(f"/proc/{pid}").st_uid, 0)
            self.assertEqual(os.stat(f"/proc/{pid}/mem").st_uid, 0)  # nobody's but root's

    def test_without_clone(self) -> None:
        """Also where the kernel does not let a process fork for its parent: then a subreaper's."""
        script = (
            "import os, sys\n"
            "from tawebeval.linux import launcher_client as launching\n"
            "from tawebeval.linux.reaper import become_subreaper\n"
            "from tawebeval.linux.child import wait_for_exit\n"
            "source = launching.LAUNCHER_SOURCE\n"
            "launching.LAUNCHER_SOURCE = source.replace(b'_CLONE = {', b'_CLONE = {} and {')\n"
            "assert source != launching.LAUNCHER_SOURCE\n"
            "become_subreaper()\n"
            "launch = launching.LaunchSpec(['/bin/sh', '-c', 'echo $PPID'], {}, '/')\n"
            "one = launching.LauncherClient()\n"
            "for _ in range(3):\n"
            "    started, _ = one.start_program(launch)\n"
            "    status, told = wait_for_exit(started, 120)\n"
            "    assert (status, int(told)) == (0, os.getpid()), told\n"
            "one.close()\n"
        )
        done = run_script(script)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_at_once(self) -> None:
        """Any number of threads may start something at once, each its own."""
        with ThreadPoolExecutor(8) as threads:
            told = list(threads.map(lambda number: self.shell(f"echo {number}"), range(40)))
        self.assertEqual(told, [(0, b"%d\n" % number) for number in range(40)])
        self.assertEqual(len(self.processes()), 2)

    def test_lower_limits(self) -> None:
        """A limit above the launcher's own, which nobody may raise, is lowered to that."""
        own = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = {resource.RLIMIT_NOFILE: (50, own + 1)}
        self.assertEqual(
            self.shell("ulimit -Sn; ulimit -Hn", rlimits=limits), (0, b"50\n%d\n" % own)
        )


class FailureTests(LaunchingTestCase):
    """Programs that cannot be started."""

    def fail(self, kind: type[OSError], **changes: Any) -> OSError:  # type: ignore[override]
        """Return the error of an order; it leaves no descriptor and no child behind."""
        self.processes()
        launch = {"argv": ["/bin/true"], "environment": {}, "directory": "/", **changes}
        layers = launch.pop("layers", None)
        before = descriptors()
        with self.assertRaises(kind) as caught:
            self.launching.start_program(LaunchSpec(**launch), layers)
        self.assertEqual(descriptors(), before)
        left = set(list_children(os.getpid())) - self.before - set(self.processes())
        self.assertEqual(left, set())
        error: OSError = caught.exception
        return error

    def test_errors(self) -> None:
        """The error is what the kernel says, and names what it is about."""
        for changes, kind in (
            ({"argv": ["/nonexistent/program"]}, FileNotFoundError),
            ({"argv": ["/etc/passwd"]}, PermissionError),
            ({"directory": "/nonexistent"}, FileNotFoundError),
            ({"cgroup_procs_files": ["/nonexistent/cgroup.procs"]}, FileNotFoundError),
        ):
            error = self.fail(kind, **changes)
            self.assertEqual(error.strerror, os.strerror(error.errno or 0))
            if "argv" not in changes:
                ((named,),) = [x if isinstance(x, list) else [x] for x in changes.values()]
                self.assertEqual(error.filename, named)

    def test_too_long(self) -> None:
        """A word that is too long for the kernel is refused, and not cut."""
        self.fail(OSError, argv=["/bin/true", "x" * 2**18])

    def test_not_mounted(self) -> None:
        """Where there is no right to mount, or nothing to mount, that is told apart."""
        folder = Path(self.mktemp()).absolute()
        folder.mkdir()
        self.fail(
            OverlayMountError,
            layers=OverlayLayers(folder / "no", folder / "upper", folder / "work"),
        )

    def test_no_pidfd(self) -> None:
        """Where its end could not be told, the child is killed and nothing is left."""

        def fail(pid: int) -> int:
            raise OSError(24, "Too many open files")

        self.patch(os, "pidfd_open", fail)
        self.fail(OSError, argv=["/bin/sleep", "60"])
        # The top of an overlay, if there is one, is closed then.
        read_report = module.read_launch_report
        self.patch(
            module,
            "read_launch_report",
            lambda report: (read_report(report)[0], MountedOverlay(os.open("/", 0), frozenset())),
        )
        self.fail(OSError, argv=["/bin/sleep", "60"])

    def test_hangs_on_its_way(self) -> None:
        """A child that has told its number, and then nothing, is killed."""
        child = subprocess.Popen(["/bin/sleep", "60"])
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with report, theirs:
            report.settimeout(0.05)
            theirs.send(b"%d" % child.pid)
            self.assertRaises(TimeoutError, module.read_launch_report, report)
        self.assertEqual(child.wait(PATIENCE), -signal.SIGKILL)


class LossTests(LaunchingTestCase):
    """Launchers that are lost."""

    def test_killed(self) -> None:
        """Whoever of it is killed, the next program is started."""
        for victims in (slice(0, 1), slice(1, 2), slice(0, 2)):
            for pid in self.processes()[victims]:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            for _ in range(3):
                self.assertEqual(self.shell("echo again"), (0, b"again\n"), victims)

    def test_others_that_are_killed_at_once_are_replaced(self) -> None:
        """A program is started although several launchers, one after the other, were killed."""
        start, started = module.start_process, list[module.LauncherProcess]()

        def start_and_kill(*arguments: Any) -> module.LauncherProcess:
            started.append(start(*arguments))
            if len(started) < 4:
                os.killpg(started[-1].process.pid, signal.SIGKILL)
            return started[-1]

        self.launching.close()
        self.patch(module, "start_process", start_and_kill)
        self.assertEqual(self.shell("echo again"), (0, b"again\n"))
        self.assertEqual(len(started), 4)

    def test_dropped_once(self) -> None:
        """Of those who have lost one launcher only the first ends it, and none the next one."""
        lost = self.launcher()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.shell("true")
        following = self.processes()
        self.launching.end_launcher(lost)
        self.assertEqual(self.processes(), following)

    def test_no_other(self) -> None:
        """Where it cannot be replaced clients get fixed words, and the log what was said."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        path = Path(self.mktemp()).resolve()
        self.patch(module, "PYTHON_CANDIDATES", [str(path)])
        with capturedLogs() as events, self.assertRaises(OSError) as caught:
            self.shell("true")
        told = str(caught.exception.strerror)
        self.assertEqual(told, "the launcher of evaluators cannot be started")
        self.assertIn(f"{told}: No such file or directory", str(formatEvent(events[-1])))

    def test_hangs(self) -> None:
        """One that does not answer is killed, its spare, too; the next one starts the program."""
        for victims in (slice(0, 1), slice(1, 2), slice(0, 2)):
            hung = self.processes()
            for pid in hung[victims]:
                os.kill(pid, signal.SIGSTOP)
            self.patch(module, "LAUNCHER_TIMEOUT", 3.0)  # the next one has to start within that
            with capturedLogs() as events, ThreadPoolExecutor(4) as threads:
                told = list(threads.map(lambda number: self.shell(f"echo {number}"), range(4)))
            self.patch(module, "LAUNCHER_TIMEOUT", PATIENCE)
            self.assertEqual(told, [(0, b"%d\n" % number) for number in range(4)], victims)
            said = " ".join(str(formatEvent(event)) for event in events)
            self.assertIn("does not answer; starting another one", said)
            self.gone(hung)

    def gone(self, pids: Sequence[int]) -> None:
        """Wait for processes that end, of which somebody may have waited for some."""
        deadline = time.monotonic() + PATIENCE
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(pid, os.WNOHANG) == (0, 0):
                    self.assertLess(time.monotonic(), deadline, "it is still there")
                    time.sleep(0.01)

    def test_all_hang(self) -> None:
        """Where the next one does not answer either the program is not started, and why is told."""
        self.replace(
            "_, descriptors = receive_message(",
            "os.kill(os.getpid(), signal.SIGSTOP); receive_message(",
        )
        self.patch(module, "LAUNCHER_TIMEOUT", 3.0)  # the next one has to start within that
        with self.assertRaises(TimeoutError) as caught:
            self.shell("true")
        self.assertEqual(caught.exception.strerror, "the launcher of evaluators does not answer")

    def replace(self, text: str, other: str) -> None:
        """Let launchers from now on have other words in place of theirs."""
        source = module.LAUNCHER_SOURCE.decode()
        self.assertIn(text, source)
        self.patch(module, "LAUNCHER_SOURCE", source.replace(text, other).encode())

    def test_no_more_processes(self) -> None:
        """Where none can be made that is the error, as the kernel has it, and not the loss."""
        self.replace("reading, writing =", "raise BlockingIOError(errno.EAGAIN, ''); reading =")
        for _ in range(2):
            with self.assertRaises(OSError) as caught:
                self.shell("true")
            self.assertEqual(
                (caught.exception.errno, caught.exception.strerror),
                (
                    errno.EAGAIN,
                    (
                        "the launcher of evaluators cannot start a process: Resource temporarily"
                        " unavailable"
                    ),
                ),
            )

    def test_last_word(self) -> None:
        """It is heard also of one that has left an order where it was."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process: Any = None
        with ours:
            ours.send(b"an order")
            theirs.send(b"%d" % errno.ENOMEM)
            theirs.close()
            error = module.LauncherProcess(process, ours).read_error()
        self.assertEqual(
            error.strerror,
            "the launcher of evaluators cannot start a process: Cannot allocate memory",
        )

    def test_no_more_processes_for_a_while(self) -> None:
        """What the last one could not do the next one does, and the log tells why there was one."""
        full = Path(self.mktemp()).absolute()
        self.replace(
            "if not fork_as_sibling():",
            f"os.path.exists({str(full)!r}) and os.fstat(-1)\n        if not fork_as_sibling():",
        )
        self.processes()
        full.touch()
        self.shell("true")
        held = self.launching.launcher
        assert held is not None
        os.waitid(os.P_PID, held.process.pid, os.WEXITED | os.WNOWAIT)
        full.unlink()
        with capturedLogs() as events:
            self.assertEqual(self.shell("echo again"), (0, b"again\n"))
        (said,) = map(formatEvent, events)
        self.assertIn("cannot start a process: Bad file descriptor; starting another", str(said))

    def test_spares_that_end(self) -> None:
        """Where a spare ends without an order no more are made: each might end like it."""
        self.replace("    os.umask(_UMASK)\n", "    os._exit(1)\n")
        self.launching.start_launcher()
        held = self.launching.launcher
        assert held is not None
        os.waitid(os.P_PID, held.process.pid, os.WEXITED | os.WNOWAIT)
        self.assertEqual(len(set(list_children(os.getpid())) - self.before), 2)

    def test_left_alone(self) -> None:
        """When the daemon has gone without a word, both end by themselves."""
        _, spare = self.processes()
        held = self.launcher()
        held.connection.close()
        self.assertEqual(held.process.wait(PATIENCE), 0)
        os.waitpid(spare, 0)
        self.assertEqual(set(list_children(os.getpid())) - self.before, set())

    def test_close(self) -> None:
        """With the connection all of it ends, but for what was started."""
        started, _ = self.launching.start_program(LaunchSpec(["/bin/sleep", "60"], {}, "/"))
        _, spare = self.processes()
        self.launching.close()
        self.launching.close()
        os.waitpid(spare, 0)
        self.assertEqual(set(list_children(os.getpid())) - self.before, {started.pid})
        os.kill(started.pid, signal.SIGKILL)
        status, _ = wait_for_exit(started, PATIENCE)
        self.assertEqual(status, -signal.SIGKILL)


class StartTests(SynchronousTestCase):
    """A launcher that cannot be started, and what is said then."""

    def use(self, *scripts: str) -> None:
        """Let these programs be taken for Python."""
        pythons = []
        for script in scripts:
            path = Path(self.mktemp()).resolve()
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            pythons.append(str(path))
        self.patch(module, "PYTHON_CANDIDATES", pythons)

    def start(self, *scripts: str) -> str:
        """Start with these programs as Python; return why it cannot."""
        self.use(*scripts)
        before = os.listdir("/proc/self/fd")
        with self.assertRaises(OSError) as caught:
            start_launcher(mounting=False)
        self.assertEqual(os.listdir("/proc/self/fd"), before)
        return str(caught.exception.strerror)

    def test_last_words(self) -> None:
        """The last line of each, each once."""
        said = self.start("echo Traceback >&2; echo no module >&2", "echo no right >&2; exit 1")
        self.assertEqual(said, "no module; no right")
        self.assertEqual(self.start("echo same >&2", "echo same >&2"), "same")

    def test_silent(self) -> None:
        """One that says nothing has ended, at least."""
        self.assertEqual(self.start("exit 0"), "the launcher of evaluators has ended")

    def test_killed(self) -> None:
        """One that is killed as it starts is started once more; the log tells."""
        flag = Path(self.mktemp()).resolve()
        python, path = shlex.quote(sys.executable), shlex.quote(str(flag))
        killed = f"[ -e {path} ] || {{ : >{path}; kill -9 $$; }}"
        self.use(f'{killed}; exec {python} "$@"')
        with capturedLogs() as events:
            start_launcher(mounting=False).kill()
        (said,) = map(formatEvent, events)
        self.assertIn("has ended at its start; starting another one", str(said))

    def test_killed_each_time(self) -> None:
        """Then that is why, and not what another Python has always said."""
        said = self.start("echo no such program >&2; exit 1", "kill -9 $$")
        self.assertEqual(said, "the launcher of evaluators has ended")

    def test_not_there(self) -> None:
        """So it is said where there is no such program."""
        self.patch(module, "UNSHARE_COMMAND", ("/nonexistent",))
        with self.assertRaises(OSError) as caught:
            start_launcher(mounting=True)
        self.assertIn("No such file", str(caught.exception.strerror))

    def test_slow(self) -> None:
        """One that does not become ready in time is ended."""
        self.patch(module, "LAUNCHER_TIMEOUT", 0.05)
        self.assertIn("timed out", self.start("exec sleep 600"))

    def test_another_python(self) -> None:
        """The second is taken where the first does not do."""
        said: list[Any] = []

        def start(argv: Sequence[str], user: User | None, keeper: str | None) -> str:
            said.append((list(argv), user, keeper))
            if argv[-1] == "first":
                raise OSError(None, "no")
            return "started"

        self.patch(module, "start_process", start)
        self.patch(module, "PYTHON_CANDIDATES", ("first", "second", "third"))
        self.assertEqual(start_launcher(mounting=False), "started")
        self.assertEqual(said, [(["first"], None, None), (["second"], None, None)])
