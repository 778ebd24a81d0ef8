"""`linux.cgroups` with what proc(5) says on machines of all kinds."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.linux.cgroups import parse_own_cgroup


def mount(root: str, point: str, kind: str) -> str:
    """Return a line of mountinfo."""
    return f"31 23 0:28 {root} {point} rw,relatime shared:9 master:1 - {kind}\n"


VERSION_1 = mount("/", "/cg/memory", "cgroup cgroup rw,memory")
VERSION_2 = "cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot"


class OwnCgroupTests(SynchronousTestCase):
    def check(self, mountinfo: str, membership: str, expected: str | None = None) -> None:
        mountinfo = mount("/", "/", "ext4 /dev/sda rw") + mountinfo
        self.assertEqual(parse_own_cgroup(mountinfo, membership), expected)

    def test_machine_without_version_2_has_none(self) -> None:
        self.check("", "")
        self.check("", "0::/\n4:memory:/\n")
        self.check(VERSION_1, "4:memory:/a\n1:name=systemd:/c\n")

    def test_own_cgroup_is_below_the_mount(self) -> None:
        mounted = mount("/", "/sys/fs/cgroup", VERSION_2)
        own = "/system.slice/tawebeval.service"
        self.check(mounted, f"0::{own}\n", f"/sys/fs/cgroup{own}")
        self.check(mounted, "0::/\n", "/sys/fs/cgroup")

    def test_hybrid_machine_has_version_2_beside_version_1(self) -> None:
        mounted = VERSION_1 + mount("/", "/cg/unified", VERSION_2)
        self.check(mounted, "4:memory:/a\n0::/b\n", "/cg/unified/b")

    def test_container_shows_a_part_of_the_hierarchy(self) -> None:
        mounted = mount("/docker/1", "/cg", VERSION_2)
        self.check(mounted, "0::/docker/1\n", "/cg")
        self.check(mounted, "0::/docker/1/x\n", "/cg/x")
        self.check(mounted, "0::/docker/12\n")
        self.check(mounted, "0::/\n")

    def test_outside_of_the_namespace_has_no_path(self) -> None:
        self.check(mount("/", "/cg", VERSION_2), "0::/../x\n")
        self.check(mount("/..", "/cg", VERSION_2), "0::/\n")

    def test_shortest_and_uppermost_mount_counts(self) -> None:
        mounted = mount("/", "/cgroup", VERSION_2) + mount("/", "/deep/down/cgroup", VERSION_2)
        self.check(mounted, "0::/a\n", "/cgroup/a")
        mounted += mount("/a", "/cgroup", VERSION_2)
        self.check(mounted, "0::/a\n", "/cgroup")

    def test_spaces_are_octal_numbers_and_colons_are_allowed(self) -> None:
        mounted = mount("/", r"/my\040cgroups", VERSION_2)
        self.check(mounted, "0::/a:b\n", "/my cgroups/a:b")
