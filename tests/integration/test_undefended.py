"""Every defence, taken away: then the attack that it is against succeeds.

Who has only ever seen an attack fail does not know why it does. Here each is run in a cell of
the product, first as it is, and then without one argument of its command, one descriptor, one
limit. What would do harm has a ceiling.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import time

from tawebeval.config import SandboxSettings
from tawebeval.linux.filetree import remove_tree
from tests.cases.patience import PATIENCE
from tests.integration.attacks import bombs, budgets, calls, fillers, views
from tests.integration.attacks.case import MIB
from tests.integration.attacks.cell import (
    CellTestCase,
    Change,
    all_of,
    as_it_is,
    instead,
    sharing,
    showing,
    without,
    without_option,
)
from tests.integration.client import python
from tests.integration.processes import new_word, processes
from tests.integration.unprivileged import PYTHON, USER

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
    """Without a first process that is closed to its own user."""

    def test_first_process(self) -> None:
        """The one of bwrap can be written to, and its pipes are there."""
        self.assertEqual(self.run_program(views.SHELL_MOUNT_POINT), "")
        with_bwrap = all_of(without("--as-pid-1"), without("--remount-ro", "/proc"))
        found = self.run_program(views.SHELL_MOUNT_POINT, change=with_bwrap).split()
        self.assertLessEqual({"mem", "environ", "fd", "maps", "syscall"}, {*found})


class FilterTests(CellTestCase):
    """Without `--add-seccomp-fd`."""

    change = staticmethod(all_of(*[without_option("--add-seccomp-fd")] * 2))

    def outcomes(self, change: Change, *tables: dict[str, tuple[object, ...]]) -> dict[str, int]:
        """Return the error number of each call."""
        argument = calls.calls_argument(*tables)
        found: dict[str, int] = json.loads(self.run_program(calls.CALLS, argument, change=change))
        return found

    def test_calls(self) -> None:
        """Tracing, others' memory, keys, handles and the rest are to be had."""
        before = self.outcomes(as_it_is, calls.REFUSED)
        after = self.outcomes(self.change, calls.REFUSED)
        self.assertEqual({before[name] for name in ONLY_THE_FILTER}, {errno.EPERM})
        for name in ONLY_THE_FILTER - {"kcmp"}:  # which compares with the first process
            self.assertNotEqual(after[name], errno.EPERM, name)
        for name in ("ptrace", "keyctl", "add_key", "userfaultfd", "personality"):
            self.assertEqual(after[name], 0, name)

    def test_allocation(self) -> None:
        """Blocks are to be had without a write, and beyond the limit of a file's size."""
        told = self.say(ALLOCATED, self.change)
        self.assertEqual(told, "allocated\nallocated\nFalse\nTrue\n")

    def test_missing(self) -> None:
        """io_uring and clone3 are there."""
        self.assertEqual(set(self.outcomes(as_it_is, calls.MISSING).values()), {errno.ENOSYS})
        self.assertNotIn(errno.ENOSYS, self.outcomes(self.change, calls.MISSING).values())

    def test_filters(self) -> None:
        """Sockets and processes take filters, whose memory is the machine's."""
        attack = (budgets.FILTERS, str(calls.number_of("seccomp")))
        self.assertEqual(self.run_program(*attack), "sockets 0\nprocess 0\nprocess 0\n")
        said = self.run_program(*attack, change=self.change)
        self.assertEqual(said, "sockets 50\nprocess 1\nprocess 1\n")

    def test_spies(self) -> None:
        """Directories tell of what others open in them."""
        for change, told in ((as_it_is, "0\n"), (self.change, "2\n")):
            spy = self.start(python(budgets.SPY), change)
            assert spy.stdout is not None
            self.assertEqual(spy.stdout.readline(), "ready\n")
            deadline = time.monotonic() + PATIENCE
            while spy.poll() is None and time.monotonic() < deadline:
                os.listdir(budgets.SPIED)
                time.sleep(0.01)
            self.assertEqual(spy.stdout.read(), told)

    def test_families(self) -> None:
        """Netlink sockets open in spite of the network's namespace."""
        self.assertEqual(
            self.outcomes(as_it_is, calls.FAMILIES)["socket:netlink"], errno.EAFNOSUPPORT
        )
        self.assertEqual(self.outcomes(self.change, calls.FAMILIES)["socket:netlink"], 0)

    def test_other_architectures(self) -> None:
        """Calls of 32 bits are answered as outside, where not every kernel has them."""
        self.assertNotIn("succeeded", self.run_program(calls.OTHER_ARCHITECTURES))
        said = self.run_program(calls.OTHER_ARCHITECTURES, change=self.change)
        outside = [PYTHON, "-S", "-c", calls.OTHER_ARCHITECTURES]
        self.assertEqual(said, subprocess.check_output(outside, text=True))

    def test_user_namespaces(self) -> None:
        """Two defences are against these; with both gone a user becomes root somewhere."""
        for change in (as_it_is, self.change, without("--disable-userns")):
            self.assertEqual(self.say(UNSHARE_USERS, change), "-1\n")
        both = all_of(self.change, without("--disable-userns"))
        self.assertEqual(self.say(UNSHARE_USERS, both), "0\n")


class NamespaceTests(CellTestCase):
    """Without one of the namespaces."""

    settings = SandboxSettings(loopback=True)  # by which sockets of the Internet's families open

    def test_network(self) -> None:
        """With the machine's network its servers and abstract sockets are reached."""
        word = new_word()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as one:
            one.bind(f"\0{word}")
            one.listen()
            addresses = (f"127.0.0.1 {server.getsockname()[1]}", f"@{word}")
            said = self.run_program(views.CONNECT, *addresses)
            self.assertEqual(said.count("ECONNREFUSED"), 2, said)
            said = self.run_program(views.CONNECT, *addresses, change=sharing("net"))
            self.assertEqual(said.count("connected"), 3, said)

    def test_processes(self) -> None:
        """With the machine's processes those of the daemon's user are seen and signalled."""
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

    def test_ipc(self) -> None:
        """With the machine's System V objects those of others are found."""
        made = subprocess.run(["ipcmk", "-Q", "-p", "0666"], capture_output=True, text=True)
        number = made.stdout.split()[-1]
        self.addCleanup(subprocess.run, ["ipcrm", "-q", number], check=True)
        script = f"tail -n +2 /proc/sysvipc/msg | grep -c '^ *-\\?[0-9]\\+ *{number} '"
        self.assertEqual(self.say(script), "0\n")
        self.assertEqual(self.say(script, sharing("ipc")), "1\n")

    def test_parent(self) -> None:
        """Without `--die-with-parent` an evaluator outlives a daemon that is killed."""
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

    def test_session(self) -> None:
        """Without `--new-session` it is in the session of who started it, whose terminal it has."""
        script = python("import os; print(os.getsid(0) == 0)")
        self.assertEqual(self.say(script), "False\n")
        self.assertEqual(self.say(script, without("--new-session")), "True\n")


class ViewTests(CellTestCase):
    """With more to be seen or to be written."""

    def test_files(self) -> None:
        """What is shown is found."""
        (self.folder / "key").write_text("a-secret-key")
        (self.folder / "key").chmod(0o644)
        search = (views.SEARCH, "a-secret", "-key", str(self.folder / "key"), "/shown/key")
        self.assertEqual(self.run_program(*search), "")
        said = self.run_program(*search, change=showing(str(self.folder), "/shown"))
        self.assertEqual(said, "found in /shown/key\nreached /shown/key\n")

    def test_environment(self) -> None:
        """What is in the environment is found: it has to be made from nothing."""
        search = (views.SEARCH, "a-secret", "-key")
        self.assertEqual(self.run_program(*search), "")
        said = self.run_program(*search, environment={"CANARY": "a-secret-key"})
        self.assertIn("environ", said)

    def test_descriptors(self) -> None:
        """What is open is inherited: it has to be closed."""
        secret = self.folder / "key"
        secret.write_text("a secret")
        with secret.open() as file:
            script = f"cat /proc/self/fd/{file.fileno()} 2>/dev/null || echo closed"
            self.assertEqual(self.say(script), "closed\n")
            said = self.say(script, descriptors=(file.fileno(),))
        self.assertEqual(said, "a secret")

    def test_root(self) -> None:
        """Without `--remount-ro` directories in memory can be filled, which nobody counts."""
        for place in ("/", "/dev"):
            script = f"(echo x > {place}/x) 2>/dev/null && echo written || echo no"
            self.assertEqual(self.say(script), "no\n")
            self.assertEqual(self.say(script, without("--remount-ro", place)), "written\n")

    def test_kernel_figures(self) -> None:
        """Without `--remount-ro` a process lowers its own `oom_score_adj` after it was raised."""
        own = "/proc/self/oom_score_adj"
        script = f"for score in 700 10; do echo $score >{own}; done 2>/dev/null; cat {own}"
        self.assertEqual(self.say(script), "0\n")
        self.assertEqual(self.say(script, without("--remount-ro", "/proc")), "10\n")

    def test_submission(self) -> None:
        """Bound as the other places are, the submission can be changed."""
        script = 'echo 43 > "$SUBMISSION_FILE_SOLUTION"; cat "$SUBMISSION_FILE_SOLUTION"'
        self.assertTrue(self.say(script).endswith("\n42\n"))
        outside = str(self.workspace.submission_directory)
        inside = "/evaluation/submission"
        writable = all_of(without("--ro-bind", outside, inside), showing(outside, inside, "--bind"))
        self.assertEqual(self.say(script, writable), "43\n")
        self.assertEqual(self.solution.read_text(), "43\n")

    def test_temporary_files(self) -> None:
        """With the machine's /tmp something can be left there for the next run."""
        name = f"/tmp/{new_word()}"
        self.addCleanup(lambda: os.path.exists(name) and os.remove(name))
        self.say(f"touch {name}")
        self.assertFalse(os.path.exists(name))
        self.assertTrue((self.workspace.sandbox_tmp_directory / os.path.basename(name)).exists())
        self.say(f"touch {name}", instead(str(self.workspace.sandbox_tmp_directory), "/tmp"))
        self.assertTrue(os.path.exists(name))

    def test_links(self) -> None:
        """A link that leads out leads out for whoever follows it from outside."""
        secret = self.folder / "key"
        secret.write_text("a secret")
        self.say(f"ln -s {secret} link; cat link")
        self.assertEqual((self.workspace.tree_directory / "link").read_text(), "a secret")


class LimitTests(CellTestCase):
    """Without one of the limits of a process, and without what only groups can limit."""

    def test_file_size(self) -> None:
        """Without `--fsize` one file has any size."""
        program = fillers.ONE_FILE.replace("range(100)", "range(20)")
        arguments = ("/evaluation/tmp", "x")
        self.assertIn("File too large", self.run_program(program, *arguments))
        said = self.run_program(program, *arguments, change=without_option("--fsize"))
        self.assertEqual(said, "unlimited\n")

    def test_cpu(self) -> None:
        """Without `--cpu` a loop goes on."""
        program = "import time\nwhile time.process_time() < 7: pass\nprint('unlimited')"
        self.assertNotIn("unlimited", self.run_program(program))
        said = self.run_program(program, change=without_option("--cpu"))
        self.assertEqual(said, "unlimited\n")

    def test_open_files(self) -> None:
        """Without `ulimit -n` there are as many open files as the daemon may have."""
        script = "ulimit -n"

        def change(argv: list[str]) -> list[str]:
            return [word.replace('ulimit -n "$1"', "true") for word in argv]

        self.assertEqual(self.say(script), "256\n")
        self.assertNotEqual(self.say(script, change), "256\n")

    def test_processes(self) -> None:
        """Without `--nproc` there is no end of forks; with it they are counted inside alone."""
        program = bombs.FORKS.replace("time.sleep(600)", "time.sleep(2)")
        program = program.replace("except OSError:", "except OSError:\n        break")
        program = program.replace('print("unlimited")', "print(_ == 299, flush=True)")
        self.assertEqual(self.run_program(program), "False\n")
        said = self.run_program(program, change=without_option("--nproc"))
        self.assertEqual(said, "True\n")

    def test_heap(self) -> None:
        """Without `--data` a heap is as large as the machine allows."""
        self.assertIn("MemoryError", self.run_program(bombs.HEAP))
        said = self.run_program(bombs.HEAP, change=without_option("--data"))
        self.assertEqual(said, "unlimited\n")

    def test_memory_without_groups(self) -> None:
        """Without a group nothing limits what is shared, in files, or in several processes."""
        for program in (
            bombs.MEMFD,
            bombs.SHARED_SEGMENTS,
            bombs.SHARED_MAPPINGS,
            bombs.HEAP_OF_CHILDREN,
        ):
            self.assertEqual(self.run_program(program), "unlimited\n")

    def test_disk_without_a_watch(self) -> None:
        """Without one who looks, the disk is filled in each of the ways."""
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

    def test_output_without_a_reader_that_counts(self) -> None:
        """A flood goes on as long as somebody reads."""
        process = self.start(python(bombs.FLOOD, "1"))
        assert process.stdout is not None
        self.assertEqual(len(process.stdout.read(20 * MIB)), 20 * MIB)


def _kill_all(word: str) -> None:
    """Kill whoever has that word."""
    for pid in processes(word):
        with contextlib.suppress(ProcessLookupError):  # with the first all others end
            os.kill(pid, signal.SIGKILL)
