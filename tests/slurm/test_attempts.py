"""`slurm.attempts`: the files of jobs."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.sandbox.workspace import Workspace
from tawebeval.slurm.attempts import Attempt, remove_other_node_programs, write_node_program


class AttemptCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.parent = Path(tempfile.mkdtemp(prefix="tawebeval-test-"))
        self.addCleanup(shutil.rmtree, self.parent)


class ProgramTests(AttemptCase):
    def test_several_threads_write_it_once_beside_that_of_another_version(self) -> None:
        other = self.parent / "node-0123456789abcdef"
        other.touch()
        with ThreadPoolExecutor(8) as threads:
            found = set(threads.map(write_node_program, [self.parent] * 8))
        (program,) = found
        self.assertEqual(set(self.parent.iterdir()), {other, program})
        self.assertTrue((program / "__main__.py").is_file())
        remove_other_node_programs(self.parent)
        self.assertEqual(list(self.parent.iterdir()), [program])


class JobTests(AttemptCase):
    def make_attempt(self) -> Attempt:
        attempt = Attempt.create("tawebeval-x-", "s", Workspace(self.parent / "evaluation"))
        attempt.make_directories()
        return attempt

    def test_description_leads_to_the_same_directory(self) -> None:
        attempt = self.make_attempt()
        attempt.job_identifier, attempt.node = "7", "one"
        loaded = Attempt.load(attempt.describe(), attempt.evaluation)
        self.assertEqual(loaded.directory, attempt.directory)
        self.assertEqual((loaded.job_identifier, loaded.node), ("7", "one"))

    def test_start_in_place_of_another_job_names_no_directory_of_that(self) -> None:
        first, second = self.make_attempt(), self.make_attempt()
        first.write_start({"argv": ["bwrap", "--bind", str(first.workspace.tree_directory)]})
        argv = second.read_start(first)["argv"]
        self.assertEqual(argv[-1], str(second.workspace.tree_directory))

    def test_broken_state_counts_as_none(self) -> None:
        attempt = self.make_attempt()
        self.assertIsNone(attempt.read_state())
        attempt.state_file.write_text('{"node": "o')
        self.assertIsNone(attempt.read_state())

    def test_output_is_moved_once_the_evaluator_runs(self) -> None:
        attempt = self.make_attempt()
        (attempt.workspace.output_directory / "stdout").write_text("one")
        attempt.state_file.write_text('{"node": "one", "error": "no room"}')
        attempt.read_state()
        self.assertFalse((attempt.evaluation.output_directory / "stdout").exists())
        attempt.state_file.write_text('{"node": "one", "pid": 5}')
        attempt.read_state()
        self.assertEqual((attempt.evaluation.output_directory / "stdout").read_text(), "one")
        self.assertTrue(attempt.has_printed())
