"""`linux.cgroups` on machines of all kinds, whose cgroups are plain files here."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from resource import struct_rusage

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import MIB, LimitSettings
from tawebeval.linux import cgroups as module
from tawebeval.linux.cgroups import (
    CgroupManager,
    EvaluationCgroup,
    ResourceUsage,
    describe_missing_limits,
    describe_resource_limit,
    find_cgroup_remedy,
    find_own_cgroup,
    find_process_limit_cgroup,
    is_delegated,
    open_cgroups,
    open_starter_cgroups,
)
from tests.fakes.cgroups import FakeMachine


class OwnCgroupTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.mount = str(self.folder / "mount")
        (self.folder / "mount" / "a:b").mkdir(parents=True)
        for place in ("", "a:b"):
            (self.folder / "mount" / place / "cgroup.controllers").touch()

    def find(self, membership: str) -> str | None:
        (self.folder / "cgroup").write_text(membership)
        return find_own_cgroup(self.folder / "cgroup", self.mount)

    def test_own_cgroup_is_below_the_mount(self) -> None:
        self.assertEqual(self.find("4:memory:/x\n0::/a:b\n"), f"{self.mount}/a:b")
        self.assertEqual(self.find("0::/\n"), self.mount)

    def test_own_cgroup_is_none_without_cgroups_v2_or_outside_the_mount(self) -> None:
        for membership in ("", "4:memory:/a:b\n1:name=systemd:/c\n", "0::/../x\n", "0::/gone\n"):
            self.assertIsNone(self.find(membership), membership)


LIMITS = LimitSettings(memory=64 * MIB, processes=32)
ALL = {"memory", "processes", "cpu", "weight"}
LESS = ALL - {"memory"}
STRANGER = 4194305  # no process: numbers end below


def describe(cgroups: CgroupManager) -> str:
    """Return all that is said of what is not limited."""
    found = [describe_resource_limit(cgroups, what) for what in cgroups.unenforced_resources]
    return "\n".join([*found, find_cgroup_remedy()])


class CgroupsTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.delegated = True
        self.patch(module, "is_delegated", lambda path: self.delegated)
        self.patch(module, "SYSTEMD_MARKER_DIRECTORY", "/nonexistent")
        self.machine = self.make_machine()

    def make_machine(self, controllers: str = "cpu memory pids") -> FakeMachine:
        self.machine = FakeMachine(Path(self.mktemp()).absolute(), controllers)
        self.patch(time, "sleep", lambda seconds: self.machine.sleep(seconds))
        return self.machine

    def check(self, cgroups: CgroupManager, enforced: set[str], *words: str) -> None:
        """Hold what works, and how it is told that the rest does not."""
        self.assertEqual(cgroups.enforced_resources, enforced, describe(cgroups))
        # One line names all that is missing, and what to do about it.
        for resource in ALL - enforced:
            self.assertIn(resource, describe_missing_limits(cgroups))
        remedy = "" if enforced == ALL else find_cgroup_remedy()
        warning = describe_missing_limits(cgroups)
        self.assertEqual(bool(warning), enforced != ALL)
        self.assertTrue(warning.endswith(remedy), warning)
        for word in words:
            self.assertIn(word, describe(cgroups))

    def make_group(self) -> EvaluationCgroup:
        return self.machine.open().make_evaluation_cgroup("abc", LIMITS)

    def path(self, group: EvaluationCgroup, name: str) -> Path:
        return Path(group.directory.path, name)

    def put(self, group: EvaluationCgroup, name: str, text: str) -> None:
        self.path(group, name).write_text(text)

    def get(self, group: EvaluationCgroup, name: str) -> str:
        return self.path(group, name).read_text().strip()

    def enter(self, group: EvaluationCgroup, *pids: int) -> None:
        self.put(group, "cgroup.procs", "".join(f"{pid}\n" for pid in pids))


class UnitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.patch(module, "SYSTEMD_MARKER_DIRECTORY", str(self.folder))
        self.group = f"{self.folder}/user.slice/user@7.service/app.slice/it.service"

    def put_systemctl(self, script: str) -> Path:
        program = self.folder / "systemctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        self.patch(os, "environ", {"PATH": f"{self.folder}:/bin"})
        return program

    def test_cgroup_is_delegated_where_systemd_does_not_run(self) -> None:
        self.folder.rmdir()
        self.assertTrue(is_delegated(self.group))

    def test_cgroup_of_a_system_unit_is_delegated_if_it_is_writable(self) -> None:
        self.assertTrue(is_delegated(f"{self.folder}/system.slice/it.service"))

    def test_delegation_of_a_user_unit_is_read_from_systemctl(self) -> None:
        self.patch(os, "environ", {"PATH": str(self.folder)})
        self.assertFalse(is_delegated(self.group), "no answer")
        for said, delegated in (("yes", True), ("no", False)):
            self.put_systemctl(
                'test "$*" = "--user show --value --property=Delegate it.service" || exit\n'
                f'test "$XDG_RUNTIME_DIR" = "/run/user/{os.geteuid()}" && echo {said}'
            )
            for below in ("", "/a/group"):
                self.assertEqual(is_delegated(f"{self.group}{below}"), delegated)


class ParentTests(CgroupsTestCase):
    def test_daemon_and_git_have_cgroups_with_all_controllers_enabled(self) -> None:
        own = self.machine.own
        self.check(self.machine.open(), ALL)
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])
        daemon = own / "tawebeval-x/daemon/cgroup.procs"
        self.assertEqual(daemon.read_text(), f"{os.getpid()}\n")
        for group in (own, own / "tawebeval-x"):
            enabled = (group / "cgroup.subtree_control").read_text()
            self.assertEqual(enabled, "cpu memory pids")

    def test_daemon_has_ten_shares_of_the_processors(self) -> None:
        cgroups = self.machine.open()
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        home = self.machine.own / "tawebeval-x"
        weights = [int((home / name / "cpu.weight").read_text()) for name in ("daemon", "git")]
        self.assertEqual([*weights, int(self.get(group, "cpu.weight"))], [1000, 100, 100])
        self.assertEqual(cgroups.git_procs_files, (f"{home}/git/cgroup.procs",))
        self.assertEqual(cgroups.evaluator_niceness, 0)

    def test_controller_that_the_parent_does_not_enable_is_reported_missing(self) -> None:
        for controllers, missing, niceness in (
            ("memory pids", "cpu", 10),
            ("cpu pids", "memory", 0),
        ):
            self.make_machine(controllers)
            cgroups = self.machine.open()
            enforced = LESS if missing == "memory" else ALL - {"weight"}
            self.check(cgroups, enforced, f"has no controller {missing!r}")
            self.assertEqual(cgroups.evaluator_niceness, niceness)

    def test_read_only_cgroup_file_system_enforces_no_limit(self) -> None:
        self.machine.refusals["/tawebeval-x"] = errno.EROFS
        self.patch(Path, "read_text", lambda *_: "")  # of mountinfo: no version 1
        words = ("Read-only file system", "make a cgroup in /sys/fs", "for a container see")
        self.check(self.machine.open(), set(), *words)

    def test_cgroup_that_systemd_has_not_delegated_enforces_no_limit(self) -> None:
        self.delegated = False
        self.patch(Path, "read_text", lambda *_: "")
        self.patch(module, "SYSTEMD_MARKER_DIRECTORY", "/")
        said = f"{self.machine.own}: systemd has not delegated it"
        words = ("Delegate=memory pids cpu", "; or by: systemd-run --user --pty -p Delegate=yes ")
        self.check(self.machine.open(), set(), said, *words)
        self.assertEqual(self.machine.groups(), [])

    def test_remedy_on_a_machine_with_cgroups_v1_is_a_kernel_parameter(self) -> None:
        self.patch(Path, "read_text", lambda *_: "1 0 0:1 / /c rw - cgroup cgroup rw,memory\n")
        said = "with the kernel parameter systemd.unified_cgroup_hierarchy=1"
        for place in ("/nonexistent", "/"):
            self.patch(module, "SYSTEMD_MARKER_DIRECTORY", place)
            self.assertIn(said, find_cgroup_remedy())

    def test_cgroup_with_other_processes_is_used_to_measure_cpu_only(self) -> None:
        for others in (f"{STRANGER}\n", f"1\n{STRANGER}\n"):
            own = self.make_machine().own
            with open(own / "cgroup.procs", "a") as file:
                file.write(others)
            self.check(self.machine.open(), {"cpu"}, "other processes are in the cgroup")
            self.assertEqual((own / "cgroup.procs").read_text(), others, "they are left alone")

    def test_init_of_a_container_moves_with_the_daemon_and_back(self) -> None:
        procs, both = self.machine.own / "cgroup.procs", {"1", str(os.getpid())}
        procs.write_text(f"1\n{os.getpid()}\n")
        cgroups = self.machine.open()
        self.check(cgroups, ALL)
        home = self.machine.own / "tawebeval-x/daemon"
        self.assertEqual(set((home / "cgroup.procs").read_text().split()), both)
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), [])
        self.assertEqual(set(procs.read_text().split()), both)

    def test_init_that_cannot_be_moved_is_beside_the_daemon(self) -> None:
        (self.machine.own / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
        move = self.machine.write

        def refuse(file: Path, text: str) -> None:
            if text == "1":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            move(file, text)

        self.patch(self.machine, "write", refuse)
        self.check(self.machine.open(), {"cpu"}, "other processes are in the cgroup")

    def test_refused_cgroup_file_disables_only_the_limits_that_need_the_file(self) -> None:
        for end, number, enforced, words in (
            ("/git", errno.ENOSPC, ALL - {"weight"}, "/git: No space left on device"),
            ("/probe/memory.max", errno.EPERM, LESS, "memory"),
            ("/probe/cgroup.subtree_control", errno.EPERM, {"cpu", "weight"}, "processes"),
            ("/memory.swap.max", errno.ENOENT, ALL, ""),
            ("/daemon/cgroup.procs", errno.EACCES, set(), "Permission denied"),
            ("/probe", errno.EACCES, set(), "Permission denied"),
        ):
            self.make_machine().refusals[end] = number
            cgroups = self.machine.open()
            self.check(cgroups, enforced, words)
            self.assertEqual(bool(cgroups.git_procs_files), "weight" in enforced, end)
            self.assertEqual(bool(self.machine.groups()), bool(enforced), end)
            if not enforced:
                procs = self.machine.own / "cgroup.procs"
                self.assertEqual(procs.read_text(), f"{os.getpid()}\n")

    def test_close_removes_all_cgroups_and_disables_the_controllers(self) -> None:
        own = self.machine.own
        cgroups = self.machine.open()
        self.enter(cgroups.make_evaluation_cgroup("abc", LIMITS), STRANGER)
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), [])
        self.assertEqual((own / "cgroup.procs").read_text(), f"{os.getpid()}\n")
        self.assertEqual((own / "cgroup.subtree_control").read_text(), "")

    def test_close_leaves_controllers_that_were_enabled_before(self) -> None:
        control = self.machine.own / "cgroup.subtree_control"
        control.write_text("memory")
        self.machine.open().remove_all_cgroups()
        self.assertEqual(control.read_text(), "memory")

    def test_close_removes_evaluation_cgroups_if_the_daemon_cannot_be_moved_back(self) -> None:
        cgroups = self.machine.open()
        cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.machine.refusals |= {"/own/cgroup.procs": errno.EACCES}
        cgroups.remove_all_cgroups()
        self.assertEqual(self.machine.groups(), ["x", "x/daemon"])

    def test_cgroups_of_a_dead_daemon_are_removed(self) -> None:
        self.enter(self.make_group(), STRANGER)
        below = self.machine.own / "tawebeval-x/evaluation-abc/below"
        self.machine.make(below)
        (below / "cgroup.procs").write_text(f"{STRANGER}\n")
        # The dead one was in the daemon's group; this one is where it was started.
        (self.machine.own / "cgroup.procs").write_text(f"{os.getpid()}\n")
        (self.machine.own / "cgroup.subtree_control").write_text("")
        (self.machine.own / "tawebeval-x/daemon/cgroup.procs").write_text(f"{STRANGER + 1}\n")
        self.machine.lingering = 3
        self.check(self.machine.open(), ALL)
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])
        self.assertLess(self.machine.slept, 0.1)

    def test_cgroups_of_dead_starters_and_trials_are_removed(self) -> None:
        kept = {f"tawebeval-try-{os.getpid()}", "tawebeval-0123456789ab"}
        for name in (f"tawebeval-starter-{STRANGER}", f"tawebeval-try-{STRANGER}", *kept):
            self.machine.make(self.machine.own / name)
        self.machine.open()
        found = {path.name for path in self.machine.own.iterdir() if path.is_dir()}
        self.assertEqual(found, {*kept, "tawebeval-x"})

    def test_cgroup_of_a_live_starter_is_kept_if_proc_hides_the_starter(self) -> None:
        self.patch(os.path, "exists", lambda path: False)
        beside = self.machine.own / f"tawebeval-starter-{os.getpid()}"
        self.machine.make(beside)
        self.machine.open()
        self.assertTrue(beside.is_dir())

    def test_process_without_a_cgroup_limits_and_measures_nothing(self) -> None:
        self.patch(module, "find_own_cgroup", lambda: None)
        cgroups = open_cgroups("x")
        self.check(cgroups, set(), "in no cgroup of version 2")
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.assertEqual((group.procs_files, group.name), ([], ""))
        self.assertEqual(group.read_usage(None), ResourceUsage(None, None))
        self.assertEqual(group.find_exceeded_limits(), frozenset())
        found = cgroups.find_evaluation_cgroup("")
        assert found is not None
        self.assertEqual(found.directory.path, "")
        cgroups.remove_orphan_cgroups(())
        self.assertIsNone(find_process_limit_cgroup(cgroups.encode_parent_json()))
        group.remove_cgroup()
        cgroups.remove_all_cgroups()


class AttachTests(CgroupsTestCase):
    def attach(self) -> CgroupManager:
        self.starter, self.own = self.machine.open(name="starter"), self.machine.open()
        return self.attach_again()

    def attach_again(self) -> CgroupManager:
        self.patch(module, "CgroupDirectory", self.machine.directory)
        return open_starter_cgroups(self.own, self.starter.encode_parent_json())

    def test_evaluations_are_below_the_starter(self) -> None:
        own = self.machine.own
        cgroups = self.attach()
        self.check(cgroups, ALL)
        self.assertEqual(cgroups.evaluator_niceness, 0)
        self.assertEqual(cgroups.git_procs_files, (f"{own}/tawebeval-x/git/cgroup.procs",))
        daemon = own / "tawebeval-x/daemon/cgroup.procs"
        self.assertEqual(daemon.read_text(), f"{os.getpid()}\n")
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        path = own / "tawebeval-starter/evaluation-abc"
        self.assertEqual(group.procs_files, [f"{path}/evaluator/cgroup.procs"])
        self.assertEqual(self.get(group, "memory.max"), str(64 * MIB))

    def test_next_daemon_finds_the_cgroup_of_an_evaluation_that_is_still_running(self) -> None:
        own = self.machine.own
        cgroups = self.attach()
        group = cgroups.make_evaluation_cgroup("abc", LIMITS)
        self.enter(group, STRANGER)
        cgroups.make_evaluation_cgroup("def", LIMITS)
        cgroups.remove_all_cgroups()
        later = self.attach_again()
        self.check(later, ALL)
        found = later.find_evaluation_cgroup("evaluation-abc")
        assert found is not None
        self.assertEqual(self.get(found, "cgroup.procs"), str(STRANGER))
        self.assertEqual(found.procs_files, group.procs_files)
        self.assertIsNone(later.find_evaluation_cgroup("evaluation-ghi"))
        later.remove_orphan_cgroups({"evaluation-abc"})
        left = sorted(path.name for path in (own / "tawebeval-starter").iterdir() if path.is_dir())
        self.assertEqual(left, ["daemon", "evaluation-abc", "git"])

    def test_missing_controllers_are_reported_with_reasons(self) -> None:
        own = self.make_machine("memory").own
        cgroups = self.attach()
        self.check(
            cgroups, {"memory", "cpu"}, "has no controller 'pids'", "has no controller 'cpu'"
        )
        self.machine.refusals["/probe"] = errno.EACCES
        self.check(self.attach_again(), set(), f"{own}/tawebeval-starter/probe: Permission denied")

    def test_probe_of_a_killed_daemon_is_removed(self) -> None:
        own = self.machine.own
        self.attach()
        self.machine.make(own / "tawebeval-starter/probe")
        self.check(self.attach_again(), ALL)


class GroupTests(CgroupsTestCase):
    def test_only_the_limits_of_the_own_cgroup_count(self) -> None:
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

    def test_fork_refused_by_a_parent_cgroup_does_not_count(self) -> None:
        group = self.make_group()
        self.put(group, "pids.events", "max 1\n")
        self.put(group, "pids.peak", "31\n")
        self.assertEqual(group.find_exceeded_limits(), set())
        self.put(group, "pids.peak", "32\n")
        self.assertEqual(group.find_exceeded_limits(), {"processes"})

    def test_memory_peaks_of_submissions_are_summed_when_memory_is_exceeded(self) -> None:
        group = self.make_group()
        for name, used in (("run-1", 20), ("run-2", 3), ("evaluator", 30)):
            place = self.path(group, name)
            place.mkdir(exist_ok=True)
            (place / "memory.peak").write_text(f"{used * MIB}\n")
        group.find_exceeded_limits()
        self.assertEqual(group.submission_peak_memory_bytes, 0)
        self.put(group, "memory.events", "max 1\noom 1\noom_kill 1\n")
        group.find_exceeded_limits()
        self.assertEqual(group.submission_peak_memory_bytes, 23 * MIB)

    def test_peak_of_memory_leaves_out_the_page_cache(self) -> None:
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

    def test_limit_checks_measure_peak_memory_if_the_kernel_has_no_memory_peak_file(self) -> None:
        group = self.make_group()
        self.path(group, "memory.peak").unlink()
        self.assertEqual(group.read_usage(None).peak_memory_bytes, None)
        self.put(group, "memory.stat", "anon 4096\nfile 100\nshmem 8192\n")
        group.find_exceeded_limits()
        self.assertEqual(group.read_usage(None).peak_memory_bytes, 12288)

    def test_exceeded_limits_are_read_again_after_the_maximum_age(self) -> None:
        clock = Clock()
        group = attrs.evolve(self.make_group(), time=clock.seconds)
        self.assertEqual(group.find_exceeded_limits(1), set())
        self.put(group, "pids.events", "max 1\n")
        clock.advance(0.75)
        self.assertEqual(group.find_exceeded_limits(1), set(), "it is not looked at")
        clock.advance(0.25)
        self.assertEqual(group.find_exceeded_limits(1), {"processes"})
        self.put(group, "pids.events", "max 0\n")
        self.assertEqual(group.find_exceeded_limits(), {"processes"}, "what was so once stays so")

    def test_cpu_time_is_not_read_before_all_processors_can_have_used_the_limit(self) -> None:
        self.patch(os, "cpu_count", lambda: 2)
        clock = Clock()
        group = attrs.evolve(self.make_group(), time=clock.seconds)

        def used(seconds: int) -> bool:
            self.put(group, "cpu.stat", f"usage_usec {seconds}000000\n")
            return group.is_over_cpu_limit(10, lambda: 0)

        self.assertFalse(used(4))
        clock.advance(2.5)
        self.assertFalse(used(11), "two processors cannot have done this: it is not looked at")
        clock.advance(0.5)
        self.assertFalse(used(10))
        self.assertTrue(used(11))
        self.assertTrue(used(11), "it stays so")

    def test_cpu_time_is_measured_by_process_if_cpu_stat_is_malformed(self) -> None:
        group = self.make_group()
        self.put(group, "cpu.stat", "?")
        clock = Clock()
        group = attrs.evolve(group, time=clock.seconds)
        self.assertFalse(group.is_over_cpu_limit(10, lambda: 9))
        clock.advance(1)
        self.assertTrue(group.is_over_cpu_limit(10, lambda: 11))

    def test_usage_is_unknown_if_the_kernel_has_no_such_files(self) -> None:
        group = self.make_group()
        for name in ("memory.peak", "memory.stat", "cpu.stat", "memory.events", "pids.events"):
            self.path(group, name).unlink()
        self.assertEqual(group.read_usage(None), ResourceUsage(None, None))
        self.assertEqual(group.find_exceeded_limits(), frozenset())

    def test_exceeded_limits_are_known_after_the_cgroup_is_removed(self) -> None:
        group = self.make_group()
        self.put(group, "pids.events", "max 1\n")
        group.find_exceeded_limits()
        group.remove_cgroup()
        self.assertEqual(group.find_exceeded_limits(), {"processes"})
        self.assertEqual(group.read_usage(None), ResourceUsage(None, None))
        group.remove_cgroup()
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])

    def test_removal_is_tried_again_while_killed_processes_are_there(self) -> None:
        group = self.make_group()
        self.enter(group, STRANGER)
        self.machine.lingering = 8
        group.remove_cgroup()
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])
        self.assertApproximates(self.machine.slept, 0.255, 1e-6)

    def test_removal_gives_up_after_a_second_and_can_be_repeated(self) -> None:
        group = self.make_group()
        self.enter(group, STRANGER)
        self.machine.lingering = 12
        error = self.assertRaises(OSError, group.remove_cgroup)
        self.assertTrue(error.filename.endswith("/evaluation-abc"), error)
        self.assertApproximates(self.machine.slept, 1.023, 1e-6)
        group.remove_cgroup()
        self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])
        self.assertEqual(group.find_exceeded_limits(), frozenset(), "what was so before counts")

    def test_remove_cgroup_raises_at_once_if_the_removal_is_refused(self) -> None:
        group = self.make_group()
        self.machine.refusals["/evaluation-abc"] = errno.EACCES
        self.assertRaises(PermissionError, group.remove_cgroup)
        self.assertEqual(self.machine.slept, 0)

    def test_new_cgroup_is_removed_if_a_limit_cannot_be_set(self) -> None:
        cgroups = self.machine.open()
        for end in ("/evaluation-abc/pids.max", "/evaluation-abc"):
            self.machine.refusals = {end: errno.ENOSPC}
            self.assertRaises(OSError, cgroups.make_evaluation_cgroup, "abc", LIMITS)
            self.assertEqual(self.machine.groups(), ["x", "x/daemon", "x/git"])
        self.machine.refusals = {}
        cgroups.make_evaluation_cgroup("abc", LIMITS)
        # One of this name is there: it is left alone.
        self.assertRaises(FileExistsError, cgroups.make_evaluation_cgroup, "abc", LIMITS)
        self.assertEqual(self.machine.groups()[-1], "x/git")
