"""`daemon.doctor_storage`: secrets, directories, free space; the remedies help."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import (
    Configuration,
    EvaluationSettings,
    EventBufferSettings,
    HealthSettings,
    LimitSettings,
    RepositoryFetchSettings,
)
from tawebeval.daemon import doctor_storage as module
from tawebeval.daemon.doctor_storage import check_free_space
from tawebeval.daemon.findings import Finding
from tawebeval.errors import SetupProblem, format_size
from tawebeval.sandbox.disk_usage import DiskUsage
from tests.cases.doctor_case import BROKEN, WEAKER, DoctorTestCase
from tests.cases.secrets import OLD, format_secret

GIB = 2**30
RUNNING = 3
SPARE = 5 * GIB
CONFIGURATION = Configuration(
    evaluations=EvaluationSettings(running=RUNNING),
    limits=LimitSettings(uploads=7 * GIB, disk=11 * GIB, output=2 * GIB),
    buffers=EventBufferSettings(disk=23 * GIB),
    repositories=RepositoryFetchSettings(
        cache=13 * GIB,
        fetches=2,
        max_fetch_bytes=17 * GIB,
        tree_bytes=19 * GIB,
    ),
    health=HealthSettings(min_free_disk_bytes=SPARE),
)
STATE = (7 + 23 + RUNNING * (11 + 2 + 19)) * GIB
CACHE = (13 + (RUNNING + 2) * (17 + 19)) * GIB

TOKEN = f"alice sha256:{'0' * 64}\n"
CREDENTIAL = "[[repositories.credentials]]\nhost = 'h'\nusername = 'u'\n"
# The part, the settings that name its file, what is in it, a mistake, a mode that is too open.
SECRETS = (
    ("tokens", "[callers]\ntokens = '{}'", TOKEN, "s3cret", 0o666, "other users may write"),
    (
        "metrics",
        "[metrics]\nreaders = 'tokens'\ntokens = '{}'",
        *(TOKEN, "s3cret", 0o602, "other users may write"),
    ),
    (
        "credentials",
        f"{CREDENTIAL}password_file = '{{}}'",
        *("xyzzy s3cret\n", "s3cret\ns3cret", 0o644, "every user"),
    ),
    (
        "callbacks",
        "[callbacks]\nenabled = true\nsecrets = '{}'",
        *(f"* {format_secret(OLD)}\n", "* s3cret\n", 0o604, "every user"),
    ),
)


class StorageTestCase(DoctorTestCase):
    """Files and directories with rights that a test sets."""

    def cure(self, finding: Finding) -> None:
        """Do as the remedy says, which then helps."""
        subprocess.run(finding.remedy.rpartition("as root: ")[2], shell=True, check=True)
        self.check_ok(self.file.read_text())

    def forbid(self, path: Path) -> Any:
        """Let the daemon's user have no right to a file, until the patch is restored."""
        access = os.access

        def may(asked: Path, mode: int, **more: bool) -> bool:
            return asked != path and access(asked, mode, **more)

        return self.patch(os, "access", may)


class ArchiveTests(StorageTestCase):
    """The directory of the archive."""

    def test_directory(self) -> None:
        """It can be created and written to, or the command that makes it is named."""
        path = self.folder / "some" / "archive"
        settings = f"[archive]\nenabled = true\ndirectory = '{path}'"
        self.check("archive", BROKEN, str(path), "install -d", settings=settings)
        path.mkdir(parents=True)
        self.check_ok(settings)
        path.rmdir()
        self.check_ok(settings)


class SecretTests(StorageTestCase):
    """The files of tokens and credentials."""

    def test_each(self) -> None:
        """It is there, without a mistake, nobody else's; the daemon's user can read it again."""
        for part, settings, content, mistake, mode, words in SECRETS:
            path = self.folder / part
            settings = settings.format(path)
            self.check(part, BROKEN, str(path), settings=settings)
            self.write(part, mistake)
            said = self.check(part, BROKEN, str(path), settings=settings)
            self.assertNotIn("s3cret", str(said))
            self.write(part, content, mode)
            said = self.check(part, BROKEN, words, settings=settings)
            self.assertNotIn(content.split()[-1], str(said))
            self.cure(said)
            forbidden = self.forbid(path)
            self.check(part, WEAKER, "reload", "-> ch", settings=settings)
            forbidden.restore()

    def test_no_file(self) -> None:
        """Where a file has to be named, and is not, both ways to name one are told."""
        for part, settings, setting in (
            ("metrics", "metrics.readers = 'tokens'", "metrics.readers"),
            ("callbacks", "callbacks.enabled = true", "callbacks.secrets"),
        ):
            self.check(part, BROKEN, setting, "LoadCredential", settings=settings)

    def test_key_for_ssh(self) -> None:
        """A key is read by ssh, as the daemon's user."""
        key, hosts = self.write("ssh", "key"), self.write("hosts", "h ssh-ed25519 AAAA", 0o644)
        self.forbid(key)
        settings = f"{CREDENTIAL}key_file = '{key}'\nknown_hosts_file = '{hosts}'\n"
        self.check("credentials", BROKEN, "ssh cannot use it", settings=settings)


class DirectoryTests(StorageTestCase):
    """The configuration, the state and the cache: whose they are, and who may write there."""

    def test_others(self) -> None:
        """Nobody else may write to the configuration or the directories, or read the key."""
        for path, mode, words in (
            (self.file, 0o666, "other users may write"),
            (self.state, 0o702, "other users may write"),
            (self.cache, 0o777, "other users may write"),
            (self.write("state/key", "x" * 32), 0o644, "forge identifiers"),
        ):
            path.touch()
            path.chmod(mode)
            self.cure(self.check("permissions", BROKEN, f"{path}: ", words))

    def test_key(self) -> None:
        """The key is whole."""
        self.write("state/key", "x")
        self.check("permissions", BROKEN, "has 1 bytes, and a key has 32 -> remove the file")

    def test_owner(self) -> None:
        """What is not the daemon's user's is refused, and the remedy names nothing around it."""
        if os.geteuid() == 0:
            os.chown(self.cache, 65534, 65534)
        else:
            self.environment["CACHE_DIRECTORY"] = "/usr"
        finding = self.check("permissions", BROKEN, "belongs to", "chown -R --no-dereference")
        self.assertEqual(finding.remedy.split()[-1], self.environment["CACHE_DIRECTORY"])

    def test_read_only(self) -> None:
        """A file system that cannot be written to is said, also of what is not there yet."""
        statvfs = os.statvfs

        def look(path: Path) -> os.statvfs_result:
            *numbers, flags, longest = statvfs(path)
            flags = flags | os.ST_RDONLY if path == read_only else flags & ~os.ST_RDONLY
            return os.statvfs_result((*numbers, flags, longest))

        self.patch(os, "statvfs", look)
        directories = self.state, self.cache
        for read_only in directories:
            said = f"{read_only}: its file system is mounted read-only -> mount it"
            self.check("permissions", BROKEN, said)
        for path in directories:
            path.rmdir()
        read_only = self.folder
        broken = [each.description for each in self.examine() if each.severity is BROKEN]
        said = "its file system is mounted read-only"
        self.assertEqual(broken, [f"{path}: {said}" for path in directories])

    def test_not_written(self) -> None:
        """A file system that takes nothing is found out although nothing else shows it."""

        def write(path: Path) -> None:
            if path == failing:
                raise OSError(number, os.strerror(number))

        self.patch(module, "probe_disk_write", write)
        for failing in (self.state, self.cache):
            for number, remedy in ((errno.EROFS, "mount it"), (errno.ENOSPC, "free some")):
                said = f"{failing}: cannot write: {os.strerror(number)} -> {remedy}"
                self.check("permissions", BROKEN, said)

    def test_closed(self) -> None:
        """What is the daemon's user's, and closed to it all the same, is said with its path."""
        for name in ("accounts", "uploads", "evaluations"):
            (self.state / name).mkdir()
        lock, key = self.write("state/lock", ""), self.write("state/key", "x" * 32)
        for path in (self.state, self.cache, *self.state.iterdir()):
            forbidden = self.forbid(path)
            right = {lock: "w", key: "r"}.get(path, "rwx")
            self.check("permissions", BROKEN, f"{path}: ", f"-> chmod u+{right} {path}")
            forbidden.restore()
        key.chmod(0o400)
        self.check_ok()

    def test_missing(self) -> None:
        """Directories that are not there are made by the daemon, if it can."""
        self.cache.rmdir()
        self.environment["STATE_DIRECTORY"] = str(self.folder / "one" / "two")
        self.check_ok()
        self.environment["STATE_DIRECTORY"] = str(self.state)
        self.forbid(self.folder)
        self.cure(self.check("permissions", BROKEN, "cannot create it"))

    def test_odd_places(self) -> None:
        """A file in the way of a directory is no reason for a traceback."""
        self.environment["STATE_DIRECTORY"] = str(self.file / "state")
        self.check("permissions", BROKEN, str(self.file / "state"))

    def test_space(self) -> None:
        """Two directories of one file system, which is smaller than what may be written to it."""
        self.free = 0
        self.check("disk", WEAKER, f"{self.state} and {self.cache}", "repositories.cache")


class SpaceTests(SynchronousTestCase):
    """A state and a cache, of which the test says where they are and how much is free there."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.state, self.cache = self.root / "state", self.root / "cache"
        for path in (self.state, self.cache):
            path.mkdir(parents=True)
        self.devices = {self.state: 1, self.cache: 2}
        self.free = {self.state: 2**60, self.cache: 2**60}
        stat = os.stat

        def look(path: Path, **more: bool) -> object:
            found = stat(path, **more)
            return SimpleNamespace(st_dev=self.devices[path]) if path in self.devices else found

        self.patch(module, "os", SimpleNamespace(stat=look))
        usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=self.free[path]))
        self.patch(module, "shutil", usage)

    def compare(self) -> list[str | SetupProblem]:
        """Return what is found of each file system."""
        return list(check_free_space(CONFIGURATION, self.state, self.cache))

    def check_bound(self, path: Path, needed: int, start: str, taken: int = 0) -> SetupProblem:
        """Hold how much is needed, to the byte; return what is said where that is not there."""
        self.free[path] = needed - taken
        self.assertEqual([said for said in self.compare() if isinstance(said, SetupProblem)], [])
        self.free[path] -= 1
        (problem,) = (said for said in self.compare() if isinstance(said, SetupProblem))
        self.assertTrue(problem.description.startswith(f"{start}: "), problem)
        self.assertIn(f"up to {format_size(needed)} may be needed", problem.description)
        return problem

    def test_each(self) -> None:
        """Uploads, events, writes and copies; what is cached, and fetched and checked out."""
        for path, needed, settings in (
            (
                self.state,
                STATE,
                "limits.uploads, buffers.disk, limits.disk, repositories.tree_bytes",
            ),
            (self.cache, CACHE, "repositories.cache, repositories.fetch_bytes, repositories."),
        ):
            remedy = self.check_bound(path, needed + SPARE, str(path)).remedy
            self.free[path] = 2**60
            self.assertIn(f"a larger file system, or lower {settings}", remedy)
            self.assertTrue(remedy.endswith("tree_bytes or evaluations.running"), remedy)

    def test_one_file_system(self) -> None:
        """Where both are on one there has to be room for the sum, with one reserve."""
        self.devices[self.cache] = self.devices[self.state]
        both = f"{self.state} and {self.cache}"
        found = self.check_bound(self.state, STATE + CACHE + SPARE, both)
        self.assertEqual(len(self.compare()), 1)
        self.assertEqual(found.remedy.count("tree_bytes"), 1)

    def test_taken(self) -> None:
        """What the cache has of its size already need not be free, however much more it has."""
        for taken, counts in ((GIB, 1), (14 * GIB, 13)):

            def measure(path: Path, pids: object, taken: int = taken) -> DiskUsage:
                self.assertEqual(path, self.cache)
                return DiskUsage(disk_bytes=taken)

            self.patch(module, "measure_disk_usage", measure)
            self.check_bound(self.cache, CACHE + SPARE, str(self.cache), counts * GIB)
            self.assertNotIn("in the cache", self.compare()[0])

    def test_measured(self) -> None:
        """That is looked up on the disk."""
        with open(self.cache / "pack", "wb") as pack:
            pack.write(os.urandom(2**20))
            os.fsync(pack.fileno())
        self.assertIn("free or in the cache", self.compare()[1])

    def test_not_there(self) -> None:
        """What is not there yet will be on the file system of what is above it."""
        self.cache.rmdir()
        self.devices = {self.state: 1, self.root: 1}
        (found,) = self.compare()
        self.assertIn(f"{self.state} and {self.cache}: ", found)
