"""`linux.cgroups.filesystem` with what proc(5) says on machines of all kinds."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.cgroups.filesystem import ProcessCgroups, parse_cgroups_of_process


def mount(root: str, point: str, kind: str) -> str:
    """Return a line of mountinfo."""
    return f"31 23 0:28 {root} {point} rw,relatime shared:9 master:1 - {kind}\n"


LEGACY = "cgroup cgroup rw,"
UNIFIED = "cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"


class HierarchiesTests(SynchronousTestCase):
    """Where a process's own groups are."""

    def check(
        self, mountinfo: str, membership: str, unified: str | None = None, **controllers: str
    ) -> None:
        """Hold what is found against what is there."""
        mountinfo = mount("/", "/", "ext4 /dev/sda rw") + mountinfo
        found = parse_cgroups_of_process(mountinfo, membership)
        self.assertEqual(found, ProcessCgroups(controllers, unified))

    def test_nothing(self) -> None:
        """A machine without cgroups has none."""
        self.check("", "")
        self.check("", "0::/\n4:memory:/\n")

    def test_unified(self) -> None:
        """Version 2 alone, as systemd mounts it; in the top group, too."""
        mounted = mount("/", "/sys/fs/cgroup", UNIFIED)
        own = "/system.slice/tawebeval.service"
        self.check(mounted, f"0::{own}\n", f"/sys/fs/cgroup{own}")
        self.check(mounted, "0::/\n", "/sys/fs/cgroup")

    def test_legacy(self) -> None:
        """Version 1: each controller where it is mounted, some of them together."""
        self.check(
            mount("/", "/cg/cpu,cpuacct", LEGACY + "cpu,cpuacct")
            + mount("/", "/cg/memory", LEGACY + "memory")
            + mount("/", "/cg/systemd", LEGACY + "xattr,name=systemd"),
            "5:cpu,cpuacct:/a\n4:memory:/a/b\n3:pids:/a\n1:name=systemd:/c\n",
            cpu="/cg/cpu,cpuacct/a",
            cpuacct="/cg/cpu,cpuacct/a",
            memory="/cg/memory/a/b",
            **{"name=systemd": "/cg/systemd/c"},
        )

    def test_both(self) -> None:
        """A hybrid machine has each controller in one of the versions."""
        self.check(
            mount("/", "/cg/memory", LEGACY + "memory") + mount("/", "/cg/unified", UNIFIED),
            "4:memory:/a\n0::/b\n",
            "/cg/unified/b",
            memory="/cg/memory/a",
        )

    def test_part_of_a_tree(self) -> None:
        """A mount may show the groups below one only, as in containers: paths begin there."""
        mounted = mount("/docker/1", "/cg/memory", LEGACY + "memory")
        self.check(mounted, "4:memory:/docker/1\n", memory="/cg/memory")
        self.check(mounted, "4:memory:/docker/1/x\n", memory="/cg/memory/x")
        self.check(mounted, "4:memory:/docker/12\n")
        self.check(mounted, "4:memory:/\n")

    def test_outside_of_the_namespace(self) -> None:
        """What is beyond the cgroup namespace has no path that could be followed."""
        self.check(mount("/", "/cg", UNIFIED), "0::/../x\n")
        self.check(mount("/..", "/cg", UNIFIED), "0::/\n")

    def test_several_mounts(self) -> None:
        """Of several mounts the shortest counts, and of two at one place the upper one."""
        mounted = mount("/", "/cgroup", UNIFIED) + mount("/", "/deep/down/cgroup", UNIFIED)
        self.check(mounted, "0::/a\n", "/cgroup/a")
        mounted += mount("/a", "/cgroup", UNIFIED)
        self.check(mounted, "0::/a\n", "/cgroup")

    def test_odd_names(self) -> None:
        """Spaces in mount points are written as octal numbers; colons may be in groups."""
        mounted = mount("/", r"/my\040cgroups", UNIFIED)
        self.check(mounted, "0::/a:b\n", "/my cgroups/a:b")
