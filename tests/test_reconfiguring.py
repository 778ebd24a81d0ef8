"""`daemon.reconfiguring`: the configuration, and what it names, is read again."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from twisted.internet.testing import MemoryReactor, MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import Configuration
from tawebeval.daemon.reconfiguring import ConfigurationFile, Reconfiguring, read_configuration
from tawebeval.daemon.reload import Reloading
from tawebeval.errors import InvalidField
from tawebeval.linux import rlimits
from tawebeval.linux.descriptors import needed
from tawebeval.reloadable import Outcome
from tawebeval.webhooks.callbacks import open_callbacks
from tests.fake_resolver import FakeResolver
from tests.test_reporting import FakeSupervisor
from tests.test_signatures import NEW, OLD, written

URL = "https://8.8.8.8/hook"


class CallbacksTests(SynchronousTestCase):
    """A file of which callbacks are told, and their file of secrets."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.file = self.folder / "tawebeval.toml"
        self.secrets = self.write_secrets("secrets", f"* {written(OLD)}")
        self.environment = {
            "STATE_DIRECTORY": str(self.folder / "state"),
            "CACHE_DIRECTORY": str(self.folder / "cache"),
        }
        self.taken: list[Configuration] = []

    def write_secrets(self, name: str, text: str) -> Path:
        """Write a file of secrets."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def write(self, settings: str, others: str = "") -> None:
        """Write the configuration."""
        self.file.write_text(f"{others}\n[callbacks]\n{settings}\n")

    def enabled(self, secrets: Path | None = None) -> str:
        """Return settings that enable callbacks."""
        return f"enabled = true\nsecrets = '{secrets or self.secrets}'"

    def begin(self, settings: str, others: str = "", *, by_file: bool = True) -> None:
        """Start with these settings, in a file that can be read again or not."""
        self.write(settings, others)
        written = read_configuration(self.file)
        reactor: Any = MemoryReactorClock()
        self.callbacks = open_callbacks(
            *(written.callbacks, self.environment, FakeResolver(), reactor),
            *(bytes, lambda: 0),
            alone=True,
        )
        file = ConfigurationFile(self.file, (), written, self.environment)
        reconfiguring = Reconfiguring(
            file if by_file else ConfigurationFile(),
            written,
            (self.taken.append, lambda taken: self.callbacks.go_by(taken.callbacks)),
            lambda configuration: self.callbacks.rereadings(configuration.callbacks),
        )
        copies = self.environment.get("CREDENTIALS_DIRECTORY", "")
        supervisor = FakeSupervisor("/notify")
        self.rereadings = reconfiguring.rereadings()
        self.reloading = Reloading([reconfiguring], copies, supervisor, MemoryReactor())

    def signed(self) -> str:
        """Return what a document is signed with."""
        return self.callbacks._signing.secrets.sign("", "e", 1, b"")["Webhook-Signature"]

    def refused(self) -> str:
        """Reload in vain, so that nothing has changed; return the problem."""
        before = self.callbacks._settings, self.callbacks._signing.secrets
        outcome = self.reloading.reload()
        (problem,) = outcome.problems
        self.assertEqual(self.taken, [])
        self.assertEqual((self.callbacks._settings, self.callbacks._signing.secrets), before)
        return problem

    def allow(self, limited: int, hard: int) -> None:
        """Let this process have so much of one thing, and any number of all others."""
        limits = {limited: (0, hard)}
        none = (0, resource.RLIM_INFINITY)
        self.patch(resource, "getrlimit", lambda which: limits.get(which, none))

    def test_there_and_back(self) -> None:
        """From none to callbacks, for which there are secrets from then on, and back to none."""
        self.begin("")
        self.assertRaises(InvalidField, self.callbacks.expect, URL, "")
        self.write(self.enabled())
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertEqual(self.callbacks.expect(URL, "").url, URL)
        self.secrets.unlink()  # which nobody needs then
        self.write("")
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertRaises(InvalidField, self.callbacks.expect, URL, "")

    def test_known(self) -> None:
        """The file of secrets that is named at the start is known beside the configuration."""
        for settings, paths in ((self.enabled(), [self.secrets]), ("", [])):
            self.begin(settings)
            (rereading,) = self.rereadings
            self.assertEqual(rereading.paths, (self.file,))
            self.assertEqual([path for one in rereading.named for path in one.paths], paths)

    def test_other_secrets(self) -> None:
        """The file that is named now is read, and the one before no more."""
        self.begin(self.enabled())
        before = self.signed()
        other = self.write_secrets("other", f"* {written(NEW)}")
        self.secrets.unlink()
        self.write(self.enabled(other))
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertNotEqual(self.signed(), before)

    def test_relative(self) -> None:
        """A path is that of where the daemon was started, wherever it has gone."""
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.folder)
        self.begin(self.enabled(Path(self.secrets.name)))
        before = self.signed()
        other = self.write_secrets("other", f"* {written(NEW)}")
        os.chdir("/")
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertEqual(self.signed(), before)
        self.write(self.enabled(Path(other.name)))
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertNotEqual(self.signed(), before)
        self.assertEqual(self.taken[-1].callbacks.secrets, str(other))

    def test_broken_secrets(self) -> None:
        """Without secrets that can be read nothing changes, also of the rest of the file."""
        self.begin("")
        self.write("enabled = true", "[polls]\nwait = 3")
        self.assertTrue(self.refused().startswith("callbacks.secrets: callbacks have to be signed"))
        self.write(self.enabled(self.folder / "nowhere"), "[polls]\nwait = 3")
        self.assertTrue(self.refused().startswith("callbacks.secrets: "))
        self.write(self.enabled())
        self.secrets.write_text("* s3cret")
        problem = self.refused()
        self.assertTrue(problem.startswith(f"callbacks.secrets: {self.secrets}: line 1"), problem)
        self.assertNotIn("s3cret", problem)

    def test_broken_settings(self) -> None:
        """Good secrets do not count where the configuration is broken, whose key is named."""
        self.begin(self.enabled())
        self.secrets.write_text(f"* {written(NEW)}")
        self.write(f"{self.enabled()}\nattempts = 0")
        problem = self.refused()
        self.assertTrue(problem.startswith(f"{self.file}: callbacks.attempts: "), problem)

    def test_shown_to_evaluators(self) -> None:
        """Secrets that evaluators can read are refused, as at the start."""
        readable = f"[sandbox]\nreadable = ['{self.folder}/tools']"
        self.begin("", readable)
        secrets = self.folder / "tools" / "secrets"
        secrets.parent.mkdir()
        self.secrets.rename(secrets)
        self.write(self.enabled(secrets), readable)
        problem = self.refused()
        self.assertTrue(problem.startswith("sandbox.readable[0]: "), problem)
        self.assertIn(str(secrets), problem)

    def test_too_few_descriptors(self) -> None:
        """More at once than there are descriptors for are refused."""
        self.begin("")
        self.allow(resource.RLIMIT_NOFILE, needed(Configuration()))
        self.write("at_once = 11")
        self.assertTrue(self.refused().startswith("callbacks.at_once: with 11 of them"))
        self.write("at_once = 10\nenabled = false")
        self.assertEqual(self.reloading.reload(), Outcome())

    def test_beyond_the_daemon(self) -> None:
        """Limits that the daemon could give to no evaluator are refused, as at the start."""
        self.begin("")
        self.allow(resource.RLIMIT_CPU, 61)
        self.write("", "[limits]\ncpu = 61")
        problem = self.refused()
        self.assertTrue(problem.startswith("limits.cpu: "), problem)
        self.write("", "[limits]\ncpu = 60")
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertEqual(self.taken[-1].limits.cpu, 60)

    def test_few_processes(self) -> None:
        """More for each than there are for all is told when they become more, as at the start."""
        for allowed, few in ((lambda: 200, True), (lambda: 428, False), (self.fail_to_look, False)):
            self.patch(rlimits, "processes_allowed", allowed)
            self.begin("", "[evaluations]\nrunning = 2\n[limits]\nprocesses = 100")
            self.assertEqual(self.reloading.reload(), Outcome())
            self.write("", "[evaluations]\nrunning = 7\n[limits]\nprocesses = 150")
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

    def test_copied(self) -> None:
        """Secrets that systemd has handed over are told to be a copy as soon as they are needed."""
        copy = self.folder / "credentials" / "callback-secrets"
        copy.parent.mkdir()
        self.secrets.rename(copy)
        self.environment["CREDENTIALS_DIRECTORY"] = str(copy.parent)
        self.begin("")
        stale = {copy.name: "12ab"}
        self.assertEqual(self.reloading.reload(stale), Outcome())
        self.write("enabled = true")
        (problem,) = self.reloading.reload(stale).problems
        self.assertTrue(problem.startswith(f"callbacks.secrets: {copy} is a copy"), problem)
        self.assertRaises(InvalidField, self.callbacks.expect, URL, "")
        (note,) = self.reloading.reload().notes
        self.assertTrue(note.startswith(f"callbacks.secrets: {copy} is a copy"), note)
        self.assertEqual(self.callbacks.expect(URL, "").url, URL)

    def test_without_a_file(self) -> None:
        """Secrets are read again also where the configuration is not."""
        self.begin(self.enabled(), by_file=False)
        before = self.signed()
        self.secrets.write_text(f"* {written(NEW)}")
        self.file.unlink()
        self.assertEqual(self.reloading.reload(), Outcome())
        self.assertNotEqual(self.signed(), before)
