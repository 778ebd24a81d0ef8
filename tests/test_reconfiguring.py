"""`daemon.reconfiguring`: the configuration is read again."""

from __future__ import annotations

import resource
from pathlib import Path

from twisted.internet.testing import MemoryReactor
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration
from tawebeval.daemon.reconfiguring import ConfigurationFile, Reconfiguring, read_configuration
from tawebeval.daemon.reload import Reloading
from tawebeval.linux import rlimits
from tawebeval.reloadable import Outcome
from tests.test_reporting import FakeSupervisor


class ReconfiguringTests(SynchronousTestCase):
    """A file, and a daemon that is told of it."""

    def setUp(self) -> None:
        self.file = Path(self.mktemp()).absolute()
        self.taken: list[Configuration] = []

    def begin(self, text: str) -> None:
        """Start with this configuration."""
        self.file.write_text(text)
        written = read_configuration(self.file)
        file = ConfigurationFile(self.file, (), written)
        reconfiguring = Reconfiguring(file, written, (self.taken.append,))
        self.reloading = Reloading([reconfiguring], "", FakeSupervisor("/notify"), MemoryReactor())

    def refused(self) -> str:
        """Reload in vain, so that nothing has changed; return the problem."""
        outcome = self.reloading.reload()
        (problem,) = outcome.problems
        self.assertEqual(self.taken, [])
        return problem

    def test_taken(self) -> None:
        """What is live counts; each other change is named, until it is taken back."""
        self.begin("")
        self.file.write_text("[polls]\nwait = 3\n[callbacks]\nenabled = true\nat_once = 11")
        notes = [
            f"callbacks.{name}: has changed, and counts after a restart"
            for name in ("enabled", "at_once")
        ]
        for _ in range(2):
            self.assertEqual(self.reloading.reload(), Outcome(notes=tuple(notes)))
            self.assertEqual(self.taken.pop().polls.wait, 3)
        self.file.write_text("")
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertEqual(self.taken, [Configuration()])

    def test_broken(self) -> None:
        """A mistake is named by its key, and nothing of the file counts."""
        self.begin("")
        self.file.write_text("[polls]\nwait = 3\n[callbacks]\nattempts = 0")
        problem = self.refused()
        self.assertTrue(problem.startswith(f"{self.file}: callbacks.attempts: "), problem)

    def test_beyond_the_daemon(self) -> None:
        """Limits that the daemon could give to no evaluator are refused, as at the start."""
        self.begin("")
        none = (0, resource.RLIM_INFINITY)
        limits = {resource.RLIMIT_CPU: (0, 61)}
        self.patch(resource, "getrlimit", lambda which: limits.get(which, none))
        self.file.write_text("[limits]\ncpu = 61")
        problem = self.refused()
        self.assertTrue(problem.startswith("limits.cpu: "), problem)
        self.file.write_text("[limits]\ncpu = 60")
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertEqual(self.taken[-1].limits.cpu, 60)

    def test_few_processes(self) -> None:
        """More for each than there are for all is told when they become more, as at the start."""
        for allowed, few in ((lambda: 200, True), (lambda: 428, False), (self.fail_to_look, False)):
            self.patch(rlimits, "processes_allowed", allowed)
            self.begin("[evaluations]\nrunning = 2\n[limits]\nprocesses = 100")
            self.assertEqual(self.reloading.reload(), Outcome())
            self.file.write_text("[evaluations]\nrunning = 7\n[limits]\nprocesses = 150")
            restart, *notes = self.reloading.reload().notes
            self.assertTrue(restart.startswith("evaluations.running: has changed"), restart)
            self.assertEqual(self.taken[-1].limits.processes, 150)
            said = [note.partition(";")[0] for note in notes]
            wanted = ["processes: 200 are allowed here, and 428 may be needed"]
            self.assertEqual(said, wanted if few else [])
            self.assertEqual(self.reloading.reload().notes, (restart,))

    def fail_to_look(self) -> int:
        """Be at a loss."""
        raise OSError

    def test_without_a_file(self) -> None:
        """Where defaults hold there is nothing to read again."""
        reconfiguring = Reconfiguring(ConfigurationFile(), Configuration(), ())
        self.assertEqual(reconfiguring.rereadings(), ())
