"""`linux.privileges`: root becomes somebody else, whole and for good, or does not start."""

from __future__ import annotations

import grp
import os
import pwd

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.errors import ConfigurationError
from tawebeval.linux.privileges import Privileges, User, find_privileges, find_user
from tests.fakes.process import EVERYTHING, PORTS, FakeProcess

TAWEB = User("taweb", 1000, 1001, frozenset({1001, 44}), "/srv/taweb")


def entry(name: str, uid: int, gid: int) -> pwd.struct_passwd:
    """Return a line of the table of users."""
    return pwd.struct_passwd((name, "x", uid, gid, "", f"/srv/{name}", "/bin/false"))


class FindTests(SynchronousTestCase):
    """Whom the daemon becomes, on a machine with a few users."""

    def setUp(self) -> None:
        self.users = {
            "root": entry("root", 0, 0),
            "toor": entry("toor", 0, 5),
            "rooted": entry("rooted", 1002, 0),
            "wheel": entry("wheel", 1003, 1003),
            "taweb": entry("taweb", 1000, 1001),
        }
        groups = {"taweb": [1001, 44], "wheel": [1003, 0], "rooted": [0], "root": [0], "toor": [5]}
        self.patch(pwd, "getpwnam", self.users.__getitem__)
        self.patch(os, "getgrouplist", lambda name, gid: groups[name])

    def refused(self, name: str, process: FakeProcess | None = None) -> str:
        """Return why a setting does not do; it is named, and nothing was changed."""
        process = process or FakeProcess(0)
        with self.assertRaises(ConfigurationError) as caught:
            find_privileges(name, process)
        self.assertTrue(str(caught.exception).startswith("service.user: "))
        self.assertEqual(process.calls, [])
        return str(caught.exception)

    def test_root_becomes(self) -> None:
        """Root becomes the user that is configured, with the groups which that has."""
        self.assertEqual(find_privileges("taweb", FakeProcess(0)).user, TAWEB)

    def test_root_alone(self) -> None:
        """Root without such a user is refused and told what to do."""
        self.assertIn("adduser --system", self.refused(""))

    def test_some_root(self) -> None:
        """One that has root left anywhere (a setuid start, `--euid`) counts as root."""
        for users in ((0, 7, 7), (7, 0, 7), (7, 7, 0)):
            process = FakeProcess(7)
            process.users = users
            self.refused("", process)

    def test_no_user(self) -> None:
        """A user that does not exist is named, to root and to others."""
        for process in (FakeProcess(0), FakeProcess(1000)):
            self.assertIn("'missing'", self.refused("missing", process))

    def test_root_in_disguise(self) -> None:
        """Root under any name, or who is in root's group, is as bad as root."""
        for name in ("root", "toor", "rooted", "wheel"):
            self.assertIn(f"'{name}'", self.refused(name))

    def test_others(self) -> None:
        """Others stay who they are, and cannot become another one."""
        self.assertIsNone(find_privileges("", FakeProcess(1000)).user)
        self.assertIsNone(find_privileges("taweb", FakeProcess(1000)).user)
        self.assertIn("only root", self.refused("taweb", FakeProcess(1004)))

    def test_group_without_a_name(self) -> None:
        """The message gets along without a name for root's group."""

        def missing(gid: int) -> grp.struct_group:
            raise KeyError(gid)

        self.patch(grp, "getgrgid", missing)
        self.assertIn("group 0", self.refused("rooted"))


class DropTests(SynchronousTestCase):
    """Giving up rights, in a process that only pretends."""

    def setUp(self) -> None:
        self.process = FakeProcess(0)
        self.privileges = Privileges(self.process, TAWEB)

    def fails(self, *words: str) -> None:
        """Hold that the daemon ends, before or after it listens, with these words."""
        with self.assertRaises(SystemExit) as caught:
            self.privileges.become_user()
            self.privileges.drop_privileges()
        message = str(caught.exception.code)
        self.assertTrue(message.startswith("tawebeval: "), message)
        for word in words:
            self.assertIn(word, message)

    def test_order(self) -> None:
        """The bounding set and groups need root, and so go first; the user goes last."""
        self.privileges.become_user()
        self.assertEqual(
            self.process.calls,
            ["bounding", "keep", "groups", "gid", "uid", "capabilities", "hide"],
        )

    def test_while_it_listens(self) -> None:
        """Then it is the user in every way, but may still bind low ports."""
        self.privileges.become_user()
        process = self.process
        self.assertEqual((process.users, process.gids), ((1000,) * 3, (1001,) * 3))
        self.assertEqual(process.supplementary, {1001, 44})
        self.assertEqual((process.permitted, process.bounding), (PORTS, 0))
        self.assertTrue(process.hidden)
        variables = {"HOME": "/srv/taweb", "USER": "taweb", "LOGNAME": "taweb"}
        self.assertEqual(process.variables, variables)

    def test_low_ports_of_a_container(self) -> None:
        """A root that may not bind low ports itself is no obstacle."""
        self.process.permitted = EVERYTHING & ~PORTS
        self.privileges.become_user()
        self.assertEqual(self.process.permitted, 0)

    def test_in_the_end(self) -> None:
        """Nothing at all is left, it cannot come back, and nobody looks in."""
        self.privileges.become_user()
        self.privileges.drop_privileges()
        process = self.process
        self.assertEqual(
            (process.permitted, process.hidden, process.gains_nothing), (0, True, True)
        )
        self.privileges.check_no_root_rights()

    def test_others(self) -> None:
        """Who was not root stays the same user, and gives up all else, too."""
        self.process = FakeProcess(1000, capabilities=PORTS)
        self.privileges = Privileges(self.process)
        self.privileges.become_user()
        self.assertEqual(self.process.calls, [])
        self.privileges.drop_privileges()
        process = self.process
        self.assertEqual(
            (process.permitted, process.hidden, process.gains_nothing), (0, True, True)
        )
        self.assertEqual(process.users, (1000,) * 3)
        self.assertEqual(process.variables, {})

    def test_refused(self) -> None:
        """What the kernel refuses ends the start, wherever that is."""
        for call in ("keep", "groups", "gid", "uid", "capabilities", "hide", "no new"):
            self.setUp()
            self.process.refused = {call}
            self.fails("Operation not permitted")

    def test_bounding_set(self) -> None:
        """Some containers do not let it be emptied; without it programs gain nothing either."""
        self.process.refused = {"bounding"}
        self.privileges.become_user()
        self.privileges.drop_privileges()

    def test_not_as_it_should_be(self) -> None:
        """What the kernel says that it has done is looked at."""
        for call in ("groups", "gid", "uid", "capabilities", "hide"):
            self.setUp()
            self.process.ignored = {call}
            self.fails()

    def test_regained(self) -> None:
        """A process that can become root again, or have its group, has given up nothing."""
        for ignored in ("users", "gids"):
            self.setUp()
            self.privileges.become_user()
            self.privileges.drop_privileges()
            held = getattr(self.process, ignored)
            self.patch(
                self.process, "allow_change", lambda now, then, held=held: self.allow(now, held)
            )
            with self.assertRaises(SystemExit) as caught:
                self.privileges.check_no_root_rights()
            self.assertIn("again", str(caught.exception.code))

    def allow(self, now: tuple[int, ...], held: tuple[int, ...]) -> None:
        """Refuse all but one kind of change."""
        if now != held:
            raise PermissionError

    def test_threads(self) -> None:
        """Rights are a thread's own: with more than one the drop would not be whole."""
        self.process.running_threads = 2
        self.fails("thread")
        self.assertEqual(self.process.users, (0, 0, 0))

    def test_root_at_the_start(self) -> None:
        """Whoever starts the daemon without any of it runs nothing as root (`twistd --euid`)."""
        for users in ((0, 0, 0), (0, 7, 7), (7, 0, 7), (7, 7, 0)):
            process = FakeProcess(7)
            process.users, process.hidden = users, True
            with self.assertRaises(SystemExit) as caught:
                Privileges(process).check_no_root_rights()
            self.assertIn("service.user", str(caught.exception.code))


class ActingTests(SynchronousTestCase):
    """Work with the user's rights for a while."""

    def test_acting(self) -> None:
        """Within it is the user; what it was before it is again, also after an error."""
        process = FakeProcess(0)
        process.supplementary = frozenset({0, 27})
        with self.assertRaises(ZeroDivisionError), Privileges(process, TAWEB).act_as_user():
            self.assertEqual((process.users, process.gids), ((0, 1000, 0), (0, 1001, 0)))
            self.assertEqual(process.supplementary, {1001, 44})
            raise ZeroDivisionError
        self.assertEqual((process.users, process.gids), ((0, 0, 0), (0, 0, 0)))
        self.assertEqual(process.supplementary, {0, 27})

    def test_nobody_to_become(self) -> None:
        """Who is not root works as ever."""
        process = FakeProcess(1000)
        with Privileges(process).act_as_user():
            self.assertEqual(process.calls, [])

    def test_environment(self) -> None:
        """The environment is the user's, so that directories are not looked for in root's home."""
        given = {"HOME": "/root", "LANG": "C"}
        there = Privileges(FakeProcess(0), TAWEB).build_user_environment(given)
        self.assertEqual((there["HOME"], there["LANG"]), ("/srv/taweb", "C"))
        self.assertEqual(Privileges(FakeProcess(1000)).build_user_environment(given), given)


class HereTests(SynchronousTestCase):
    """The real tables of users and groups."""

    def test_somebody(self) -> None:
        """Some user of this machine will do, with the groups that the system gives it."""
        user = find_user("nobody")
        self.assertEqual((user.uid, user.gid), pwd.getpwnam("nobody")[2:4])
        self.assertEqual(user.groups, set(os.getgrouplist("nobody", user.gid)))
