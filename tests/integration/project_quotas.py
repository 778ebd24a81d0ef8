"""Tests of a state directory on a file system that holds each evaluation to a project quota.

It is ext4 in a file, mounted in a mount namespace of the daemon's own. Only root can mount it, and
only where the kernel has project quotas (QFMT_V2), as Debian's have. So these tests are not among
those that `make test` runs: `make test TESTS=tests.integration.project_quotas`.
"""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import tempfile
from pathlib import Path

from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SkipTest

from tests.integration.attacks import fillers
from tests.integration.client import failure, python, text
from tests.integration.harness import TWISTD, Daemon, DaemonTestCase, until
from tests.integration.processes import new_word
from tests.integration.unprivileged import PYTHON, USER

MIB = 2**20
DISK, DISK_FILES = 24 * MIB, 400
HELD = 30 * MIB
"""`limits.disk`, and what the other settings below add to it."""

_MAKE = 'truncate -s 300M "$0" && mkfs.ext4 -q -O quota,project -E quotatype=prjquota "$0"'
_MOUNT = f"""
set -e
mkdir -p "$STATE_DIRECTORY"
[ -e "$TEST_IMAGE" ] || (set -- && {_MAKE.replace("$0", "$TEST_IMAGE")})
mount -o loop,prjquota "$TEST_IMAGE" "$STATE_DIRECTORY"
chown "$TEST_USER" "$STATE_DIRECTORY"
"$TEST_COMMAND" quota --config "$TEST_CONFIGURATION"
exec "$@"
"""

# Writes as fast as it can, and tells how far it got.
FLOOD = """
import os, sys
written = 0
try:
    for number in range(100):
        with open(f"{sys.argv[1]}/{number}", "wb", buffering=0) as file:
            for _ in range(64):
                written += file.write(bytes(2**16))
except OSError as error:
    print(error.strerror, flush=True)
print(written)
sys.exit(1)
"""

# Moves a directory to no project at all, and lets nothing in it inherit one.
LEAVE = """
import fcntl, os, struct, sys
place = os.open(sys.argv[1], os.O_RDONLY)
flags, extent, extents, project, copied = struct.unpack(
    "=5I8x", fcntl.ioctl(place, 0x801C581F, bytes(28)))
assert flags & 0x200 and project
attributes = struct.unpack("=Q", fcntl.ioctl(place, 0x80086601, bytes(8)))[0]
for request, content in (
    (0x401C5820, struct.pack("=5I8x", flags, extent, extents, 0, copied)),
    (0x401C5820, struct.pack("=5I8x", flags & ~0x200, extent, extents, project, copied)),
    (0x40086602, struct.pack("=Q", attributes & ~0x20000000)),
):
    try:
        fcntl.ioctl(place, request, content)
        print("left")
    except OSError as error:
        print(error.strerror)
"""


@functools.cache
def reason_to_skip() -> str | None:
    """Return why there can be no such file system here."""
    if USER is None:
        return "only root can mount a file system with quotas"
    with tempfile.TemporaryDirectory(prefix="tawebeval-test-") as folder:
        mount = ("unshare", "--mount", "mount", "-o", "loop,prjquota", "image", ".")
        for command in (("sh", "-c", _MAKE, "image"), mount):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                return f"no file system with project quotas can be mounted here: {done.stderr}"
    return None


class QuotaDisk(Daemon):
    """Such a daemon."""

    program = (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        _MOUNT,
        "sh",
        str(TWISTD),
    )

    def __init__(self, configuration: str) -> None:
        assert USER is not None, "only root can mount"
        super().__init__(
            configuration,
            TEST_USER=USER.pw_name,
            TEST_COMMAND=str(TWISTD.with_name("tawebeval")),
        )
        self._environment = {
            **self._environment,
            "TEST_IMAGE": str(self.folder / "image"),
            "TEST_CONFIGURATION": str(self.folder / "tawebeval.toml"),
        }

    def remains(self) -> list[str]:
        """Return what is left of evaluations, where the daemon has it."""
        found = self.used_groups()
        if self.running:
            state = Path(f"/proc/{self.pid}/root{self.state}")
            for pattern in ("evaluations/*", "uploads/*", "quotas/*/*"):
                found += state.glob(pattern)
        return list(map(str, found))


class ProjectQuotaTests(DaemonTestCase):
    """Two evaluations at once, of which each may have 24 MiB and its tree 4."""

    configuration = f"""
        [repositories]
        protocols = ["file"]
        tree_bytes = {4 * MIB}
        tree_files = 200
        [evaluations]
        running = 2
        grace = 0.3
        [limits]
        disk = {DISK}
        disk_files = {DISK_FILES}
        free_disk = {16 * MIB}
        """

    async def setUp(self) -> None:
        reason = reason_to_skip()
        if reason is not None:
            raise SkipTest(reason)
        cls = type(self)
        if cls._shared is None:
            cls._shared = QuotaDisk(cls.configuration)
        await super().setUp()

    async def stopped(self, command: str, limit: str = "disk", value: int = DISK) -> str:
        """Hold that a limit of the disk has ended a command; return what it has printed."""
        events = await self.run_command(command)
        error = failure(events, "disk")
        self.assertEqual((error["limit"], error["value"]), (f"limits.{limit}", value))
        return text(events)

    async def test_flood(self) -> None:
        """However fast a program writes, the file system takes no more than the quota."""
        for place in ("$PWD", "$TEMPORARY_DIRECTORY", "/tmp"):
            said = await self.stopped(f"{python(FLOOD)} {place}")
            if said:  # nobody has looked in time
                error, written = said.splitlines()
                self.assertIn(error, (os.strerror(errno.EDQUOT), os.strerror(errno.ENOSPC)))
                self.assertLess(DISK, int(written))
                self.assertLess(int(written), HELD)

    async def test_hidden(self) -> None:
        """What lies in no directory counts as well: files that are mapped."""
        for place, program in (("$PWD", fillers.MAPPED), ("/tmp", fillers.NAMELESS)):
            await self.stopped(f'{python(program)} "{place}" {new_word()} 2>/dev/null')

    async def test_inodes(self) -> None:
        """So do files with nothing in them."""
        command = f'{python(fillers.INODES)} "$TEMPORARY_DIRECTORY" {new_word()}'
        await self.stopped(f"{command} 2>/dev/null", "disk_files", DISK_FILES)

    async def test_honest(self) -> None:
        """Whoever keeps within it notices nothing, in the tree neither, again and again."""
        self.repository.write("folder/file", "as it was\n")
        self.commit = self.repository.commit()
        command = (
            "head -c 10000000 /dev/zero >big && mv big $TEMPORARY_DIRECTORY && echo more >>README"
            " && rm -r folder && mkdir folder && cat README && ls folder"
        )
        for _ in range(6):
            events = await self.run_command(command)
            self.assertEqual(text(events), "an evaluator\nmore\n", events)

    async def test_leaving(self) -> None:
        """No file leaves its project: the filter refuses it, and without that the kernel does."""
        events = await self.run_command(f"{python(LEAVE)} $TEMPORARY_DIRECTORY")
        self.assertEqual(text(events), f"{os.strerror(errno.EOPNOTSUPP)}\n" * 3)
        assert USER is not None
        place = self.daemon.state / "quotas/0"
        outside = ["setpriv", f"--reuid={USER.pw_uid}", "--clear-groups", "unshare", "--user"]
        out, _, _ = await self.run_there(*outside, PYTHON, "-c", LEAVE, str(place))
        self.assertEqual(out.decode(), f"{os.strerror(errno.EINVAL)}\n" * 3)

    async def run_there(self, *command: str) -> tuple[bytes, bytes, int]:
        """Run a command in the daemon's mount namespace; return its output and status."""
        nsenter = [f"--mount=/proc/{self.daemon.pid}/ns/mnt", "--", *command]
        environment = {**os.environ, "STATE_DIRECTORY": str(self.daemon.state)}
        return await getProcessOutputAndValue("nsenter", nsenter, env=environment)

    async def test_doctor(self) -> None:
        """The doctor tells that the quotas are there."""
        program = str(TWISTD.with_name("tawebeval"))
        configuration = str(self.daemon.folder / "tawebeval.toml")
        out, _, _ = await self.run_there(program, "doctor", "--config", configuration)
        self.assertRegex(out.decode(), "ok +quotas +.*quotas: 2 evaluations")

    async def test_too_small(self) -> None:
        """The daemon does not start with quotas that are less than evaluations may have."""
        await self.daemon.stop()
        file = self.daemon.folder / "tawebeval.toml"
        before = file.read_text()
        self.daemon.program = [
            word.replace('"$TEST_COMMAND" quota --config "$TEST_CONFIGURATION"\n', "")
            for word in self.daemon.program
        ]
        file.write_text(before.replace(str(DISK), str(2 * DISK)))
        self.daemon.start()
        await until(lambda: not self.daemon.running, "it has ended")
        self.assertIn("quotas/0: the quota is", self.daemon.log.splitlines()[-1])
        file.write_text(before)
        del self.daemon.program
        self.daemon.start()
        await self.daemon.ready()
