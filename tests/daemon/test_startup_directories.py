"""`daemon.startup`: where the daemon keeps things, and who else may not."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon.configuration import locate_directories
from tawebeval.daemon.startup import DaemonDirectories, open_directories
from tawebeval.errors import ConfigurationError
from tests.fakes.world import straw


class DirectoriesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        self.environment = {
            "STATE_DIRECTORY": str(self.root / "state"),
            "CACHE_DIRECTORY": str(self.root / "cache"),
        }

    def open(self, seed: int = 0, **environment: str) -> DaemonDirectories:
        directories = open_directories(environment or self.environment, straw(seed))
        for lock in directories.directory_locks:
            self.addCleanup(lock.close)
        return directories

    def close(self, directories: DaemonDirectories) -> None:
        for lock in directories.directory_locks:
            lock.close()

    def test_missing_directories_are_made_private_and_named_without_links(self) -> None:
        (self.root / "real").mkdir(parents=True)
        (self.root / "link").symlink_to("real")
        state, cache = self.root / "real/s", self.root / "real/c"
        link = f"{self.root}/link"
        directories = self.open(STATE_DIRECTORY=f"{link}/s", CACHE_DIRECTORY=f"{link}/c")
        self.assertEqual(directories.uploads, state / "uploads")
        self.assertEqual(directories.evaluations, state / "evaluations")
        self.assertEqual(directories.repositories, cache / "repositories")
        for path in (
            *(directories.uploads, directories.evaluations, directories.repositories),
            *(state, cache),
        ):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o700)

    def test_key_is_generated_once_and_readable_by_its_owner_only(self) -> None:
        first = self.open(seed=1)
        self.assertEqual(first.mac_key_content, straw(1)(32))
        path = self.root / "state" / "key"
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        self.assertNotIn(repr(first.mac_key_content), repr(first))
        self.close(first)
        self.assertEqual(self.open(seed=2).mac_key_content, first.mac_key_content)
        self.assertFalse((self.root / "state" / "key.new").exists())

    def test_key_of_a_wrong_length_stops_the_start_and_a_partial_file_is_replaced(self) -> None:
        self.close(self.open())
        path = self.root / "state" / "key"
        path.write_bytes(b"short")
        with self.assertRaises(ConfigurationError) as caught:
            self.open()
        self.assertIn(str(path), str(caught.exception))
        del caught  # and with it what was opened on the way
        path.rename(path.with_suffix(".new"))
        self.assertEqual(self.open(seed=3).mac_key_content, straw(3)(32))

    def test_leftovers_of_an_earlier_daemon_are_removed_but_no_repository(self) -> None:
        first = self.open()
        self.close(first)
        for directory in (first.uploads, first.evaluations, first.repositories):
            (directory / "left" / "over").mkdir(parents=True)
            (directory / "left").chmod(0)
        second = self.open()
        self.assertTrue((first.uploads / "left").exists())
        second.move_leftovers_to_trash()
        self.assertEqual(len(list(second.trash.iterdir())), 2)
        self.assertEqual(list(first.uploads.iterdir()), [])
        self.assertEqual(list(first.evaluations.iterdir()), [])
        self.assertTrue((first.repositories / "left").exists())
        (first.repositories / "left").chmod(0o700)

    def test_trash_of_several_starts_is_emptied(self) -> None:
        for _ in range(3):
            directories = self.open()
            for name in ("a", "kept"):
                (directories.evaluations / name / "tree").mkdir(parents=True, exist_ok=True)
            # Not "a" itself: without root, a directory that is moved has to be writable.
            (directories.evaluations / "a" / "tree").chmod(0)
            directories.move_leftovers_to_trash(["kept"])
            self.assertEqual(os.listdir(directories.evaluations), ["kept"])
            self.close(directories)
        self.assertEqual(len(os.listdir(directories.trash)), 3)
        directories.empty_trash()
        self.assertEqual(os.listdir(directories.trash), [])

    def test_leftovers_that_cannot_be_moved_to_another_file_system_are_removed(self) -> None:
        directories = self.open()
        (directories.evaluations / "a").mkdir()

        def rename(*_: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        self.patch(os, "rename", rename)
        directories.move_leftovers_to_trash()
        self.assertEqual(os.listdir(directories.evaluations), [])

    def test_full_disk_is_reported_with_the_path_of_the_key(self) -> None:
        def sync(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch(os, "fsync", sync)
        error = self.assertRaises(ConfigurationError, self.open)
        path = self.root / "state" / "key.new"
        self.assertEqual(
            str(error),
            f"{path}: No space left on device; free some disk space, or name other directories by"
            " STATE_DIRECTORY and CACHE_DIRECTORY",
        )

    def test_link_is_removed_and_its_target_stays(self) -> None:
        first = self.open()
        self.close(first)
        precious = self.root / "precious"
        (precious / "thing").mkdir(parents=True, mode=0o500)
        first.evaluations.rmdir()
        first.evaluations.symlink_to(precious)
        self.open().move_leftovers_to_trash()
        self.assertFalse(first.evaluations.is_symlink())
        self.assertEqual(list(first.evaluations.iterdir()), [])
        self.assertTrue((precious / "thing").exists())
        self.assertEqual(stat.S_IMODE((precious / "thing").stat().st_mode), 0o500)

    def test_second_daemon_fails_to_start_and_releases_its_locks(self) -> None:
        first = self.open()
        (first.uploads / "form").touch()
        error = self.assertRaises(ConfigurationError, self.open)
        self.assertIn(str(self.root / "state"), str(error))
        self.assertIn("STATE_DIRECTORY", str(error))
        self.assertTrue((first.uploads / "form").exists())
        other = {**self.environment, "STATE_DIRECTORY": str(self.root / "other")}
        error = self.assertRaises(ConfigurationError, self.open, **other)
        self.assertIn(str(self.root / "cache"), str(error))
        del error  # and with it what was opened on the way
        self.close(first)
        self.open(**other)

    def test_directories_are_those_of_systemd_or_xdg_or_home(self) -> None:
        self.patch(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/home/alice"))
        usual = "{}/.local/state/tawebeval", "{}/.cache/tawebeval"
        for environment, state, cache in (
            ({"STATE_DIRECTORY": "/s:/t", "CACHE_DIRECTORY": "/c:/d"}, "/s", "/c"),
            ({"XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c"}, "/s/tawebeval", "/c/tawebeval"),
            ({"HOME": "/h", "STATE_DIRECTORY": "", "XDG_CACHE_HOME": ""}, *usual),
            ({}, *usual),
            ({"HOME": ""}, *usual),
        ):
            home = environment.get("HOME") or "/home/alice"
            found = locate_directories(environment)
            self.assertEqual(found, (Path(state.format(home)), Path(cache.format(home))))
        self.patch(pwd, "getpwuid", {}.__getitem__)
        self.assertEqual(locate_directories({})[1], Path("/.cache/tawebeval"))
