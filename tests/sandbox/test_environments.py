"""`sandbox.environments`: what a sandbox shows of a root, and the locks of roots."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EnvironmentSettings
from tawebeval.sandbox.environments import (
    Environment,
    EnvironmentLocks,
    find_environment,
    find_environment_root_problem,
    list_environments,
    locate_in_root,
    lock_environment_root,
    make_system_view,
)
from tests.cases.roots import make_root

DIGEST = "sha256-" + "a" * 64


class RootTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(self.mktemp()).resolve()
        self.accounts = folder / "accounts"
        self.accounts.mkdir(parents=True)
        self.root = make_root(folder / DIGEST)

    def options(self, *readable: str, network: bool = False) -> Sequence[str]:
        return make_system_view(self.root, self.accounts, readable, network=network).bwrap_options


class LocateTests(RootTestCase):
    def test_links_of_a_root_lead_to_its_own_files(self) -> None:
        self.assertEqual(locate_in_root(self.root, "/bin/sh"), self.root / "usr/bin/dash")
        (self.root / "up").symlink_to("../../../../usr/./bin")
        self.assertEqual(locate_in_root(self.root, "up/../bin"), self.root / "usr/bin")

    def test_circle_of_links_and_missing_files_are_errors(self) -> None:
        (self.root / "one").symlink_to("/two")
        (self.root / "two").symlink_to("one")
        for path, number in (("/one", errno.ELOOP), ("/none/file", errno.ENOENT)):
            error = self.assertRaises(OSError, locate_in_root, self.root, path)
            self.assertEqual(error.errno, number)

    def test_root_without_shell_or_prlimit_is_a_problem_with_a_remedy(self) -> None:
        self.assertIs(find_environment_root_problem(self.root), None)
        for name, program in (("usr/bin/prlimit", "/usr/bin/prlimit"), ("usr/bin/sh", "/bin/sh")):
            (self.root / name).unlink()
            problem = find_environment_root_problem(self.root)
            assert problem is not None
            self.assertEqual(problem[0], f"{self.root} has no program {program}")
            self.assertTrue(problem.remedy)
        (self.root / "usr/bin/sh").symlink_to("/etc/passwd")  # no program
        self.assertIsNot(find_environment_root_problem(self.root), None)
        (self.root / "usr/bin/sh").unlink()
        os.truncate(self.root / "usr/bin/dash", 10**12)
        (self.root / "usr/bin/sh").symlink_to("dash")
        (self.root / "usr/bin/prlimit").symlink_to("dash")
        problem = find_environment_root_problem(self.root)
        assert problem is not None
        self.assertEqual(problem[0], f"{self.root}: /bin/sh is 931.4 GiB; the limit is 16 MiB")
        error = self.assertRaises(OSError, self.options)
        self.assertEqual(error.errno, errno.EFBIG)
        link = self.root.with_name("link")
        link.symlink_to(self.root)
        for path in (self.root / "none", self.root / "file", link):
            problem = find_environment_root_problem(path)
            assert problem is not None
            self.assertIn("is not a directory", problem[0])


class ViewTests(RootTestCase):
    def test_directories_are_mounted_and_links_made(self) -> None:
        self.assertEqual(
            self.options(),
            [
                *("--symlink", "usr/bin", "/bin"),
                *("--ro-bind", f"{self.root}/etc", "/etc"),
                *("--ro-bind", f"{self.root}/opt", "/opt"),
                *("--ro-bind", f"{self.root}/usr", "/usr"),
                *("--ro-bind-try", str(self.accounts / "passwd"), "/etc/passwd"),
            ],
        )

    def test_links_in_place_of_covered_files_stay(self) -> None:
        (self.root / "etc/passwd").unlink()
        (self.root / "etc/passwd").symlink_to("/opt/tool")
        self.assertNotIn("/etc/passwd", self.options())
        (self.root / "etc").rename(self.root / "opt/etc")
        (self.root / "etc").symlink_to("opt/etc")
        self.assertEqual(self.options()[3:6], ["--symlink", "opt/etc", "/etc"])

    def test_network_adds_the_resolver_of_the_machine(self) -> None:
        (self.root / "etc/resolv.conf").touch()
        self.assertNotIn("/etc/resolv.conf", self.options())
        self.assertIn("/etc/resolv.conf", self.options(network=True))

    def test_readable_path_that_a_root_lacks_gets_a_place(self) -> None:
        shown = self.options("/opt/tool/new", "/srv/data", "/usr/bin/dash")
        self.assertNotIn("/opt", shown)
        self.assertNotIn("/opt/tool", shown)
        self.assertIn("/usr", shown)
        (self.root / "opt/other").mkdir()
        self.assertIn("/opt/other", self.options("/opt/tool/new"))

    def test_readable_path_below_a_link_is_refused(self) -> None:
        (self.root / "opt/link").symlink_to("/oldroot/srv")
        (self.root / "data").symlink_to("/opt/tool")
        (self.root / "home").symlink_to("/opt")
        for path, link in (("/opt/link/a/b", "opt/link"), ("/data/a", "data")):
            error = self.assertRaises(OSError, self.options, "/usr/share", path)
            self.assertEqual(error.filename, str(self.root / link))
            problem = find_environment_root_problem(self.root, [path])
            assert problem is not None
            self.assertIn(f"{self.root / link} is a symbolic link", problem[0])
        for paths in (["/opt/link"], ["/opt", "/opt/link/a"], ["/home/a"], ["/opt/tool/a"]):
            self.options(*paths)
            self.assertIsNone(find_environment_root_problem(self.root, paths))

    def test_root_with_too_many_mounts_is_an_error(self) -> None:
        for number in range(300):
            (self.root / "opt" / str(number)).mkdir()
        self.options()
        self.assertRaises(OSError, self.options, "/opt/new")

    def test_first_process_is_a_copy_of_the_shell_made_once(self) -> None:
        view = make_system_view(self.root, self.accounts, (), network=False)
        self.assertEqual(view.shell.stat().st_mode & 0o7777, 0o111)
        self.assertEqual(
            (view.shell_mount_point, view.directory_names), ("/sh", ["bin", "etc", "opt", "usr"])
        )
        again = make_system_view(self.root, self.accounts, (), network=False)
        self.assertEqual(again.shell, view.shell)
        (self.root / "usr/bin/dash").write_bytes(b"#!another\n")
        changed = make_system_view(self.root, self.accounts, (), network=False)
        self.assertNotEqual(changed.shell, view.shell)
        self.assertEqual(len(os.listdir(self.accounts)), 2)


class LockTests(RootTestCase):
    def test_named_roots_of_the_store_are_locked(self) -> None:
        locks = EnvironmentLocks()
        self.assertEqual(locks.lock_roots([str(self.root), "/usr"]), [])
        self.assertRaises(BlockingIOError, lock_environment_root, self.root, fcntl.LOCK_EX)
        self.assertEqual(locks.lock_roots([str(self.root)]), [])
        self.assertEqual(locks.lock_roots([]), [])
        os.close(lock_environment_root(self.root, fcntl.LOCK_EX))

    def test_removed_root_is_a_problem(self) -> None:
        locks = EnvironmentLocks()
        lock = lock_environment_root(self.root, fcntl.LOCK_EX)
        self.assertEqual(len(locks.lock_roots([str(self.root)])), 1)
        os.close(lock)
        self.root.rename(self.root.with_name("gone"))
        self.assertEqual(len(locks.lock_roots([str(self.root)])), 1)


class NameTests(SynchronousTestCase):
    def test_environment_is_found_by_its_name(self) -> None:
        settings = EnvironmentSettings(f"/srv/{DIGEST}", {"A": "b"})
        found = msgspec.structs.replace(Configuration(), environments={"java": settings})
        environment = Environment("java", Path(settings.root), {"A": "b"})
        self.assertEqual(find_environment(found, "java"), environment)
        self.assertEqual(environment.digest, DIGEST)
        self.assertIs(Environment("java", Path("/srv/java")).digest, None)
        self.assertIs(find_environment(found, None), None)
        self.assertRaises(KeyError, find_environment, found, "rust")
        self.assertEqual(
            list_environments(found.environments)[1],
            {"name": "java", "description": "", "digest": DIGEST},
        )
