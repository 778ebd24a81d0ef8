"""`cli.hints`: probable causes of failures, and the options that mend them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from twisted.trial.unittest import SynchronousTestCase

from tawebeval.cli.hints import HintFinder, describe_usage
from tawebeval.client import EvaluationError
from tawebeval.config import Configuration, SandboxSettings
from tawebeval.linux.cgroups import ResourceUsage

FILE = "in the file of --config write"
NETWORK = f"to allow a network, {FILE} [sandbox] and below it network = true"
MEMORY = f"to raise limits.memory, {FILE} [limits] and below it memory = 1073741824"


class HintsTests(SynchronousTestCase):
    """Evaluations by a directory with a few files."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).resolve()
        for name in ("inner/deep", "other", ".git"):
            (self.root / name).mkdir(parents=True)
        (self.root / "inner" / "evaluate").touch(0o644)
        self.configuration = Configuration()
        self.chosen: dict[str, int | float] = {}

    def hints(
        self, error: EvaluationError | None, stderr: str = "", directory: str = "inner"
    ) -> list[str]:
        """Return the hints."""
        hints = HintFinder(self.configuration, self.root, self.root, directory, self.chosen)
        return list(hints.find_hints(error, stderr))

    def check(self, words: list[str], found: list[str]) -> None:
        """Hold that each hint begins so."""
        self.assertEqual(len(found), len(words), found)
        for hint, begin in zip(found, words, strict=True):
            self.assertTrue(hint.startswith(begin), hint)

    def test_stderr_names_the_limit_after_a_bad_exit_only(self) -> None:
        for stderr, *words in (
            ("all is well",),
            ("socket.gaierror: [Errno -3] Temporary failure in name resolution", NETWORK),
            ("curl: (6) Could not resolve host: example.org", NETWORK),
            ("Traceback:\nMemoryError", MEMORY),
            ("terminate called: std::bad_alloc", MEMORY),
            ("sh: 1: Cannot fork", "to raise limits.processes, "),
            ("[Errno 24] Too many open files", "to raise limits.open_files, "),
            ("[Errno 27] File too large", "to raise limits.file_size, "),
            ("[Errno 28] No space left on device", "to raise limits.disk, "),
        ):
            self.check([], self.hints(None, stderr))
            self.check([], self.hints(EvaluationError("data", "x"), stderr))
            self.check(words, self.hints(EvaluationError("exit", "x", {"status": 1}), stderr))

    def test_no_hint_blames_the_sandbox_where_evaluators_have_a_network(self) -> None:
        stderr = "Network is unreachable"
        for settings in (SandboxSettings(network=True), SandboxSettings(kind="none")):
            self.configuration = msgspec.structs.replace(Configuration(), sandbox=settings)
            error = EvaluationError("exit", "x", {"status": 1})
            self.check([], self.hints(error, stderr))

    def test_hint_doubles_the_limit_of_the_error(self) -> None:
        for name, words in (
            ("limits.wall_clock", "to raise limits.wall_clock, "),
            ("limits.cpu", "to raise limits.cpu, "),
            ("limits.memory", MEMORY),
            ("limits.output", "to raise limits.output, "),
        ):
            error = EvaluationError("x", "y", {"limit": name, "value": 1})
            self.check([words], self.hints(error, "MemoryError" if name == "limits.memory" else ""))
        self.chosen = {"memory": 2**26}
        error = EvaluationError("x", "y", {"limit": "limits.memory", "value": 2**26})
        option = "to raise limits.memory, give another value by --limit memory=VALUE"
        self.check([option], self.hints(error))
        for name in ("limits.free_disk", ""):
            self.check([], self.hints(EvaluationError("x", "y", {"limit": name})))

    def test_hint_lists_existing_directories(self) -> None:
        error = EvaluationError("directory", "no")
        for directory, words in (
            ("nope", f"the directories in {self.root} are: inner, other"),
            ("nope/deep", f"the directories in {self.root} are: inner, other"),
            ("inner/nope", f"the directories in {self.root / 'inner'} are: deep"),
            ("inner/deep/nope", f"{self.root / 'inner' / 'deep'} has no directories"),
        ):
            self.assertEqual(self.hints(error, directory=directory), [words])

    def test_file_without_execute_bit_is_told_from_a_missing_one(self) -> None:
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


class UsageTests(SynchronousTestCase):
    """What an evaluation used."""

    def test_usage_with_cgroups_has_processor_time_and_memory(self) -> None:
        usage = ResourceUsage(0.5, 3 * 2**20)
        self.assertEqual(
            describe_usage(usage, 1.239, 2**29),
            "used 1.24 s, 0.50 s of processor time, 3 MiB of memory",
        )

    def test_usage_without_cgroups_says_how_the_memory_limit_held(self) -> None:
        said = describe_usage(ResourceUsage(None, None), 1.239, 2**29)
        self.assertIn("used 1.24 s; limits.memory (512 MiB) held for each process alone", said)
