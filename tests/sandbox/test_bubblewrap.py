"""`sandbox.bubblewrap`: how bwrap is asked for a sandbox, and what it tells of its end."""

from __future__ import annotations

import errno
import glob
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import MIB
from tawebeval.core.segi import add_tools_to_path
from tawebeval.errors import EvaluationFailure
from tawebeval.linux import kernel_files
from tawebeval.linux.starter import LaunchSpec
from tawebeval.sandbox import bubblewrap as module
from tawebeval.sandbox.base import EvaluatorExit, SandboxedRun
from tawebeval.sandbox.bubblewrap import (
    BROKER_PROGRAM_FILE_NAME,
    EVALUATOR_TOOLS_DIRECTORY_NAME,
    NETWORK_FILE_PATTERNS,
    READ_ONLY_ACCESS,
    TOOLCHAIN_FILE_PATTERNS,
    BubblewrapSandbox,
    TrustedCommandSandbox,
    build_file_options,
    build_system_options,
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
REPOSITORY = Path("/cache/x.git")
SYSTEM = ("--ro-bind", "/usr", "/usr")

CHILD = b'{ "child-pid": 77 }\n'
"""What bwrap notes at the start; at the end of the evaluator there is more."""
BEGUN = CHILD + b'{ "begun": true }\n'
ENDED = BEGUN + b'{ "exit-code": 0 }\n'


def decode(descriptor: Mapping[str, str]) -> bytes:
    """Return what a descriptor of a `LaunchSpec` has."""
    if "read" in descriptor:
        return Path(descriptor["read"]).read_bytes()
    return os.fsencode(descriptor["text"])


class BubblewrapTestCase(CellTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.workspace = Workspace(Path(self.mktemp()).resolve())
        self.workspace.root.mkdir()
        self.workspace.output_directory.mkdir()
        self.files = Path(self.mktemp()).resolve()
        self.files.mkdir()
        self.patch(module, "build_system_options", lambda accounts: SYSTEM)
        self.patch(module, "build_file_options", lambda patterns: ())
        self.cell = self.make()
        self.addCleanup(self.cell.close)
        self.start(self.cell)

    def sandbox(self, *readable: str, network: bool = False) -> BubblewrapSandbox:
        return BubblewrapSandbox(
            LIMITS,
            self.cgroups,
            self.launcher,
            "/opt/bwrap",
            self.files,
            (PROGRAM, PROGRAM),
            readable,
            network,
        )

    def make(self, *readable: str, network: bool = False) -> Any:
        sandbox = self.sandbox(*readable, network=network)
        return sandbox.make_run(self.workspace, self.checkout, LIMITS)

    def start(self, cell: SandboxedRun) -> None:
        cell.start_evaluator("x", ENVIRONMENT, self.workspace.tree_directory)

    @property
    def status_file(self) -> Path:
        return self.workspace.output_directory / "status"

    @property
    def launch(self) -> LaunchSpec:
        return self.launcher.launched[0]  # type: ignore[no-any-return]


class ArgumentTests(BubblewrapTestCase):
    def test_readable_paths_are_mounted_read_only_before_the_workspace(self) -> None:
        argv = self.sandbox("/srv/tests", "/evaluation").build_argv(
            self.cell.workspace_view,
            Path("/evaluation/tree/sub"),
            self.workspace.root / "runner",
            ["cat", "-- x"],
            99,
            self.sandbox().make_system_view(),
        )
        own = str(self.workspace.root)
        mounts = [argv[at : at + 3] for at in range(len(argv)) if argv[at].endswith("-bind")]
        self.assertEqual(
            mounts[3:8],
            [
                ["--ro-bind", "/srv/tests", "/srv/tests"],
                ["--ro-bind", "/evaluation", "/evaluation"],
                ["--ro-bind", f"{own}/submission", "/evaluation/submission"],
                ["--bind", f"{own}/tree", "/evaluation/tree"],
                ["--bind", f"{own}/tmp", "/evaluation/tmp"],
            ],
        )
        self.assertEqual(argv[-6:], ["-c", WAIT, "/init", "99", "cat", "-- x"])

    def test_process_limits_are_set_before_bwrap(self) -> None:
        directory = self.workspace.tree_directory / "sub"
        memory, processes = {"data": (64 * MIB,) * 2}, {"nproc": (33, 33)}  # bwrap's is one of them
        for enforced, more in (
            ((), memory | processes),
            (("memory",), processes),
            (("processes", "memory", "cpu"), {}),
        ):
            self.cgroups.enforced_resources = frozenset(enforced)
            limited = memory | processes
            launch = self.cell.make_launch_spec("./it --now", ENVIRONMENT, directory)
            own = {name: launch.rlimits.get(name) for name in limited}
            self.assertEqual(own, dict.fromkeys(limited) | more)
            self.assertEqual(launch.argv[-4:], ["99", "/bin/sh", "-c", "./it --now"])
            self.assertEqual(launch.environment, {})
            self.assertEqual((launch.directory, launch.has_own_process_limit), ("/", True))

    def test_build_has_no_network_and_a_copy_of_the_tree(self) -> None:
        for network, is_build in ((True, False), (True, True), (False, True)):
            cell = self.make(network=network)
            cell.is_build = is_build
            self.launcher.copied.clear()
            self.start(cell)
            reaches = network and not is_build
            self.assertEqual(cell.has_network, reaches)
            self.assertEqual("--share-net" in self.launcher.launched[-1].argv, reaches)
            self.assertEqual(self.launcher.copied, [self.checkout.path] * is_build)

    def test_environment_is_in_a_file_for_bwrap(self) -> None:
        for given in (ENVIRONMENT, {"A": "1 = 2", "EMPTY": "", "LINES": "a\nb", "ODD": "\udcff"}):
            launch = self.cell.make_launch_spec("x", given, self.workspace.tree_directory)
            written = decode(launch.descriptors[0])
            whole = add_tools_to_path(given, "/evaluation/tools")
            words = [part for pair in whole.items() for part in ("--setenv", *pair)]
            self.assertEqual(written, os.fsencode("\0".join(["--clearenv", *words])))

    def test_evaluator_sees_its_workspace_under_another_path(self) -> None:
        self.assertEqual(
            self.cell.workspace_view, self.workspace.make_sandboxed_view(Path("/evaluation"))
        )


class DescriptorTests(BubblewrapTestCase):
    def test_bwrap_and_its_first_process_append_status_to_one_file(self) -> None:
        status = {"append": str(self.status_file)}
        self.assertEqual(self.launch.descriptors[1:3], [status, status])

    def test_each_bwrap_reads_the_filters_from_their_beginning(self) -> None:
        self.assertEqual([decode(each) for each in self.launch.descriptors[3:]], [PROGRAM] * 2)
        assert self.launch.broker_specification is not None
        filters = self.launch.broker_specification.descriptors[3:]
        self.assertEqual([decode(each) for each in filters], [PROGRAM] * 2)

    def test_damaged_filter_file_is_rewritten_by_the_next_daemon(self) -> None:
        (filter_file,) = self.files.iterdir()
        filter_file.unlink()
        filter_file.touch()
        self.assertEqual(self.sandbox().store_filter_files(), [{"read": str(filter_file)}] * 2)
        self.assertEqual(filter_file.read_bytes(), PROGRAM)

    def test_broker_program_is_a_file_and_is_not_sent_with_each_start(self) -> None:
        write_sandbox_files(self.files)
        run = [sys.executable, self.files / BROKER_PROGRAM_FILE_NAME]
        said = subprocess.run(run, capture_output=True).stderr
        self.assertIn(b"Bad file descriptor", said)  # it needs those of the starter
        self.assertLess(len(json.dumps(self.launch.build_json_object())), 2**15)


class BrokerTests(BubblewrapTestCase):
    def test_broker_is_in_the_cgroup_of_the_evaluation(self) -> None:
        self.cgroups.group.entries = ["/cgroup/a"]
        self.start(self.make())
        broker = self.launcher.launched[-1].broker_specification
        self.assertEqual(broker.procs_files, ["/cgroup/a"])
        self.assertEqual((broker.niceness, broker.environment), (10, {}))
        self.assertEqual(
            self.launcher.launched[-1].broker_socket_path, str(self.workspace.root / "runner")
        )

    def test_broker_gets_program_file_configuration_and_socket(self) -> None:
        broker = self.launch.broker_specification
        assert broker is not None
        self.assertEqual(broker.argv[-2:], ["/proc/self/fd/3", "tawebeval-broker"])
        program, configuration, listening = broker.descriptors[:3]
        self.assertEqual(program, {"read": f"{self.files}/{BROKER_PROGRAM_FILE_NAME}"})
        self.assertEqual(listening, {"socket": ""})
        told = json.loads(configuration["text"])
        self.assertEqual(told["parent_pid"], self.launcher.pid)
        self.assertEqual(told["memory_bytes"], LIMITS.memory)
        self.assertEqual(told["max_processes"], LIMITS.processes)

    def test_stderr_of_the_broker_is_logged_at_the_close(self) -> None:
        said = self.workspace.output_directory / "broker-stderr"
        for content, logged in (
            (b"", []),
            (b"Traceback\xff" + b"." * 5000, ["Traceback\ufffd" + "." * 1014]),
        ):
            said.write_bytes(content)
            with capturedLogs() as events:
                self.cell.close()
            self.assertEqual([event["said"] for event in events], logged)


class ExitTests(BubblewrapTestCase):
    def note(self, text: bytes) -> None:
        self.status_file.write_bytes(text)

    def test_exit_is_interpreted_as_status_or_signal_of_the_command(self) -> None:
        self.note(ENDED)
        for status in (0, 1, 2, 126, 127, 128, 193, 255):
            self.assertEqual(self.cell.interpret_exit(status, None), EvaluatorExit(status), status)
        for number in (1, 9, 15, 24, 25, 31, 34, 64):
            found = self.cell.interpret_exit(128 + number, None)
            self.assertEqual(found, EvaluatorExit(None, number), number)
        for noted in (CHILD, BEGUN, ENDED):
            self.note(noted)
            self.assertEqual(self.cell.interpret_exit(None, signal.SIGKILL), EvaluatorExit(None, 9))

    def test_run_is_lost_if_the_sandbox_did_not_start(self) -> None:
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
    def setUp(self) -> None:
        super().setUp()
        self.sent: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.inside: list[int] = []
        self.patch(
            kernel_files, "list_descendant_pids", lambda pid: self.asked.append(pid) or self.inside
        )
        self.patch(kernel_files, "send_signal", lambda pid, number: self.sent.append((pid, number)))
        self.child: Any = FakeChild(Clock(), ProcessProtocol())

    def test_signal_reaches_all_inside_processes_but_kills_a_lone_first_process(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for inside, sent, own in (
                ([31, 32], [(31, number), (32, number)], []),
                ([31], [(31, signal.SIGKILL)], []),
                ([], [], [signal.SIGKILL]),
            ):
                self.inside = inside
                self.cell.send_signal(self.child, number)
                self.assertEqual((self.sent, self.child.group_signals), (sent, own))
                self.sent.clear()
                self.child.group_signals.clear()
        self.assertEqual(self.asked, [NO_PROCESS] * 6)

    def test_first_process_inside_is_killed_if_it_is_still_alive(self) -> None:
        waited: list[object] = []
        self.patch(module, "kill_adopted_process", lambda *given: waited.append(given))
        lives = [False, True]
        self.patch(kernel_files, "is_pid_in_use", lambda pid: lives.pop())
        self.cell.run_limits.first_process = self.child
        self.status_file.write_bytes(CHILD)
        for _ in range(2):
            self.successResultOf(Deferred.fromCoroutine(self.cell.kill_remaining_processes()))
        self.assertEqual((waited, lives), ([(77, self.launcher.pid)], []))
        self.assertEqual((self.sent, self.child.group_signals), ([], []))

    def test_no_process_is_killed_if_the_sandbox_never_started(self) -> None:
        self.patch(module, "kill_adopted_process", self.fail)
        self.successResultOf(Deferred.fromCoroutine(self.cell.kill_remaining_processes()))


class SystemTests(SynchronousTestCase):
    """What is shown of a machine, whose `/` is a folder here."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for name in ("usr/bin", "lib32", "etc/ssl/certs", "etc/ssl/private"):
            (self.root / name).mkdir(parents=True)
        for name in ("etc/java-17-openjdk", "var/lib/ghc"):
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
            *("ld.so.conf", "ld.so.cache", "fpc-3.2.2.cfg", "hosts", "passwd", "group", "shadow"),
            *("gshadow", "sudoers", "machine-id", "ssl/private/key", "environment"),
        ):
            (self.root / "etc" / name).write_text("")
        (self.root / "etc/fpc.cfg").symlink_to("fpc-3.2.2.cfg")
        self.patch(
            module,
            "SYSTEM_ROOT_DIRECTORIES",
            [str(self.root / name) for name in module.SYSTEM_ROOT_DIRECTORIES],
        )
        self.patch(module, "glob", lambda pattern: glob.glob(f"{self.root}{pattern}"))

    def show(self, options: Iterable[str]) -> list[str]:
        return [option.removeprefix(str(self.root)) for option in options]

    def test_system_has_no_accounts_and_no_keys_of_the_machine(self) -> None:
        accounts = Path("/state")
        self.assertEqual(
            self.show(
                [
                    *build_system_options(accounts),
                    *build_file_options((*TOOLCHAIN_FILE_PATTERNS, *NETWORK_FILE_PATTERNS)),
                ]
            ),
            [
                *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
                *("--ro-bind", "/lib32", "/lib32", "--symlink", "usr/lib64", "/lib64"),
                *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
                *("--ro-bind-try", "/etc/ld.so.conf", "/etc/ld.so.conf"),
                *("--ro-bind", "/state/passwd", "/etc/passwd"),
                *("--ro-bind", "/state/group", "/etc/group"),
                *("--ro-bind-try", "/etc/fpc-3.2.2.cfg", "/etc/fpc-3.2.2.cfg"),
                *("--ro-bind-try", "/etc/fpc-3.2.2.cfg", "/etc/fpc.cfg"),
                *("--ro-bind-try", "/etc/java-17-openjdk", "/etc/java-17-openjdk"),
                *("--ro-bind-try", "/usr/share/zoneinfo/Europe/Rome", "/etc/localtime"),
                *("--ro-bind-try", "/var/lib/ghc", "/var/lib/ghc"),
                *("--ro-bind-try", "/etc/hosts", "/etc/hosts"),
                *("--ro-bind-try", "/run/resolv.conf", "/etc/resolv.conf"),
                *("--ro-bind-try", "/etc/ssl/certs", "/etc/ssl/certs"),
            ],
        )


class AccountTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        write_sandbox_files(self.folder)

    def test_accounts_are_the_evaluator_and_nobody(self) -> None:
        write_sandbox_files(self.folder)  # a daemon finds those of an earlier one
        self.assertEqual(
            (self.folder / "passwd").read_text(),
            "evaluator:x:1000:1000::/evaluation/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
        )
        self.assertEqual(
            (self.folder / "group").read_text(), "evaluator:x:1000:\nnogroup:x:65534:\n"
        )
        self.assertEqual(
            {path.name for path in self.folder.iterdir()},
            {"passwd", "group", "init", EVALUATOR_TOOLS_DIRECTORY_NAME, BROKER_PROGRAM_FILE_NAME},
        )

    def test_evaluator_tools_include_an_unchanged_copy_of_the_installed_pyyaml(self) -> None:
        lib = self.folder / EVALUATOR_TOOLS_DIRECTORY_NAME / "lib/judge"
        (installed,) = yaml.__path__
        for path in Path(installed).rglob("*.py"):  # compiled modules may come at any time
            copy = lib / "yaml" / path.relative_to(installed)
            self.assertEqual(copy.read_bytes(), path.read_bytes())
            self.assertEqual(int(copy.stat().st_mtime), int(path.stat().st_mtime))
        code = "import sys; sys.path = [sys.argv[1], *sys.path]; import yaml; print(yaml.__file__)"
        run = ["/usr/bin/python3", "-IS", "-c", code, lib]
        said = subprocess.run(run, capture_output=True, text=True).stdout
        self.assertEqual(said, f"{lib}/yaml/__init__.py\n")

    def test_pyyaml_without_sources_is_refused_at_the_start(self) -> None:
        self.patch(module, "_EVALUATOR_TOOLS", {Path("lib/judge/yaml/__init__.pyc"): (b"", 0)})
        error = self.assertRaises(OSError, write_sandbox_files, Path(self.mktemp()))
        self.assertIn("PyYAML has no source files", error.strerror)

    def test_full_disk_error_names_the_file_and_leaves_no_partial_program(self) -> None:
        write_bytes = Path.write_bytes
        for full, is_whole in (
            ("init", True),
            (BROKER_PROGRAM_FILE_NAME, True),
            ("passwd", False),
            ("group", False),
        ):
            folder = Path(self.mktemp())
            folder.mkdir()

            def write(path: Path, content: bytes, full: str = full) -> int:
                if path.stem == full:
                    write_bytes(path, content[:1])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write_bytes(path, content)

            self.patch(Path, "write_bytes", write)
            error = self.assertRaises(OSError, write_sandbox_files, folder)
            self.assertIn(str(folder / full), error.filename)
            left = [path.stem for path in folder.iterdir()]
            self.assertNotEqual(full in left, is_whole, full)

    def test_init_is_an_unreadable_shell_that_exits_with_the_status_of_the_command(self) -> None:
        init = self.folder / "init"
        self.assertEqual(stat.S_IMODE(init.stat().st_mode), 0o111)
        run = [init, "-c", WAIT, "/init", "99"]
        for status in (0, 7):
            command = ["/bin/sh", "-c", f"echo told >&2; exit {status}"]
            done = subprocess.run([*run, *command], capture_output=True)
            self.assertEqual((done.returncode, done.stderr), (status, b"told\n"))
        done = subprocess.run([*run, "/bin/sh", "-c", "kill -SEGV $$"], capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (128 + signal.SIGSEGV, b""))


class TrustedCommandSandboxTests(SynchronousTestCase):
    def test_each_command_reads_the_filter_from_its_beginning(self) -> None:
        box = TrustedCommandSandbox("bwrap", (PROGRAM, PROGRAM), ())
        for _ in range(2):
            with box.open_command_prefix(REPOSITORY, READ_ONLY_ACCESS) as (argv, opened):
                self.assertEqual(len(opened), 2)
                for descriptor in opened:
                    self.assertIn(str(descriptor), argv)
                    self.assertFalse(os.get_inheritable(descriptor))
                    self.assertEqual(os.read(descriptor, 10**6), PROGRAM)
            for descriptor in opened:
                self.assertRaises(OSError, os.fstat, descriptor)

    def test_command_without_sandbox_is_killed_as_a_group(self) -> None:
        with TrustedCommandSandbox().open_command_prefix(REPOSITORY, READ_ONLY_ACCESS) as entered:
            self.assertEqual(entered, ((), ()))
        child = FakeChild(Clock(), ProcessProtocol())
        TrustedCommandSandbox().kill_command(child)
        self.assertEqual(child.group_signals, [signal.SIGKILL])
