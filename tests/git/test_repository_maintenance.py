"""`git.repository`: maintenance, so that the thousandth fetch is as quick as the first."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable
from pathlib import Path
from typing import NoReturn

from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, capturedLogs, formatEvent

from tawebeval.core.checkout import Commit
from tawebeval.git.command import GitResult
from tawebeval.sandbox.helper_sandbox import SandboxAccess
from tests.cases.git import DONE, OTHER, URL, CacheTestCase, Command, Running, failed
from tests.fakes.world import OID

MAINTENANCE = "maintenance"
BLOCK = 4096


class MaintenanceTestCase(CacheTestCase):
    """Each fetch adds 34 packs, which makes maintenance due; `runs` are results of maintenance."""

    def setUp(self) -> None:
        super().setUp()
        self.runs: list[GitResult | Running] = []
        self.grow = self.add_packs

    def add_packs(self, repository: Path) -> None:
        for number in range(34):
            for suffix in ("idx", "pack", "rev"):
                name = f"objects/pack/pack-{self.fetched}-{number}.{suffix}"
                (repository / name).write_bytes(b"x" * BLOCK)

    def script(self, command: Command) -> GitResult | Awaitable[GitResult]:
        """Answer as git does, which makes one pack of all."""
        if command.name != MAINTENANCE:
            return super().script(command)
        return self.pack(command.repository, self.runs.pop(0) if self.runs else DONE)

    async def pack(self, repository: Path, answer: GitResult | Running) -> GitResult:
        result = await answer.result() if isinstance(answer, Running) else answer
        if result.status == 0:
            for part in sorted(repository.glob("objects/pack/*"))[3:]:
                part.unlink()
        return result

    def request(self, url: str = URL) -> Deferred[Commit]:
        self.present.clear()
        for marker in self.root.glob("*.git/commits/*"):
            marker.unlink()
        return self.check_out(url)

    def fetch_again(self, *urls: str) -> None:
        for url in urls or (URL,):
            self.successResultOf(self.request(url))

    def maintain(self, times: int = 1) -> None:
        for _ in range(times):
            self.cache.start_maintenance()

    def check_maintained(self, *expected: str) -> None:
        found = [name for name in self.names() if name == MAINTENANCE]
        self.assertEqual(found, list(expected))

    def maintained_urls(self) -> list[str]:
        """Return the URLs of the repositories that had maintenance, in order."""
        runs = [command for command in self.git.commands if command.name == MAINTENANCE]
        return [(command.repository / "url").read_text().strip() for command in runs]

    def count_packs(self) -> int:
        return len(list(self.path().glob("objects/pack/*.pack")))


class DueTests(MaintenanceTestCase):
    def test_maintenance_is_due_after_about_thirty_fetches(self) -> None:
        self.maintain()
        self.fetch_again()
        self.check_maintained()
        self.maintain()
        self.check_maintained(MAINTENANCE)
        self.assertEqual(self.count_packs(), 1)
        self.grow = lambda repository: None
        self.fetch_again()
        self.maintain()
        self.check_maintained(MAINTENANCE)

    def test_maintenance_writes_to_repository_alone(self) -> None:
        self.fetch_again()
        before = self.cache.disk_sizes["repositories"]
        self.maintain()
        command = self.git.commands[-1]
        self.assertEqual(command.reach, SandboxAccess((self.path(),)))
        self.assertEqual((command.timeout, command.max_file_size), (30, 2 * before))
        self.assertEqual(command.arguments[-4:], (MAINTENANCE, "run", "--quiet", "--task=gc"))

    def test_only_eight_newest_commits_have_ref_of_their_own(self) -> None:
        self.grow = lambda repository: None
        self.fetch_again(*[URL] * 20)
        refs = [command.arguments[-1] for command in self.fetch_commands()]
        self.assertEqual(refs[:2], [f"{OID}:refs/commits/1", f"{OID}:refs/commits/2"])
        self.assertEqual(len(set(refs)), 8)

    def test_one_repository_at_time_has_maintenance(self) -> None:
        running = Running()
        self.runs = [running]
        self.fetch_again("/a", "/b")
        self.maintain(2)
        self.check_maintained(MAINTENANCE)
        running.end()
        self.maintain(2)
        self.assertEqual(self.maintained_urls(), ["/a", "/b"])

    def test_markers_are_measured_as_they_are_written(self) -> None:
        self.grow = lambda repository: None
        self.get()
        before = self.cache.disk_sizes["repositories"]
        self.present.clear()
        self.get(oid=OTHER)
        self.assertEqual(self.cache.disk_sizes["repositories"], before + BLOCK)
        self.restart()
        self.assertEqual(self.cache.disk_sizes["repositories"], before + BLOCK)

    def test_start_of_daemon_takes_no_memory_for_each_marker(self) -> None:
        self.get()
        for number in range(1000):
            (self.path() / "commits" / f"{number:040}").touch()
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        self.restart()
        self.assertLess(tracemalloc.get_traced_memory()[1], 200_000)


class LockTests(MaintenanceTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.running = Running()
        self.runs = [self.running]
        self.fetch_again()
        self.maintain()
        self.check_maintained(MAINTENANCE)

    def test_fetch_waits_for_the_end_of_maintenance(self) -> None:
        requested = self.request()
        self.assertNoResult(requested)
        self.runs = []
        self.running.end()
        self.successResultOf(requested)
        self.assertEqual(self.running.killed, 0)

    def test_repository_in_use_has_no_maintenance_but_another_one(self) -> None:
        self.running.end()
        fetching = Running()
        self.fetch_again(URL, "/b")
        self.fetches = [fetching]
        requested = self.request()
        self.maintain()
        self.check_maintained(MAINTENANCE, MAINTENANCE)
        self.assertEqual(self.maintained_urls()[1:], ["/b"])
        fetching.end()
        self.successResultOf(requested)
        self.maintain()
        self.assertEqual(self.maintained_urls()[2:], [URL])

    def test_marked_commit_is_checked_out_during_maintenance(self) -> None:
        self.lose_trees()
        self.get()
        self.assertEqual(self.names()[-1], "read-tree")

    def test_damaged_repository_is_not_removed_during_maintenance(self) -> None:
        self.lose_trees()
        self.broken["read-tree"] = failed("error: inflate: data stream error")
        requested = self.check_out()
        self.assertNoResult(requested)
        del self.broken["read-tree"]
        self.running.end()
        self.successResultOf(requested)

    def test_daemons_end_kills_maintenance(self) -> None:
        closed = Deferred.fromCoroutine(self.cache.close())
        self.assertEqual(self.running.killed, 1)
        self.assertNoResult(closed)
        self.running.end(failed("", -1))
        self.successResultOf(closed)
        self.successResultOf(Deferred.fromCoroutine(self.cache.close()))


class FailureTests(MaintenanceTestCase):
    def test_failure_is_logged_with_gits_stderr(self) -> None:
        self.runs = [failed("fatal: no")]
        self.fetch_again()
        (self.path() / "shallow.lock").touch()
        with capturedLogs() as events:
            self.maintain()
        (warning,) = [formatEvent(e) for e in events if e["log_level"] == LogLevel.warn]
        self.assertIn("could not pack", warning)
        self.assertIn("fatal: no", warning)
        self.assertFalse((self.path() / "shallow.lock").exists())

    def test_maintenance_that_takes_too_long_is_tried_after_more_fetches(self) -> None:
        self.runs = [failed("", -9, timed_out=True)]
        self.fetch_again()
        with capturedLogs() as events:
            self.maintain(2)
        self.assertIn("git took over 30 seconds", "".join(map(formatEvent, events)))
        self.check_maintained(MAINTENANCE)
        self.fetch_again()
        self.maintain()
        self.check_maintained(MAINTENANCE, MAINTENANCE)

    def test_errors_of_the_machine_and_defects_are_logged(self) -> None:
        for error, words in ((OSError(2, "no git"), "no git"), (ZeroDivisionError(), "defect: ")):
            self.setUp()
            self.fetch_again()

            def fail(command: Command, error: Exception = error) -> NoReturn:
                raise error

            script, self.git.script = self.git.script, fail
            with capturedLogs() as events:
                self.maintain()
            self.assertIn(words, "".join(map(formatEvent, events)))
            self.assertEqual(len(self.flushLoggedErrors()), isinstance(error, ZeroDivisionError))
            self.git.script = script
            self.fetch_again()


class SizeTests(MaintenanceTestCase):
    capacity = 34 * 3 * BLOCK * 4

    def test_new_packs_count_beside_old_ones(self) -> None:
        running = Running()
        self.runs = [running]
        self.fetch_again("/a", "/b")
        self.release()
        before = self.cache.disk_sizes["repositories"]
        self.maintain()
        self.assertEqual(len(list(self.root.glob("*.git"))), 1)
        self.assertEqual(self.cache.disk_sizes["repositories"], before * 3 // 2)
        running.end()
        self.assertLess(self.cache.disk_sizes["repositories"], before / 4)

    def test_repository_that_takes_more_than_third_of_cache_is_left_as_it_is(self) -> None:
        self.capacity = 34 * 3 * BLOCK
        self.restart()
        self.fetch_again()
        self.maintain()
        self.check_maintained()

    def test_repository_that_was_evicted_in_meantime_gets_none(self) -> None:
        for url in ("/a", "/b", "/c", "/d"):
            self.fetch_again(url)
            self.release()
        self.maintain()
        self.assertEqual(self.maintained_urls(), ["/b"])
