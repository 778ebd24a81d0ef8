"""`git.cache`: maintenance, so that the thousandth fetch is as quick as the first."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, capturedLogs, formatEvent

from tawebeval.core.checkout import Commit
from tawebeval.git.command import Outcome
from tawebeval.sandbox.commands import Reach
from tests.fakes import OID, Command
from tests.test_repositories import DONE, OTHER, URL, RepositoriesTestCase, Running, failed

MAINTENANCE = ["repack", "pack-refs", "prune"]
BLOCK = 4096
PATIENCE = 5


class MaintenanceTestCase(RepositoriesTestCase):
    """Each fetch adds 34 packs, which is enough for maintenance; `repacks` are its answers."""

    def setUp(self) -> None:
        super().setUp()
        self.repacks: list[Outcome | Running] = []
        self.grow = self.add_packs

    def add_packs(self, repository: Path) -> None:
        """Add as many files as 34 fetches do."""
        for number in range(34):
            for suffix in ("idx", "pack", "rev"):
                name = f"objects/pack/pack-{self.fetched}-{number}.{suffix}"
                (repository / name).write_bytes(b"x" * BLOCK)

    def script(self, command: Command) -> Outcome | object:
        """Answer as git does, which makes one pack of all."""
        if command.arguments[0] != "repack":
            return super().script(command)
        return self.repack(command.repository, self.repacks.pop(0) if self.repacks else DONE)

    async def repack(self, repository: Path, answer: Outcome | Running) -> Outcome:
        """Answer a repack."""
        outcome = await answer.outcome() if isinstance(answer, Running) else answer
        if outcome.status == 0:
            for part in sorted(repository.glob("objects/pack/*"))[3:]:
                part.unlink()
        return outcome

    def fetch_again(self, url: str = URL) -> Deferred[Commit]:
        """Ask for a commit that has to be fetched."""
        self.here.clear()
        for marker in self.root.glob("*.git/commits/*"):
            marker.unlink()
        return self.check_out(url=url)

    def fetched_again(self, url: str = URL) -> None:
        """Fetch."""
        self.successResultOf(self.fetch_again(url))

    def maintained(self) -> list[str]:
        """Return the commands of maintenance so far."""
        return [name for name in self.names() if name in MAINTENANCE]

    def packs(self) -> int:
        """Return how many packs there are."""
        return len(list(self.path().glob("objects/pack/*.pack")))


class DueTests(MaintenanceTestCase):
    """When there is maintenance, and how."""

    def test_due(self) -> None:
        """After about thirty fetches, once; and not before there are as many more."""
        self.repositories.maintain()
        self.fetched_again()
        self.assertEqual(self.maintained(), [])
        self.repositories.maintain()
        self.assertEqual(self.maintained(), MAINTENANCE)
        self.assertEqual(self.packs(), 1)
        self.grow = lambda repository: None
        self.fetched_again()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), MAINTENANCE)

    def test_few_fetches(self) -> None:
        """Where there are few files there is none."""
        self.grow = lambda repository: None
        self.fetched_again()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), [])

    def test_commands(self) -> None:
        """Git writes there alone, in bounded time, and no more than what was there."""
        self.fetched_again()
        before = self.repositories.sizes["repositories"]
        self.repositories.maintain()
        (repack, *rest) = self.git.commands[-3:]
        self.assertEqual(repack.reach, Reach((self.path(),)))
        self.assertEqual((repack.timeout, repack.largest), (60, before))
        self.assertIn("--geometric=2", repack.arguments)
        self.assertTrue(all(command.follows for command in rest))

    def test_refs(self) -> None:
        """No more than the eight newest commits have a ref of their own."""
        self.grow = lambda repository: None
        for _ in range(20):
            self.fetched_again()
        refs = [way[1] for way in self.ways()]
        self.assertEqual(refs[:2], [f"{OID}:refs/commits/1", f"{OID}:refs/commits/2"])
        self.assertEqual(len(set(refs)), 8)

    def test_turns(self) -> None:
        """One repository at a time, in the order in which they came to need it."""
        running = Running()
        self.repacks = [running]
        for url in ("/a", "/b"):
            self.fetched_again(url)
        for _ in range(2):
            self.repositories.maintain()
        self.assertEqual(self.maintained(), ["repack"])
        running.end()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), MAINTENANCE * 2)
        repositories = [c.repository for c in self.git.commands if c.arguments[0] == "repack"]
        urls = [(path / "url").read_text() for path in repositories]
        self.assertEqual(urls, ["/a\n", "/b\n"])

    def test_evicted(self) -> None:
        """One that has gone meanwhile needs none."""
        self.fetched_again()
        self.release()
        self.repositories._entries.clear()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), [])


class MarkersTests(MaintenanceTestCase):
    """The size of what there is one more of with each commit."""

    def test_counted(self) -> None:
        """Markers are counted as they are written, and again at the start of a daemon."""
        self.grow = lambda repository: None
        self.successResultOf(self.check_out())
        before = self.repositories.sizes["repositories"]
        self.here.clear()
        self.successResultOf(self.check_out(oid=OTHER))
        self.assertEqual(self.repositories.sizes["repositories"], before + BLOCK)
        self.repositories = self.make()
        self.repositories.load()
        self.assertEqual(self.repositories.sizes["repositories"], before + BLOCK)


class FetchTests(MaintenanceTestCase):
    """Fetches and maintenance of one repository, which are never at the same time."""

    def setUp(self) -> None:
        super().setUp()
        self.running = Running()
        self.repacks = [self.running]
        self.fetched_again()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), ["repack"])

    def test_soon(self) -> None:
        """A fetch waits for maintenance that ends soon."""
        asked = self.fetch_again()
        self.clock.advance(PATIENCE - 1)
        self.assertNoResult(asked)
        self.running.end()
        self.successResultOf(asked)
        self.assertEqual(self.running.killed, 0)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_killed(self) -> None:
        """It does not wait for longer: git is killed then, and leaves nothing."""
        (self.path() / "objects/pack/.tmp-1-pack-x.pack").touch()
        asked = self.fetch_again()
        self.clock.advance(PATIENCE)
        self.assertEqual(self.running.killed, 1)
        self.assertNoResult(asked)
        self.running.end(failed("", -1))
        self.successResultOf(asked)
        self.assertEqual(list(self.path().glob("objects/pack/.tmp*")), [])
        self.assertEqual(self.packs(), 68)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_seldom(self) -> None:
        """What had to be killed is tried again after more fetches, not with the next one."""
        self.fetch_again()
        self.clock.advance(PATIENCE)
        self.running.end(failed("", -1))
        self.repositories.maintain()
        self.assertEqual(self.maintained(), ["repack"])
        self.fetched_again()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), ["repack", *MAINTENANCE])

    def test_one_that_waits(self) -> None:
        """One that waits when maintenance begins does not wait for longer, either."""
        self.running.end()
        fetching, self.running = Running(), Running()
        self.repacks = [self.running]
        self.fetched_again()
        self.fetches = [fetching]
        first = self.fetch_again()
        self.repositories.maintain()
        second = self.check_out(oid=OTHER)
        fetching.end()
        self.successResultOf(first)
        self.assertEqual(self.maintained()[-1], "repack")
        self.here.clear()
        self.clock.advance(PATIENCE)
        self.assertEqual(self.running.killed, 1)
        self.running.end(failed("", -1))
        self.successResultOf(second)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_long_fetch(self) -> None:
        """Maintenance does not wait for a long fetch: others may need it, too."""
        self.running.end()
        fetching = Running()
        self.fetched_again()
        self.fetched_again("/b")
        self.fetches = [fetching]
        asked = self.fetch_again()
        for _ in range(2):
            self.repositories.maintain()
        self.assertEqual(self.maintained(), MAINTENANCE)
        self.clock.advance(PATIENCE)
        self.repositories.maintain()
        self.assertEqual(self.maintained(), MAINTENANCE * 2)
        fetching.end()
        self.successResultOf(asked)

    def test_check_out(self) -> None:
        """A commit that is here is checked out meanwhile."""
        self.lose_trees()
        self.successResultOf(self.check_out())
        self.assertEqual(self.names()[-1], "read-tree")

    def test_damage(self) -> None:
        """A repository that is damaged is not removed below it."""
        self.lose_trees()
        self.broken["read-tree"] = failed("error: inflate: data stream error")
        asked = self.check_out()
        self.assertNoResult(asked)
        del self.broken["read-tree"]
        self.running.end()
        self.successResultOf(asked)

    def test_close(self) -> None:
        """The daemon's end kills it, and waits for that."""
        closed = Deferred.fromCoroutine(self.repositories.close())
        self.assertEqual(self.running.killed, 1)
        self.assertNoResult(closed)
        self.running.end(failed("", -1))
        self.successResultOf(closed)
        self.successResultOf(Deferred.fromCoroutine(self.repositories.close()))


class FailureTests(MaintenanceTestCase):
    """Maintenance that fails."""

    def test_logged(self) -> None:
        """It is in the log, what git said as well; what git has left is removed."""
        self.repacks = [failed("fatal: no")]
        self.fetched_again()
        (self.path() / "shallow.lock").touch()
        with capturedLogs() as events:
            self.repositories.maintain()
        (said,) = [formatEvent(e) for e in events if e["log_level"] == LogLevel.warn]
        self.assertIn("could not be packed", said)
        self.assertIn("fatal: no", said)
        self.assertFalse((self.path() / "shallow.lock").exists())

    def test_machine(self) -> None:
        """So it is where git cannot be started; evaluations go on."""
        self.fetched_again()
        script, self.git.script = self.git.script, lambda command: 1 // 0
        self.repositories.maintain()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.git.script = lambda command: (_ for _ in ()).throw(OSError(2, "no git"))
        self.repositories._worn[self.path().name] = None
        with capturedLogs() as events:
            self.repositories.maintain()
        self.assertIn("no git", "".join(map(str, map(formatEvent, events))))
        self.git.script = script
        self.fetched_again()


class RoomTests(MaintenanceTestCase):
    """What maintenance takes of the disk meanwhile."""

    capacity = 34 * 3 * BLOCK * 3

    def test_room(self) -> None:
        """Who is packed counts twice, so others go; afterwards it counts for what it takes."""
        running = Running()
        self.repacks = [running]
        self.fetched_again("/a")
        self.fetched_again("/b")
        self.release()
        before = self.repositories.sizes["repositories"]
        self.repositories.maintain()
        self.assertEqual(len(list(self.root.glob("*.git"))), 1)
        self.assertEqual(self.repositories.sizes["repositories"], before)
        running.end()
        self.assertLess(self.repositories.sizes["repositories"], before / 4)

    def test_too_large(self) -> None:
        """One that takes more than half of the cache is left as it is."""
        self.capacity = 34 * 3 * BLOCK
        self.repositories = self.make()
        self.fetched_again()
        self.repositories.maintain()
        self.assertEqual(self.maintained(), [])
