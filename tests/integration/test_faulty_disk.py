"""A state directory on a disk that stops, or fails: forms wait, or are refused; nothing else."""

from __future__ import annotations

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SkipTest

from tests.integration.client import Answer, data, text
from tests.integration.faulty_disks import FaultyDisks, missing
from tests.integration.harness import until
from tests.integration.raw import Connection, body_of, head_of, part
from tests.integration.small_disks import CLOSED, MIB, SmallDisksTestCase
from tests.integration.uploads import DESCRIBE, described

SMALL, LARGE = b"42\n", bytes(range(256)) * 4096 * 3


class FaultyDiskTestCase(SmallDisksTestCase):
    """A daemon on two disks of ext4, with room for what tests send."""

    kind = FaultyDisks
    size = 96 * MIB
    disks: FaultyDisks

    configuration = """
        [repositories]
        protocols = ["file"]
        [evaluations]
        running = 4
        grace = 0.3
        [http]
        window = 1
        [limits]
        free_disk = 1048576
        [health]
        free_disk = 1048576
        """

    async def setUp(self) -> None:
        if missing():
            raise SkipTest(missing())
        await super().setUp()

    async def post(self, content: bytes) -> Answer:
        """Return the answer to a form."""
        files = [("s", "file", content)]
        return await self.client.post(self.repository.url, self.commit, DESCRIBE, files=files)


class SlowDiskTests(FaultyDiskTestCase):
    """A disk that takes nothing for as long as a test says."""

    async def test_forms_wait(self) -> None:
        """Forms wait for the disk, and are good; the daemon serves all others meanwhile."""
        before = self.daemon.memory
        contents = [SMALL] * 30 + [LARGE] * 3
        with self.disks.frozen(self.disks.state):
            answers: list[Deferred[Answer]] = [
                Deferred.fromCoroutine(self.post(content)) for content in contents
            ]
            # Until it is known that the disk takes nothing: longer than a client may be slow.
            while not await self.hangs():
                self.assertEqual((await self.client.get("/health")).code, 200)
            self.assertFalse(any(answer.called for answer in answers))
            self.assertLess(self.daemon.memory - before, 24 * MIB)
        for answer, content in zip(await gatherResults(answers), contents, strict=True):
            self.assertEqual(answer.code, 200, answer.body)
            events = await self.client.follow(answer.json["evaluation_id"])
            self.assertEqual(data(events), [described(("s", "file", content))])
        await self.uploads_are_gone()
        await self.ready()

    async def hangs(self) -> bool:
        """Tell whether the daemon has found that it waits for the disk."""
        return any("of the state hangs" in one for one in await self.obstacles())

    async def test_clients_go(self) -> None:
        """Of clients that go while the disk takes nothing nothing is left when it does."""
        solution = part("submission[s]", LARGE, "file")
        fields = {
            "repository[url]": self.repository.url,
            "commit_oid": self.commit,
            "evaluator_cmd": "true",
        }
        small = body_of(part(name, value.encode()) for name, value in fields.items())
        small = part("submission[s]", SMALL, "file") + small
        with self.disks.frozen(self.disks.state):
            for sent in (head_of(40 * MIB) + solution[:MIB], head_of(len(small)) + small) * 4:
                with Connection(self.daemon.port) as connection:
                    connection.send(sent)
                    await until(
                        lambda: self.client.figure("uploaded_bytes"), "the upload is counted"
                    )
            self.assertEqual((await self.client.get("/health")).code, 200)
        await self.uploads_are_gone()

    async def test_cache(self) -> None:
        """What has been fetched is evaluated although nothing can be written to the cache."""
        await self.run_command("true")
        with self.disks.frozen(self.disks.cache):
            for _ in range(30):  # more than there are threads
                self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")

    async def uploads_are_gone(self) -> None:
        """Wait until nothing of any upload is left, nor counted."""
        await super().uploads_are_gone()
        await self.daemon.nothing_left()


class FailedDiskTests(FaultyDiskTestCase):
    """A disk that has failed, which nobody mends."""

    async def test_not_ready(self) -> None:
        """A file system that the kernel closes after an error: forms get 503, and it says why."""
        self.disks.fail(self.disks.state)
        for content in (SMALL, LARGE):
            problem = (await self.post(content)).problem(503)
            self.assertEqual(problem["detail"], f"the form cannot be stored: {CLOSED}")
        # Besides CLOSED the kernel tells EBADMSG, of what it has written in part.
        await self.not_ready("the file system of the state cannot be written to: ")
        self.assertEqual(await self.client.figure("uploaded_bytes"), 0)
