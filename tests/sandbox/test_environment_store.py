"""`sandbox.environment_store`: imports of real archives by real programs, and attacks in them."""

from __future__ import annotations

import fcntl
import io
import os
import stat
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.environment_store import EnvironmentStore, StoredRoot
from tawebeval.sandbox.environments import lock_environment_root
from tests.cases.roots import make_root


def add(archive: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    """Add a member that everybody may execute and that would run as its owner."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.size = kind, link, 0o6755, 0
    member.devmajor, member.devminor = 1, 3
    archive.addfile(member, io.BytesIO())


class StoreTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.addCleanup(remove_tree, self.folder)
        self.source = make_root(self.folder / "source")
        self.store = EnvironmentStore(self.folder / "store")

    def archive(self, *members: tuple[str, bytes, str], kind: str = "w") -> Path:
        path = self.folder / "root.tar"
        with tarfile.open(path, kind) as archive:
            archive.add(self.source, ".")
            for name, type_, link in members:
                add(archive, name, type_, link)
        return path

    def import_source(self) -> StoredRoot:
        return self.store.import_root(self.archive())

    def refuse(self, archive: Path) -> str:
        error = self.assertRaises(ConfigurationError, self.store.import_root, archive)
        self.assertEqual(os.listdir(self.store.directory), [])
        return str(error)

    def test_second_import_of_same_content_makes_no_copy(self) -> None:
        one = self.import_source()
        self.assertTrue(one.was_added)
        self.assertRegex(one.digest, r"\Asha256-[0-9a-f]{64}\Z")
        self.assertIn("/usr/bin/python3", one.warnings[0])
        for kind in ("w:gz", "w:xz"):
            same = self.store.import_root(self.archive(kind=kind))
            self.assertEqual((same.path, same.was_added), (one.path, False))
        (self.source / "usr/bin/dash").write_bytes(b"#!another\n")
        self.assertNotEqual(self.import_source().path, one.path)
        self.assertEqual(len(list(self.store.list_roots())), 2)

    def test_root_that_is_being_removed_is_not_taken_for_stored(self) -> None:
        path = self.import_source().path
        lock = lock_environment_root(path, fcntl.LOCK_EX)
        error = self.assertRaises(ConfigurationError, self.import_source)
        self.assertIn(f"{path.name} is being removed", str(error))
        os.close(lock)
        self.assertFalse(self.import_source().was_added)

    def test_roots_are_readable_to_all_and_writable_to_none(self) -> None:
        (self.source / "usr/secret").mkdir(mode=0o700)
        (self.source / "usr/secret/file").touch(mode=0o600)
        (self.source / "usr/bin/dash").chmod(0o6711)
        path = self.import_source().path
        for name, mode in (
            ("usr", 0o555),
            ("usr/secret", 0o555),
            ("usr/secret/file", 0o444),
            ("usr/bin/dash", 0o555),
        ):
            self.assertEqual(stat.S_IMODE((path / name).stat().st_mode), mode, name)
        for name in ("root", "dev", "proc"):
            self.assertFalse((path / name).exists(), name)

    def test_special_files_of_an_archive_are_left_out_or_refused(self) -> None:
        self.assertIn("mknod", self.refuse(self.archive(("usr/disk", tarfile.BLKTYPE, ""))))
        path = self.store.import_root(
            self.archive(
                ("dev/null", tarfile.CHRTYPE, ""),
                ("usr/pipe", tarfile.FIFOTYPE, ""),
                ("usr/setuid", tarfile.REGTYPE, ""),
            )
        ).path
        self.assertEqual(sorted(os.listdir(path / "usr")), ["bin", "setuid"])
        self.assertEqual(stat.S_IMODE((path / "usr/setuid").stat().st_mode), 0o555)

    def test_links_in_place_of_covered_files_become_files(self) -> None:
        (self.source / "etc/passwd").unlink()
        (self.source / "etc/passwd").symlink_to("/etc/shadow")
        path = self.import_source().path
        for name in ("passwd", "group", "hosts", "resolv.conf"):
            self.assertTrue(stat.S_ISREG((path / "etc" / name).lstat().st_mode))

    def test_no_path_of_an_archive_leads_out_of_the_root(self) -> None:
        outside = self.folder / "outside"
        outside.mkdir()
        path = self.store.import_root(
            self.archive(("/abs", tarfile.REGTYPE, ""), ("out", tarfile.SYMTYPE, str(outside)))
        ).path
        self.assertTrue((path / "abs").is_file())
        self.assertEqual(os.readlink(path / "out"), str(outside))
        self.store.remove_root(path.name)
        for members in (
            [("../../outside/up", tarfile.REGTYPE, "")],
            [("out", tarfile.SYMTYPE, str(outside)), ("out/through", tarfile.REGTYPE, "")],
            [("up", tarfile.SYMTYPE, "../../../outside"), ("up/through", tarfile.REGTYPE, "")],
            [("hard", tarfile.LNKTYPE, "/etc/shadow")],
            [("hard", tarfile.LNKTYPE, "../../../../../../etc/shadow")],
        ):
            self.assertIn("tar failed: ", self.refuse(self.archive(*members)))
        self.assertEqual(os.listdir(outside), [])

    def test_sources_without_a_root_are_refused_with_a_remedy(self) -> None:
        text = self.folder / "text"
        text.write_text("no archive\n")
        self.assertIn("tar failed: ", self.refuse(text))
        self.assertIn("cannot read it; copy it", self.refuse(self.folder / "none"))
        self.assertIn("not a file; pack a directory: `tar ", self.refuse(self.source))
        (self.source / "usr/bin/prlimit").unlink()
        message = self.refuse(self.archive())
        self.assertIn("the archive has no program /usr/bin/prlimit; install util-linux", message)

    def test_archive_of_layers_is_refused_with_the_command_that_makes_a_root(self) -> None:
        layers = self.folder / "layers.tar"
        with tarfile.open(layers, "w") as archive:
            for name in ("manifest.json", "blobs/sha256/0"):
                add(archive, name)
        self.assertIn("use `docker export` or `podman export`, not `save`", self.refuse(layers))

    def test_full_disk_ends_the_import(self) -> None:
        self.store = EnvironmentStore(self.folder / "store", 2**60)
        self.assertIn("does not fit on the disk", self.refuse(self.archive()))

    def test_next_import_removes_what_a_killed_one_has_left(self) -> None:
        stale, running = self.store.directory / "new-1", self.store.directory / "new-2"
        for path in (stale, running):
            path.mkdir(parents=True)
        lock = lock_environment_root(running)
        self.addCleanup(os.close, lock)
        path = self.import_source().path
        self.assertEqual(sorted(os.listdir(self.store.directory)), ["new-2", path.name])

    def test_roots_are_removed_by_the_beginning_of_their_digest(self) -> None:
        path = self.import_source().path
        lock = lock_environment_root(path)
        error = self.assertRaises(ConfigurationError, self.store.remove_root, path.name)
        self.assertIn("is in use by a daemon or an evaluation", str(error))
        os.close(lock)
        for digest in ("", "sha256-x"):
            error = self.assertRaises(ConfigurationError, self.store.remove_root, digest)
            self.assertIn("environment list", str(error))
        self.store.remove_root(path.name[:12])
        self.assertEqual(os.listdir(self.store.directory), [])
