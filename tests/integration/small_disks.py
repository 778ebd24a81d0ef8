"""A daemon whose state and cache lie on small file systems, which fill up and are mended.

They are mounted in a mount namespace of the daemon's own, and seen from outside through its root
directory in `/proc`. Only root can do that.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from twisted.trial.unittest import SkipTest

from tests.integration.client import text
from tests.integration.harness import TWISTD, Daemon, DaemonTestCase, is_kept, until
from tests.integration.unprivileged import USER

_MOUNT = (
    'mkdir -p "$STATE_DIRECTORY" "$CACHE_DIRECTORY"\n'
    'for place in "$STATE_DIRECTORY" "$CACHE_DIRECTORY"; do\n'
    '  mount -t tmpfs -o "$TEST_OPTIONS" tmpfs "$place" || exit 1\n'
    "done\n"
    'exec "$@"'
)
MIB = 2**20
CLOSED = "Read-only file system"

PRIVATE = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
"""What runs a script of the shell whose mounts nobody else sees."""


class SmallDisks(Daemon):
    """Such a daemon, with so many bytes on each of the two."""

    program = (
        *(*PRIVATE, _MOUNT, "sh"),
        str(TWISTD),
    )

    def __init__(self, configuration: str, size: int, *options: str) -> None:
        """Let each be mounted with further options (tmpfs(5))."""
        assert USER is not None, "only root can mount"
        options = (f"size={size}", "mode=700", f"uid={USER.pw_uid}", *options)
        super().__init__(configuration, TEST_OPTIONS=",".join(options))

    def seen(self, place: Path) -> Path:
        return Path(f"/proc/{self.pid}/root{place}")

    @property
    def starter_socket(self) -> Path:
        return self.seen(super().starter_socket)

    def remains(self) -> list[str]:
        """Return what is left of evaluations, where the daemon has it."""
        found = self.used_groups()
        if self.running:
            for name in ("evaluations", "uploads"):
                places = self.seen(self.state / name).glob("*")
                found += (place for place in places if not is_kept(place))
        return list(map(str, found))

    def fill(self, place: Path) -> None:
        """Leave no room at all."""
        with open(self.seen(place) / "filler", "ab", buffering=0) as filler:
            for size in (2**16, 2**12, 1):
                with suppress(OSError):
                    while filler.write(bytes(size)):
                        pass
        room = os.statvfs(self.seen(place))
        assert room.f_bavail == 0, room

    def empty(self, place: Path) -> None:
        (self.seen(place) / "filler").unlink(missing_ok=True)

    def close(self, place: Path) -> None:
        """Let nothing be written there, as if the file system had become read-only."""
        # What has a file open for writing, as the lock is, cannot be made so itself.
        self._inside("mount", "--bind", str(place), str(place))
        self._inside("mount", "-o", "remount,bind,ro", str(place))

    def open(self, place: Path) -> None:
        self._inside("umount", "--lazy", str(place))

    def _inside(self, *command: str) -> None:
        """Run a command in the daemon's mount namespace."""
        nsenter = ("nsenter", f"--mount=/proc/{self.pid}/ns/mnt")
        assert shutil.which(nsenter[0]), "util-linux has it"
        status = os.spawnvp(os.P_WAIT, nsenter[0], [*nsenter, *command])
        assert status == 0, command


class SmallDisksTestCase(DaemonTestCase):
    """A daemon with `size` bytes for each of the two; what a test does to them is undone after."""

    kind: ClassVar[type[SmallDisks]] = SmallDisks
    size: ClassVar[int] = 24 * MIB

    configuration = """
        [repositories]
        protocols = ["file"]
        cache = 8388608
        [evaluations]
        running = 4
        [limits]
        free_disk = 1048576
        """

    async def setUp(self) -> None:
        if USER is None:
            raise SkipTest("only root can mount file systems of its own for a daemon")
        cls = type(self)
        if cls._shared is None:
            cls._shared = self.disks = self.kind(cls.configuration, cls.size)
        else:
            assert isinstance(cls._shared, SmallDisks)
            self.disks = cls._shared
        await super().setUp()
        await self.ready()

    async def obstacles(self) -> list[str]:
        """Return why the daemon says that it is not ready."""
        answer = await self.client.get("/health/ready")
        return [] if answer.code == 200 else list(answer.problem(503)["reasons"])

    async def not_ready(self, reason: str) -> None:
        """Wait until the daemon is not ready, for a reason that begins like this at least."""

        async def found() -> bool:
            return any(one.startswith(reason) for one in await self.obstacles())

        await until(found, f"not ready: {reason}")

    async def ready(self) -> None:
        """Wait until the daemon has found nothing wrong."""

        async def found() -> bool:
            return not await self.obstacles()

        await until(found, "ready")

    async def check_mended(self) -> None:
        """Hold that all is as before, by itself: ready, and evaluations come to a good end."""
        await self.daemon.nothing_left()
        self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")
        await self.ready()
