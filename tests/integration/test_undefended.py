"""Every defence, taken away: then the attack that it is against succeeds.

Who has only ever seen an attack fail does not know why it does. Here each is run in a cell of
the product, first as it is, and then without one argument of its command, one descriptor, one
limit. What would do harm has a ceiling.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, LimitSettings, SandboxSettings
from tawebeval.core.checkout import Checkout, Commit
from tawebeval.linux.cgroups import CgroupManager
from tawebeval.linux.child import Spawner
from tawebeval.linux.filetree import remove_tree
from tawebeval.linux.reaper import OrphanReaper
from tawebeval.linux.starter import FIRST_PASSED_DESCRIPTOR
from tawebeval.sandbox.bubblewrap import BROKER_SOCKET_NAME, write_sandbox_files
from tawebeval.sandbox.probe import open_bubblewrap
from tawebeval.sandbox.workspace import Workspace
from tests.cases.patience import PATIENCE
from tests.fakes.sandbox import FakeTrees
from tests.integration.attacks import bombs, budgets, calls, fillers, views
from tests.integration.attacks.case import CPU, DISK, DISK_FILES, FILE_SIZE, MEMORY, MIB, PROCESSES
from tests.integration.client import python
from tests.integration.processes import new_word, processes
from tests.integration.unprivileged import PYTHON, USER, give, temporary_folder

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
        if "append" in described:
            self.workspace.output_directory.mkdir(exist_ok=True)
            descriptor = os.open(described["append"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        else:
            descriptor = os.memfd_create("given")
            os.pwrite(descriptor, b64decode(described["base64"]), 0)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def say(self, command: str, change: Change = as_it_is, **more: object) -> str:
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
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


# What the filter alone refuses: with it EPERM, without it the kernel has something else to say.
ONLY_THE_FILTER = {
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "keyctl", "add_key"),
    *("request_key", "name_to_handle_at", "userfaultfd", "personality", "pidfd_getfd"),
}
UNSHARE_USERS = python(
    "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"  # CLONE_NEWUSER
)

ALLOCATED = f'{python(fillers.ALLOCATED)} "$TEMPORARY_DIRECTORY" file'


class FirstProcessTests(CellTestCase):
    def test_first_process_of_bwrap_is_readable_by_its_user(self) -> None:
        self.assertEqual(self.run_program(views.SHELL_MOUNT_POINT), "")
        with_bwrap = all_of(without("--as-pid-1"), without("--remount-ro", "/proc"))
        found = self.run_program(views.SHELL_MOUNT_POINT, change=with_bwrap).split()
        self.assertLessEqual({"mem", "environ", "fd", "maps", "syscall"}, {*found})


class FilterTests(CellTestCase):
    change = staticmethod(all_of(*[without_option("--add-seccomp-fd")] * 2))

    def outcomes(self, change: Change, *tables: dict[str, tuple[object, ...]]) -> dict[str, int]:
        """Return the error number of each call."""
        argument = calls.calls_argument(*tables)
        found: dict[str, int] = json.loads(self.run_program(calls.CALLS, argument, change=change))
        return found

    def test_filter_refuses_dangerous_calls(self) -> None:
        before = self.outcomes(as_it_is, calls.REFUSED)
        after = self.outcomes(self.change, calls.REFUSED)
        self.assertEqual({before[name] for name in ONLY_THE_FILTER}, {errno.EPERM})
        for name in ONLY_THE_FILTER - {"kcmp"}:  # which compares with the first process
            self.assertNotEqual(after[name], errno.EPERM, name)
        for name in ("ptrace", "keyctl", "add_key", "userfaultfd", "personality"):
            self.assertEqual(after[name], 0, name)

    def test_filter_refuses_allocation_without_a_write(self) -> None:
        told = self.say(ALLOCATED, self.change)
        self.assertEqual(told, "allocated\nallocated\nFalse\nTrue\n")

    def test_filter_hides_io_uring_and_clone3(self) -> None:
        self.assertEqual(set(self.outcomes(as_it_is, calls.MISSING).values()), {errno.ENOSYS})
        self.assertNotIn(errno.ENOSYS, self.outcomes(self.change, calls.MISSING).values())

    def test_filter_refuses_filters_for_sockets_and_processes(self) -> None:
        attack = (budgets.FILTERS, str(calls.number_of("seccomp")))
        self.assertEqual(self.run_program(*attack), "sockets 0\nprocess 0\nprocess 0\n")
        said = self.run_program(*attack, change=self.change)
        self.assertEqual(said, "sockets 50\nprocess 1\nprocess 1\n")

    def test_filter_refuses_watches_of_directories(self) -> None:
        for change, told in ((as_it_is, "0\n"), (self.change, "2\n")):
            spy = self.start(python(budgets.SPY), change)
            assert spy.stdout is not None
            self.assertEqual(spy.stdout.readline(), "ready\n")
            deadline = time.monotonic() + PATIENCE
            while spy.poll() is None and time.monotonic() < deadline:
                os.listdir(budgets.SPIED)
                time.sleep(0.01)
            self.assertEqual(spy.stdout.read(), told)

    def test_filter_refuses_netlink(self) -> None:
        self.assertEqual(
            self.outcomes(as_it_is, calls.FAMILIES)["socket:netlink"], errno.EAFNOSUPPORT
        )
        self.assertEqual(self.outcomes(self.change, calls.FAMILIES)["socket:netlink"], 0)

    def test_filter_refuses_32_bit_calls(self) -> None:
        self.assertNotIn("succeeded", self.run_program(calls.OTHER_ARCHITECTURES))
        said = self.run_program(calls.OTHER_ARCHITECTURES, change=self.change)
        outside = [PYTHON, "-S", "-c", calls.OTHER_ARCHITECTURES]
        self.assertEqual(said, subprocess.check_output(outside, text=True))

    def test_two_defences_refuse_user_namespaces(self) -> None:
        for change in (as_it_is, self.change, without("--disable-userns")):
            self.assertEqual(self.say(UNSHARE_USERS, change), "-1\n")
        both = all_of(self.change, without("--disable-userns"))
        self.assertEqual(self.say(UNSHARE_USERS, both), "0\n")


class NamespaceTests(CellTestCase):
    settings = SandboxSettings(loopback=True)  # by which sockets of the Internet's families open

    def test_network_namespace_hides_servers_of_the_machine(self) -> None:
        word = new_word()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as one:
            one.bind(f"\0{word}")
            one.listen()
            addresses = (f"127.0.0.1 {server.getsockname()[1]}", f"@{word}")
            said = self.run_program(views.CONNECT, *addresses)
            self.assertEqual(said.count("ECONNREFUSED"), 2, said)
            said = self.run_program(views.CONNECT, *addresses, change=sharing("net"))
            self.assertEqual(said.count("connected"), 3, said)

    def test_pid_namespace_hides_processes_of_the_machine(self) -> None:
        other = subprocess.Popen(["sleep", "600"], user=USER.pw_uid if USER else None)
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        program = (
            "import os, sys; pid = int(sys.argv[1])\n"
            "print(os.path.exists(f'/proc/{pid}/cmdline'))\n"
            "try:\n    os.kill(pid, 0)\n    print('told')\n"
            "except ProcessLookupError:\n    print('not there')\n"
        )
        self.assertEqual(self.run_program(program, str(other.pid)), "False\nnot there\n")
        shared = all_of(
            sharing("pid"), without("--as-pid-1"), without("--proc", "/proc"), showing("/proc")
        )
        self.assertEqual(self.run_program(program, str(other.pid), change=shared), "True\ntold\n")

    def test_ipc_namespace_hides_system_v_objects(self) -> None:
        made = subprocess.run(["ipcmk", "-Q", "-p", "0666"], capture_output=True, text=True)
        number = made.stdout.split()[-1]
        self.addCleanup(subprocess.run, ["ipcrm", "-q", number], check=True)
        script = f"tail -n +2 /proc/sysvipc/msg | grep -c '^ *-\\?[0-9]\\+ *{number} '"
        self.assertEqual(self.say(script), "0\n")
        self.assertEqual(self.say(script, sharing("ipc")), "1\n")

    def test_die_with_parent_ends_the_evaluator_with_the_daemon(self) -> None:
        for change, lives in ((as_it_is, False), (without("--die-with-parent"), True)):
            word = new_word()
            process = self.start(
                python("import time; print('there', flush=True); time.sleep(600)", word), change
            )
            assert process.stdout is not None
            self.assertEqual(process.stdout.readline(), "there\n")
            process.kill()
            process.wait()
            self.addCleanup(_kill_all, word)
            end = time.monotonic() + PATIENCE
            while processes(word) and time.monotonic() < end and not lives:
                time.sleep(0.01)
            self.assertEqual(bool(processes(word)), lives)

    def test_new_session_hides_the_terminal(self) -> None:
        script = python("import os; print(os.getsid(0) == 0)")
        self.assertEqual(self.say(script), "False\n")
        self.assertEqual(self.say(script, without("--new-session")), "True\n")


class ViewTests(CellTestCase):
    def test_shown_directory_would_be_found(self) -> None:
        (self.folder / "key").write_text("a-secret-key")
        (self.folder / "key").chmod(0o644)
        search = (views.SEARCH, "a-secret", "-key", str(self.folder / "key"), "/shown/key")
        self.assertEqual(self.run_program(*search), "")
        said = self.run_program(*search, change=showing(str(self.folder), "/shown"))
        self.assertEqual(said, "found in /shown/key\nreached /shown/key\n")

    def test_given_environment_would_be_found(self) -> None:
        search = (views.SEARCH, "a-secret", "-key")
        self.assertEqual(self.run_program(*search), "")
        said = self.run_program(*search, environment={"CANARY": "a-secret-key"})
        self.assertIn("environ", said)

    def test_open_descriptor_would_be_inherited(self) -> None:
        secret = self.folder / "key"
        secret.write_text("a secret")
        with secret.open() as file:
            script = f"cat /proc/self/fd/{file.fileno()} 2>/dev/null || echo closed"
            self.assertEqual(self.say(script), "closed\n")
            said = self.say(script, descriptors=(file.fileno(),))
        self.assertEqual(said, "a secret")

    def test_read_only_root_cannot_be_filled(self) -> None:
        for place in ("/", "/dev"):
            script = f"(echo x > {place}/x) 2>/dev/null && echo written || echo no"
            self.assertEqual(self.say(script), "no\n")
            self.assertEqual(self.say(script, without("--remount-ro", place)), "written\n")

    def test_read_only_proc_keeps_oom_score_adj(self) -> None:
        own = "/proc/self/oom_score_adj"
        script = f"for score in 700 10; do echo $score >{own}; done 2>/dev/null; cat {own}"
        self.assertEqual(self.say(script), "0\n")
        self.assertEqual(self.say(script, without("--remount-ro", "/proc")), "10\n")

    def test_read_only_submission_cannot_be_changed(self) -> None:
        script = 'echo 43 > "$SUBMISSION_FILE_SOLUTION"; cat "$SUBMISSION_FILE_SOLUTION"'
        self.assertTrue(self.say(script).endswith("\n42\n"))
        outside = str(self.workspace.submission_directory)
        inside = "/evaluation/submission"
        writable = all_of(without("--ro-bind", outside, inside), showing(outside, inside, "--bind"))
        self.assertEqual(self.say(script, writable), "43\n")
        self.assertEqual(self.solution.read_text(), "43\n")

    def test_private_tmp_keeps_files_from_the_next_run(self) -> None:
        name = f"/tmp/{new_word()}"
        self.addCleanup(lambda: os.path.exists(name) and os.remove(name))
        self.say(f"touch {name}")
        self.assertFalse(os.path.exists(name))
        self.assertTrue((self.workspace.sandbox_tmp_directory / os.path.basename(name)).exists())
        self.say(f"touch {name}", instead(str(self.workspace.sandbox_tmp_directory), "/tmp"))
        self.assertTrue(os.path.exists(name))

    def test_link_that_leads_outside_leads_outside_for_others(self) -> None:
        secret = self.folder / "key"
        secret.write_text("a secret")
        self.say(f"ln -s {secret} link; cat link")
        self.assertEqual((self.workspace.tree_directory / "link").read_text(), "a secret")


class LimitTests(CellTestCase):
    def test_fsize_limits_one_file(self) -> None:
        program = fillers.ONE_FILE.replace("range(100)", "range(20)")
        arguments = ("/evaluation/tmp", "x")
        self.assertIn("File too large", self.run_program(program, *arguments))
        said = self.run_program(program, *arguments, change=without_option("--fsize"))
        self.assertEqual(said, "unlimited\n")

    def test_cpu_limits_a_loop(self) -> None:
        program = "import time\nwhile time.process_time() < 7: pass\nprint('unlimited')"
        self.assertNotIn("unlimited", self.run_program(program))
        said = self.run_program(program, change=without_option("--cpu"))
        self.assertEqual(said, "unlimited\n")

    def test_ulimit_limits_open_files(self) -> None:
        script = "ulimit -n"

        def change(argv: list[str]) -> list[str]:
            return [word.replace('ulimit -n "$1"', "true") for word in argv]

        self.assertEqual(self.say(script), "256\n")
        self.assertNotEqual(self.say(script, change), "256\n")

    def test_nproc_limits_forks(self) -> None:
        program = bombs.FORKS.replace("time.sleep(600)", "time.sleep(2)")
        program = program.replace("except OSError:", "except OSError:\n        break")
        program = program.replace('print("unlimited")', "print(_ == 299, flush=True)")
        self.assertEqual(self.run_program(program), "False\n")
        said = self.run_program(program, change=without_option("--nproc"))
        self.assertEqual(said, "True\n")

    def test_data_limits_the_heap(self) -> None:
        self.assertIn("MemoryError", self.run_program(bombs.HEAP))
        said = self.run_program(bombs.HEAP, change=without_option("--data"))
        self.assertEqual(said, "unlimited\n")

    def test_memory_of_several_kinds_needs_a_cgroup(self) -> None:
        for program in (
            bombs.MEMFD,
            bombs.SHARED_SEGMENTS,
            bombs.SHARED_MAPPINGS,
            bombs.HEAP_OF_CHILDREN,
        ):
            self.assertEqual(self.run_program(program), "unlimited\n")

    def test_disk_is_filled_where_nobody_looks(self) -> None:
        for program in (
            *(fillers.MANY_FILES, fillers.INODES, fillers.NAMELESS),
            *(fillers.MAPPED, fillers.CLOSED, fillers.DEEP),
        ):
            program = program.replace(fillers.WAIT, "")
            # Nor without a limit of time, for to make files takes long on some disks.
            change = without_option("--cpu")
            said = self.run_program(program, "/evaluation/tmp", new_word(), change=change)
            self.assertEqual(said, "filled\nunlimited\n")
            remove_tree(self.workspace.root)
            for place in ("submission", "tree", "tmp", "home", "scratch", "shm", "output"):
                (self.workspace.root / place).mkdir(parents=True)
                if USER:
                    os.chown(self.workspace.root / place, USER.pw_uid, USER.pw_gid)
            os.chmod(self.workspace.root, 0o755)

    def test_output_is_endless_where_nobody_counts(self) -> None:
        process = self.start(python(bombs.FLOOD, "1"))
        assert process.stdout is not None
        self.assertEqual(len(process.stdout.read(20 * MIB)), 20 * MIB)


def _kill_all(word: str) -> None:
    """Kill whoever has that word."""
    for pid in processes(word):
        with contextlib.suppress(ProcessLookupError):  # with the first all others end
            os.kill(pid, signal.SIGKILL)
