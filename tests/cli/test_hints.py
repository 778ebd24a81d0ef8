"""`cli.hints`: probable causes of failures, and the options that mend them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.hints import Hints
from tawebeval.client import EvaluationError
from tawebeval.config import Configuration, SandboxSettings

NETWORK = "the sandbox has no network; to allow it, set sandbox.network = true in the file of"
MEMORY = "limits.memory is 512 MiB; to raise it, set limits.memory = 1073741824 in the file of"


class HintsTests(SynchronousTestCase):
    """Evaluations by a directory with a few files."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for name in ("inner/deep", "other", ".git"):
            (self.root / name).mkdir(parents=True)
        (self.root / "inner" / "evaluate").touch(0o644)
        self.configuration = Configuration()

    def hints(
        self, error: EvaluationError | None, stderr: str = "", directory: str = "inner"
    ) -> list[str]:
        """Return the hints."""
        return Hints(self.configuration, self.root, directory).find(error, stderr)

    def check(self, words: list[str], found: list[str]) -> None:
        """Hold that each hint begins so."""
        self.assertEqual(len(found), len(words), found)
        for hint, begin in zip(found, words, strict=True):
            self.assertTrue(hint.startswith(begin), hint)

    def test_stderr(self) -> None:
        """Words of the system and of languages name the limit, also without a failure."""
        for stderr, *words in (
            ("all is well",),
            ("socket.gaierror: [Errno -3] Temporary failure in name resolution", NETWORK),
            ("curl: (6) Could not resolve host: example.org", NETWORK),
            ("Traceback:\nMemoryError", MEMORY),
            ("terminate called: std::bad_alloc", MEMORY),
            ("sh: 1: Cannot fork", "limits.processes is 128; to raise it, set limits.processes ="),
            ("[Errno 24] Too many open files", "limits.open_files is 256;"),
            ("[Errno 27] File too large", "limits.file_size is 256 MiB;"),
            ("[Errno 28] No space left on device", "limits.disk is 1 GiB;"),
        ):
            self.check(words, self.hints(None, stderr))
            self.check(words, self.hints(EvaluationError("exit", "x", {"status": 1}), stderr))

    def test_network(self) -> None:
        """Where evaluators have a network the sandbox is not to blame."""
        stderr = "Network is unreachable"
        for settings in (SandboxSettings(network=True), SandboxSettings(kind="none")):
            self.configuration = msgspec.structs.replace(Configuration(), sandbox=settings)
            self.check([], self.hints(None, stderr))

    def test_limits(self) -> None:
        """A limit that the failure names is shown with its value, once."""
        for name, words in (
            (
                "limits.wall_clock",
                "limits.wall_clock is 300 seconds; to raise it, set",
            ),
            ("limits.cpu", "limits.cpu is 300 seconds;"),
            ("limits.memory", MEMORY),
            ("limits.output", "limits.output is 256 MiB;"),
        ):
            error = EvaluationError("x", "y", {"limit": name, "value": 1})
            self.check([words], self.hints(error, "MemoryError" if name == "limits.memory" else ""))
        for name in ("limits.free_disk", "evaluations.paused", ""):
            self.check([], self.hints(EvaluationError("x", "y", {"limit": name})))

    def test_directory(self) -> None:
        """A directory that does not exist: those that do are named."""
        error = EvaluationError("directory", "no")
        for directory, words in (
            ("nope", f"the directories in {self.root} are: inner, other"),
            ("nope/deep", f"the directories in {self.root} are: inner, other"),
            ("inner/nope", f"the directories in {self.root / 'inner'} are: deep"),
            ("inner/deep/nope", f"{self.root / 'inner' / 'deep'} has no directories"),
        ):
            self.assertEqual(self.hints(error, directory=directory), [words])

    def test_not_executable(self) -> None:
        """A file without the execute bit is told from one that is missing."""
        expected = f"./evaluate is not executable; run `chmod +x {self.root}/inner/evaluate`"
        for path, status, words in (
            ("./evaluate", 126, [expected]),
            ("./other", 126, []),
            ("/etc/passwd", 126, []),
            ("./evaluate", 1, []),
        ):
            stderr = f"/bin/sh: 1: {path}: Permission denied\n"
            error = EvaluationError("exit", "x", {"status": status, "stderr": stderr})
            self.check(words, self.hints(error, stderr))
