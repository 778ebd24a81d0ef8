"""`linux.filetree`: whatever an evaluator has left goes, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux import filetree as module
from tawebeval.linux.filetree import remove_tree


class RemoveTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.tree = self.root / "one" / "tree"
        self.tree.mkdir(parents=True)
        (self.tree.parent / "file").write_text("x")
        self.secret = self.root / "secret"
        self.secret.write_text("secret")
        self.programs: list[str] = []
        run = module.run_and_read_stderr_line
        self.patch(
            module,
            "run_and_read_stderr_line",
            lambda *command: (self.programs.append(command[0]), run(*command))[1],
        )

    def assert_removed(self) -> None:
        remove_tree(self.tree.parent)
        self.assertEqual([p.name for p in self.root.iterdir()], ["secret"])
        self.assertEqual(self.secret.read_text(), "secret")

    def test_tree_is_removed_without_a_program_and_again_without_error(self) -> None:
        for name in ("a/b", "a/c", "d"):
            (self.tree / name).mkdir(parents=True)
            (self.tree / name / "file").touch()
        self.assert_removed()
        self.assert_removed()
        self.assertEqual(self.programs, [])

    def test_many_entries_are_left_to_a_program(self) -> None:
        self.patch(module, "MAX_ENTRIES_REMOVED_IN_PROCESS", 12)
        for names in (["a"], ["a", "b"]):
            with self.subTest(names):
                for name in names:
                    (self.tree / name).mkdir(parents=True, exist_ok=True)
                    for number in range(12 // len(names)):
                        (self.tree / name / str(number)).touch()
                self.programs.clear()
                self.assert_removed()
                self.assertEqual(self.programs, ["/bin/rm"])

    def test_links_are_not_followed(self) -> None:
        (self.tree / "out").symlink_to(self.root)
        (self.tree / "file").symlink_to(self.secret)
        os.link(self.secret, self.tree / "hard")
        self.assert_removed()
        self.assertEqual(self.programs, [])

    def test_directories_without_permissions_are_removed(self) -> None:
        for name in ("a", "b"):
            deep = self.tree / name / "deep"
            deep.mkdir(parents=True)
            (deep / "file").touch()
            deep.chmod(0)
            deep.parent.chmod(0)
        self.tree.chmod(0o500)
        self.remove_as_nobody()
        self.assert_removed()
        self.assertEqual(self.programs, [])

    def remove_as_nobody(self) -> None:
        """As another user than root, for whom modes mean something, try it, too."""
        if os.geteuid() != 0:
            return
        copy = Path(self.mktemp()).resolve()
        subprocess.run(["cp", "-a", self.tree.parent, copy], check=True)
        subprocess.run(["chown", "-R", "nobody", copy], check=True)
        (copy.parent).chmod(0o777)
        for parent in copy.parents:
            if not os.access(parent, os.X_OK) or not parent.stat().st_mode & 1:
                return  # nobody does not get there
        child = os.fork()
        if not child:
            try:
                os.setgid(65534)
                os.setuid(65534)
                remove_tree(copy)
            finally:
                os._exit(os.path.lexists(copy) or bool(self.programs))
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)

    def test_very_deep_directories_are_removed(self) -> None:
        self.dig(3000)
        self.assert_removed()

    def dig(self, levels: int) -> None:
        here = os.open(self.tree, os.O_DIRECTORY)
        for _ in range(levels):
            os.mkdir("dddd", dir_fd=here)
            below = os.open("dddd", os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)

    def test_deep_tree_takes_few_descriptors(self) -> None:
        self.patch(os, "environ", {"PATH": "/nonexistent"})
        self.dig(1500)
        opened: list[object] = []
        open_ = os.open
        self.patch(os, "open", lambda *args, **how: (opened.append(args), open_(*args, **how))[1])
        self.assert_removed()
        self.assertLess(len(opened), 40)  # two for each level that is gone into

    def test_what_cannot_be_removed_is_named(self) -> None:
        self.dig(50)
        programs = Path(self.mktemp()).absolute()
        programs.mkdir()
        for name in ("rm", "chmod"):
            (programs / name).write_text(
                f"#!/bin/sh\necho '{name}: No way' >&2\n"
                "i=0; while [ $i -lt 9999 ]; do echo more and more >&2; i=$((i+1)); done\n"
            )
            (programs / name).chmod(0o755)
            self.patch(module, f"_{name.upper()}", str(programs / name))
        with self.assertRaises(OSError) as caught:
            remove_tree(self.tree.parent)
        self.assertEqual(caught.exception.filename, str(self.tree.parent))
        self.assertEqual(caught.exception.strerror, "rm: No way")

    def test_odd_names_are_removed(self) -> None:
        for name in (b"-rf", b"--", b"\xff\n", b" "):
            os.mkdir(os.fsencode(self.tree) + b"/" + name)
        odd = self.root / "-x"
        odd.mkdir()
        odd.chmod(0)
        remove_tree(odd)
        self.assert_removed()

    def test_file_link_and_fifo_are_removed(self) -> None:
        path = self.root / "file"
        path.touch()
        remove_tree(path)
        path.symlink_to(self.secret)
        remove_tree(path)
        os.mkfifo(path)
        remove_tree(path)
        self.assertEqual(self.programs, [])
        self.assertFalse(os.path.lexists(path))
        self.assertEqual(self.secret.read_text(), "secret")
