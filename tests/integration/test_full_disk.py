"""A state or cache directory that is full, closed or gone: said clearly, survived, and mended.

Both lie on small file systems, which are mounted in a mount namespace of the daemon's own, and seen
from outside through its root directory in `/proc`. Only root can do that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest

from tests.integration.client import failure, text
from tests.integration.harness import TWISTD, Daemon, DaemonTestCase, is_kept, until
from tests.integration.unprivileged import USER

FULL = "No space left on device"
NO_ROOM = "has less than 2 MiB free (twice limits.free_disk), or no free inode"
_MOUNT = (
    'mkdir -p "$STATE_DIRECTORY" "$CACHE_DIRECTORY"\n'
    'for place in "$STATE_DIRECTORY" "$CACHE_DIRECTORY"; do\n'
    '  mount -t tmpfs -o "$TEST_OPTIONS" tmpfs "$place" || exit 1\n'
    "done\n"
    'exec "$@"'
)
MIB = 2**20
CLOSED = "Read-only file system"


class SmallDisks(Daemon):
    """Such a daemon, with 24 MiB on each of the two."""

    program = (
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, "sh"),
        str(TWISTD),
    )

    def __init__(self, configuration: str) -> None:
        assert USER is not None, "only root can mount"
        options = (f"size={24 * MIB}", "mode=700", f"uid={USER.pw_uid}")
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
        with open(self.seen(place) / "filler", "ab", buffering=0) as filler:
            for size in (2**16, 2**12, 1):
                with contextlib.suppress(OSError):
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
        nsenter = ("nsenter", f"--mount=/proc/{self.pid}/ns/mnt")
        assert shutil.which(nsenter[0]), "util-linux has it"
        status = os.spawnvp(os.P_WAIT, nsenter[0], [*nsenter, *command])
        assert status == 0, command


class DiskTests(DaemonTestCase):
    """What a test does to the two file systems is undone after it."""

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
        await super().setUp()
        assert isinstance(self.daemon, SmallDisks)
        self.disks = self.daemon
        await self.ready()

    def make_daemon(self) -> Daemon:
        return SmallDisks(self.configuration)

    async def obstacles(self) -> list[str]:
        answer = await self.client.get("/health/ready")
        return [] if answer.code == 200 else list(answer.problem(503)["reasons"])

    async def not_ready(self, reason: str) -> None:
        """Wait until the daemon is not ready, for a reason that begins like this at least."""

        async def found() -> bool:
            return any(one.startswith(reason) for one in await self.obstacles())

        await until(found, f"not ready: {reason}")

    async def ready(self) -> None:
        async def found() -> bool:
            return not await self.obstacles()

        await until(found, "ready")

    async def check_mended(self) -> None:
        """Hold that all is as before, by itself: ready, and evaluations come to a good end."""
        await self.daemon.nothing_left()
        self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")
        await self.ready()

    async def lost(self, command: str = "true") -> dict[str, Any]:
        """Return the end of an evaluation that is accepted and cannot be run."""
        return failure(await self.run_command(command), "lost")

    def other_commit(self) -> None:
        """Let evaluations be by a commit that was never fetched."""
        self.repository.write("new", os.urandom(MIB))
        self.commit = self.repository.commit()

    async def test_form_on_a_full_disk_gets_503(self) -> None:
        self.disks.fill(self.disks.state)
        for content in (b"x", bytes(3 * MIB)):
            answer = await self.client.post(
                self.repository.url,
                self.commit,
                "true",
                files=[("solution", "solution.txt", content)],
            )
            problem = answer.problem(503)
            self.assertEqual(problem["detail"], f"the form cannot be stored: {FULL}")
            self.assertIsNotNone(answer.header("Retry-After"))
        await self.not_ready(f"the file system of the state {NO_ROOM}")
        self.disks.empty(self.disks.state)
        await self.check_mended()

    async def test_evaluator_that_fills_the_disk_is_stopped(self) -> None:
        error = failure(await self.run_command("cat /dev/zero >file"), "disk")
        self.assertEqual((error["limit"], error["value"]), ("limits.free_disk", MIB))
        await self.check_mended()

    async def test_evaluation_that_prints_to_a_full_disk_is_lost(self) -> None:
        command = "cd $TEMPORARY_DIRECTORY; touch gate; echo ready"
        command += "; while test -e gate; do sleep 0.01; done; seq 1000"
        identifier = await self.begin_and_wait(command)
        (gate,) = self.disks.seen(self.disks.state / "evaluations").glob("*/tmp/gate")
        self.disks.fill(self.disks.state)
        gate.unlink()
        events = await self.client.follow(identifier)
        self.assertEqual(text(events[:2]), "ready\n")
        self.assertIn(FULL, failure(events, "lost")["message"])
        self.disks.empty(self.disks.state)
        await self.check_mended()

    async def test_commit_without_room_in_the_cache_is_lost(self) -> None:
        await self.run_command("true")
        self.other_commit()
        self.disks.fill(self.disks.cache)
        error = await self.lost()
        self.assertIn(FULL, error["message"])
        await self.not_ready(f"the file system of the cache {NO_ROOM}")
        self.disks.empty(self.disks.cache)
        await self.check_mended()

    async def test_pack_that_fills_the_cache_is_no_damage(self) -> None:
        self.repository.write("huge", os.urandom(25 * MIB))
        self.commit = self.repository.commit()
        error = await self.lost()
        self.assertEqual(error["message"], f"git cannot use the disk: {FULL}")
        self.assertIn(FULL, error["stderr"])
        self.repository.write("huge", b"")
        self.commit = self.repository.commit()
        await self.check_mended()
        self.assertNotIn("is damaged", self.daemon.log)

    async def test_read_only_file_system_is_reported(self) -> None:
        for place, name in ((self.disks.state, "state"), (self.disks.cache, "cache")):
            self.other_commit()
            self.disks.close(place)
            try:
                obstacle = f"the file system of the {name} cannot be written to: {CLOSED}"
                await self.not_ready(obstacle)
                if name == "state":
                    answer = await self.client.post(self.repository.url, self.commit, "true")
                    self.assertIn(CLOSED, answer.problem(503)["detail"])
                else:
                    self.assertIn(CLOSED, (await self.lost())["message"])
            finally:
                self.disks.open(place)
            await self.check_mended()
