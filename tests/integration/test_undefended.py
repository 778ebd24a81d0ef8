"""The attacks succeed outside of the sandbox: where they fail inside, the sandbox is the reason.

Each program runs here as the daemons' user, without any defence. What could do harm has a ceiling.
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
import subprocess

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.filetree import remove_tree
from tests.cases.patience import PATIENCE
from tests.integration.attacks import bombs, calls, fillers, views
from tests.integration.processes import new_word
from tests.integration.unprivileged import PYTHON, USER, temporary_folder

# What the system call filter alone refuses with EPERM.
ONLY_THE_FILTER = {
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "keyctl", "add_key"),
    *("request_key", "name_to_handle_at", "userfaultfd", "personality", "pidfd_getfd"),
}


class UndefendedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = temporary_folder()
        self.addCleanup(shutil.rmtree, self.folder)

    def run_program(self, program: str, *arguments: str, **environment: str) -> str:
        """Return what a Python program prints."""
        return subprocess.run(
            [PYTHON, "-S", "-u", "-c", program, *arguments],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            start_new_session=True,
            user=USER.pw_uid if USER else None,
            group=USER.pw_gid if USER else None,
            extra_groups=() if USER else None,
        ).stdout

    def test_memory_of_each_kind_is_taken(self) -> None:
        for program in (bombs.HEAP, bombs.MEMFD, bombs.SHARED_SEGMENTS, bombs.SHARED_MAPPINGS):
            self.assertEqual(self.run_program(program), "unlimited\n")

    def test_disk_is_filled(self) -> None:
        for program in (
            *(fillers.MANY_FILES, fillers.INODES, fillers.NAMELESS),
            *(fillers.MAPPED, fillers.CLOSED, fillers.DEEP),
        ):
            place = temporary_folder()
            self.addCleanup(remove_tree, place)  # a directory in it is closed
            program = program.replace(fillers.WAIT, "")
            said = self.run_program(program, str(place), new_word())
            self.assertEqual(said, "filled\nunlimited\n")
        said = self.run_program(fillers.ALLOCATED, str(self.folder), "file")
        self.assertEqual(said, "allocated\nallocated\nFalse\nTrue\n")

    def test_calls_are_not_refused(self) -> None:
        argument = calls.calls_argument(calls.REFUSED, calls.MISSING)
        found = json.loads(self.run_program(calls.CALLS, argument))
        for name in ONLY_THE_FILTER - {"kcmp"}:  # which compares with the first process
            self.assertNotEqual(found[name], errno.EPERM, name)
        for name in ("ptrace", "keyctl", "add_key", "userfaultfd", "personality"):
            self.assertEqual(found[name], 0, name)
        self.assertNotIn(errno.ENOSYS, [found[name] for name in calls.MISSING])

    def test_servers_of_the_machine_are_reached(self) -> None:
        word = new_word()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as one:
            one.bind(f"\0{word}")
            one.listen()
            addresses = (f"127.0.0.1 {server.getsockname()[1]}", f"@{word}")
            self.assertEqual(self.run_program(views.CONNECT, *addresses).count("connected"), 3)

    def test_first_process_of_a_user_is_read(self) -> None:
        program = views.SHELL_MOUNT_POINT.replace('"/proc/1/"', '"/proc/self/"')
        found = {*self.run_program(program).split()}
        self.assertLessEqual({"mem", "environ", "fd", "maps", "syscall"}, found)
