"""`linux.cgroups.manager` on machines of all kinds, whose cgroups are plain files here."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from resource import struct_rusage

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import MIB, LimitSettings
from tawebeval.linux.cgroups import filesystem
from tawebeval.linux.cgroups.filesystem import CgroupDirectory, CgroupOperations
from tawebeval.linux.cgroups.manager import (
    CgroupManager,
    EvaluationCgroup,
    ResourceUsage,
    open_cgroups,
    open_starter_cgroups,
)
from tawebeval.linux.container import PODMAN
from tests.fakes.cgroups import FakeMachine

LIMITS = LimitSettings(memory=64 * MIB, processes=32)
ALL = {"memory", "processes", "cpu", "weight"}
LESS = ALL - {"memory"}
STRANGER = 4194305  # no process: numbers end below


def describe(cgroups: CgroupManager) -> str:
    """Return all that is said of what is not limited."""
    found = [cgroups.describe_enforcement(what) for what in cgroups.unenforced_resources]
    return "\n".join([*found, cgroups.unenforced_resources_remedy])


class CgroupsTestCase(SynchronousTestCase):
    """A machine to set up."""

    def setUp(self) -> None:
        self.machine = FakeMachine(Path(self.mktemp()).absolute())
        self.machine.root.mkdir()

    def check(self, cgroups: CgroupManager, enforced: set[str], *words: str) -> None:
        """Hold what works, and how it is told that the rest does not."""
        self.assertEqual(cgroups.enforced_resources, enforced, describe(cgroups))
        # One line names all that is missing, and what to do about it.
        for resource in ALL - enforced:
            self.assertIn(resource, cgroups.enforcement_warning)
        remedy = "" if enforced == ALL else cgroups.unenforced_resources_remedy
        self.assertEqual(bool(cgroups.enforcement_warning), enforced != ALL)
        self.assertTrue(cgroups.enforcement_warning.endswith(remedy), cgroups.enforcement_warning)
        for word in words:
            self.assertIn(word, describe(cgroups))

    def make_group(self, *legacy: str) -> EvaluationCgroup:
        """Make a group in hierarchies of version 1 for these controllers, or in version 2."""
        for each in legacy:
            self.machine.mount_legacy(each)
        if not legacy:
            self.machine.mount_unified()
        return self.machine.open().make_evaluation_cgroup("abc", LIMITS)

    def put(self, group: EvaluationCgroup, name: str, text: str) -> None:
        """Let the kernel say something in a file of a group."""
        for entry in group.find_procs_files():
            path = Path(entry).parent / name
            if path.exists():
                path.write_text(text)
                return
        self.fail(f"no {name}")

    def get(self, group: EvaluationCgroup, name: str) -> str:
        """Return what is in a file of a group."""
        found = [Path(entry).parent / name for entry in group.find_procs_files()]
        return next(path for path in found if path.exists()).read_text().strip()

    def enter(self, group: EvaluationCgroup, *pids: int) -> None:
        """Have processes in a group."""
        for entry in group.find_procs_files():
            members = Path(entry).with_name("cgroup.procs")
            members.write_text("".join(f"{pid}\n" for pid in pids))


class KernelTests(SynchronousTestCase):
    """What systemd leaves to the daemon, and how something is started under it."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.uid = 7
        self.patch(os, "geteuid", lambda: self.uid)
        self.patch(filesystem, "SYSTEMD_MARKER_DIRECTORY", str(self.folder))
        self.patch(filesystem, "find_user_runtime_directory", lambda: str(self.folder / "run"))
        self.group = "/user.slice/user@7.service/app.slice/it.service"

    def is_delegated(self, group: str) -> bool:
        """Ask of a group, which has no attributes."""
        return CgroupOperations().is_delegated(f"{self.folder}{group}")

    def test_no_systemd(self) -> None:
        """Nobody else is there who might use the groups."""
        self.folder.rmdir()
        for self.uid in (0, 7):
            self.assertTrue(self.is_delegated(self.group))
            self.assertIsNone(CgroupOperations().find_systemd_run())

    def test_system(self) -> None:
        """Of units of the system an attribute tells root, and their owner tells others."""
        for self.uid, delegated in ((0, False), (7, True)):
            self.assertEqual(self.is_delegated("/system.slice/it.service"), delegated)

    def test_users_own(self) -> None:
        """Of units of a user's own systemd only that knows; who does not answer leaves nothing."""
        program = self.folder / "systemctl"
        self.patch(os, "environ", {"PATH": str(self.folder)})
        self.assertFalse(self.is_delegated(self.group))
        for said, delegated in (("yes", True), ("no", False)):
            program.write_text(
                "#!/bin/sh\n"
                'test "$*" = "--user show --value --property=Delegate it.service" || exit\n'
                f'test "$XDG_RUNTIME_DIR" = {self.folder}/run && echo {said}\n'
            )
            program.chmod(0o755)
            for below in ("", "/a/group"):
                self.assertEqual(self.is_delegated(f"{self.group}{below}"), delegated)

    def test_systemd_run(self) -> None:
        """The command is the one that works for who asks."""
        self.assertEqual(
            CgroupOperations().find_systemd_run(), "", "there is no systemd of the user"
        )
        (self.folder / "run/systemd").mkdir(parents=True)
        (self.folder / "run/systemd/private").touch()
        own = f"XDG_RUNTIME_DIR={self.folder}/run"
        for environment, command in (
            ({}, f"{own} systemd-run --user"),
            ({"XDG_RUNTIME_DIR": f"{self.folder}/run"}, "systemd-run --user"),
        ):
            self.patch(os, "environ", environment)
            self.assertEqual(CgroupOperations().find_systemd_run(), command)
        self.uid = 0
        self.assertEqual(CgroupOperations().find_systemd_run(), "systemd-run")

    def test_oom_policy(self) -> None:
        """The unit is asked about, of whose manager it is."""
        program = self.folder / "systemctl"
        program.write_text('#!/bin/sh\necho "$*"\n')
        program.chmod(0o755)
        self.patch(os, "environ", {"PATH": f"{self.folder}:/bin"})
        ask = CgroupOperations().query_oom_policy
        show = "show --value --property=OOMPolicy it.service"
        self.assertEqual(ask("/sys/fs/cgroup/system.slice/it.service"), show)
        self.assertEqual(ask(f"/sys/fs/cgroup{self.group}"), f"--user {show}")
        self.assertEqual(ask("/sys/fs/cgroup/a/group"), "")
        program.unlink()
        self.folder.rmdir()
        self.assertEqual(ask("/sys/fs/cgroup/system.slice/it.service"), "")


class UnifiedTests(CgroupsTestCase):
    """Version 2 alone, as systemd mounts it."""

    def test_delegated(self) -> None:
        """Everything works; the daemon is beside its evaluations, in a group of its own."""
        own = self.machine.mount_unified()
        cgroups = self.machine.open()
        self.check(cgroups, ALL)
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])
        daemon = own / "tawebeval-x/daemon/cgroup.procs"
        self.assertEqual(daemon.read_text(), f"{os.getpid()}\n")
        for group in (own, own / "tawebeval-x"):
            enabled = (group / "cgroup.subtree_control").read_text()
            self.assertEqual(enabled, "cpu memory pids")

    def test_weights(self) -> None:
        """The daemon has ten times the share of an evaluation, git that of one."""
        own = self.machine.mount_unified()
        cgroups = self.machine.open()
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        home = own / "tawebeval-x"
        weights = [int((home / name / "cpu.weight").read_text()) for name in ("daemon", "git")]
        self.assertEqual([*weights, int(self.get(group, "cpu.weight"))], [1000, 100, 100])
        self.assertEqual(cgroups.git_procs_files, [f"{home}/git/cgroup.procs"])
        self.assertEqual(cgroups.evaluator_niceness, 0)

    def test_no_weights(self) -> None:
        """Where the controller has been left out evaluators and git are nicer than the daemon."""
        self.machine.mount_unified("memory pids")
        cgroups = self.machine.open()
        self.check(cgroups, ALL - {"weight"}, "weight: an evaluation with many processes", "'cpu'")
        self.assertEqual((cgroups.git_procs_files, cgroups.evaluator_niceness), ((), 10))

    def test_git_cannot_have_a_group(self) -> None:
        """Without one for git there are no shares."""
        self.machine.mount_unified()
        self.machine.refusals["/git"] = errno.ENOSPC
        cgroups = self.machine.open()
        self.check(cgroups, ALL - {"weight"}, "/git: No space left on device")
        self.assertEqual(cgroups.git_procs_files, ())

    def test_limits(self) -> None:
        """A group has its limits, without swap beyond them, and dies as a whole."""
        own = self.machine.mount_unified()
        group = self.machine.open().make_evaluation_cgroup("abc", LIMITS)
        path = own / "tawebeval-x/evaluation-abc"
        self.assertEqual(group.find_procs_files(), [f"{path}/cgroup.procs"])
        self.assertEqual(self.get(group, "memory.max"), str(64 * MIB))
        self.assertEqual(self.get(group, "memory.swap.max"), "0")
        self.assertEqual(self.get(group, "memory.oom.group"), "1")
        self.assertEqual(self.get(group, "pids.max"), "32")

    def test_read_only(self) -> None:
        """A container that shows its cgroups without the right to write."""
        self.patch(os, "geteuid", lambda: 0)
        self.machine.mount_unified()
        self.machine.refusals["/tawebeval-x"] = errno.EROFS
        self.check(
            self.machine.open(), set(), "Read-only file system", "make /sys/fs/cgroup writable"
        )
        self.machine.container = PODMAN
        option = "start the container with --security-opt unmask=/sys/fs/cgroup"
        for uid in (0, 7):
            self.patch(os, "geteuid", lambda uid=uid: uid)
            self.check(self.machine.open(), set(), "Read-only file system", option)

    def test_not_delegated_by_systemd(self) -> None:
        """Root could, but systemd would take it back later: nothing is touched."""
        own = self.machine.mount_unified()
        self.machine.delegated = False
        for run, words in (
            ("", ("Delegate=memory pids cpu",)),
            ("systemd-run --user", ("; or by: systemd-run --user --pty -p Delegate=yes ",)),
        ):
            self.machine.run = run
            cgroups = self.machine.open()
            self.check(cgroups, set(), f"{own}: systemd has not delegated it", *words)
            self.assertEqual("systemd-run" in cgroups.unenforced_resources_remedy, bool(run))
            self.assertEqual(self.machine.groups(), [])

    def test_no_controllers(self) -> None:
        """Where version 2 has no controllers the remedy is the kernel's parameter."""
        boot = "boot the machine with the kernel parameter systemd.unified_cgroup_hierarchy=1"
        as_root = "start the daemon as root"
        self.patch(os, "geteuid", lambda: 7)
        self.machine.mount_unified("")
        self.machine.run = ""
        self.check(self.machine.open(), {"cpu"}, "'memory'", f"(under such a unit: {boot}, for")
        self.machine.mount_legacy("memory")
        self.machine.refusals["/tawebeval-x"] = errno.EACCES
        for self.machine.run, words in (
            ("systemd-run --user", f"{boot}, or {as_root}, without tawebeval.service"),
            (None, f"on a server, {as_root}"),
        ):
            self.check(self.machine.open(), set(), words)

    def test_may_not_enter(self) -> None:
        """A daemon that may not move itself leaves nothing behind."""
        self.machine.mount_unified()
        self.machine.refusals["/daemon/cgroup.procs"] = errno.EACCES
        self.check(self.machine.open(), set(), "Permission denied")
        self.assertEqual(self.machine.groups(), [])

    def test_others_in_the_group(self) -> None:
        """Beside a shell in its own group the daemon can measure, but not limit."""
        own = self.machine.mount_unified()
        with open(own / "cgroup.procs", "a") as file:
            file.write(f"{STRANGER}\n")
        cgroups = self.machine.open()
        self.check(cgroups, {"cpu"}, "other processes are in the cgroup")
        self.assertEqual((own / "cgroup.procs").read_text(), f"{STRANGER}\n", "it is left alone")

    def test_missing_controllers(self) -> None:
        """What the group above does not pass on cannot be had."""
        self.machine.mount_unified("cpu pids")
        self.check(self.machine.open(), LESS, "has no controller 'memory'")

    def test_limit_without_effect(self) -> None:
        """A limit that is taken but not kept is none; what tried it is removed."""
        self.machine.mount_unified()
        self.machine.deaf.add("/memory.max")
        self.check(self.machine.open(), LESS, "has no effect for 'memory'")
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])

    def test_oom_policy(self) -> None:
        """What systemd does counts where it sees the groups that are limited."""
        own = self.machine.mount_unified()
        self.machine.policies = {str(own): "stop"}
        cgroups = self.machine.open()
        self.assertEqual(cgroups.query_oom_policy(), "stop")
        cgroups.remove_all_cgroups()
        self.machine.mount_legacy("memory")
        self.assertEqual(self.machine.open().query_oom_policy(), "")
        machine = FakeMachine(self.machine.root / "other")
        machine.mount_unified("pids")
        self.assertEqual(machine.open().query_oom_policy(), "", "no memory is limited")

    def test_no_swap(self) -> None:
        """Kernels without swap accounting have no file for it."""
        self.machine.mount_unified()
        self.machine.refusals["/memory.swap.max"] = errno.ENOENT
        self.check(self.machine.open(), ALL)

    def test_owner(self) -> None:
        """A user gets a group, the places in it, and may move processes within; nothing above."""
        self.machine.mount_unified()
        self.check(self.machine.open((7, 8)), ALL)
        groups = ("uid-7", "uid-7/ended", "uid-7/tawebeval-x", "uid-7/tawebeval-x/git")
        given = [f"{group}{file}" for group in groups for file in ("", "/cgroup.procs")]
        self.assertEqual(self.machine.given, [(path, (7, 8)) for path in given])
        self.assertEqual(self.machine.groups(), sorted([*groups, "uid-7/tawebeval-x/daemon"]))

    def test_owner_closes(self) -> None:
        """As that user the daemon leaves nothing of itself; the user's group stays."""
        own = self.machine.mount_unified()
        cgroups = self.machine.open((7, 8))
        self.enter(cgroups.make_evaluation_cgroup("abc", LIMITS), STRANGER)
        self.machine.refusals["/own/tawebeval-uid-7/cgroup.subtree_control"] = errno.EACCES
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), ["uid-7", "uid-7/ended"])
        ended = own / "tawebeval-uid-7/ended/cgroup.procs"
        self.assertEqual(ended.read_text(), f"{os.getpid()}\n")

    def test_owner_root_closes(self) -> None:
        """With the rights of root nothing at all is left."""
        own = self.machine.mount_unified()
        self.machine.open((7, 8)).remove_all_cgroups()
        self.assertEqual(self.machine.groups(), [])
        self.assertEqual((own / "cgroup.subtree_control").read_text(), "")
        self.assertEqual((own / "cgroup.procs").read_text(), f"{os.getpid()}\n")

    def end_beside(self, times: int) -> None:
        """Let root end, so many times, when a daemon of the user is about to have its place."""
        make, left = self.machine.make_cgroup, [None] * times

        def make_too_late(path: str) -> None:
            if path.endswith("/tawebeval-x") and left:
                left.pop()
                shutil.rmtree(os.path.dirname(path))
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            make(path)

        self.patch(self.machine, "make_cgroup", make_too_late)

    def test_others_end(self) -> None:
        """The group of the user, which root has removed with what was its own, is made anew."""
        self.machine.mount_unified()
        self.end_beside(2)
        self.check(self.machine.open((7, 8)), ALL)

    def test_others_end_without_end(self) -> None:
        """Where it can never be there, that is a reason like any other."""
        self.machine.mount_unified()
        self.end_beside(99)
        cgroups = self.machine.open((7, 8))
        self.assertEqual(cgroups.enforced_resources, frozenset())
        self.assertIn("No such file or directory", describe(cgroups))

    def test_executed_anew(self) -> None:
        """A daemon that is in its group already stays there, and ends only evaluations."""
        own = self.machine.mount_unified()
        self.machine.open().make_evaluation_cgroup("abc", LIMITS)
        daemon = own / "tawebeval-x/daemon"
        again = FakeMachine(self.machine.root)
        again.mount_unified(own="/own/tawebeval-x/daemon")
        (own / "cgroup.controllers").write_text("cpu memory pids")
        with open(daemon / "cgroup.procs", "a") as file:
            file.write(f"{STRANGER}\n")
        again.refusals["/daemon/cpu.weight"] = errno.EACCES  # root has made that file
        self.check(again.open(), ALL)
        self.assertEqual(again.groups(), ["x", "x/daemon", "x/git"])
        self.assertEqual((daemon / "cgroup.procs").read_text(), f"{os.getpid()}\n{STRANGER}\n")

    def test_close(self) -> None:
        """The daemon goes back where it was, and its place is no more."""
        own = self.machine.mount_unified()
        cgroups = self.machine.open()
        self.enter(cgroups.make_evaluation_cgroup("abc", LIMITS), STRANGER)
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), [])
        self.assertEqual((own / "cgroup.procs").read_text(), f"{os.getpid()}\n")
        self.assertEqual((own / "cgroup.subtree_control").read_text(), "")

    def test_close_leaves_what_others_need(self) -> None:
        """What was enabled before, or in the top group of all, stays so."""
        own = self.machine.mount_unified()
        (own / "cgroup.subtree_control").write_text("memory")
        self.machine.open().remove_all_cgroups()
        self.assertEqual((own / "cgroup.subtree_control").read_text(), "memory")
        machine = FakeMachine(self.machine.root / "other")
        top = machine.mount_unified(own="/")
        machine.open().remove_all_cgroups()
        self.assertEqual((top / "cgroup.subtree_control").read_text(), "cpu memory pids")

    def test_close_without_the_rights(self) -> None:
        """Who has given up root removes the evaluations' groups at least, and is silent."""
        self.machine.mount_unified()
        cgroups = self.machine.open()
        cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.machine.refusals |= {"/own/cgroup.procs": errno.EACCES}
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), ["x", "x/daemon"])


class LegacyTests(CgroupsTestCase):
    """Version 1, alone and beside version 2."""

    def test_separate(self) -> None:
        """Each controller has a tree; a group is one directory in each of four."""
        places = [self.machine.mount_legacy(each) for each in ("memory", "pids", "cpuacct", "cpu")]
        cgroups = self.machine.open()
        self.check(cgroups, ALL)
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        entries = [f"{place}/tawebeval-x/evaluation-abc/tasks" for place in places]
        self.assertEqual(group.find_procs_files(), entries)
        self.assertEqual(self.get(group, "memory.limit_in_bytes"), str(64 * MIB))
        self.assertEqual(self.get(group, "memory.memsw.limit_in_bytes"), str(64 * MIB))
        self.assertEqual(self.get(group, "memory.swappiness"), "0")
        self.assertEqual(self.get(group, "pids.max"), "32")
        home = places[0] / "tawebeval-x/memory.use_hierarchy"
        self.assertEqual(home.read_text(), "1\n")

    def test_shares(self) -> None:
        """All together have of each processor what one process has, and share it alike."""
        own = self.machine.mount_legacy("cpu,cpuacct")
        for processors, shares in ((2, 2048), (1000, 262144), (None, 1024)):
            self.patch(os, "cpu_count", lambda processors=processors: processors)
            cgroups = self.machine.open()
            home = own / "tawebeval-x"
            self.assertEqual(int((home / "cpu.shares").read_text()), shares)
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.assertEqual(self.get(group, "cpu.shares"), "1024")
        self.assertEqual(cgroups.git_procs_files, [f"{home}/git/tasks"])
        self.assertEqual((home / "git/cpu.shares").read_text(), "1024")
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), [])

    def test_combined(self) -> None:
        """Controllers that share a tree share a directory."""
        place = self.machine.mount_legacy("cpu,cpuacct,memory,pids")
        cgroups = self.machine.open((7, 8))
        self.check(cgroups, ALL)
        entry = f"{place}/tawebeval-uid-7/tawebeval-x/evaluation-abc/tasks"
        self.assertEqual(cgroups.make_evaluation_cgroup("abc", LIMITS).find_procs_files(), [entry])
        given = (
            "uid-7",
            "uid-7/tawebeval-x",
            *(f"uid-7/tawebeval-x/git{x}" for x in ("", "/tasks")),
        )
        self.assertEqual(self.machine.given, [(path, (7, 8)) for path in given])

    def test_owner_closes(self) -> None:
        """The user's daemon removes its place, root also the group that nobody needs any more."""
        self.machine.mount_legacy("memory,pids,cpuacct")
        other = self.machine.open((7, 8), "y")
        self.machine.open((7, 8)).remove_all_cgroups()
        self.assertEqual(self.machine.groups(), ["uid-7", "uid-7/tawebeval-y"])
        other.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), [])
        cgroups = self.machine.open((7, 8))
        self.machine.refusals["/tawebeval-uid-7"] = errno.EACCES
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), ["uid-7"])
        cgroups.remove_all_cgroups()

    def test_hybrid(self) -> None:
        """Each controller is taken where it is, the memory's version before the other."""
        memory, pids = self.machine.mount_legacy("memory"), self.machine.mount_legacy("pids")
        cpu = self.machine.mount_legacy("cpu,cpuacct")
        self.machine.mount_unified("", own="/")
        group = self.machine.open().make_evaluation_cgroup("abc", LIMITS)
        entries = [f"{place}/tawebeval-x/evaluation-abc/tasks" for place in (memory, pids, cpu)]
        self.assertEqual(group.find_procs_files(), entries)

    def test_hybrid_with_parts(self) -> None:
        """What version 1 does not have, version 2 may: it measures, at least."""
        memory, pids = self.machine.mount_legacy("memory"), self.machine.mount_legacy("pids")
        unified = self.machine.mount_unified("", own="/")
        cgroups = self.machine.open()
        self.check(cgroups, ALL - {"weight"})
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        within = "tawebeval-x/evaluation-abc"
        entries = [f"{place}/{within}/tasks" for place in (memory, pids)]
        self.assertEqual(group.find_procs_files(), [*entries, f"{unified}/{within}/cgroup.procs"])
        self.put(group, "cpu.stat", "usage_usec 2500000\n")
        self.assertEqual(group.read_usage(None).cpu_seconds, 2.5)

    def test_hybrid_without_delegation(self) -> None:
        """Where version 2 is refused version 1 serves for what it has."""
        self.machine.mount_legacy("memory,pids,cpuacct,cpu")
        self.machine.mount_unified("")
        self.machine.delegated = False
        self.check(self.machine.open(), ALL)

    def test_place_that_serves_for_nothing(self) -> None:
        """Where nothing works no place is kept, and the daemon goes back."""
        unified = self.machine.mount_unified("")
        self.machine.refusals["/probe"] = errno.EACCES
        self.check(self.machine.open(), set())
        self.assertEqual(self.machine.groups(), [])
        self.assertEqual((unified / "cgroup.procs").read_text(), f"{os.getpid()}\n")

    def test_partly_read_only(self) -> None:
        """One controller that cannot be had does not spoil the others."""
        self.machine.mount_legacy("memory")
        self.machine.mount_legacy("pids")
        self.machine.refusals["/memory/own/tawebeval-x"] = errno.EACCES
        words = "memory: limited for each", "Permission denied", "no cgroup controller"
        self.check(self.machine.open(), {"processes"}, *words)

    def test_cannot_be_given(self) -> None:
        """A place that the daemon's later user does not get is not kept."""
        self.machine.mount_legacy("pids")
        self.machine.gives = False
        self.check(self.machine.open((7, 8)), set(), "Operation not permitted")
        self.assertEqual(self.machine.groups(), [])

    def test_nothing(self) -> None:
        """Without cgroups, or without /proc, nothing is enforced; groups are empty shells."""
        cgroups = self.machine.open()
        self.check(cgroups, set())
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.assertEqual(group.find_procs_files(), [])
        self.assertEqual(group.read_usage(None), ResourceUsage(None, None))
        self.assertEqual(group.find_exceeded_limits(), frozenset())
        group.remove_cgroup()
        cgroups.remove_all_cgroups()
        cgroups = open_cgroups("x", proc=self.machine.root / "nowhere")
        self.assertEqual(cgroups.enforced_resources, frozenset())
        self.assertIn("nowhere/mountinfo", describe(cgroups))

    def test_leftovers(self) -> None:
        """Groups of a dead daemon are removed with all who are in them, and those below."""
        self.machine.mount_legacy("pids")
        self.machine.mount_unified("")
        before = self.machine.open().make_evaluation_cgroup("abc", LIMITS)
        self.enter(before, STRANGER)
        for entry in before.find_procs_files():
            below = os.path.join(os.path.dirname(entry), "below")
            self.machine.make_cgroup(below)
            Path(below, "cgroup.procs").write_text(f"{STRANGER}\n")
        # The dead one was in the daemon's group; this one is where it was started.
        for file in self.machine.root.rglob("cgroup/*/own/cgroup.procs"):
            file.write_text(f"{os.getpid()}\n")
        for file in self.machine.root.rglob("daemon/cgroup.procs"):
            file.write_text(f"{STRANGER + 1}\n")
        self.machine.lingering = 3
        self.machine.open()
        self.assertEqual(self.machine.groups(), ["x", "x", "x/daemon"])
        files = [*self.machine.root.rglob("cgroup.procs")]
        self.assertEqual(len(files), 7)
        for file in files:
            self.assertIn(file.read_text(), ("", f"{os.getpid()}\n"), file)
        self.assertLess(self.machine.slept, 0.1)

    def test_left_beside(self) -> None:
        """Places of processes of one kind that have ended are removed, and no others."""
        self.machine.mount_legacy("pids")
        self.machine.mount_unified("")
        kept = {f"try-{os.getpid()}", f"starter-{STRANGER}", "x"}
        for name in (f"try-{STRANGER}", *kept - {"x"}):
            self.enter(self.machine.open(name=name).make_evaluation_cgroup("abc", LIMITS), STRANGER)
        self.machine.open().remove_dead_parents("try")
        found = {path.partition("/")[0] for path in self.machine.groups()}
        self.assertEqual(found, kept)

    def test_leftovers_in_the_place_itself(self) -> None:
        """Who has stayed in the place is killed; the daemon, if it is there, is not."""
        own = self.machine.mount_legacy("pids")
        self.machine.open()
        procs = own / "tawebeval-x/cgroup.procs"
        procs.write_text(f"{os.getpid()}\n{STRANGER}\n")
        self.machine.open()
        self.assertEqual(procs.read_text(), f"{os.getpid()}\n")


class AttachTests(CgroupsTestCase):
    """The cgroups of the starter, which a daemon uses, and the next one."""

    def attach(self) -> CgroupManager:
        """Open the cgroups of the starter and of a daemon."""
        self.starter, self.own = self.machine.open(name="starter"), self.machine.open()
        return self.attach_again()

    def attach_again(self) -> CgroupManager:
        """Let another daemon use those of the starter."""
        return open_starter_cgroups(self.own, self.starter.describe_parents(), self.machine)

    def test_unified(self) -> None:
        """In version 2 evaluations are the starter's; git and the daemon have their own groups."""
        own = self.machine.mount_unified()
        cgroups = self.attach()
        self.check(cgroups, ALL)
        self.assertEqual(cgroups.evaluator_niceness, 0)
        self.assertEqual(cgroups.git_procs_files, [f"{own}/tawebeval-x/git/cgroup.procs"])
        daemon = own / "tawebeval-x/daemon/cgroup.procs"
        self.assertEqual(daemon.read_text(), f"{os.getpid()}\n")
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        path = own / "tawebeval-starter/evaluation-abc"
        self.assertEqual(group.find_procs_files(), [f"{path}/cgroup.procs"])
        self.assertEqual(self.get(group, "memory.max"), str(64 * MIB))
        self.machine.policies[str(own / "tawebeval-starter")] = "continue"
        self.assertEqual(cgroups.query_oom_policy(), "continue")

    def test_legacy(self) -> None:
        """In version 1, too."""
        places = [self.machine.mount_legacy(each) for each in ("memory", "pids", "cpuacct", "cpu")]
        cgroups = self.attach()
        self.check(cgroups, ALL)
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        entries = [f"{place}/tawebeval-starter/evaluation-abc/tasks" for place in places]
        self.assertEqual(group.find_procs_files(), entries)
        self.assertEqual(self.get(group, "memory.limit_in_bytes"), str(64 * MIB))
        self.assertEqual(cgroups.git_procs_files, [f"{places[3]}/tawebeval-x/git/tasks"])
        self.assertEqual(cgroups.query_oom_policy(), "")

    def test_next_daemon(self) -> None:
        """A later daemon finds the cgroups again, with their processes, and can remove them."""
        own = self.machine.mount_unified()
        cgroups = self.attach()
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.enter(group, STRANGER)
        cgroups.make_evaluation_cgroup("def", LIMITS)
        cgroups.remove_all_cgroups()
        later = self.attach_again()
        self.check(later, ALL)
        self.assertEqual(later.list_evaluation_cgroups(), {"evaluation-abc", "evaluation-def"})
        found = later.find_evaluation_cgroup("evaluation-abc")
        assert found is not None
        self.assertEqual(self.get(found, "cgroup.procs"), str(STRANGER))
        self.assertEqual(found.find_procs_files(), group.find_procs_files())
        self.assertIsNone(later.find_evaluation_cgroup("evaluation-ghi"))
        for name in later.list_evaluation_cgroups():
            later.remove_evaluation_cgroup(name)
        self.assertEqual(later.list_evaluation_cgroups(), set())
        left = sorted(path.name for path in (own / "tawebeval-starter").iterdir() if path.is_dir())
        self.assertEqual(left, ["daemon", "git"])

    def test_missing(self) -> None:
        """What the starter has not, or the daemon may not use, is told with its reason."""
        own = self.machine.mount_unified("memory")
        cgroups = self.attach()
        self.check(
            cgroups, {"memory", "cpu"}, "has no controller 'pids'", "has no controller 'cpu'"
        )
        self.machine.refusals["/probe"] = errno.EACCES
        self.check(self.attach_again(), set(), f"{own}/tawebeval-starter/probe: Permission denied")

    def test_killed_at_its_start(self) -> None:
        """What a daemon leaves that is killed while it tries the controllers is in nobody's way."""
        own = self.machine.mount_unified()
        self.attach()
        self.machine.make_cgroup(f"{own}/tawebeval-starter/probe")
        self.check(self.attach_again(), ALL)


class GroupTests(CgroupsTestCase):
    """One group, during its life."""

    def test_unified_counts(self) -> None:
        """What version 2 says of use and of limits that were met."""
        group = self.make_group()
        self.assertEqual(group.read_usage(None), ResourceUsage(0, 0))
        self.put(group, "cpu.stat", "usage_usec 1250000\nuser_usec 1\n")
        self.put(group, "memory.peak", "4096\n")
        self.assertEqual(group.read_usage(None), ResourceUsage(1.25, 4096))
        self.put(group, "memory.events", "max 0\noom_kill 1\n")
        self.assertEqual(group.find_exceeded_limits(), set(), "another group had no more memory")
        self.put(group, "memory.events", "max 3\noom_kill 0\n")
        self.assertEqual(group.find_exceeded_limits(), set(), "it got by without its caches")
        self.put(group, "memory.events", "max 3\noom 1\noom_kill 1\n")
        self.put(group, "memory.events.local", "max 3\noom 0\noom_kill 0\n")
        self.assertEqual(group.find_exceeded_limits(), set(), "it was the limit of a group below")
        self.put(group, "memory.events.local", "max 3\noom 1\noom_kill 0\n")
        self.assertEqual(group.find_exceeded_limits(), {"memory"})
        self.put(group, "pids.events", "max 1\n")
        self.assertEqual(group.find_exceeded_limits(), {"memory", "processes"})

    def test_processes_of_others(self) -> None:
        """A fork fails by the group's own limit only where there were as many at once."""
        group = self.make_group("pids")
        self.put(group, "pids.events", "max 1\n")
        self.put(group, "pids.peak", "31\n")
        self.assertEqual(group.find_exceeded_limits(), set())
        self.put(group, "pids.peak", "32\n")
        self.assertEqual(group.find_exceeded_limits(), {"processes"})

    def test_legacy_counts(self) -> None:
        """What version 1 says of use and of limits that were met."""
        group = self.make_group("memory", "pids", "cpuacct")
        self.assertEqual(group.read_usage(None), ResourceUsage(0, 0))
        self.put(group, "cpuacct.usage", "1250000000\n")
        self.put(group, "memory.max_usage_in_bytes", f"{63 * MIB}\n")
        self.assertEqual(group.read_usage(None), ResourceUsage(1.25, 63 * MIB))
        self.put(group, "memory.oom_control", "oom_kill_disable 0\noom_kill 1\n")
        self.assertEqual(group.find_exceeded_limits(), set(), "another group had no more memory")
        self.put(group, "memory.memsw.max_usage_in_bytes", f"{64 * MIB - 4096}\n")
        self.assertEqual(group.find_exceeded_limits(), {"memory"})
        self.put(group, "pids.events", "max 1\n")
        self.assertEqual(group.find_exceeded_limits(), {"memory", "processes"})

    def test_memory_of_programs(self) -> None:
        """When memory is exceeded, the peaks of the submission's programs are known."""
        for version, peak in ((2, "memory.peak"), (1, "memory.max_usage_in_bytes")):
            machine = FakeMachine(self.machine.root / str(version))
            own = machine.mount_unified() if version == 2 else machine.mount_legacy("memory")
            group = machine.open().make_evaluation_cgroup("abc", LIMITS)
            directory = own / "tawebeval-x/evaluation-abc"
            for name, used in (("run-1", 20), ("run-2", 3), ("evaluator", 30)):
                (directory / name).mkdir()
                (directory / name / peak).write_text(f"{used * MIB}\n")
            group.find_exceeded_limits()
            self.assertEqual(group.submission_peak_memory_bytes, 0)
            if version == 2:
                self.put(group, "memory.events", "max 1\noom 1\noom_kill 1\n")
            else:
                self.put(group, "memory.max_usage_in_bytes", f"{64 * MIB}\n")
                self.put(group, "memory.oom_control", "oom_kill 1\n")
            group.find_exceeded_limits()
            self.assertEqual(group.submission_peak_memory_bytes, 23 * MIB)

    def test_legacy_programs(self) -> None:
        """Version 1 counts a kill where the killed process was: below its own limit, it counts."""
        for own_limit, own_peak, expected in ((48, 48, set()), (48, 40, {"memory"})):
            machine = FakeMachine(self.machine.root / str(own_peak))
            own = machine.mount_legacy("memory")
            group = machine.open().make_evaluation_cgroup("abc", LIMITS)
            directory = own / "tawebeval-x/evaluation-abc"
            (directory / "memory.max_usage_in_bytes").write_text(f"{64 * MIB}\n")
            self.assertEqual(group.find_exceeded_limits(), set())
            program = directory / "run-1"
            machine.make_cgroup(str(program))
            (program / "memory.limit_in_bytes").write_text(f"{own_limit * MIB}\n")
            (program / "memory.max_usage_in_bytes").write_text(f"{own_peak * MIB}\n")
            self.assertEqual(group.find_exceeded_limits(), set())
            (program / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
            self.assertEqual(group.find_exceeded_limits(), expected)

    def test_peak_of_memory(self) -> None:
        """The page cache is left out, whichever figure of the kernel shows how much of it was."""
        self.machine.mount_unified()
        cgroups = self.machine.open()
        for looked, left, moved, largest, expected in (
            (0, 2, 1, 70, 88),  # several processes, hardly any files
            (0, 70, 60, 30, 20),  # files that are still there
            (0, 2, 80, 30, 30),  # files that were removed
            (0, 10, 80, 85, 80),  # files that were mapped and are still there
            (40, 70, 60, 30, 40),  # what a look has found
        ):
            group = cgroups.make_evaluation_cgroup(f"{expected}", LIMITS)
            half = looked * MIB // 2
            self.put(group, "memory.stat", f"anon {half}\nfile {half}\nshmem {half}\n")
            group.find_exceeded_limits()
            self.put(group, "memory.stat", "anon 0\nshmem 0\n")
            self.put(group, "memory.peak", f"{90 * MIB}\n")
            self.put(group, "memory.current", f"{left * MIB}\n")
            read, written = moved // 3 * 2048, (moved - moved // 3) * 2048
            waited = struct_rusage((0, 0, largest * 1024, *[0] * 6, read, written, *[0] * 5))
            self.assertEqual(group.read_usage(waited).peak_memory_bytes, expected * MIB)
            self.put(group, "memory.events", "max 1\noom 1\noom_kill 1\n")
            self.assertEqual(
                group.read_usage(waited).peak_memory_bytes, 90 * MIB, "no cache was left"
            )

    def test_peak_that_the_kernel_does_not_say(self) -> None:
        """Looks alone tell then, if one has found something: under version 2 before Linux 5.19."""
        for version, peak, stat in (
            (2, "memory.peak", "anon 4096\nfile 100\nshmem 8192\n"),
            (1, "memory.max_usage_in_bytes", "rss 7\nshmem 7\ntotal_rss 4096\ntotal_shmem 8192\n"),
        ):
            machine = FakeMachine(self.machine.root / str(version))
            own = machine.mount_unified() if version == 2 else machine.mount_legacy("memory")
            group = machine.open().make_evaluation_cgroup("abc", LIMITS)
            (own / "tawebeval-x/evaluation-abc" / peak).unlink()
            self.assertEqual(group.read_usage(None).peak_memory_bytes, None)
            self.put(group, "memory.stat", stat)
            group.find_exceeded_limits()
            self.assertEqual(group.read_usage(None).peak_memory_bytes, 12288)

    def test_patience(self) -> None:
        """Who has patience is told what was so a while ago, and who has none what is so."""
        clock = Clock()
        group = attrs.evolve(self.make_group("pids"), time=clock.seconds)
        self.assertEqual(group.find_exceeded_limits(1), set())
        self.put(group, "pids.events", "max 1\n")
        clock.advance(0.75)
        self.assertEqual(group.find_exceeded_limits(1), set(), "it is not looked at")
        clock.advance(0.25)
        self.assertEqual(group.find_exceeded_limits(1), {"processes"})
        self.put(group, "pids.events", "max 0\n")
        self.assertEqual(group.find_exceeded_limits(), {"processes"}, "what was so once stays so")

    def test_over_cpu(self) -> None:
        """Processor time is looked at when its limit can have been met, and not before."""
        self.patch(os, "cpu_count", lambda: 2)
        clock = Clock()
        group = attrs.evolve(self.make_group("cpuacct"), time=clock.seconds)

        def used(seconds: int) -> bool:
            self.put(group, "cpuacct.usage", f"{seconds}000000000\n")
            return group.is_over_cpu_limit(10, lambda: 0)

        self.assertFalse(used(4))
        clock.advance(2.5)
        self.assertFalse(used(11), "two processors cannot have done this: it is not looked at")
        clock.advance(0.5)
        self.assertFalse(used(10))
        self.assertTrue(used(11))
        self.assertTrue(used(11), "it stays so")

    def test_cpu_unknown(self) -> None:
        """What cannot be read is measured otherwise."""
        group = self.make_group("cpuacct")
        self.put(group, "cpuacct.usage", "?")
        clock = Clock()
        group = attrs.evolve(group, time=clock.seconds)
        self.assertFalse(group.is_over_cpu_limit(10, lambda: 9))
        clock.advance(1)
        self.assertTrue(group.is_over_cpu_limit(10, lambda: 11))

    def test_unknown_figures(self) -> None:
        """What a kernel does not say is unknown, and no error."""
        group = self.make_group()
        for name in ("memory.peak", "memory.stat", "cpu.stat", "memory.events", "pids.events"):
            (Path(group.find_procs_files()[0]).parent / name).unlink()
        self.assertEqual(group.read_usage(None), ResourceUsage(None, None))
        self.assertEqual(group.find_exceeded_limits(), frozenset())

    def test_rounded(self) -> None:
        """The kernel rounds down to its pages; a limit that is far from its value is none."""
        for off, enforced in ((0, ALL), (-65535, ALL), (-65536, LESS), (1, LESS)):
            machine = FakeMachine(self.machine.root / str(off), rounding=off)
            machine.mount_unified()
            self.assertEqual(machine.open().enforced_resources, enforced, off)

    def test_kill_of_version_1(self) -> None:
        """Everybody is killed, one by one, and no one can be started; limits stay as they were."""
        group = self.make_group("memory", "pids", "cpuacct")
        self.enter(group, 0, *range(STRANGER, STRANGER + 200))
        self.assertRaises(OSError, group.remove_cgroup)
        self.assertEqual(self.get(group, "pids.max"), "0")
        # 0 is somebody of another process namespace, whom nobody here can reach.
        self.assertEqual(self.get(group, "cgroup.procs"), "0")
        self.put(group, "pids.events", "max 7\n")
        self.assertEqual(group.find_exceeded_limits(), set(), "that was the end, not the evaluator")

    def test_exceeded_before_the_end(self) -> None:
        """What had been exceeded before is still told after the group is gone."""
        group = self.make_group()
        self.put(group, "pids.events", "max 1\n")
        group.find_exceeded_limits()
        group.remove_cgroup()
        self.assertEqual(group.find_exceeded_limits(), {"processes"})
        self.assertEqual(group.read_usage(None), ResourceUsage(None, None))
        group.remove_cgroup()
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])

    def test_remove_at_once(self) -> None:
        """A group in which nobody is any more is removed, and nothing else done to it."""
        group = self.make_group("pids")
        written: list[str] = []
        self.patch(CgroupDirectory, "list_children", lambda group: self.fail("not needed"))
        self.patch(self.machine, "write_file", lambda path, text: written.append(path))
        group.remove_cgroup()
        self.assertEqual((self.machine.groups(), written, self.machine.slept), (["x"], [], 0))

    def test_remove_waits(self) -> None:
        """Who was killed holds the group for a moment: it is tried again for about a second."""
        group = self.make_group("pids")
        self.enter(group, STRANGER)
        self.machine.lingering = 8
        group.remove_cgroup()
        self.assertEqual(self.machine.groups(), ["x"])
        self.assertApproximates(self.machine.slept, 0.255, 1e-6)

    def test_remove_gives_up(self) -> None:
        """Who has not gone after about a second is an error; who has the next time is none."""
        group = self.make_group("pids")
        self.enter(group, STRANGER)
        self.machine.lingering = 12
        error = self.assertRaises(OSError, group.remove_cgroup)
        self.assertTrue(error.filename.endswith("/evaluation-abc"), error)
        self.assertApproximates(self.machine.slept, 1.023, 1e-6)
        group.remove_cgroup()
        self.assertEqual(self.machine.groups(), ["x"])
        self.assertEqual(group.find_exceeded_limits(), frozenset(), "what was so before counts")

    def test_remove_is_refused(self) -> None:
        """What time does not heal is not waited for."""
        group = self.make_group("pids")
        self.machine.refusals["/evaluation-abc"] = errno.EACCES
        self.assertRaises(PermissionError, group.remove_cgroup)
        self.assertEqual(self.machine.slept, 0)

    def test_failed_to_make(self) -> None:
        """A group that cannot have its limits is not made, in none of the hierarchies."""
        for each in ("memory", "pids", "cpuacct"):
            self.machine.mount_legacy(each)
        cgroups = self.machine.open()
        for end in ("/evaluation-abc/pids.max", "/cpuacct/own/tawebeval-x/evaluation-abc"):
            self.machine.refusals = {end: errno.ENOSPC}
            self.assertRaises(OSError, cgroups.make_evaluation_cgroup, "abc", LIMITS)
            self.assertEqual(self.machine.groups(), ["x"] * 3)
        self.machine.refusals = {"/evaluation-abc/pids.max": errno.EMFILE}

        def no_descriptor(directory: CgroupDirectory) -> list[CgroupDirectory]:
            raise OSError(errno.EMFILE, "Too many open files")

        self.patch(CgroupDirectory, "list_children", no_descriptor)
        self.assertRaises(OSError, cgroups.make_evaluation_cgroup, "abc", LIMITS)
        self.assertEqual(self.machine.groups(), ["x"] * 3)
        self.machine.refusals = {}
        cgroups.make_evaluation_cgroup("abc", LIMITS)
        # One of this name is there: it is left alone.
        self.assertRaises(FileExistsError, cgroups.make_evaluation_cgroup, "abc", LIMITS)
        self.assertEqual(self.machine.groups(), [*["x"] * 3, *["x/evaluation-abc"] * 3])
