"""`daemon.reload`: all is read before any of it counts."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from twisted.internet.testing import MemoryReactor
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.daemon import reload as module
from tawebeval.daemon.reload import EarlyHangup, Reloading
from tawebeval.errors import ConfigurationError
from tawebeval.linux.secretfiles import digest
from tawebeval.reloadable import Outcome, Rereading, Source
from tests.test_reporting import FakeSupervisor

NONE: Mapping[str, str] = MappingProxyType({})


@attrs.define
class FakeSource:
    """A file that says something, or is broken."""

    name: str
    says: str = "old"
    broken: str = ""
    notes: Sequence[str] = ()
    path: Path = Path("/etc/file")
    counts: str = "old"

    def rereadings(self) -> Sequence[Rereading[Any]]:
        """Return what reads it."""
        take = partial(setattr, self, "counts")
        return [Rereading(self.name, (self.path,), self._read, take, lambda _: self.notes)]

    def _read(self) -> str:
        if self.broken:
            raise ConfigurationError(self.broken)
        return self.says


class HangupTests(SynchronousTestCase):
    """SIGHUP, before and after the start."""

    def start(self) -> tuple[Reloading, MemoryReactor]:
        """Start what takes the signal, on a reactor that does not run yet."""
        self.addCleanup(signal.signal, signal.SIGHUP, signal.getsignal(signal.SIGHUP))
        reactor = MemoryReactor()
        reloading = Reloading((FakeSource("file"),), "", FakeSupervisor("/notify"), reactor)
        self.patch(module.os, "access", lambda *_: True)
        early = EarlyHangup()
        early.install()
        if self.came:
            signal.raise_signal(signal.SIGHUP)
        reloading.startService()
        reloading.stopService()
        self.assertIs(signal.getsignal(signal.SIGHUP), early)
        return reloading, reactor

    came = False

    def test_none(self) -> None:
        """Where none came nothing is read again."""
        self.assertEqual(self.start()[1].whenRunningHooks, [])

    def test_early(self) -> None:
        """One that comes during the start ends nothing, and counts when all is there."""
        self.came = True
        reloading, reactor = self.start()
        self.assertEqual(reactor.whenRunningHooks, [(reloading.reload, (), {})])


class ReloadingTests(SynchronousTestCase):
    """What an order to reload comes to."""

    def reload(
        self,
        *sources: Source | None,
        copies: str = "",
        originals: Mapping[str, str] = NONE,
    ) -> tuple[Outcome, list[str]]:
        """Reload; return what has come of it, and what is logged of each level."""
        supervisor = FakeSupervisor("/notify")
        reloading = Reloading(sources, copies, supervisor, MemoryReactor())
        with capturedLogs() as logged:
            outcome = reloading.reload(originals)
        self.assertEqual([one.split("=")[0] for one in supervisor.told], ["RELOADING", "READY"])
        self.levels = [event["log_level"] for event in logged]
        return outcome, [str(formatEvent(event)) for event in logged]

    def test_taken(self) -> None:
        """What was read counts, and the log names it."""
        one, two = FakeSource("one", "new"), FakeSource("two", "new", path=Path("/etc/two"))
        outcome, said = self.reload(one, None, two)
        self.assertEqual(outcome, Outcome())
        self.assertEqual((one.counts, two.counts), ("new", "new"))
        self.assertEqual(said, ["one: read again from /etc/file", "two: read again from /etc/two"])

    def test_refused(self) -> None:
        """With one mistake nothing changes, and each mistake is told."""
        good = FakeSource("good", "new", notes=["a note"])
        others = [FakeSource(name, "new", f"{name}: line 1") for name in ("bad", "worse")]
        outcome, said = self.reload(good, *others)
        self.assertEqual(outcome, Outcome(problems=("bad: line 1", "worse: line 1")))
        self.assertEqual([one.counts for one in (good, *others)], ["old", "old", "old"])
        self.assertEqual(
            said, ["nothing is reloaded: bad: line 1", "nothing is reloaded: worse: line 1"]
        )
        self.assertEqual(self.levels, [LogLevel.error] * 2)

    def test_noted(self) -> None:
        """What does not count yet is told, and logged as a warning."""
        outcome, said = self.reload(FakeSource("one", "new", notes=["listen: has changed"]))
        self.assertEqual(outcome, Outcome(notes=("listen: has changed",)))
        self.assertEqual(said[-1], "listen: has changed")
        self.assertEqual(self.levels, [LogLevel.info, LogLevel.warn])

    def test_copies(self) -> None:
        """Of what systemd has handed over it is told that this is a copy, of other files not."""
        path = Path("/run/credentials/x/tokens")
        for copies, count in ((str(path.parent), 1), ("/run/credentials/y", 0), ("", 0)):
            outcome, _ = self.reload(FakeSource("callers.tokens", path=path), copies=copies)
            self.assertEqual(len(outcome.notes), count, outcome)
            for note in outcome.notes:
                self.assertTrue(note.startswith(f"callers.tokens: {path} is a copy"), note)
                self.assertIn("restart", note)

    def test_stale(self) -> None:
        """By a copy whose original has changed nothing is reloaded; other files do not matter."""
        path = Path(self.mktemp()).absolute()
        path.write_text("alice")
        folder, same = str(path.parent), digest(path)
        for copies, originals, well in (
            (folder, {path.name: same}, True),
            (folder, {path.name: "12ab"}, False),
            (folder, {path.name: ""}, False),
            (folder, {"other": "12ab"}, True),
            ("/elsewhere", {path.name: "12ab"}, True),
            ("", {path.name: "12ab"}, True),
        ):
            one, two = FakeSource("callers.tokens", "new", path=path), FakeSource("two", "new")
            outcome, _ = self.reload(one, two, copies=copies, originals=originals)
            self.assertEqual(len(outcome.problems), 0 if well else 1, (copies, originals))
            for problem in outcome.problems:
                self.assertTrue(problem.startswith(f"callers.tokens: {path} is a copy"), problem)
                self.assertIn("restart", problem)
            counts = "new" if well else "old"
            self.assertEqual((one.counts, two.counts), (counts, counts))

    def test_unreadable_copy(self) -> None:
        """Of a copy that cannot be read its reader says so, and nobody that it is another."""
        folder = Path(self.mktemp()).absolute()
        (folder / "tokens").mkdir(parents=True)
        source = FakeSource("callers.tokens", broken="is a directory", path=folder / "tokens")
        outcome, _ = self.reload(source, copies=str(folder), originals={"tokens": "12ab"})
        self.assertEqual(outcome.problems, ("is a directory",))

    def test_unreadable(self) -> None:
        """Each file that cannot be read is warned of at the start."""
        folder = Path(self.mktemp()).absolute()
        sources = [FakeSource(name, path=folder / name) for name in ("one", "two")]
        reloading = Reloading(sources, "", FakeSupervisor("/notify"), MemoryReactor())
        with capturedLogs() as logged:
            reloading.startService()
        self.addCleanup(reloading.stopService)
        said = [str(formatEvent(event)) for event in logged]
        self.assertEqual(len(said), 2)
        for words, source in zip(said, sources, strict=True):
            self.assertIn(f"{source.path} cannot be read by the user", words)
            self.assertIn(f"({source.name})", words)

    def test_nothing(self) -> None:
        """Where there is no file that is logged."""
        self.assertEqual(self.reload(None), (Outcome(), ["there is no file to read again"]))
