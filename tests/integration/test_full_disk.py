"""A state or cache directory that is full, closed or gone: said clearly, survived, and mended."""

from __future__ import annotations

import os
from typing import Any

from tests.integration.client import failure, text
from tests.integration.small_disks import CLOSED, MIB, SmallDisksTestCase

FULL = "No space left on device"
NO_ROOM = "has less than 2 MiB free (twice limits.free_disk), or no free inode"


class DiskTests(SmallDisksTestCase):
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
