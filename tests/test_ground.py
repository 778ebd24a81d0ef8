"""`daemon.startup`: nothing begins on ground that does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration
from tawebeval.daemon import startup as module
from tawebeval.daemon.startup import Ground
from tawebeval.errors import ConfigurationError
from tawebeval.sandbox.probe import Places
from tests.fakes import InlineThreads, SlowThreads


@attrs.define
class FakeDirectories:
    """Directories that are cleared, or raise `error`; what is done goes into `done`."""

    done: list[str]
    accounts: Path
    repositories: Path = Path("/cache/repositories")
    evaluations: Path = Path("/state/evaluations")
    error: OSError | None = None

    quotas: tuple[Path, ...] = ()
    gone: tuple[Path, ...] = ()

    def restore(self) -> list[Path]:
        self.done.append("restore")
        if self.error is not None:
            raise self.error
        return list(self.gone)

    def clear(self) -> None:
        self.done.append("clear")
        if self.error is not None:
            raise self.error


@attrs.define
class FakeCgroups:
    """Cgroups with these problems."""

    done: list[str]
    problems: tuple[str, ...] = ()

    def close(self) -> None:
        self.done.append("close")


@attrs.define
class FakeCrew:
    """Threads that are not there."""

    done: list[str]
    error: OSError | None = None

    def start(self) -> None:
        self.done.append("start")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.done.append("stop")


ENDED = f"end {(Path('/state/evaluations'), Path('/cache/repositories'))}"


class GroundTests(SynchronousTestCase):
    """The start and the stop."""

    def setUp(self) -> None:
        self.done: list[str] = []
        accounts = Path(self.mktemp())
        accounts.mkdir()
        self.directories: Any = FakeDirectories(self.done, accounts)
        self.cgroups: Any = FakeCgroups(self.done)
        self.sandbox: Any = object()
        self.git: ConfigurationError | None = None
        self.patch(module, "end_leftovers", lambda *roots: self.done.append(f"end {roots}"))
        self.patch(module, "check_git", self.check_git)
        self.patch(module, "rely_on", self.rely_on)
        self.patch(module, "close_sandbox", lambda sandbox: self.done.append("trees"))
        crew: Any = FakeCrew(self.done)
        self.configuration = Configuration()
        self.checking: Any = InlineThreads()
        crews = (crew, crew)
        fakes = self.directories, self.cgroups, self.sandbox, crews, self.checking
        self.ground = Ground(*fakes, self.configuration)

    def check_git(self) -> None:
        """Note it, and raise what the test wants."""
        self.done.append("git")
        if self.git is not None:
            raise self.git

    def rely_on(self, sandbox: object, places: Places) -> None:
        """Note it; it is tried where evaluations will be."""
        self.assertEqual(places, Places(Path("/cache/repositories"), Path("/state/evaluations")))
        self.assertIs(sandbox, self.sandbox)
        self.done.append("sandbox")

    def refused(self) -> str:
        """Return with which message the daemon exits."""
        with self.assertRaises(SystemExit) as caught:
            self.ground.startService()
        return str(caught.exception)

    def test_start(self) -> None:
        """What is left of an earlier daemon goes first, what still runs before what lies there."""
        with capturedLogs() as events:
            self.ground.startService()
        self.assertEqual(self.done, [ENDED, "clear", "git", "sandbox", "start", "start"])
        self.assertEqual(list(events), [])
        self.assertTrue(self.ground.running)
        self.assertIs(self.ground.directories, self.directories)

    def test_stop(self) -> None:
        """What mounts ends when no thread is at work any more; the cgroups are given back last."""
        self.ground.startService()
        self.done.clear()
        self.ground.stopService()
        self.assertEqual(self.done, ["stop", "stop", "trees", "close"])
        self.assertFalse(self.ground.running)

    def test_threads(self) -> None:
        """Without its threads it does not begin, and says what helps."""
        self.ground._crews[0].error = OSError(11, "threads: can't start new thread")  # type: ignore[attr-defined]
        self.assertIn("tawebeval: threads: can't start new thread; TasksMax=", self.refused())

    def test_leftovers(self) -> None:
        """What cannot be removed is named, and ends the start."""
        self.directories.error = PermissionError(1, "Not permitted", "/state/evaluations/x")
        self.assertEqual(self.refused(), "tawebeval: /state/evaluations/x: Not permitted")
        self.assertEqual(self.done, [ENDED, "clear"])

    def test_quotas(self) -> None:
        """Quota directories are cleared, checked and tried, in that order; a wrong one stops it."""
        quotas = self.directories.quotas = (Path("/state/quotas/0"), Path("/state/quotas/1"))
        wrong = ConfigurationError("no quota")

        def check(directories: object, configuration: object) -> None:
            self.assertEqual((directories, configuration), (quotas, self.configuration))
            self.done.append("check")

        def attempt(directories: object) -> None:
            self.done.append("try")
            raise wrong

        self.patch(module, "check_quotas", check)
        self.patch(module, "try_quotas", attempt)
        self.assertEqual(self.refused(), "tawebeval: no quota")
        ended = f"end {(self.directories.evaluations, self.directories.repositories, *quotas)}"
        self.assertEqual(self.done, [ended, "clear", "check", "try"])

    def test_full(self) -> None:
        """Where there is no room the start says so, too, and what helps."""
        self.directories.error = OSError(28, "No space left on device", "/state/x")
        said = "tawebeval: /state/x: No space left on device; make room there"
        self.assertEqual(self.refused(), said)

    def test_accounts(self) -> None:
        """The sandbox's users are there before it is tried; where they cannot be is told."""
        names: list[str] = []
        accounts = self.directories.accounts
        self.patch(
            module, "rely_on", lambda *_: names.extend(path.name for path in accounts.iterdir())
        )
        self.ground.startService()
        self.assertGreaterEqual(set(names), {"group", "passwd"})
        self.directories.accounts = accounts / "missing"
        said = self.refused()
        self.assertTrue(said.startswith(f"tawebeval: {accounts}/missing/"), said)
        self.assertTrue(said.endswith(": No such file or directory"), said)

    def test_removed(self) -> None:
        """What was removed meanwhile is made anew and told, and filled where it has to be."""
        accounts = self.directories.accounts
        for gone, filled in (((), False), ((Path("/x"),), False), ((Path("/x"), accounts), True)):
            self.directories.gone = gone
            with capturedLogs() as events:
                self.ground.mend()
            self.assertEqual(
                [formatEvent(event) for event in events],
                [f"{path} was gone, and is made anew" for path in gone],
            )
            self.assertEqual((accounts / "passwd").exists(), filled)

    def test_removed_for_good(self) -> None:
        """What cannot be made anew is no defect: it is tried again."""
        self.directories.error = PermissionError(1, "Not permitted", "/state/uploads")
        with capturedLogs() as events:
            self.ground.mend()
        self.assertEqual(list(events), [])
        self.assertEqual(self.done, ["restore"])

    def test_slow_disk(self) -> None:
        """One look is made at a time, by a thread, however long it takes."""
        self.ground._checking = threads = SlowThreads()  # type: ignore[assignment]
        for _ in range(3):
            self.ground.mend()
        self.assertEqual((len(threads.waiting), self.done), (1, []))
        threads.finish()
        self.ground.mend()
        threads.finish()
        self.assertEqual(self.done, ["restore", "restore"])

    def test_git(self) -> None:
        """So does a git that does not do, in the words of who has looked at it."""
        self.git = ConfigurationError("git is older than the hills")
        self.assertEqual(self.refused(), "tawebeval: git is older than the hills")
        self.assertEqual(self.done, [ENDED, "clear", "git"])

    def test_limits(self) -> None:
        """What cannot be limited is told, each as it is; the daemon starts all the same."""
        self.cgroups.problems = ("memory is {not} limited", "write to {problem}")
        with capturedLogs() as events:
            self.ground.startService()
        self.assertEqual(
            [formatEvent(event) for event in events],
            ["limits: memory is {not} limited", "limits: write to {problem}"],
        )
        self.assertEqual({event["log_level"].name for event in events}, {"warn"})
        self.assertEqual(self.done[3], "sandbox")

    def test_sandbox(self) -> None:
        """A sandbox that does not work ends the start with its own message."""

        def rely_on(sandbox: object, places: Places) -> None:
            raise SystemExit("tawebeval: no sandbox")

        self.patch(module, "rely_on", rely_on)
        self.assertEqual(self.refused(), "tawebeval: no sandbox")
