"""`daemon.metrics`: readiness, its reasons, and the probe of a sandbox that has failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration, EvaluationSettings
from tawebeval.core.evaluations import EvaluationCounters
from tawebeval.daemon import metrics as module
from tawebeval.daemon.assembly import make_periodic_timer
from tawebeval.daemon.metrics import (
    DISK_CHECK_PERIOD,
    DISK_CHECK_TIMEOUT,
    SANDBOX_PROBE_PERIOD,
    DiskCheck,
    Readiness,
    SandboxProbe,
    find_disk_fault,
    probe_disk_write,
)
from tawebeval.errors import SetupProblem
from tests.fakes.clients import MULTIPART, Service, form, parts
from tests.fakes.world import InlineThreads, SlowThreads

FREE = 1000  # bytes that have to be
FULL = "has less than 1000 bytes free (twice limits.free_disk), or no free inode"


def fails(number: int) -> Any:
    """Return a call that fails so."""

    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


class FaultTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.place = Path(self.mktemp())
        self.place.mkdir()

    def find(self, **changes: int) -> str | None:
        room = {"f_bavail": 10, "f_frsize": 100, "f_files": 50, "f_favail": 5}
        found = SimpleNamespace(**{**room, **changes})
        self.patch(module, "os", SimpleNamespace(statvfs=lambda path: found))
        return find_disk_fault(self.place, FREE)

    def test_disk_is_full_without_free_bytes_or_free_inodes(self) -> None:
        for changes, full in (
            ({"f_bavail": 9}, True),
            ({"f_bavail": 10}, False),
            ({"f_favail": 0}, True),
            ({"f_favail": 0, "f_files": 0}, False),
        ):
            self.assertEqual(self.find(**changes), FULL if full else None)

    def test_failed_write_is_a_fault_of_the_disk(self) -> None:
        for number, words in (
            (errno.EROFS, "cannot be written to: Read-only file system"),
            (errno.EIO, "cannot be written to: Input/output error"),
            (errno.ENOSPC, FULL),
        ):
            self.patch(module, "probe_disk_write", fails(number))
            self.assertEqual(self.find(), words)

    def test_unusable_disk_is_reported_with_the_reason(self) -> None:
        fault = find_disk_fault(self.place / "missing", 0)
        self.assertEqual(fault, "cannot be used: its directory was removed; restart the daemon")

    def test_write_probe_removes_its_file_and_compares_the_content(self) -> None:
        self.assertIsNone(find_disk_fault(self.place, 0))
        self.assertEqual(list(self.place.iterdir()), [])
        self.patch(module, "DISK_PROBE_CONTENT", Forgetful(b"x"))
        self.assertRaises(OSError, probe_disk_write, self.place)


class Forgetful(bytes):
    """What is never read as it was written."""

    def __ne__(self, other: object) -> bool:
        return True


class DiskTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.threads: Any = SlowThreads()
        self.wrong: str | None = None
        self.tried: list[tuple[Path, int]] = []
        self.disk = DiskCheck("state", Path("/s"), self.threads, self.clock)
        self.patch(module, "find_disk_fault", self.find)

    def find(self, path: Path, free: int) -> str | None:
        self.tried.append((path, free))
        return self.wrong

    def check(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.disk.start_check_if_due(FREE)
            self.clock.advance(1)

    def test_disk_is_probed_each_period_and_each_second_while_it_has_a_fault(self) -> None:
        self.check(1)
        self.threads.step()
        self.assertEqual(self.tried, [(Path("/s"), FREE)])
        self.check(DISK_CHECK_PERIOD - 1)
        self.assertEqual(self.threads.waiting, [])
        self.wrong = "is full"
        self.check(1)
        self.assertIsNone(self.disk.fault)
        self.threads.step()
        self.assertEqual(self.disk.fault, "is full")
        for _ in range(3):
            self.check(1)
            self.threads.step()
        self.wrong = None
        self.check(1)
        self.assertEqual(self.disk.fault, "is full")
        self.threads.step()
        self.assertIsNone(self.disk.fault)

    def test_disk_that_hangs_is_probed_by_one_thread_and_reported_until_it_answers(self) -> None:
        self.check(DISK_CHECK_TIMEOUT)
        self.assertIsNone(self.disk.fault)
        self.check(20)
        self.assertEqual(len(self.threads.waiting), 1)
        fault = "hangs: writing a small file took over 5 seconds"
        self.assertEqual(self.disk.fault, fault)
        self.threads.step()
        self.assertIsNone(self.disk.fault)
        self.check(1)
        self.assertEqual(len(self.threads.waiting), 1)

    def test_disk_is_probed_again_after_a_defect_in_a_probe(self) -> None:
        self.patch(module, "find_disk_fault", lambda *_: 1 / 0)
        self.check(1)
        self.threads.step()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.check(DISK_CHECK_PERIOD)
        self.assertEqual(len(self.threads.waiting), 1)


class ReadinessTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.service = Service(
            Path(self.mktemp()).resolve(),
            Configuration(evaluations=EvaluationSettings(queued=0)),
            1,
            0,
        )
        self.faults: dict[str, str] = {}
        self.patch(module, "find_disk_fault", lambda path, free: self.faults.get(str(path)))
        self.tally = EvaluationCounters()
        threads: Any = InlineThreads()
        disks = [
            DiskCheck(name, Path(path), threads, self.service.reactor)
            for name, path in (("state", "/s"), ("cache", "/c"))
        ]
        self.readiness = Readiness(self.service.registry, self.tally, disks, FREE)

    def check(self, *words: str) -> None:
        """Hold that there is an obstacle for each of these words, in that order, and no other."""
        self.service.reactor.advance(DISK_CHECK_PERIOD)
        self.readiness.check_disks()
        found = self.readiness.find_unreadiness_reasons()
        self.assertEqual(len(found), len(words), found)
        for obstacle, word in zip(found, words, strict=True):
            self.assertIn(word, obstacle)

    def test_disk_fault_has_the_name_of_the_disk_without_its_path(self) -> None:
        self.faults = {"/s": "is full", "/c": "cannot be used: why"}
        self.check(
            "the file system of the state is full",
            "the file system of the cache cannot be used: why",
        )
        del self.faults["/s"]
        self.check("of the cache cannot be used")

    def test_full_queue_is_not_ready(self) -> None:
        connection = self.service.connect()
        connection.request("POST /evaluate", form(parts()), Content_Type=MULTIPART)
        self.assertEqual(connection.answer().status, 200)
        self.check("the queue is full (evaluations.queued)")
        self.service.world.end()
        self.check()

    def test_stopping_daemon_is_not_ready(self) -> None:
        Deferred.fromCoroutine(self.service.registry.drain_and_close())
        self.check("is stopping")

    def test_daemon_is_not_ready_until_its_latest_fault_is_cleared(self) -> None:
        self.tally.set_latest_machine_fault("the sandbox could not be started", 1)
        self.check("the sandbox could not be started")
        self.tally.set_latest_machine_fault(None, 2)
        self.check()


FAULT = "the sandbox could not be started"


class SandboxProbeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.tally = EvaluationCounters()
        self.threads: Any = SlowThreads()
        self.outcome: SetupProblem | Exception | None = None
        self.probe = SandboxProbe(self.tally, self.probe_sandbox, self.threads, self.clock)
        timer = make_periodic_timer(
            (self.probe.start_probe_if_needed,), self.clock, SANDBOX_PROBE_PERIOD
        )
        timer.startService()
        self.addCleanup(timer.stopService)

    def probe_sandbox(self) -> SetupProblem | None:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def lose(self) -> None:
        self.tally.set_latest_machine_fault(FAULT, self.clock.seconds())

    def try_once(self) -> list[str]:
        """Let the time for a trial come, and the trial end; return what is logged."""
        with capturedLogs() as logged:
            self.clock.advance(SANDBOX_PROBE_PERIOD)
            self.assertEqual(len(self.threads.waiting), 1)
            self.threads.step()
        return [str(formatEvent(event)) for event in logged]

    def test_failed_probe_is_logged_once_and_repeated_until_one_succeeds(
        self,
    ) -> None:
        for _ in range(2):
            self.lose()
            fault = self.tally.latest_machine_fault
            self.outcome = ("no bwrap", "install it")
            self.assertEqual(self.try_once(), ["the sandbox does not work: no bwrap; install it"])
            self.assertEqual(self.try_once(), [])
            self.assertIs(self.tally.latest_machine_fault, fault)
            self.outcome = None
            (said,) = self.try_once()
            self.assertIn(FAULT, said)
            self.assertIsNone(self.tally.latest_machine_fault)
            self.clock.pump([SANDBOX_PROBE_PERIOD] * 3)
            self.assertEqual(self.threads.waiting, [])

    def test_slow_probe_delays_the_next_probe(self) -> None:
        self.lose()
        self.clock.pump([SANDBOX_PROBE_PERIOD] * 4)
        self.assertEqual(len(self.threads.waiting), 1)
        self.threads.step()
        self.assertIsNone(self.tally.latest_machine_fault)

    def test_evaluation_lost_during_a_probe_keeps_the_daemon_unready(self) -> None:
        self.lose()
        self.clock.advance(SANDBOX_PROBE_PERIOD)
        self.lose()
        self.threads.step()
        self.assertIsNotNone(self.tally.latest_machine_fault)

    def test_defect_of_a_probe_is_logged_and_the_probe_repeated(self) -> None:
        self.lose()
        self.outcome = ZeroDivisionError()
        self.try_once()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.outcome = None
        self.try_once()
        self.assertIsNone(self.tally.latest_machine_fault)

    def test_probe_without_free_descriptors_is_logged_in_one_line(self) -> None:
        self.lose()
        self.outcome = OSError(errno.EMFILE, "Too many open files")
        (said,) = self.try_once()
        self.assertIn("could not be probed: [Errno 24] Too many open files", said)
        self.assertIsNotNone(self.tally.latest_machine_fault)
