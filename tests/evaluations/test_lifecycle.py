"""`evaluations.lifecycle`: lines in the log, memory, and the status document."""

from __future__ import annotations

import gc
import json
import sys
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any
from unittest import TestCase, TestResult

import attrs
from twisted.logger import LogEvent, Logger, capturedLogs, formatEvent

from tawebeval.config import Configuration
from tawebeval.core.evaluations import EvaluationState
from tawebeval.core.form import (
    LIMIT_UNITS,
    MAX_FIELDS,
    MAX_TRUNCATED_COMMAND_BYTES,
    TEXT_FIELD_SIZE_LIMITS,
    Repository,
    SubmissionFile,
)
from tawebeval.daemon.logging import format_json
from tawebeval.errors import EvaluationFailure
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.evaluations.reading import build_list_entry, build_status_document
from tawebeval.evaluations.store import STDERR_TAIL_BYTES
from tawebeval.webhooks.records import CallbackRecord
from tests.cases.evaluations import EvaluationTestCase
from tests.fakes.world import EPOCH, OID, TREE


class EvaluationLogTests(EvaluationTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.events: list[LogEvent] = self.enterContext(capturedLogs())

    def story(self) -> list[str]:
        """Return its lines, without the name, which each begins with and has as a field."""
        name = self.evaluation.details.log_name
        lines = []
        for event in self.events:
            line = formatEvent(event)
            self.assertTrue(line.startswith(f"{name}: "), line)
            self.assertEqual(event["evaluation"], name)
            self.assertEqual((event["caller"], event["commit"]), ("", OID))
            lines.append(line.removeprefix(f"{name}: "))
        return lines

    def test_each_state_is_logged_in_one_line_with_the_time_since_the_last_state(self) -> None:
        self.slot.shut = self.world.repositories.gate.shut = True
        self.begin()
        self.world.clock.advance(1)
        self.slot.open()
        self.world.clock.advance(2)
        self.world.repositories.gate.open()
        self.world.child.print(b"one\n")
        self.world.clock.advance(3)
        self.finish()
        self.evaluation.enter_state(EvaluationState.DRAINED)
        story = self.story()
        self.assertEqual(story[0], f"queued; caller '', commit {OID}")
        self.assertEqual(story[1], "fetching after 1.000 s")
        self.assertEqual(story[2], "running after 2.000 s")
        self.assertTrue(story[3].startswith("finished after 3.000 s; 2 events"))
        self.assertEqual(story[4:], ["drained after 0.000 s"])
        states = [event["state"] for event in self.events]
        self.assertEqual(states, ["queued", "fetching", "running", "finished", "drained"])
        self.assertEqual([event.get("after") for event in self.events], [None, 1, 2, 3, 0])

    def test_failed_evaluation_is_logged_with_its_reason_and_stderr(self) -> None:
        self.begin()
        self.world.child.complain(b"{evaluation} %s {nothing}\n\x1b[2J")
        self.finish(3)
        stderr, failed = self.story()[-2:]
        self.assertEqual(stderr, r"end of stderr: '{evaluation} %s {nothing}\n\x1b[2J'")
        self.assertIn(": exit: the evaluator exited with status 3; 1 events", failed)
        self.assertEqual(self.events[-1]["reason"], "exit")

    def test_end_of_the_evaluation_is_logged_with_the_first_malformed_result(self) -> None:
        self.begin()
        child = self.world.child
        value = '{"type": "goal_result", "goal": "x", "result": "{yes}"}'
        child.print(child.make_data_block(value)[1:])
        self.finish()
        words = '"goal_result" does not count as a result: "result" is "{yes}"; write true or false'
        self.assertTrue(self.story()[-1].endswith(words), self.story()[-1])

    def test_log_line_of_the_end_omits_unmeasured_usage(self) -> None:
        self.begin()
        self.world.child.exit()
        self.world.child.resource_usage = None
        self.world.child.close()
        self.world.turn()
        expected = "finished after 0.000 s; 0 events; the evaluator printed nothing"
        self.assertEqual(self.story()[-1], expected)
        self.assertFalse({"cpu_seconds", "peak_memory_bytes"} & set(self.events[-1]))

    def test_times_and_durations_ignore_changes_of_the_wall_clock(self) -> None:
        times = iter((50.0, 1e9, 60.0))
        object.__setattr__(self.evaluation.context, "read_wall_clock", lambda: next(times))
        self.begin()
        self.world.clock.advance(10)
        self.world.end()
        self.assertEqual([event.get("after") for event in self.events], [None, 0, 0, 10])
        self.assertEqual(
            [
                self.evaluation.details.state_times[name]
                for name in ("created", "fetching", "running", "ended")
            ],
            [EPOCH, EPOCH, EPOCH, EPOCH + 10],
        )

    def test_clock_of_an_evaluation_never_goes_back_after_a_reboot(self) -> None:
        self.begin()
        first, row = self.evaluation, self.evaluation.make_row()
        for wall, expected in ((EPOCH + 1000, EPOCH + 1000), (50.0, EPOCH)):
            context = attrs.evolve(
                first.context,
                read_wall_clock=lambda wall=wall: wall,
                read_boot_clock=lambda: 3.0,
            )
            later = Evaluation(attrs.evolve(row), first.workspace, context)
            self.assertEqual(later.wall_clock.read(), expected)

    def test_log_has_no_identifier(self) -> None:
        self.evaluation.details.identifier = "z" * 40
        self.begin()
        self.world.child.complain(b"oops")
        self.evaluation.stop(EvaluationFailure("lost", "nobody asked for the events"))
        self.world.end()
        self.assertNotIn("z" * 40, "".join(map(format_json, self.events)))
        document: dict[str, Any] = build_status_document(self.evaluation, None)
        named = {json.loads(format_json(event))["evaluation"] for event in self.events}
        self.assertEqual(named, {document["log_name"]})


KIB = 1024
USUAL = 8 * KIB
"""Bytes of texts that each evaluation may have besides: its names, paths and markers."""


_OTHERS = (type, ModuleType, CodeType, TracebackType, TestCase, TestResult, Logger)
"""What no evaluation owns, to which frames and globals lead: a log has what it was told of all."""


def largest(name: str, before: str = "") -> str:
    """Return a text as large as that field may have it, which as a `str` takes far more."""
    limit = TEXT_FIELD_SIZE_LIMITS[name]
    return before + "😀" + "x" * (limit - 4 - len(before))


def files() -> tuple[SubmissionFile, ...]:
    """Return as many files as a form can have beside its fields, with the longest names."""
    count = MAX_FIELDS - len(TEXT_FIELD_SIZE_LIMITS)
    return tuple(
        SubmissionFile("a" * 240 + f"{number:03}".translate(LETTERS), "😀" + "x" * 251)
        for number in range(count)
    )


KEPT = len(largest("repository[url]")) + MAX_TRUNCATED_COMMAND_BYTES + 2048
"""Bytes of texts that the status shows of the largest form, and the URL of its callback."""

LETTERS = str.maketrans("0123456789", "abcdefghij")


class MemoryTests(EvaluationTestCase):
    configuration = Configuration()

    def make(self, **changes: Any) -> Any:
        """Return an evaluation whose form is as large as a form can be."""
        url = largest("repository[url]", "https://example.org/")
        large = {
            "repository": Repository(url, largest("repository[branch]")),
            "evaluator_cmd": largest("evaluator_cmd"),
            "submission": files(),
        }
        evaluation = super().make(**{**large, **changes})
        evaluation.details.callback = CallbackRecord("https://example.org/" + "x" * 2028, "")
        return evaluation

    def texts(self) -> int:
        """Return how many bytes all strings take that the evaluation leads to, and nobody else."""
        context = self.evaluation.context
        others = [*attrs.asdict(context, recurse=False).values(), *self.world.spawn.children]
        others += self.world.files.values()
        seen = {id(context), *map(id, others)}
        found, waiting = 0, [self.evaluation]
        gc.collect()
        while waiting:
            one = waiting.pop()
            if id(one) in seen or isinstance(one, _OTHERS):
                continue
            seen.add(id(one))
            if isinstance(one, str | bytes | bytearray):
                found += sys.getsizeof(one)
            elif isinstance(one, FunctionType):
                waiting += one.__closure__ or ()
            elif isinstance(one, FrameType):
                waiting += one.f_locals.values()
            else:
                waiting += gc.get_referents(one)
        return found

    def test_texts_of_a_queued_evaluation_take_no_more_memory_than_the_form(self) -> None:
        self.slot.shut = True
        self.begin()
        sent = sum(TEXT_FIELD_SIZE_LIMITS.values())
        names = sum(len(file.field) + len(file.filename.encode()) for file in files())
        self.assertLess(self.texts(), sent + names + USUAL)

    def test_command_and_file_names_are_freed_when_the_run_starts(self) -> None:
        self.begin()
        self.world.sandbox.last.started_as.clear()
        self.assertLess(self.texts(), KEPT + USUAL)
        shown = build_status_document(self.evaluation, None)
        self.assertEqual(
            shown["evaluator_cmd"], largest("evaluator_cmd")[: MAX_TRUNCATED_COMMAND_BYTES - 3]
        )
        self.assertEqual(shown["repository"], self.evaluation.details.request.repository.url)
        self.finish_well()

    def test_ended_evaluation_has_no_partial_line(self) -> None:
        self.begin()
        begin = self.world.child.environment["EVALUATION_FILE_BEGIN"].encode()
        self.world.child.print(begin + b"\n\n" + b"x" * 10**6)
        self.world.child.complain("😀".encode() + b"x" * (STDERR_TAIL_BYTES - 4))
        self.finish(3)
        self.assertIs(self.evaluation.details.state, EvaluationState.FAILED)
        self.read_all()
        self.assertLess(self.texts(), KEPT + 2 * STDERR_TAIL_BYTES + USUAL)
        self.assertEqual(
            len(build_status_document(self.evaluation, None)["stderr"].encode()), STDERR_TAIL_BYTES
        )

    def read_all(self) -> None:
        self.evaluation.events.acknowledge(self.evaluation.events.event_log.end_cursor)

    def test_failure_does_not_keep_its_traceback(self) -> None:
        self.world.repositories.fail("repository", "could not be fetched", stderr="x" * 8192)
        self.begin()
        self.assertEqual(
            self.assert_over(EvaluationState.FAILED, "repository")["stderr"], "x" * 8192
        )
        self.read_all()
        self.assertLess(self.texts(), KEPT + 8192 + USUAL)
        failure = self.evaluation.details.failure
        assert failure is not None
        self.assertEqual((failure.reason, str(failure)), ("repository", "could not be fetched"))
        self.assertEqual((failure.extra_members, failure.__traceback__), ({}, None))

    def test_message_about_a_missing_directory_is_short(self) -> None:
        (self.root / "upload").rename(self.mktemp())
        self.evaluation = self.make(directory="\x01" * 4096)
        self.begin()
        message = self.assert_over(EvaluationState.FAILED, "directory")["message"]
        self.assertLess(len(message), 400)
        self.assertLess(self.texts(), KEPT + len(message) + 3 * USUAL)


class StatusTests(EvaluationTestCase):
    def status(self, position: int | None = None) -> dict[str, Any]:
        document = build_status_document(self.evaluation, position)
        self.assertEqual(json.loads(json.dumps(document)), document)
        return document

    def test_queued_status_has_the_request_and_nulls(self) -> None:
        self.slot.shut = True
        self.begin()
        expected = {
            "evaluation_id": "some",
            "log_name": "a6b46dd0d1ae5e86",
            "state": "queued",
            "queue_place": 4,
            "counts": False,
            "repository": "https://example.org/problem.git",
            "commit_oid": OID,
            "directory": "",
            "evaluator_cmd": "./evaluate",
            "seed": 7,
            "build": None,
            "limits": {name: getattr(self.configuration.limits, name) for name in LIMIT_UNITS},
            "metadata": {},
            "submitted": "2023-11-14T22:13:20.000+00:00",
            "created": "2023-11-14T22:13:20.000+00:00",
            "stderr": "",
            "events": {"buffered": 0, "discarded": 0},
            "buffered_bytes": 0,
        }
        nulls = (
            "caller problem tree_oid environment fetching running ended exit usage error results"
        )
        expected |= dict.fromkeys([*nulls.split(), "runner", "callback"])
        self.assertEqual(self.status(4), expected)

    def test_running_status_has_tree_stderr_and_event_counts(self) -> None:
        self.begin()
        self.world.child.print(b"one\ntwo\nthree\n")
        self.world.child.complain(b"careful")
        self.evaluation.events.acknowledge(2)
        document = self.status()
        self.assertEqual((document["state"], document["queue_place"]), ("running", None))
        self.assertEqual((document["tree_oid"], document["stderr"]), (TREE, "careful"))
        self.assertEqual(document["events"], {"buffered": 3, "discarded": 2})
        self.assertEqual(document["buffered_bytes"], len(b"one\ntwo\nthree\n"))
        self.assertEqual((document["exit"], document["usage"]), (None, None))

    def test_status_has_the_results_so_far(self) -> None:
        self.begin()
        self.assertIsNone(self.status()["results"])
        child = self.world.child
        for value in (
            '{"type": "goal_result", "goal": "fast", "result": true}',
            '{"type": "case", "case": "1", "verdict": "partial"}',
            '{"type": "score", "score": 7.5, "maximum": 10}',
        ):
            child.print(child.make_data_block(value)[1:])
        self.evaluation.events.acknowledge(3)
        shown = {
            "goals": {"fast": True},
            "goals_omitted": 0,
            "cases": {"partial": 1},
            "progress": None,
            "score": {"score": 7.5, "maximum": 10},
        }
        self.assertEqual(self.status()["results"], shown)
        self.finish()
        self.assertEqual(self.status()["results"], shown)
        self.assertEqual(build_list_entry(self.evaluation.details)["results"], shown)

    def test_finished_status_has_exit_and_usage(self) -> None:
        self.begin()
        self.world.clock.advance(1.5)
        self.finish()
        document = self.status()
        self.assertEqual((document["state"], document["error"]), ("finished", None))
        self.assertEqual(document["exit"], {"status": 0, "signal": None})
        self.assertEqual(document["usage"]["wall_seconds"], 1.5)
        usage = self.world.child.resource_usage
        assert usage is not None
        used = round(usage.ru_utime + usage.ru_stime, 3)
        self.assertEqual(document["usage"]["cpu_seconds"], used)
        self.assertEqual(document["running"], "2023-11-14T22:13:20.000+00:00")
        self.assertEqual(document["ended"], "2023-11-14T22:13:21.500+00:00")

    def test_status_has_no_exit_while_orphaned_processes_are_killed(self) -> None:
        self.world.sandbox.orphans.shut = True
        self.begin()
        self.world.child.exit()
        self.assertEqual((self.status()["exit"], self.status()["state"]), (None, "running"))
