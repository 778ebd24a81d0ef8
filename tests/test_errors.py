"""`errors`: what errors carry to those who show them."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import errors

STARTED = "2026-11-21T09:00:00.000+00:00"


class RequestErrorTests(SynchronousTestCase):
    """Errors that refuse a request."""

    def test_error_has_a_detail_and_members(self) -> None:
        error = errors.RequestTooLarge("too much", limit=5)
        self.assertEqual(
            (str(error), error.detail, error.extra_members), ("too much",) * 2 + ({"limit": 5},)
        )
        self.assertEqual(errors.UnsupportedMediaType("x").extra_members, {})

    def test_refused_field_is_named(self) -> None:
        error = errors.InvalidField("seed", "is too large")
        self.assertEqual(error.detail, "seed: is too large")
        self.assertEqual(error.extra_members, {"field": "seed"})

    def test_discarded_cursor_tells_the_oldest(self) -> None:
        error = errors.DiscardedCursor("17")
        self.assertEqual(error.extra_members, {"oldest": "17"})
        self.assertIn("17", error.detail)

    def test_full_server_has_a_retry_after(self) -> None:
        self.assertEqual(errors.ServerBusy("full", 5).retry_after, 5)

    def test_unready_server_tells_all_reasons(self) -> None:
        error = errors.ServerNotReady(["no disk", "no queue"])
        self.assertEqual(error.detail, "no disk; no queue")
        self.assertEqual(error.extra_members, {"reasons": ["no disk", "no queue"]})
        self.assertEqual(error.retry_after, 5)

    def test_stopping_server_has_a_retry_after(self) -> None:
        self.assertEqual(errors.ServerStopping().retry_after, 5)

    def test_store_error_has_a_retry_after(self) -> None:
        error = errors.StoreError()
        self.assertEqual(error.retry_after, 60)
        self.assertIn("disk is full", error.detail)

    def test_moved_resource_has_a_location(self) -> None:
        error = errors.ResourceMoved("/judge/")
        self.assertEqual((error.detail, error.location), ("moved to /judge/", "/judge/"))

    def test_constant_errors_differ(self) -> None:
        unknown, gone = (
            errors.EvaluationNotFound(),
            errors.EvaluationExpired(STARTED),
        )
        self.assertTrue(unknown.detail)
        self.assertTrue(gone.detail)
        self.assertIn("40 characters", errors.EvaluationNotFound(malformed=True).detail)
        self.assertNotEqual(unknown.detail, gone.detail)
        self.assertTrue(gone.detail.endswith(STARTED))
        self.assertEqual(gone.extra_members, {"started": STARTED})

    def test_refused_rerun_and_unknown_problem_name_the_next_step(self) -> None:
        self.assertIn("wait for its end, or cancel it", errors.EvaluationNotEnded().detail)
        self.assertIn("send the submission again", errors.SubmissionDiscarded().detail)
        self.assertIn("is damaged", errors.DamagedArchive().detail)
        detail = errors.ProblemNotFound("a\n" * 80).detail
        self.assertIn("GET /problems", detail)
        self.assertTrue(detail.isprintable() and len(detail) < 200, detail)


class EvaluationErrorTests(SynchronousTestCase):
    """Errors that end an evaluation."""

    def test_failure_has_reason_message_and_members(self) -> None:
        error = errors.EvaluationFailure("exit", "status 3", {"status": 3})
        self.assertEqual(
            (error.reason, error.message, error.extra_members), ("exit", "status 3", {"status": 3})
        )
        self.assertEqual(str(error), "status 3")
        self.assertEqual(errors.EvaluationFailure("lost", "x").extra_members, {})

    def test_limit_is_named_with_its_value(self) -> None:
        for error, reason, limit in (
            (errors.build_limit_failure("disk", "disk", "wrote much", 7), "disk", "limits.disk"),
        ):
            self.assertEqual(error.reason, reason)
            self.assertIn(f"({limit})", error.message)
            self.assertEqual(error.extra_members, {"limit": limit, "value": 7})

    def test_failure_is_a_value_that_can_be_raised(self) -> None:
        error = errors.EvaluationFailure("lost", "gone")
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            error.reason = "exit"
        with self.assertRaises(errors.EvaluationFailure) as caught:
            raise error from ValueError()
        self.assertIs(caught.exception, error)
        self.assertIsInstance(error.__cause__, ValueError)
        self.assertIs(error.with_traceback(None), error)


class SizeTests(SynchronousTestCase):
    """Sizes in messages."""

    def test_size_has_the_largest_unit(self) -> None:
        for size, shown in (
            *((0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1025, "1.1 KiB")),
            *((64 * 2**20, "64 MiB"), (3 * 2**29, "1.5 GiB"), (2**40, "1 TiB")),
        ):
            self.assertEqual(errors.format_size(size), shown)


class FamilyTests(SynchronousTestCase):
    """The two families, and the one root."""

    def test_all_errors_have_one_root(self) -> None:
        for value in vars(errors).values():
            if isinstance(value, type) and issubclass(value, Exception):
                self.assertTrue(issubclass(value, errors.TawebevalError), value)
        self.assertFalse(issubclass(errors.EvaluationFailure, errors.RequestError))
