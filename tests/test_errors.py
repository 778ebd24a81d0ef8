"""`errors`: what errors carry to those who show them."""

from __future__ import annotations

import attrs
from twisted.trial.unittest import SynchronousTestCase

from tawebeval import errors

STARTED = "2026-11-21T09:00:00.000+00:00"


class RequestErrorTests(SynchronousTestCase):
    """Errors that refuse a request."""

    def test_detail_and_members(self) -> None:
        """The sentence and the further members of the problem document."""
        error = errors.RequestTooLarge("too much", limit=5)
        self.assertEqual(
            (str(error), error.detail, error.extra_members), ("too much",) * 2 + ({"limit": 5},)
        )
        self.assertEqual(errors.UnsupportedMediaType("x").extra_members, {})

    def test_field(self) -> None:
        """A refused field is named in the sentence and as a member."""
        error = errors.InvalidField("seed", "is too large")
        self.assertEqual(error.detail, "seed: is too large")
        self.assertEqual(error.extra_members, {"field": "seed"})

    def test_oldest(self) -> None:
        """A discarded cursor tells the oldest usable one."""
        error = errors.DiscardedCursor("17")
        self.assertEqual(error.extra_members, {"oldest": "17"})
        self.assertIn("17", error.detail)

    def test_busy(self) -> None:
        """A full server tells when to come again, in seconds."""
        self.assertEqual(errors.ServerBusy("full", 5).retry_after, 5)

    def test_reasons(self) -> None:
        """Who is not ready says all of why, as a sentence and one by one."""
        error = errors.ServerNotReady(["no disk", "no queue"])
        self.assertEqual(error.detail, "no disk; no queue")
        self.assertEqual(error.extra_members, {"reasons": ["no disk", "no queue"]})
        self.assertEqual(error.retry_after, 5)

    def test_stopping(self) -> None:
        """A daemon that stops tells when to come again."""
        self.assertEqual(errors.ServerStopping().retry_after, 5)

    def test_store(self) -> None:
        """Who cannot store evaluations says why, and tells when to come again."""
        error = errors.StoreError()
        self.assertEqual(error.retry_after, 60)
        self.assertIn("disk is full", error.detail)

    def test_moved(self) -> None:
        """A resource that has moved tells where it is."""
        error = errors.ResourceMoved("/judge/")
        self.assertEqual((error.detail, error.location), ("moved to /judge/", "/judge/"))

    def test_sentences(self) -> None:
        """Errors that always say the same say something, and apart from each other."""
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

    def test_next_steps(self) -> None:
        """A rerun that is refused, and an unknown problem, name what to do."""
        self.assertIn("wait for its end, or cancel it", errors.EvaluationNotEnded().detail)
        self.assertIn("send the submission again", errors.SubmissionDiscarded().detail)
        self.assertIn("is damaged", errors.DamagedArchive().detail)
        detail = errors.ProblemNotFound("a\n" * 80).detail
        self.assertIn("GET /problems", detail)
        self.assertTrue(detail.isprintable() and len(detail) < 200, detail)


class EvaluationErrorTests(SynchronousTestCase):
    """Errors that end an evaluation."""

    def test_fields(self) -> None:
        """Reason, sentence and members; the sentence is what people see."""
        error = errors.EvaluationFailure("exit", "status 3", {"status": 3})
        self.assertEqual(
            (error.reason, error.message, error.extra_members), ("exit", "status 3", {"status": 3})
        )
        self.assertEqual(str(error), "status 3")
        self.assertEqual(errors.EvaluationFailure("lost", "x").extra_members, {})

    def test_limits(self) -> None:
        """A limit is named in the sentence, and with its value in members."""
        for error, reason, limit in (
            (errors.build_limit_failure("disk", "disk", "wrote much", 7), "disk", "limits.disk"),
        ):
            self.assertEqual(error.reason, reason)
            self.assertIn(f"({limit})", error.message)
            self.assertEqual(error.extra_members, {"limit": limit, "value": 7})

    def test_is_fixed(self) -> None:
        """It is a value, and yet can be raised, chained and annotated as exceptions are."""
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

    def test_units(self) -> None:
        """A size has the largest unit of which it has one, and is rounded up."""
        for size, shown in (
            *((0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1025, "1.1 KiB")),
            *((64 * 2**20, "64 MiB"), (3 * 2**29, "1.5 GiB"), (2**40, "1 TiB")),
        ):
            self.assertEqual(errors.format_size(size), shown)


class FamilyTests(SynchronousTestCase):
    """The two families, and the one root."""

    def test_root(self) -> None:
        """Whatever the project reports can be caught as one."""
        for value in vars(errors).values():
            if isinstance(value, type) and issubclass(value, Exception):
                self.assertTrue(issubclass(value, errors.TawebevalError), value)
        self.assertFalse(issubclass(errors.EvaluationFailure, errors.RequestError))
