"""`errors`: what errors carry to those who show them."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import errors


class EvaluationErrorTests(SynchronousTestCase):
    """Errors that end an evaluation."""

    def test_evaluation_failure_is_immutable_and_can_be_raised(self) -> None:
        error = errors.EvaluationFailure("lost", "gone")
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            error.reason = "exit"
        with self.assertRaises(errors.EvaluationFailure) as caught:
            raise error from ValueError()
        self.assertIs(caught.exception, error)
        self.assertIsInstance(error.__cause__, ValueError)
        self.assertIs(error.with_traceback(None), error)


class RequestErrorTests(SynchronousTestCase):
    """Errors that refuse a request."""

    def test_request_errors_have_their_extra_members_and_retry_after(self) -> None:
        for error, members in (
            (errors.EvaluationNotFound(), {}),
            (errors.EvaluationNotEnded(), {}),
            (errors.SubmissionDiscarded(), {}),
            (errors.DamagedArchive(), {}),
            (errors.DiscardedCursor("7"), {"oldest": "7"}),
            (errors.EvaluationExpired(), {}),
            (errors.ServerNotReady(["a", "b"]), {"reasons": ["a", "b"]}),
        ):
            self.assertEqual(str(error), error.detail)
            self.assertEqual(error.extra_members, members)
        busy = errors.ServerStopping(), errors.ServerNotReady([]), errors.StoreError()
        self.assertEqual([error.retry_after for error in busy], [5, 5, 60])
        self.assertEqual(errors.ResourceMoved("/new").location, "/new")
        detail = errors.ProblemNotFound("a\n" * 80).detail
        self.assertTrue(detail.isprintable() and len(detail) < 200, detail)


class MessageTests(SynchronousTestCase):
    """Limits and sizes in messages."""

    def test_limit_is_named_with_its_value_and_a_size_has_the_largest_unit(self) -> None:
        error = errors.make_limit_failure("output", "output", "printed over 1 MiB", 2**20)
        self.assertIn("(limits.output)", str(error))
        self.assertEqual(error.extra_members, {"limit": "limits.output", "value": 2**20})
        for size, shown in (
            *((0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1025, "1.1 KiB")),
            *((64 * 2**20, "64 MiB"), (3 * 2**29, "1.5 GiB"), (2**40, "1 TiB")),
        ):
            self.assertEqual(errors.format_size(size), shown)


class FamilyTests(SynchronousTestCase):
    """The two families, and the one root."""

    def test_all_exceptions_derive_from_tawebeval_error(self) -> None:
        for value in vars(errors).values():
            if isinstance(value, type) and issubclass(value, Exception):
                self.assertTrue(issubclass(value, errors.TawebevalError), value)
        self.assertFalse(issubclass(errors.EvaluationFailure, errors.RequestError))
