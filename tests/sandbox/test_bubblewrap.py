"""`sandbox.bubblewrap`: how bwrap is asked for a sandbox, and what it tells of its end."""

from __future__ import annotations

import errno
import glob
import os
import resource
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import MIB
from tawebeval.core.evaluator_environment import add_tools_to_path
from tawebeval.errors import EvaluationFailure
from tawebeval.linux.launcher_client import MountedOverlay
from tawebeval.sandbox import bubblewrap as module
from tawebeval.sandbox.base import EvaluatorExit, SandboxedRun
from tawebeval.sandbox.bubblewrap import (
    TOOLS_NAME,
    BubblewrapDescriptors,
    BubblewrapRun,
    BubblewrapSandbox,
    build_minimal_system_options,
    build_network_options,
    build_system_options,
    prepare_etc,
    write_sandbox_files,
)
from tawebeval.sandbox.workspace import Workspace
from tests.cases.sandbox import ENVIRONMENT, LIMITS, CellTestCase
from tests.fakes.children import NO_PROCESS, FakeChild

WAIT = (
    "exec 3>&2 2>/dev/null </dev/null;"
    """ (ulimit -n "$1" && shift && { echo '{ "begun": true }' >&5;"""
    """ exec "$@" 2>&3 3>&- 5>&-; }); exit $?"""
)
PROGRAM = b"a filter's program"

CHILD = b'{ "child-pid": 77 }\n'
"""What bwrap notes at the start; at the end of the evaluator there is more."""
BEGUN = CHILD + b'{ "begun": true }\n'
ENDED = BEGUN + b'{ "exit-code": 0 }\n'


class BubblewrapTestCase(CellTestCase):
    """A cell of bubblewrap, opened."""

    def setUp(self) -> None:
        super().setUp()
        self.workspace = Workspace(Path(self.mktemp()).resolve())
        self.workspace.root.mkdir()
        self.filter = os.memfd_create("filter")
        self.addCleanup(os.close, self.filter)
        os.write(self.filter, PROGRAM)  # and is at its end now
        self.cell = self.make()
        self.addCleanup(self.cell.close)
        self.start(self.cell)

    def sandbox(self, *readable: str, network: bool = False) -> BubblewrapSandbox:
        """Return the daemon's sandbox."""
        return BubblewrapSandbox(
            "/opt/bwrap",
            Path("/state/accounts"),
            (self.filter, self.filter),
            ("--ro-bind", "/usr", "/usr"),
            readable,
            network,
            self.trees,
            LIMITS,
            self.cgroups,
            self.orphans,
        )

    def make(self, *readable: str, network: bool = False) -> BubblewrapRun:
        """Return a cell."""
        sandbox = self.sandbox(*readable, network=network)
        cell = sandbox.make_run(self.workspace, self.checkout, LIMITS)
        assert isinstance(cell, BubblewrapRun)
        return cell

    def start(self, cell: SandboxedRun) -> None:
        """Start something in a cell, in nothing but name."""
        (self.workspace.root / "runner").unlink(missing_ok=True)
        cell.start_evaluator("x", ENVIRONMENT, self.workspace.tree_directory)

    def descriptors(self, cell: BubblewrapRun | None = None) -> BubblewrapDescriptors:
        """Return those for the environment, bwrap's notes and the filters."""
        cell = cell or self.cell
        given = cell.make_launch_spec("x", ENVIRONMENT, self.workspace.tree_directory).descriptors
        return BubblewrapDescriptors(given[0], given[1], tuple(given[3:]))


class ArgumentTests(BubblewrapTestCase):
    """What is started."""

    def expected(self, *middle: str, network: bool = False) -> list[str]:
        """Return the whole argv, whose part for what is readable is given."""
        own = str(self.workspace.root)
        return [
            *("/opt/bwrap", "--unshare-user", "--unshare-all", "--disable-userns"),
            *("--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000"),
            *("--hostname", "evaluation", "--cap-drop", "ALL", "--as-pid-1"),
            *(["--share-net"] if network else []),
            *("--add-seccomp-fd", "6", "--add-seccomp-fd", "7"),
            *("--json-status-fd", "4", "--args", "3"),
            *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
            *("--bind", f"{own}/scratch", "/tmp", "--bind", f"{own}/shm", "/dev/shm"),
            *middle,
            *("--ro-bind", f"{own}/submission", "/evaluation/submission"),
            *("--bind", f"{own}/tree", "/evaluation/tree"),
            *("--bind", f"{own}/tmp", "/evaluation/tmp"),
            *("--bind", f"{own}/home", "/evaluation/home"),
            *("--ro-bind", f"/state/accounts/{TOOLS_NAME}", "/evaluation/tools"),
            *("--ro-bind", f"{own}/runner", "/evaluation/runner"),
            *("--ro-bind", "/state/accounts/init", "/init"),
            *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
            *("--chdir", "/evaluation/tree/sub"),
            *("--", "/init", "-c", WAIT, "/init", "99", "cat", "-- x"),
        ]

    def test_argv(self) -> None:
        """All namespaces, nothing but the workspace writable, and the command at the end."""
        for network in (False, True):
            argv = self.sandbox(network=network).build_argv(
                self.cell.workspace_view,
                Path("/evaluation/tree/sub"),
                self.workspace.root / "runner",
                ["cat", "-- x"],
                99,
            )
            self.assertEqual(list(argv), self.expected(network=network))

    def test_readable(self) -> None:
        """What the operator shows is read-only; nothing of it can hide what is the evaluation's."""
        argv = self.sandbox("/srv/tests", "/evaluation").build_argv(
            self.cell.workspace_view,
            Path("/evaluation/tree/sub"),
            self.workspace.root / "runner",
            ["cat", "-- x"],
            99,
        )
        shown = ("--ro-bind", "/srv/tests", "/srv/tests", "--ro-bind", "/evaluation", "/evaluation")
        self.assertEqual(list(argv), self.expected(*shown))

    def test_launch(self) -> None:
        """The limits of a process are set before bwrap, where its user's processes are its own."""
        directory = self.workspace.tree_directory / "sub"
        memory, processes = {"DATA": (64 * MIB,) * 2}, {"NPROC": (33, 33)}  # bwrap's is one of them
        for enforced, more in (
            ((), memory | processes),
            (("memory",), processes),
            (("processes",), memory),
            (("processes", "memory"), {}),
            (("processes", "memory", "cpu"), {}),
            (("cpu",), memory | processes),
        ):
            self.cgroups.enforced_resources = frozenset(enforced)
            launch = self.cell.make_launch_spec("./it --now", ENVIRONMENT, directory)
            limits = {
                "CPU": (61, resource.RLIM_INFINITY),
                "FSIZE": (5 * MIB, 5 * MIB),
                "CORE": (1, resource.RLIM_INFINITY),
                "AS": (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
                "STACK": (8 * MIB, resource.RLIM_INFINITY),
                "MSGQUEUE": (0, 0),
                "SIGPENDING": (1024, 1024),
                "NICE": (0, 0),
                "RTPRIO": (0, 0),
                **more,
            }
            self.assertEqual(
                launch.rlimits,
                {getattr(resource, f"RLIMIT_{name}"): pair for name, pair in limits.items()},
            )
            inside = ("/bin/sh", "-c", "./it --now")
            self.assertEqual(list(launch.argv), [*self.expected()[:-2], *inside], enforced)
            self.assertEqual(launch.environment, {})
            self.assertEqual((launch.directory, launch.has_own_process_limit), ("/", True))

    def test_environment(self) -> None:
        """The evaluator's environment is in a file for bwrap, to the letter."""
        for given in (ENVIRONMENT, {"A": "1 = 2", "EMPTY": "", "LINES": "a\nb", "ODD": "\udcff"}):
            self.cell.close()
            launch = self.cell.make_launch_spec("x", given, self.workspace.tree_directory)
            written = os.pread(launch.descriptors[0], 10**5, 0)
            whole = add_tools_to_path(given, "/evaluation/tools")
            words = [part for pair in whole.items() for part in ("--setenv", *pair)]
            self.assertEqual(written, os.fsencode("\0".join(["--clearenv", *words])))

    def test_view(self) -> None:
        """The evaluator knows its workspace by another name than ours."""
        self.assertEqual(
            self.cell.workspace_view, self.workspace.make_sandboxed_view(Path("/evaluation"))
        )


class DescriptorTests(BubblewrapTestCase):
    """What is open for bwrap."""

    def test_filter(self) -> None:
        """Each cell reads the filters from their beginning, whatever the others have read."""
        other = self.make()
        self.start(other)
        self.addCleanup(other.close)
        for cell in (self.cell, other):
            filters = self.descriptors(cell).filter_descriptors
            self.assertEqual([os.read(filter_, 100) for filter_ in filters], [PROGRAM] * 2)
            with self.assertRaises(OSError):
                os.write(filters[0], b"x")

    def test_not_inherited(self) -> None:
        """Only what is started with them gets them."""
        for descriptor in self.descriptors():
            self.assertFalse(os.get_inheritable(descriptor))

    def test_close(self) -> None:
        """They are closed with the cell, which also loses its group; once."""
        descriptors = self.descriptors()
        self.cell.close()
        for descriptor in descriptors:
            with self.assertRaises(OSError):
                os.fstat(descriptor)
        reused = [os.memfd_create("reused") for _ in range(5)]
        for each in reused:
            self.addCleanup(os.close, each)
        self.assertLessEqual({*descriptors.filter_descriptors}, {*reused})
        self.cell.close()
        for each in reused:
            os.fstat(each)
        self.assertEqual(self.cgroups.group.removed, 1)

    def test_never_started(self) -> None:
        """A cell in which nothing was started has nothing to close."""
        self.make().close()
        self.assertEqual(self.cgroups.group.removed, 0)

    def test_tree(self) -> None:
        """What is started has a tree over the checkout; what leads to its files is held."""
        self.assertEqual(self.cell.workspace_view.path_descriptors, {})
        directory = os.open("/proc", os.O_RDONLY)
        self.trees.overlay = MountedOverlay(directory, frozenset({39, 40}))
        cell = self.make()
        self.start(cell)
        self.assertEqual(self.trees.made, [self.checkout.path] * 2)
        self.assertEqual(
            cell.workspace_view.path_descriptors, {self.workspace.tree_directory: directory}
        )
        self.assertEqual(self.disks[-1].device_numbers, {39, 40})
        cell.close()
        cell.close()
        self.assertRaises(OSError, os.fstat, directory)

    def test_stays(self) -> None:
        """Where the group cannot be removed as yet, all else is closed."""
        before = os.listdir("/proc/self/fd")
        self.trees.overlay = MountedOverlay(os.open("/proc", os.O_RDONLY), frozenset())
        cell = self.make()
        self.start(cell)
        self.cgroups.group.stays = OSError(16, "Device or resource busy")
        self.assertRaises(OSError, cell.close)
        self.assertEqual(os.listdir("/proc/self/fd"), before)
        self.cgroups.group.stays = None

    def test_half_open(self) -> None:
        """Where the filter cannot be opened the group is removed all the same."""
        sandbox = attrs.evolve(self.sandbox(), filter_descriptors=(self.filter, 10**6))
        cell = sandbox.make_run(self.workspace, self.checkout, LIMITS)
        self.assertRaises(OSError, self.start, cell)
        cell.close()
        self.assertEqual(self.cgroups.group.removed, 1)


class ExitTests(BubblewrapTestCase):
    """How the evaluator has ended, from what bwrap tells."""

    def note(self, text: bytes) -> None:
        """Write what bwrap writes."""
        os.write(self.descriptors().status_descriptor, text)

    def test_status(self) -> None:
        """It exits with the status of its command."""
        self.note(ENDED)
        for status in (0, 1, 2, 126, 127, 128, 193, 255):
            self.assertEqual(self.cell.interpret_exit(status, None), EvaluatorExit(status), status)

    def test_signal(self) -> None:
        """128 and more is a signal, if there is one of that number."""
        self.note(ENDED)
        for number in (1, 9, 15, 24, 25, 31, 34, 64):
            self.assertEqual(
                self.cell.interpret_exit(128 + number, None), EvaluatorExit(None, number), number
            )

    def test_bwrap_killed(self) -> None:
        """Who kills the run kills bwrap, which has begun then, and may have noted more."""
        for noted in (CHILD, BEGUN, ENDED):
            self.note(noted)
            self.assertEqual(self.cell.interpret_exit(None, signal.SIGKILL), EvaluatorExit(None, 9))

    def test_not_started(self) -> None:
        """Without the notes of its begin and end it was the sandbox that failed."""
        for noted, status, number, words, more in (
            (b"", None, signal.SIGKILL, "signal 9 ended the sandbox at its start", {}),
            (b"", 1, None, "could not be started", {"status": 1}),
            (CHILD, 0, None, "could not be started", {"status": 0}),
            (b'"exit-cod', None, None, "could not be started", {"status": 0}),
            (b'{ "exit-code": 2 }', 2, None, "could not start a process", {"status": 2}),
        ):
            self.note(noted)
            with self.assertRaises(EvaluationFailure) as caught:
                self.cell.interpret_exit(status, number)
            error = caught.exception
            self.assertEqual((error.reason, error.extra_members), ("lost", more))
            self.assertIn(words, error.message)


class SignalTests(BubblewrapTestCase):
    """Signals, which are for those inside."""

    def setUp(self) -> None:
        super().setUp()
        self.sent: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.patch(module, "list_descendants", lambda pid: self.asked.append(pid) or [31, 32])
        self.patch(module, "send_signal", lambda pid, number: self.sent.append((pid, number)))
        self.child: Any = FakeChild(Clock(), ProcessProtocol())

    def test_inside(self) -> None:
        """All inside get a signal; bwrap is left, to tell how they end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.sent.clear()
            self.cell.send_signal(self.child, number)
            self.assertEqual(self.sent, [(31, number), (32, number)])
        self.assertEqual(self.asked, [NO_PROCESS] * 2)
        self.assertEqual(self.child.group_signals, [])

    def test_nobody_inside(self) -> None:
        """Before there is anybody bwrap itself is killed, for nobody could be asked to end."""
        self.patch(module, "list_descendants", lambda pid: [])
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.child.group_signals.clear()
            self.cell.send_signal(self.child, number)
            self.assertEqual((self.sent, self.child.group_signals), ([], [signal.SIGKILL]))

    def test_first_process_alone(self) -> None:
        """It would ignore what it may, and has begun nothing yet: it is killed."""
        self.patch(module, "list_descendants", lambda pid: [31])
        self.cell.send_signal(self.child, signal.SIGTERM)
        self.assertEqual((self.sent, self.child.group_signals), ([(31, signal.SIGKILL)], []))

    def test_end(self) -> None:
        """The kernel kills all that is left behind, which is over when the first one is gone."""
        self.cell.set_first_process(self.child)
        os.write(self.descriptors().status_descriptor, CHILD)
        self.successResultOf(Deferred.fromCoroutine(self.cell.kill_remaining_processes()))
        self.assertEqual(self.orphans.waited, [77])
        self.assertEqual((self.sent, self.child.group_signals), ([], []))

    def test_end_without_a_sandbox(self) -> None:
        """Where bwrap has started nobody there is nobody to wait for."""
        self.successResultOf(Deferred.fromCoroutine(self.cell.kill_remaining_processes()))
        self.assertEqual(self.orphans.waited, [])


class SystemTests(SynchronousTestCase):
    """What is shown of a machine, whose `/` is a folder here."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for name in ("usr/bin", "lib32", "etc/python3.11", "etc/ssl/certs", "etc/ssl/private"):
            (self.root / name).mkdir(parents=True)
        (self.root / "bin").symlink_to("usr/bin")
        (self.root / "lib64").symlink_to("usr/lib64")
        (self.root / "sbin").write_text("")  # which is no directory
        (self.root / "etc/localtime").symlink_to("../usr/share/zoneinfo/Europe/Rome")
        (self.root / "etc/resolv.conf").symlink_to(self.root / "run/resolv.conf")
        for name in ("usr/share/zoneinfo/Europe/Rome", "run/resolv.conf"):
            (self.root / name).parent.mkdir(parents=True)
            (self.root / name).write_text("")
        for name in (
            *("ld.so.conf", "ld.so.cache", "python3", "hosts", "passwd", "group", "shadow"),
            *("gshadow", "sudoers", "machine-id", "ssl/private/key", "environment"),
        ):
            (self.root / "etc" / name).write_text("")
        self.patch(
            module,
            "SYSTEM_ROOT_DIRECTORIES",
            [str(self.root / name) for name in module.SYSTEM_ROOT_DIRECTORIES],
        )
        self.patch(module, "glob", lambda pattern: glob.glob(f"{self.root}{pattern}"))

    def view(self, *, network: bool) -> list[str]:
        """Return the arguments, as they would be on that machine."""
        arguments = list(build_system_options(self.root / "state/accounts/etc", network=network))
        return [argument.removeprefix(str(self.root)) for argument in arguments]

    def expected(self, *etc: str) -> list[str]:
        """Return the arguments, of which those for files in /etc are given."""
        return [
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
            *("--ro-bind", "/lib32", "/lib32", "--symlink", "usr/lib64", "/lib64"),
            *etc,
        ]

    def copied(self, *, network: bool) -> set[str]:
        """Return the names in /etc, and what is mounted there."""
        etc = prepare_etc(self.root, [], network=network)
        etc.source_directory = str(self.root / "etc")
        etc.update()
        return {path.name for path in etc.directory.iterdir()}

    def test_without_network(self) -> None:
        """The system, what programs need to be run, and accounts that are not the machine's."""
        own = ("--ro-bind", "/state/accounts/etc", "/etc")
        self.assertEqual(self.view(network=False), self.expected(*own))
        self.assertEqual(
            self.copied(network=False),
            {"ld.so.cache", "ld.so.conf", "passwd", "group", "localtime", "python3", "python3.11"},
        )

    def test_with_network(self) -> None:
        """Also how hosts are found and who is trusted, and no key."""
        own = ("--ro-bind", "/state/accounts/etc", "/etc")
        certificates = ("--ro-bind-try", "/etc/ssl/certs", "/etc/ssl/certs")
        self.assertEqual(self.view(network=True), self.expected(*own, *certificates))
        more = self.copied(network=True) - self.copied(network=False)
        self.assertEqual(more, {"hosts", "resolv.conf"})

    def test_git(self) -> None:
        """Git has what programs need, file by file."""
        arguments = build_minimal_system_options(self.root / "state/accounts")
        self.assertEqual(
            [argument.removeprefix(str(self.root)) for argument in arguments],
            self.expected(
                *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
                *("--ro-bind-try", "/etc/ld.so.conf", "/etc/ld.so.conf"),
                *("--ro-bind", "/state/accounts/passwd", "/etc/passwd"),
                *("--ro-bind", "/state/accounts/group", "/etc/group"),
            ),
        )
        arguments = build_network_options()
        self.assertEqual(
            [argument.removeprefix(str(self.root)) for argument in arguments],
            [
                *("--ro-bind-try", "/etc/hosts", "/etc/hosts"),
                *("--ro-bind-try", "/run/resolv.conf", "/etc/resolv.conf"),
                *("--ro-bind-try", "/etc/ssl/certs", "/etc/ssl/certs"),
            ],
        )

    def test_this_machine(self) -> None:
        """Of the real /etc nothing is shown that others may not read, or that names people."""
        etc = prepare_etc(self.root, [], network=True)
        etc.update()
        names = {path.name for path in etc.directory.iterdir()}
        self.assertFalse({"shadow", "gshadow", "sudoers", "ssh", "machine-id"} & names)
        self.assertLessEqual({"ld.so.cache", "passwd"}, names)
        self.assertNotIn("root", (etc.directory / "passwd").read_text())
        self.assertFalse((etc.directory / "ssl/private").exists())
        for name in names:
            source = Path("/etc", name)
            self.assertTrue(source.stat().st_mode & stat.S_IROTH, name)


class AccountTests(SynchronousTestCase):
    """The users and groups inside."""

    def test_accounts(self) -> None:
        """The evaluator's own, by the numbers that it has inside, and nobody; nobody else."""
        folder = Path(self.mktemp())
        folder.mkdir()
        for _ in range(2):  # a daemon finds those of an earlier one
            write_sandbox_files(folder)
        self.assertEqual(
            (folder / "passwd").read_text(),
            "evaluator:x:1000:1000::/evaluation/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
        )
        self.assertEqual((folder / "group").read_text(), "evaluator:x:1000:\nnogroup:x:65534:\n")
        self.assertEqual(
            {path.name for path in folder.iterdir()}, {"passwd", "group", "init", TOOLS_NAME}
        )

    def test_tools_of_an_earlier_version_stay(self) -> None:
        """Evaluations that outlive an upgrade see them, and their broker knows no other."""
        folder = Path(self.mktemp())
        old = folder / "tools" / "bin" / "tawebeval-run"
        old.parent.mkdir(parents=True)
        old.write_text("earlier")
        write_sandbox_files(folder)
        self.assertEqual(old.read_text(), "earlier")

    def test_full(self) -> None:
        """Where there is no room the error names the file that did not fit, not the shell."""
        write_bytes = Path.write_bytes
        for full in ("init.new", "passwd", "group"):
            folder = Path(self.mktemp())
            folder.mkdir()

            def write(path: Path, content: bytes, full: str = full) -> int:
                if path.name == full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write_bytes(path, content)

            self.patch(Path, "write_bytes", write)
            with self.assertRaises(OSError) as caught:
                write_sandbox_files(folder)
            self.assertEqual(caught.exception.filename, str(folder / full))

    def test_init(self) -> None:
        """The first process is a shell that may be run and not read, so it is closed to others."""
        folder = Path(self.mktemp())
        folder.mkdir()
        write_sandbox_files(folder)
        init = folder.resolve() / "init"
        self.assertEqual(stat.S_IMODE(init.stat().st_mode), 0o111)
        run = [init, "-c", WAIT, "/init", "99"]
        for status in (0, 7):
            command = ["/bin/sh", "-c", f"echo told >&2; exit {status}"]
            done = subprocess.run([*run, *command], capture_output=True)
            self.assertEqual((done.returncode, done.stderr), (status, b"told\n"))
        done = subprocess.run([*run, "/bin/sh", "-c", "kill -SEGV $$"], capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (128 + signal.SIGSEGV, b""))
