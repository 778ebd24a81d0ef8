"""`linux.privileges`: owners and modes of directories and secret files."""

from __future__ import annotations

import os
import pwd
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest import SkipTest

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux import privileges
from tawebeval.linux.privileges import can_others_write, check_owner

STRANGER = 54321


class OwnerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).resolve()
        (self.folder / "ours").mkdir(parents=True)
        (self.folder / "dangling").symlink_to("nowhere")

    def test_own_and_missing_directories_pass(self) -> None:
        check_owner(self.folder, ("ours", "missing", "dangling"))

    def test_directory_of_root_passes_if_writable(self) -> None:
        self.patch(os, "geteuid", lambda: STRANGER)
        owner = attrs.make_class("Status", {"st_uid": attrs.field(default=0)})
        self.patch(Path, "stat", lambda path, **_: owner())
        self.patch(Path, "lstat", lambda path: owner())
        check_owner(self.folder, ())
        self.patch(os, "access", lambda *_, **__: False)
        with self.assertRaises(ConfigurationError) as caught:
            check_owner(self.folder, ())
        self.assertIn("belongs to root", str(caught.exception))

    def test_link_to_the_directory_may_be_anybodys(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can give a file to another user: run the tests as root")
        link = self.folder / "link"
        link.symlink_to("ours")
        os.chown(self.folder / "ours", STRANGER, STRANGER)
        self.patch(os, "geteuid", lambda: STRANGER)
        check_owner(link, ())
        os.chown(self.folder / "ours", STRANGER + 1, STRANGER)
        os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
        self.assertRaises(ConfigurationError, check_owner, link, ())

    def test_foreign_directory_is_named_with_owner_and_remedy(self) -> None:
        self.patch(os, "geteuid", lambda: STRANGER)
        self.patch(os, "access", lambda *_, **__: False)
        with self.assertRaises(ConfigurationError) as caught:
            check_owner(self.folder, ("ours",))
        owner = pwd.getpwuid(os.getuid()).pw_name
        self.assertIn(f"{self.folder} belongs to {owner}", str(caught.exception))
        self.assertIn(f"{STRANGER}: {shlex.quote(str(self.folder))}", str(caught.exception))

    def test_foreign_part_is_named(self) -> None:
        if os.geteuid() != 0:
            raise SkipTest("only root can give a file to another user: run the tests as root")
        os.chown(self.folder / "ours", STRANGER, STRANGER)
        (self.folder / "link").symlink_to("ours")
        check_owner(self.folder, ("link",))  # it is the link itself that counts
        with self.assertRaises(ConfigurationError) as caught:
            check_owner(self.folder, ("dangling", "ours"))
        self.assertIn(f"{self.folder / 'ours'} belongs to {STRANGER}", str(caught.exception))
        self.assertTrue(str(caught.exception).endswith(f"root: {shlex.quote(str(self.folder))}"))


class WriterTests(SynchronousTestCase):
    def setUp(self) -> None:
        users = {7: ("alice", 70), 8: ("bob", 80)}
        groups = {70: ("alice", ["alice"]), 80: ("staff", []), 90: ("shared", ["bob"])}

        def find_user(number: int) -> SimpleNamespace:
            name, group = users[number]
            return SimpleNamespace(pw_name=name, pw_gid=group)

        def find_group(number: int) -> SimpleNamespace:
            name, members = groups[number]
            return SimpleNamespace(gr_gid=number, gr_name=name, gr_mem=members)

        self.groups = groups
        self.patch(privileges, "pwd", SimpleNamespace(getpwuid=find_user))
        self.patch(privileges, "grp", SimpleNamespace(getgrgid=find_group))

    def check(self, mode: int, user: int, group: int, expected: bool) -> None:
        status = os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))
        self.assertIs(can_others_write(status), expected, (oct(mode), user, group))

    def test_group_of_the_owner_alone_gives_a_file_to_nobody(self) -> None:
        self.check(0o664, 7, 70, False)
        self.groups[70] = "alice", ["alice", "bob"]
        self.check(0o664, 7, 70, True)

    def test_other_groups_and_unknown_ones_may_write(self) -> None:
        for user, group in ((7, 90), (8, 80), (7, 99), (9, 70)):
            self.check(0o664, user, group, True)
            self.check(0o644, user, group, False)

    def test_everybody_may_write_whatever_the_group(self) -> None:
        self.check(0o606, 7, 70, True)
        self.check(0o666, 7, 70, True)
