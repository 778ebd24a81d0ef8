"""`slurm.jobs`: options of srun, the queue, and why jobs are lost."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tawebeval.config import LimitSettings, RunnerSettings, SlurmJobSettings
from tawebeval.slurm.jobs import (
    QueuedJob,
    build_srun_options,
    exclude_node,
    explain_job_loss,
    parse_squeue,
)

QUEUE = """\
7|tawebeval-0123456789abcdef-0|PENDING|Resources|
8|other|RUNNING|None|one
broken
"""


class OptionTests(SynchronousTestCase):
    def test_options_of_srun_are_limits_and_then_those_of_the_problem(self) -> None:
        limits = LimitSettings(wall_clock=61, memory=2**20 * 100)
        runner = RunnerSettings(arguments=("--partition=main", "--qos=low"))
        problem = SlurmJobSettings(("--cpus-per-task=4",))
        options = list(build_srun_options(limits, "name", runner, problem))
        for option in ("--job-name=name", "--mem=196M", "--time=4", "--cpus-per-task=1"):
            self.assertIn(option, options)
        self.assertEqual(options[-3:], ["--partition=main", "--qos=low", "--cpus-per-task=4"])

    def test_node_is_excluded_besides_those_of_the_operator(self) -> None:
        options = ["--exclude=one", "--exclude=two,three"]
        self.assertEqual(exclude_node(options, "four")[-1], "--exclude=two,three,four")
        self.assertEqual(exclude_node([], "four"), ["--exclude=four"])


class QueueTests(SynchronousTestCase):
    def test_jobs_are_read_by_name_and_other_lines_ignored(self) -> None:
        found = parse_squeue(QUEUE)
        name = "tawebeval-0123456789abcdef-0"
        self.assertEqual(found[name], QueuedJob("7", name, "PENDING", "Resources"))
        self.assertEqual((found["other"].state, found["other"].node), ("RUNNING", "one"))
        self.assertEqual(len(found), 2)


class LossTests(SynchronousTestCase):
    def test_each_state_has_its_reason_with_job_and_node(self) -> None:
        reasons = {
            "NODE_FAIL": "node",
            "BOOT_FAIL": "node",
            "PREEMPTED": "preempted",
            "OUT_OF_MEMORY": "memory",
            "TIMEOUT": "timeout",
            "DEADLINE": "timeout",
            "CANCELLED": "revoked",
            "FAILED": "lost",  # the program on the node: the next one would fail, too
            "COMPLETED": "lost",
            "COMPLETING": "node",  # while it lasts: its node does not end it
        }
        for state, reason in reasons.items():
            failure = explain_job_loss(QueuedJob("5", "a", state, node="one"), "")
            self.assertEqual(failure.reason, reason, state)
            self.assertIn("the job 5 of Slurm on the node one", failure.message)

    def test_job_that_is_ending_has_the_reason_of_srun(self) -> None:
        words = "slurmstepd: error: *** STEP 5.0 ON one CANCELLED AT 2026-01-01 ***"
        self.assertEqual(
            explain_job_loss(QueuedJob("5", "a", "COMPLETING"), words).reason, "revoked"
        )

    def test_words_of_srun_count_without_the_controller(self) -> None:
        reasons = {
            "srun: error: Node failure on one": "node",
            "slurmstepd: error: *** STEP 5.0 ON one CANCELLED DUE TO PREEMPTION ***": "preempted",
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.0.": "memory",
            "slurmstepd: error: *** STEP 5.0 CANCELLED AT 10:00 DUE TO TIME LIMIT ***": "timeout",
            "slurmstepd: error: *** STEP 5.0 ON one CANCELLED AT 2026-01-01 ***": "revoked",
        }
        for words, reason in reasons.items():
            self.assertEqual(explain_job_loss(None, words).reason, reason, words)

    def test_refused_job_is_a_fault_of_the_configuration(self) -> None:
        failure = explain_job_loss(None, "srun: error: invalid partition specified: none\n")
        self.assertEqual(failure.reason, "lost")
        self.assertIn("srun said: srun: error: invalid partition specified: none", failure.message)

    def test_last_line_of_a_traceback_is_shown(self) -> None:
        lines = (
            "srun: job 5 queued and waiting for resources",
            "Traceback (most recent call last):",
            '  File "/shared/secret/node.py", line 5, in <module>',
            "    import msgspec",
            "ModuleNotFoundError: No module named 'msgspec'",
            "srun: error: one: task 0: Exited with exit code 1",
        )
        message = explain_job_loss(None, "\n".join(lines)).message
        self.assertTrue(message.endswith(" ".join((lines[0], *lines[4:]))), message)
        cut = explain_job_loss(None, "\n".join(lines[2:])).message
        self.assertNotIn("/shared/secret", cut)

    def test_names_in_a_message_of_the_node_are_no_words_of_slurm(self) -> None:
        for words in ("/preemption: Permission denied", "/oom-kill: No space left on device"):
            said = f"srun: job 5 queued\ntawebeval on one: {words}\n"
            failure = explain_job_loss(QueuedJob("5", "a", "FAILED"), said)
            self.assertEqual(failure.reason, "lost", words)
            self.assertIn(words, failure.message)
