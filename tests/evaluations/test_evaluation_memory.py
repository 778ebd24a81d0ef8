"""`evaluations.lifecycle`: memory for the text of callers and evaluators."""

from __future__ import annotations

import gc
import sys
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any
from unittest import TestCase, TestResult

import attrs
from twisted.logger import Logger

from tawebeval.config import Configuration
from tawebeval.core.evaluations import EvaluationState
from tawebeval.core.form import (
    MAX_FIELDS,
    MAX_TRUNCATED_COMMAND_BYTES,
    TEXT_FIELD_SIZE_LIMITS,
    Repository,
    SubmissionFile,
    pack_request,
    unpack_request,
)
from tawebeval.evaluations.reading import build_status
from tawebeval.evaluations.store import STDERR_TAIL_BYTES
from tawebeval.webhooks.deliveries import CallbackRecord
from tests.cases.evaluations import EvaluationTestCase

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

    def test_queued_form_takes_as_many_bytes_as_it_has(self) -> None:
        self.slot.shut = True
        self.begin()
        sent = sum(TEXT_FIELD_SIZE_LIMITS.values())
        names = sum(len(file.field) + len(file.filename.encode()) for file in files())
        self.assertLess(self.texts(), sent + names + USUAL)

    def test_command_and_file_names_go_with_the_start(self) -> None:
        self.begin()
        self.world.sandbox.last.started_as.clear()
        self.assertLess(self.texts(), KEPT + USUAL)
        shown = build_status(self.evaluation, None)
        self.assertEqual(
            shown["evaluator_cmd"], largest("evaluator_cmd")[: MAX_TRUNCATED_COMMAND_BYTES - 3]
        )
        self.assertEqual(shown["repository"], self.evaluation.details.request.repository.url)
        self.world.child.end()
        self.assert_over(EvaluationState.FINISHED, None)

    def test_ended_evaluation_has_no_partial_line(self) -> None:
        self.begin()
        begin = self.world.child.environment["EVALUATION_FILE_BEGIN"].encode()
        self.world.child.print(begin + b"\n\n" + b"x" * 10**6)
        self.world.child.complain("😀".encode() + b"x" * (STDERR_TAIL_BYTES - 4))
        self.world.child.end(3)
        self.world.turn()
        self.assertIs(self.evaluation.details.state, EvaluationState.FAILED)
        self.read_all()
        self.assertLess(self.texts(), KEPT + 2 * STDERR_TAIL_BYTES + USUAL)
        self.assertEqual(
            len(build_status(self.evaluation, None)["stderr"].encode()), STDERR_TAIL_BYTES
        )

    def read_all(self) -> None:
        self.evaluation.events.acknowledge(self.evaluation.events.log.end_cursor)

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

    def test_missing_directory_is_not_repeated_whole(self) -> None:
        (self.root / "upload").rename(self.mktemp())
        self.evaluation = self.make(directory="\x01" * 4096)
        self.begin()
        message = self.assert_over(EvaluationState.FAILED, "directory")["message"]
        self.assertLess(len(message), 400)
        self.assertLess(self.texts(), KEPT + len(message) + 3 * USUAL)

    def test_packed_form_is_what_was_sent(self) -> None:
        self.assertEqual(self.evaluation.details.request.submission, files())
        request = self.evaluation.details.request
        self.assertEqual(unpack_request(pack_request(request)), request)
        self.begin()
        self.assertEqual(list(self.world.child.argv)[-1], largest("evaluator_cmd"))
        self.assertEqual(
            [name for name in self.world.child.environment if name.startswith("SUBMISSION_")],
            [f"SUBMISSION_FILE_{file.field.upper()}" for file in files()],
        )
        self.world.child.end()
        self.assert_over(EvaluationState.FINISHED, None)
