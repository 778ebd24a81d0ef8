"""A state directory on a disk that stops: forms wait, and nothing else."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SkipTest

from tests.integration.client import Answer, data, text
from tests.integration.harness import TWISTD, Daemon
from tests.integration.small_disks import MIB, PRIVATE, SmallDisks, SmallDisksTestCase
from tests.integration.unprivileged import USER
from tests.integration.uploads import DESCRIBE, described

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_MAKE = (
    'truncate -s "$TEST_SIZE" "$place.ext4" && mkfs.ext4 -q -E "root_owner=$TEST_OWNER"'
    ' "$place.ext4" && mkdir -p "$place"'
    ' && mount -o loop "$place.ext4" "$place"'
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
    """A daemon whose state and cache lie on disks that stop, as real ones do.

    Each is an ext4 in a file, mounted in a mount namespace of the daemon's own. The kernel itself
    lets all writing wait (fsfreeze(8)). Only root can do that.
    """

    program = (*(*PRIVATE, _MOUNT, "sh"), str(TWISTD))

    def __init__(self, configuration: str, size: int) -> None:
        assert USER is not None, "only root can mount"
        owner = f"{USER.pw_uid}:{USER.pw_gid}"
        Daemon.__init__(self, configuration, TEST_SIZE=str(size), TEST_OWNER=owner)

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

    async def test_cached_commit_is_evaluated_on_a_frozen_cache(self) -> None:
        await self.run_command("true")
        with self.disks.frozen(self.disks.cache):
            for _ in range(30):  # more than there are threads
                self.assertEqual(text(await self.run_command("cat README")), "an evaluator\n")

    async def uploads_are_gone(self) -> None:
        """Wait until nothing of any upload is left, nor counted."""
        await super().uploads_are_gone()
        await self.daemon.nothing_left()
