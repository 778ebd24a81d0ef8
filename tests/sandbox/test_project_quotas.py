"""`sandbox.project_quotas`: quota directories, by a fake kernel.

The check `quota` of tests/machine does it by a real one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from click.testing import CliRunner, Result
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli import main
from tawebeval.config import (
    MIB,
    Configuration,
    EvaluationSettings,
    LimitSettings,
    RepositoryFetchSettings,
)
from tawebeval.errors import ConfigurationError, format_size
from tawebeval.sandbox import project_quotas as module
from tawebeval.sandbox.project_quotas import (
    check_quota_directories,
    compute_quota,
    find_quota_directories,
    make_quota_directories,
    probe_quota_enforcement,
    read_project_quota,
)
from tests.fakes.process import FakeProcess

GET, SET = 0x80000702, 0x80000802
FIRST = 7000
CONFIGURATION = Configuration(
    evaluations=EvaluationSettings(running=2),
    limits=LimitSettings(disk=10 * MIB, disk_files=50),
    repositories=RepositoryFetchSettings(tree_bytes=5 * MIB, max_tree_files=100),
)
WHOLE = 2**30
BLOCK = 4096


def changed(**sections: Any) -> Configuration:
    """Return the configuration with other sections."""
    return msgspec.structs.replace(CONFIGURATION, **sections)


class FakeKernel:
    """A file system of 1 GiB; `projects` are those of directories, `quotas` those of projects.

    `files` is how many a project has; `unknown` what the kernel says of one that was never seen,
    and `error` what it says to everything. `users` are those as whom `process` has asked.
    """

    def __init__(self, process: FakeProcess) -> None:
        self.process = process
        self.users: dict[str, set[int]] = {"project": set(), "quota": set()}
        self.projects: dict[int, tuple[int, ...]] = {}
        self.quotas: dict[int, tuple[int, int]] = {}
        self.files: dict[int, int] = {}
        self.unknown = 0
        self.error = 0

    def statvfs(self, path: Path) -> Any:
        """Return what is said of the directory's project, or of all."""
        *_, project, _ = self.projects.get(os.stat(path).st_ino, (0,) * 5)
        size, files = self.quotas.get(project, (WHOLE, 10**6))
        return SimpleNamespace(f_frsize=BLOCK, f_blocks=min(size, WHOLE) // BLOCK, f_files=files)

    def ioctl(self, place: int, request: int, content: bytes) -> bytes:
        """Tell or take the attributes of a directory."""
        inode = os.fstat(place).st_ino
        if request == 0x401C5820:
            self.users["project"].add(self.process.users[1])
            self.projects[inode] = struct.unpack("=5I8x", content)
        return struct.pack("=5I8x", *self.projects.get(inode, (0x10, 1, 2, 0, 3)))

    def syscall(self, number: int, place: int, command: Any, project: Any, content: Any) -> int:
        """Tell or take a quota."""
        assert number == 443
        self.users["quota"].add(self.process.users[1])
        assert stat.S_ISDIR(os.fstat(place).st_mode)
        *numbers, valid = struct.unpack("=8QI4x", content.raw)
        unknown = command.value == GET and project.value not in self.files
        if self.error or (unknown and self.unknown):
            ctypes.set_errno(self.error or self.unknown)
            return -1
        if command.value == GET:
            numbers[5] = self.files.get(project.value, 0)
            content.raw = struct.pack("=8QI4x", *numbers, 63)
        else:
            assert command.value == SET
            assert valid == 5
            self.quotas[project.value] = numbers[0] * 1024, numbers[3]
        return 0


class ProjectTestCase(SynchronousTestCase):
    """A state directory."""

    def setUp(self) -> None:
        self.state = Path(self.mktemp()).resolve()
        self.state.mkdir()
        if os.geteuid() == 0:
            os.chown(self.state, 1000, 1000)
        self.user = self.state.stat().st_uid
        self.process = FakeProcess(0)
        self.kernel = FakeKernel(self.process)
        self.patch(os, "statvfs", self.kernel.statvfs)
        self.patch(module, "fcntl", SimpleNamespace(ioctl=self.kernel.ioctl))
        self.patch(module, "libc", SimpleNamespace(syscall=self.kernel.syscall))

    def prepare(self, configuration: Configuration = CONFIGURATION, first: int = FIRST) -> int:
        """Make quota directories."""
        return make_quota_directories(self.state, configuration, first, self.process)

    def refused(self, *arguments: Any, **more: Any) -> str:
        """Return why they cannot be made."""
        with self.assertRaises(ConfigurationError) as caught:
            self.prepare(*arguments, **more)
        return str(caught.exception)

    def directories(self) -> list[Path]:
        """Return them."""
        return list(find_quota_directories(self.state))


class PrepareTests(ProjectTestCase):
    """What root does."""

    def test_made(self) -> None:
        """Each evaluation that may run has a directory, with a project of its own and a quota."""
        self.assertEqual(self.prepare(), 2)
        quota = compute_quota(CONFIGURATION)
        for number, directory in enumerate(self.directories()):
            self.assertEqual(directory, self.state / "quotas" / str(number))
            self.assertEqual(stat.S_IMODE(directory.stat().st_mode), 0o700)
            attributes = self.kernel.projects[directory.stat().st_ino]
            self.assertEqual(attributes, (0x210, 1, 2, FIRST + number, 3), "others are kept")
            self.assertEqual(read_project_quota(directory), quota)
        self.assertEqual(
            self.kernel.quotas, dict.fromkeys((7000, 7001), (quota.max_bytes, quota.max_files))
        )
        self.assertEqual(self.process.users, (0, 0, 0))
        self.assertEqual(self.kernel.users, {"project": {self.user}, "quota": {0}})

    def test_again(self) -> None:
        """Another time only quotas change, also while evaluations run; more are added."""
        self.prepare()
        (self.state / "quotas/0/tmp").mkdir()
        self.kernel.files = {7000: 12, 7001: 1}
        more = changed(evaluations=EvaluationSettings(running=3), limits=LimitSettings(disk=MIB))
        self.assertEqual(self.prepare(more), 3)
        self.assertEqual(len(self.directories()), 3)
        self.assertEqual(
            {read_project_quota(directory) for directory in self.directories()},
            {compute_quota(more)},
        )

    def test_fewer(self) -> None:
        """Those that are not needed any more get the new quota, too."""
        self.prepare()
        fewer = changed(
            evaluations=EvaluationSettings(running=1), limits=LimitSettings(disk=20 * MIB)
        )
        self.assertEqual(self.prepare(fewer), 2)
        quotas = {read_project_quota(directory) for directory in self.directories()}
        self.assertEqual(quotas, {compute_quota(fewer)})

    def test_never_seen(self) -> None:
        """A file system may know no project that has no files yet, as xfs does."""
        self.kernel.unknown = errno.ENOENT
        self.assertEqual(self.prepare(), 2)

    def test_project_in_use(self) -> None:
        """A project that has files elsewhere is nobody's to take."""
        self.kernel.files = {7001: 5}
        self.assertRegex(
            self.refused(), "quotas/1: 5 files .* the project 7001; .* --first-project"
        )
        self.kernel.files = {}
        self.assertEqual(self.prepare(first=8000), 2)

    def test_not_empty(self) -> None:
        """Nor does what lies in a directory change its project."""
        self.prepare()
        (self.state / "quotas/0/tmp").mkdir()
        self.assertRegex(self.refused(first=8000), "quotas/0 is not empty; stop the daemon")

    def test_no_quotas(self) -> None:
        """Where there are none nothing is made, and it is said why and what helps."""
        for error, why in (
            (errno.ESRCH, "project quotas are not enabled"),
            (errno.ENOSYS, "Function not implemented"),
            (errno.EPERM, "Operation not permitted"),
        ):
            self.kernel.error = error
            said = self.refused()
            self.assertTrue(said.startswith(f"{self.state}: {why}; "), said)
            self.assertIn("prjquota", said)
            self.assertEqual(list(self.state.iterdir()), [])

    def test_not_enforced(self) -> None:
        """Where quotas can be set, and are not enforced, that is said."""
        self.patch(os, "statvfs", lambda path: SimpleNamespace(f_blocks=9))
        self.assertIn("quotas/0: the file system enforces no quota", self.refused())

    def test_links(self) -> None:
        """Root follows no link of the user's."""
        precious = self.state.with_name("precious")
        precious.mkdir()
        (self.state / "quotas").symlink_to(precious)
        self.assertIn("Not a directory", self.refused())
        (self.state / "quotas").unlink()
        (self.state / "quotas").mkdir()
        (self.state / "quotas/0").symlink_to(precious)
        self.assertIn("Not a directory", self.refused())
        self.assertEqual(list(precious.iterdir()), [])
        self.assertEqual(self.kernel.projects, {})

    def test_ordinary_user(self) -> None:
        """Only root can do it, which others are told."""
        self.process = FakeProcess(1000)
        self.assertIn("run the command as root", self.refused())
        self.assertEqual(list(self.state.iterdir()), [])

    def test_no_state(self) -> None:
        """A state directory that is not there, or root's, is none of a daemon."""
        self.patch(os, "fstat", lambda place: SimpleNamespace(st_uid=0))
        self.assertIn(f"{self.state} belongs to root", self.refused())
        self.state.rmdir()
        self.assertIn(f"{self.state}: No such file or directory", self.refused())


class CheckTests(ProjectTestCase):
    """What the daemon makes sure of."""

    def setUp(self) -> None:
        super().setUp()
        self.prepare()

    def wrong(self, configuration: Configuration = CONFIGURATION) -> str:
        """Return what is wrong with them."""
        with self.assertRaises(ConfigurationError) as caught:
            check_quota_directories(self.directories(), configuration)
        return str(caught.exception)

    def test_quota(self) -> None:
        """It has room for all that any evaluation may have, and some to spare."""
        quota = compute_quota(CONFIGURATION)
        self.assertEqual(quota.max_bytes % 2**16, 0)
        self.assertEqual(
            quota.max_bytes - (15 * MIB + 100 * BLOCK) - MIB, 2**16 - 100 * BLOCK % 2**16
        )
        self.assertEqual(quota.max_files, 50 + 100 + 16)

    def test_good(self) -> None:
        """As they were made they are good; none at all are, too, and more than enough."""
        check_quota_directories(self.directories(), CONFIGURATION)
        check_quota_directories([], CONFIGURATION)
        fewer = changed(evaluations=EvaluationSettings(running=1))
        check_quota_directories(self.directories(), fewer)

    def test_too_few(self) -> None:
        """Fewer than evaluations may run would have some wait."""
        (self.state / "quotas/1").rmdir()
        self.assertRegex(
            self.wrong(), ": 1 quota directories for 2 evaluations .* `tawebeval quota`"
        )

    def test_too_small(self) -> None:
        """One with a quota that honest evaluations may meet is named, with both."""
        quota = compute_quota(CONFIGURATION)
        for there in (
            (quota.max_bytes - 2**16, quota.max_files),
            (quota.max_bytes, quota.max_files - 1),
        ):
            self.kernel.quotas[7001] = there
            said = self.wrong()
            self.assertIn(
                f"quotas/1: the quota is {format_size(there[0])} and {there[1]} files", said
            )
            self.assertIn(f"{format_size(quota.max_bytes)} and {quota.max_files}", said)
            self.assertIn("run `tawebeval quota` as root", said)

    def test_not_held(self) -> None:
        """One that is held to nothing is named, and what helps."""
        self.kernel.projects.clear()
        self.assertRegex(self.wrong(), f"quotas/0: .* no quota.*prjquota.* remove {self.state}")

    def test_order(self) -> None:
        """Slots are found by their numbers, and nothing else is one."""
        for name in ("10", "9", "x", "lost+found", "09", "123456", "\u0663"):
            (self.state / "quotas" / name).mkdir()
        self.assertEqual(
            [directory.name for directory in self.directories()], ["0", "1", "9", "10"]
        )


class TryTests(ProjectTestCase):
    """What the daemon tries."""

    def setUp(self) -> None:
        super().setUp()
        self.prepare()
        self.asked: list[int] = []
        self.error: int | None = errno.EDQUOT
        self.patch(os, "posix_fallocate", self.allocate)

    def allocate(self, file: int, start: int, size: int) -> None:
        """Refuse, if the test wants that."""
        self.asked.append(size)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))

    def test_refused(self) -> None:
        """More than the quota is asked for in each, refused, and nothing is left."""
        before = os.listdir("/proc/self/fd")
        for error in (errno.EDQUOT, errno.ENOSPC):
            self.error = error
            self.asked.clear()
            probe_quota_enforcement(self.directories())
            self.assertEqual(self.asked, [compute_quota(CONFIGURATION).max_bytes + MIB] * 2)
        self.assertEqual([list(directory.iterdir()) for directory in self.directories()], [[], []])
        self.assertEqual(os.listdir("/proc/self/fd"), before)

    def test_given(self) -> None:
        """A quota beyond which there is more is none."""
        self.error = None
        with self.assertRaises(ConfigurationError) as caught:
            probe_quota_enforcement(self.directories())
        self.assertRegex(
            str(caught.exception), "quotas/0: the quota of .* is not enforced; .*prjquota"
        )

    def test_fails(self) -> None:
        """What fails otherwise says nothing of quotas; it is told with its path."""
        self.error = errno.EIO
        with self.assertRaises(OSError) as caught:
            probe_quota_enforcement(self.directories())
        self.assertEqual(caught.exception.filename, str(self.state / "quotas/0"))


class CommandTests(SynchronousTestCase):
    """`tawebeval quota`, as from a shell."""

    def setUp(self) -> None:
        self.asked: list[object] = []
        self.error: ConfigurationError | None = None
        self.patch(module, "make_quota_directories", self.prepare)

    def prepare(self, state: Path, configuration: Configuration, first: int, _: object) -> int:
        """Note what is asked for."""
        self.asked += [state, configuration.limits.disk, first]
        if self.error is not None:
            raise self.error
        return 3

    def run_command(self, *options: str) -> Result:
        """Return how it ends."""
        file = Path(self.mktemp())
        file.write_text("[limits]\ndisk = 65536\n")
        environment = {"STATE_DIRECTORY": "/some/state"}
        return CliRunner().invoke(main, ["quota", "-c", str(file), *options], env=environment)

    def test_made(self) -> None:
        """It tells how many were made, and how large."""
        result = self.run_command()
        self.assertEqual(self.asked, [Path("/some/state"), 65536, 1_000_000])
        self.assertRegex(result.output, r"^/some/state/quotas: 3 times \d+ bytes and \d+ files\n$")
        self.assertEqual(result.exit_code, 0)

    def test_first_project(self) -> None:
        """The projects are the operator's to choose."""
        self.run_command("--first-project", "7000")
        self.assertEqual(self.asked[-1], 7000)

    def test_fails(self) -> None:
        """Where it cannot it says why, and the status tells."""
        self.error = ConfigurationError("project quotas are not enabled")
        result = self.run_command()
        self.assertEqual(result.output, "tawebeval: project quotas are not enabled\n")
        self.assertEqual(result.exit_code, 2)
