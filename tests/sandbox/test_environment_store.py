"""`sandbox.environment_store`: imports of real archives by real programs, and attacks in them."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import stat
import tarfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox import environment_store
from tawebeval.sandbox.environment_store import EnvironmentStore
from tawebeval.sandbox.environments import lock_environment_root
from tests.cases.roots import make_root


def add(archive: tarfile.TarFile, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    """Add a member that everybody may execute and that would run as its owner."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.size = kind, link, 0o6755, 0
    member.devmajor, member.devminor = 1, 3
    archive.addfile(member, io.BytesIO())


class StoreTests(SynchronousTestCase):
    """A store, and a source with a minimal root."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        self.folder.mkdir()
        self.addCleanup(remove_tree, self.folder)
        self.source = make_root(self.folder / "source")
        self.store = EnvironmentStore(self.folder / "store")

    def archive(self, *members: tuple[str, bytes, str], kind: str = "w") -> Path:
        """Return an archive of the source and of these members."""
        path = self.folder / "root.tar"
        with tarfile.open(path, kind) as archive:
            archive.add(self.source, ".")
            for name, type_, link in members:
                add(archive, name, type_, link)
        return path

    def refuse(self, source: Path) -> str:
        """Return why a source is refused; nothing is left of it."""
        error = self.assertRaises(ConfigurationError, self.store.import_root, source)
        self.assertEqual(os.listdir(self.store.directory), [])
        return str(error)

    def test_directory_and_archive(self) -> None:
        """The digest is that of the content: a second import of the same makes no copy."""
        one = self.store.import_root(self.source)
        self.assertTrue(one.was_added)
        self.assertRegex(one.digest, r"\Asha256-[0-9a-f]{64}\Z")
        self.assertIn("/usr/bin/python3", one.warnings[0])
        for kind in ("w", "w:gz", "w:xz"):
            same = self.store.import_root(self.archive(kind=kind))
            self.assertEqual((same.path, same.was_added), (one.path, False))
        (self.source / "usr/bin/dash").write_bytes(b"#!another\n")
        self.assertNotEqual(self.store.import_root(self.source).path, one.path)
        self.assertEqual(len(list(self.store.list_roots())), 2)

    def test_missing_decompressor(self) -> None:
        """The remedy is the Debian package of the program that tar cannot find."""
        said = "tar (child): xz: Cannot exec: No such file or directory; tar: Child returned 2"
        self.patch(environment_store._Import, "_read_errors", lambda _: said)
        (self.folder / "root.tar.xz").write_bytes(b"no archive")
        refused = self.refuse(self.folder / "root.tar.xz")
        self.assertIn("root.tar.xz needs xz, which is not installed; install xz,", refused)
        self.assertTrue(refused.endswith("apt-get install xz-utils"), refused)

    def test_removed_meanwhile(self) -> None:
        """A root that is being removed is not taken for stored."""
        path = self.store.import_root(self.source).path
        lock = lock_environment_root(path, fcntl.LOCK_EX)
        error = self.assertRaises(ConfigurationError, self.store.import_root, self.source)
        self.assertIn(f"{path.name} is being removed", str(error))
        os.close(lock)
        self.assertFalse(self.store.import_root(self.source).was_added)

    def test_read_only(self) -> None:
        """Everybody may read a root, nobody may write; no file runs as its owner."""
        (self.source / "usr/secret").mkdir(mode=0o700)
        (self.source / "usr/secret/file").touch(mode=0o600)
        (self.source / "usr/bin/dash").chmod(0o6711)
        path = self.store.import_root(self.source).path
        for name, mode in (
            ("usr", 0o555),
            ("usr/secret", 0o555),
            ("usr/secret/file", 0o444),
            ("usr/bin/dash", 0o555),
        ):
            self.assertEqual(stat.S_IMODE((path / name).stat().st_mode), mode, name)
        for name in ("root", "dev", "proc"):
            self.assertFalse((path / name).exists(), name)

    def test_special_files(self) -> None:
        """Pipes of an archive are left out, and setuid bits dropped; device nodes are refused."""
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

    def test_covered_files(self) -> None:
        """A link in the place of a file that the sandbox covers becomes a file."""
        (self.source / "etc/passwd").unlink()
        (self.source / "etc/passwd").symlink_to("/etc/shadow")
        path = self.store.import_root(self.source).path
        for name in ("passwd", "group", "hosts", "resolv.conf"):
            self.assertTrue(stat.S_ISREG((path / "etc" / name).lstat().st_mode))

    def test_paths_outside(self) -> None:
        """No path of an archive leads out of the root, whatever it and its links are."""
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

    def test_refused(self) -> None:
        """What is no root file system is refused with the reason and a remedy."""
        text = self.folder / "text"
        text.write_text("no archive\n")
        self.assertIn("neither a tar archive nor an image", self.refuse(text))
        self.assertIn("does not exist", self.refuse(self.folder / "none"))
        (self.source / "usr/bin/prlimit").unlink()
        message = self.refuse(self.source)
        self.assertIn("the source has no program /usr/bin/prlimit; install util-linux", message)

    def test_full_disk(self) -> None:
        """An import stops when it would take the disk that must stay free."""
        with (self.source / "large").open("wb") as file:
            file.truncate(2**40)
        self.store = EnvironmentStore(self.folder / "store", 2**60)
        self.assertIn("does not fit on the disk", self.refuse(self.source))

    def test_image_programs(self) -> None:
        """An image without the programs that unpack it is refused with the packages to install."""
        image = self.folder / "image"
        image.mkdir()
        (image / "oci-layout").touch()
        lacking = [program for program in ("skopeo", "umoci") if shutil.which(program) is None]
        install = f"run `apt-get install {' '.join(lacking)}`"
        hint = install if lacking else "index.json: No such file or directory"
        self.assertIn(hint, self.refuse(image))

    def test_digest(self) -> None:
        """What is no image has no digest of one."""
        for source in (self.source, self.archive()):
            error = self.assertRaises(
                ConfigurationError, self.store.import_root, source, f"sha256:{64 * '0'}"
            )
            self.assertIn("is not an image of a container; leave out --digest", str(error))

    def test_cut(self) -> None:
        """What a killed import has left is removed by the next; one that runs is left alone."""
        stale, running = self.store.directory / "new-1", self.store.directory / "new-2"
        for path in (stale, running):
            path.mkdir(parents=True)
        lock = lock_environment_root(running)
        self.addCleanup(os.close, lock)
        path = self.store.import_root(self.source).path
        self.assertEqual(sorted(os.listdir(self.store.directory)), ["new-2", path.name])

    def test_remove(self) -> None:
        """A root is removed by the beginning of its digest, unless it is locked."""
        path = self.store.import_root(self.source).path
        lock = lock_environment_root(path)
        error = self.assertRaises(ConfigurationError, self.store.remove_root, path.name)
        self.assertIn("is in use by a daemon or an evaluation", str(error))
        os.close(lock)
        for digest in ("", "sha256-x"):
            error = self.assertRaises(ConfigurationError, self.store.remove_root, digest)
            self.assertIn("environment list", str(error))
        self.store.remove_root(path.name[:12])
        self.assertEqual(os.listdir(self.store.directory), [])
