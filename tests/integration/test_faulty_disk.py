"""A state directory on a disk that stops, or fails: forms wait, or are refused; nothing else."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SkipTest

from tests.integration.client import Answer, data, text
from tests.integration.harness import TWISTD, Daemon, until
from tests.integration.raw import Connection, body_of, head_of, part
from tests.integration.small_disks import CLOSED, MIB, PRIVATE, SmallDisks, SmallDisksTestCase
from tests.integration.unprivileged import USER
from tests.integration.uploads import DESCRIBE, described

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_MAKE = (
    'truncate -s "$TEST_SIZE" "$place.ext4" && mkfs.ext4 -q -E "root_owner=$TEST_OWNER"'
    ' "$place.ext4" && mkdir -p "$place"'
    ' && mount -o loop,errors=remount-ro "$place.ext4" "$place"'
    ' && rmdir "$place/lost+found" && chmod 700 "$place" || exit 1\n'
)
_MOUNT = f'for place in "$STATE_DIRECTORY" "$CACHE_DIRECTORY"; do {_MAKE}done\nexec "$@"'
# The disk goes on as soon as the test lets it, or has ended.
_FREEZE = 'fsfreeze --freeze "$0" && echo frozen && read -r _; fsfreeze --unfreeze "$0"'


@functools.cache
def missing() -> str:
    """Return what this machine lacks for such disks, "" if there is nothing."""
    if USER is None:
        return "only root can mount file systems of its own for a daemon"
    with tempfile.TemporaryDirectory(prefix="tawebeval-disk-") as folder:
        variables = {"PATH": _PATH, "TEST_SIZE": "16M", "TEST_OWNER": "0:0", "place": folder + "/x"}
        command = [*PRIVATE, _MAKE]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return f"no ext4 can be mounted here: {done.stderr.strip()}" if done.returncode else ""


class FaultyDisks(SmallDisks):
    """A daemon whose state and cache lie on disks that stop, and fail, as real ones do.

    Each is an ext4 in a file, mounted in a mount namespace of the daemon's own. The kernel itself
    lets all writing wait (fsfreeze(8)) or refuses it after an error (ext4(5),
    `errors=remount-ro`). Only root can do that.
    """

    _failed = False

    program = (*(*PRIVATE, _MOUNT, "sh"), str(TWISTD))

    def __init__(self, configuration: str, size: int) -> None:
        assert USER is not None, "only root can mount"
        owner = f"{USER.pw_uid}:{USER.pw_gid}"
        Daemon.__init__(self, configuration, TEST_SIZE=str(size), TEST_OWNER=owner)

    def remains(self) -> list[str]:
        """Return what is left of evaluations, as far as that can still be read."""
        return list(map(str, self.used_groups())) if self._failed else super().remains()

    @contextmanager
    def frozen(self, place: Path) -> Iterator[None]:
        """Within it whatever writes there waits."""
        nsenter = ("nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "sh", "-c", _FREEZE, str(place))
        with subprocess.Popen(
            nsenter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": _PATH}
        ) as freezer:
            assert freezer.stdin is not None and freezer.stdout is not None
            assert freezer.stdout.readline() == b"frozen\n"
            try:
                yield
            finally:
                freezer.stdin.close()
        assert freezer.returncode == 0

    def fail(self, place: Path) -> None:
        """Let the kernel find an error there: from then on it takes nothing any more."""
        self._failed = True
        device = self._device(place)
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test\n")

    def _device(self, place: Path) -> str:
        number = os.stat(self.seen(place)).st_dev
        link = os.readlink(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        return os.path.basename(link)


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
        [limits]
        free_disk = 1048576
        """

    async def setUp(self) -> None:
        if missing():
            raise SkipTest(missing())
        await super().setUp()

    async def post(self, content: bytes) -> Answer:
        files = [("s", "file", content)]
        return await self.client.post(self.repository.url, self.commit, DESCRIBE, files=files)


class SlowDiskTests(FaultyDiskTestCase):
    """A disk that takes nothing for as long as a test says."""

    async def test_forms_wait_for_a_frozen_disk(self) -> None:
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

    async def test_clients_that_leave_meanwhile_leave_nothing(self) -> None:
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

    async def test_cached_commit_is_evaluated_on_a_frozen_cache(self) -> None:
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

    async def test_failed_disk_refuses_forms_with_the_reason(self) -> None:
        self.disks.fail(self.disks.state)
        for content in (SMALL, LARGE):
            problem = (await self.post(content)).problem(503)
            self.assertEqual(problem["detail"], f"the form cannot be stored: {CLOSED}")
        # Besides CLOSED the kernel tells EBADMSG, of what it has written in part.
        await self.not_ready("the file system of the state cannot be written to: ")
        self.assertEqual(await self.client.figure("uploaded_bytes"), 0)
