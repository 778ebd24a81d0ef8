"""`sandbox.environments`: views of roots, and imports with attacks in archives."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EnvironmentSettings, LimitSettings
from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.base import Environment, find_environment
from tawebeval.sandbox.bubblewrap import BubblewrapSandbox, SystemView, resolve_path_in_root
from tawebeval.sandbox.environments import (
    ImportedRoot,
    find_environment_root_problem,
    import_root,
    list_environments,
)
from tests.cases.roots import make_root

DIGEST = "sha256-" + "a" * 64


def add(archive: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    """Add a member that everybody may execute and that would run as its owner."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.size = kind, link, 0o6755, 0
    member.devmajor, member.devminor = 1, 3
    archive.addfile(member, io.BytesIO())


class RootTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(self.mktemp()).resolve()
        self.accounts = folder / "accounts"
        self.accounts.mkdir(parents=True)
        self.root = make_root(folder / DIGEST)

    def view(self, *readable: str, network: bool = False) -> SystemView:
        unused: Any = None
        sandbox = BubblewrapSandbox(
            LimitSettings(), unused, unused, "bwrap", self.accounts, (), readable, network
        )
        return sandbox.make_system_view(Environment("java", self.root))

    def options(self, *readable: str, network: bool = False) -> Sequence[str]:
        return self.view(*readable, network=network).bwrap_options


class LocateTests(RootTestCase):
    def test_links_in_a_root_are_resolved_within_the_root(self) -> None:
        self.assertEqual(resolve_path_in_root(self.root, "/bin/sh"), self.root / "usr/bin/dash")
        (self.root / "up").symlink_to("../../../../usr/./bin")
        self.assertEqual(resolve_path_in_root(self.root, "up/../bin"), self.root / "usr/bin")

    def test_circle_of_links_and_missing_files_are_errors(self) -> None:
        (self.root / "one").symlink_to("/two")
        (self.root / "two").symlink_to("one")
        for path, number in (("/one", errno.ELOOP), ("/none/file", errno.ENOENT)):
            error = self.assertRaises(OSError, resolve_path_in_root, self.root, path)
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
        link = self.root.with_name("link")
        link.symlink_to(self.root)
        for path in (self.root / "none", self.root / "file", link):
            problem = find_environment_root_problem(path)
            assert problem is not None
            self.assertIn("is not a directory", problem[0])


class ViewTests(RootTestCase):
    def test_directories_of_a_root_are_mounted_and_its_links_copied(self) -> None:
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

    def test_too_large_shell_of_a_root_is_an_error(self) -> None:
        os.truncate(self.root / "usr/bin/dash", 10**12)
        error = self.assertRaises(OSError, self.options)
        self.assertEqual(error.errno, errno.EFBIG)

    def test_links_in_a_root_are_not_covered_by_mounted_files(self) -> None:
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

    def test_readable_path_missing_in_a_root_gets_a_mount_point(self) -> None:
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

    def test_shell_of_a_root_is_copied_again_only_after_a_change(self) -> None:
        view = self.view()
        self.assertEqual(view.shell.stat().st_mode & 0o7777, 0o111)
        self.assertEqual(
            (view.shell_mount_point, view.directory_names), ("/sh", ["bin", "etc", "opt", "usr"])
        )
        again = self.view()
        self.assertEqual(again.shell, view.shell)
        (self.root / "usr/bin/dash").write_bytes(b"#!another\n")
        changed = self.view()
        self.assertNotEqual(changed.shell, view.shell)
        self.assertEqual(len(os.listdir(self.accounts)), 2)


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


class StoreTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.addCleanup(remove_tree, self.folder)
        self.source = make_root(self.folder / "source")
        self.store = self.folder / "store"

    def archive(self, *members: tuple[str, bytes, str], kind: str = "w") -> Path:
        path = self.folder / "root.tar"
        with tarfile.open(path, kind) as archive:
            archive.add(self.source, ".")
            for name, type_, link in members:
                add(archive, name, type_, link)
        return path

    def import_archive(self, archive: Path) -> ImportedRoot:
        return import_root(archive, self.store, 0)

    def refuse(self, archive: Path) -> str:
        error = self.assertRaises(ConfigurationError, self.import_archive, archive)
        self.assertEqual(os.listdir(self.store), [])
        return str(error)

    def test_second_import_of_an_archive_makes_no_copy(self) -> None:
        archive = self.archive(kind="w:gz")
        one = self.import_archive(archive)
        self.assertTrue(one.was_added)
        self.assertEqual(
            one.path.name, f"sha256-{hashlib.sha256(archive.read_bytes()).hexdigest()}"
        )
        self.assertIn("/usr/bin/python3", one.warnings[0])
        same = self.import_archive(archive)
        self.assertEqual((same.path, same.was_added), (one.path, False))
        (self.source / "usr/bin/dash").write_bytes(b"#!another\n")
        self.assertNotEqual(self.import_archive(self.archive()).path, one.path)
        self.assertEqual(len(os.listdir(self.store)), 2)

    def test_roots_are_readable_to_all_and_writable_to_their_owner(self) -> None:
        (self.source / "usr/secret").mkdir(mode=0o700)
        (self.source / "usr/secret/file").touch(mode=0o600)
        (self.source / "usr/bin/dash").chmod(0o6711)
        path = self.import_archive(self.archive()).path
        for name, mode in (
            ("usr", 0o755),
            ("usr/secret", 0o755),
            ("usr/secret/file", 0o644),
            ("usr/bin/dash", 0o755),
        ):
            self.assertEqual(stat.S_IMODE((path / name).stat().st_mode), mode, name)
        for name in ("root", "dev", "proc"):
            self.assertFalse((path / name).exists(), name)

    def test_special_files_of_an_archive_are_left_out_or_refused(self) -> None:
        self.assertIn("mknod", self.refuse(self.archive(("usr/disk", tarfile.BLKTYPE, ""))))
        path = self.import_archive(
            self.archive(("dev/null", tarfile.CHRTYPE, ""), ("usr/setuid", tarfile.REGTYPE, ""))
        ).path
        self.assertFalse((path / "dev").exists())
        self.assertEqual(stat.S_IMODE((path / "usr/setuid").stat().st_mode), 0o755)

    def test_import_replaces_links_at_covered_paths_by_regular_files(self) -> None:
        (self.source / "etc/passwd").unlink()
        (self.source / "etc/passwd").symlink_to("/etc/shadow")
        path = self.import_archive(self.archive()).path
        for name in ("passwd", "group", "hosts", "resolv.conf"):
            self.assertTrue(stat.S_ISREG((path / "etc" / name).lstat().st_mode))

    def test_no_path_of_an_archive_leads_out_of_the_root(self) -> None:
        outside = self.folder / "outside"
        outside.mkdir()
        path = self.import_archive(
            self.archive(("/abs", tarfile.REGTYPE, ""), ("out", tarfile.SYMTYPE, str(outside)))
        ).path
        self.assertTrue((path / "abs").is_file())
        self.assertEqual(os.readlink(path / "out"), str(outside))
        remove_tree(path)
        for members in (
            [("../../outside/up", tarfile.REGTYPE, "")],
            [("out", tarfile.SYMTYPE, str(outside)), ("out/through", tarfile.REGTYPE, "")],
            [("up", tarfile.SYMTYPE, "../../../outside"), ("up/through", tarfile.REGTYPE, "")],
            [("hard", tarfile.LNKTYPE, "/etc/shadow")],
            [("hard", tarfile.LNKTYPE, "../../../../../../etc/shadow")],
        ):
            self.assertIn("tar failed: ", self.refuse(self.archive(*members)))
        self.assertEqual(os.listdir(outside), [])

    def test_import_refuses_anything_but_a_root_archive(self) -> None:
        text = self.folder / "text"
        text.write_text("no archive\n")
        self.assertIn("tar failed: ", self.refuse(text))
        self.assertIn(
            "cannot read it: No such file or directory; copy it", self.refuse(self.folder / "none")
        )
        self.assertIn("not a file; pack a directory: `tar ", self.refuse(self.source))
        (self.source / "usr/bin/prlimit").unlink()
        message = self.refuse(self.archive())
        self.assertIn("the archive has no program /usr/bin/prlimit; install util-linux", message)

    def test_archive_of_image_layers_is_refused_with_a_hint_to_use_export(self) -> None:
        layers = self.folder / "layers.tar"
        with tarfile.open(layers, "w") as archive:
            for name in ("manifest.json", "blobs/sha256/0"):
                add(archive, name)
        self.assertIn("use `docker export` or `podman export`, not `save`", self.refuse(layers))

    def test_full_disk_ends_the_import(self) -> None:
        error = self.assertRaises(
            ConfigurationError, import_root, self.archive(), self.store, 2**60
        )
        self.assertIn("does not fit on the disk", str(error))
        self.assertEqual(os.listdir(self.store), [])
