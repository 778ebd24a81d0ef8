"""`tawebeval.readiness`: whether work would be taken, and why not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import readiness as module
from tawebeval.config import Configuration, Evaluations
from tawebeval.readiness import Readiness
from tawebeval.tally import EvaluationTally
from tests.fake_clients import MULTIPART, Service, form, parts

FREE = 1000  # bytes that have to be


def file_system(**changes: int) -> SimpleNamespace:
    """Return what is told of a file system with room."""
    room = {"f_bavail": 10, "f_frsize": 100, "f_files": 50, "f_favail": 5}
    return SimpleNamespace(**{**room, **changes})


class ReadinessTests(SynchronousTestCase):
    """A daemon in memory, on two file systems."""

    def setUp(self) -> None:
        self.service = Service(
            Path(self.mktemp()).resolve(), Configuration(evaluations=Evaluations(queued=0)), 1, 0
        )
        self.systems = {"/s": file_system(), "/c": file_system()}
        self.closed: set[str] = set()
        self.patch(
            module,
            "os",
            SimpleNamespace(
                statvfs=lambda path: self.systems[str(path)],
                access=lambda path, mode: mode == self.wanted and str(path) not in self.closed,
                W_OK=os.W_OK,
                X_OK=os.X_OK,
            ),
        )
        self.wanted = os.W_OK | os.X_OK
        self.tally = EvaluationTally()
        self.readiness = Readiness(
            self.service.registry,
            self.tally,
            (("state", Path("/s")), ("cache", Path("/c"))),
            FREE,
        )

    def check(self, *words: str) -> None:
        """Hold that there is an obstacle for each of these words, in that order, and no other."""
        found = self.readiness.obstacles()
        self.assertEqual(len(found), len(words), found)
        for obstacle, word in zip(found, words, strict=True):
            self.assertIn(word, obstacle)

    def test_ready(self) -> None:
        """Nothing is wrong."""
        self.check()

    def test_disk(self) -> None:
        """Bytes and inodes have to be left, on both; not where inodes are not counted."""
        for path, name in (("/s", "state"), ("/c", "cache")):
            for changes, full in (
                ({"f_bavail": 9}, True),
                ({"f_bavail": 10}, False),
                ({"f_favail": 0}, True),
                ({"f_favail": 0, "f_files": 0}, False),
            ):
                self.systems[path] = file_system(**changes)
                self.check(*[f"of the {name} is full"] * full)
            self.systems[path] = file_system()

    def test_disk_that_fails(self) -> None:
        """One that cannot be looked at cannot be used, and why is told."""

        def fail(path: object) -> Any:
            raise OSError(5, "Input/output error")

        self.patch(module, "os", SimpleNamespace(statvfs=fail))
        self.check("state cannot be used: Input/output", "cache cannot be used: Input/output")

    def test_closed(self) -> None:
        """So it is with one where nothing can be written, whatever room there is."""
        for path, name in (("/s", "state"), ("/c", "cache")):
            self.closed = {path}
            self.check(f"{name} cannot be written to")
        self.closed = set()
        self.check()

    def test_real_disk(self) -> None:
        """A real one, of which the root may be full while we look."""
        self.patch(module, "os", os)
        self.systems.clear()
        readiness = Readiness(self.service.registry, self.tally, (("state", Path("/")),), 0)
        self.assertEqual(readiness.obstacles(), [])

    def test_queue(self) -> None:
        """A full queue has no place for more."""
        connection = self.service.connect()
        connection.request("POST /evaluate", form(parts()), Content_Type=MULTIPART)
        self.assertEqual(connection.answer().status, 200)
        self.check("as many evaluations are waiting as may")
        self.service.world.end()
        self.check()

    def test_stopping(self) -> None:
        """A daemon that stops takes nothing."""
        Deferred.fromCoroutine(self.service.registry.close())
        self.check("about to stop")

    def test_fault(self) -> None:
        """What was lost here counts until something shows that it is mended."""
        self.tally.judge("the sandbox could not be started", 1)
        self.check("the sandbox could not be started")
        self.tally.judge(None, 2)
        self.check()
