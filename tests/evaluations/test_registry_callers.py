"""`evaluations.service`: isolation of callers, and the share of each caller."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred

from tawebeval.config import (
    CallerSettings,
    Configuration,
    EvaluationSettings,
    EventBufferSettings,
)
from tawebeval.core.event_log import EventLog
from tawebeval.core.events import encode_error_event
from tawebeval.deferreds import UNLIMITED_WAITERS, FairQueue
from tawebeval.errors import (
    CallerQuotaExceeded,
    EvaluationExpired,
    EvaluationNotFound,
    IdempotencyKeyReused,
    ServerBusy,
)
from tawebeval.evaluations.lifecycle import Evaluation
from tests.cases.evaluations import END, RegistryTestCase
from tests.fakes.world import answer


class CallerTests(RegistryTestCase):
    def asked(self, identifier: str, caller: str) -> list[type[Exception] | None]:
        """Ask for everything that there is; return how each is refused."""
        registry = self.registry

        refusals: list[type[Exception] | None] = []
        questions: list[Callable[[], object]] = [
            lambda: registry.events.read_page_now(identifier, None, caller),
            lambda: registry.events.read_page_now(identifier, "0", caller),
            lambda: registry.events.read_page_now(identifier, END, caller),
            lambda: registry.get_status(identifier, caller),
            lambda: registry.cancel_evaluation(identifier, caller).send(None),
        ]
        for question in questions:
            try:
                question()
            except (StopIteration, Exception) as error:  # noqa: BLE001
                refusals.append(None if isinstance(error, StopIteration) else type(error))
            else:
                refusals.append(None)
        waited = Deferred.fromCoroutine(answer(registry, identifier, "0", 5, caller))
        if waited.called:
            waited.addErrback(lambda failure: refusals.append(failure.type))
        else:
            waited.addErrback(lambda _: None)
            waited.cancel()
        return refusals

    def begin(self, caller: str, key: str | None = None, digest: bytes = b"") -> str:
        return self.registry.accept_form(self.upload(key, digest), caller)

    def test_other_caller_never_sees_the_evaluation(self) -> None:
        identifier = self.begin("alice")
        child = self.world.child
        child.print(b"a\nb\n")
        nothing = [EvaluationNotFound] * 6
        for caller in ("bob", "", "alic", "alicee"):
            self.assertEqual(self.asked(identifier, caller), nothing)
        self.assertEqual(child.signals, [])
        self.finish(child)
        self.assertEqual(self.asked(identifier, "bob"), nothing)
        self.assertEqual(
            self.registry.events.read_page_now(identifier, None, "alice").end_cursor, END
        )
        self.registry.events.read_page_now(identifier, END, "alice")
        self.assertEqual(self.asked(identifier, "bob"), nothing)
        with self.assertRaises(EvaluationExpired):
            self.registry.get_status(identifier, "alice")
        self.assertEqual(
            self.registry.events.read_page_now(identifier, END, "alice").end_cursor, None
        )

    def test_repositories_are_fetched_in_the_name_of_the_caller(self) -> None:
        for caller in ("alice", "bob"):
            self.begin(caller)
            self.finish(self.world.child)
        self.assertEqual(self.world.repositories.callers, ["alice", "bob"])

    def test_daemon_that_lost_everything_tells_other_callers_nothing(self) -> None:
        identifier = self.begin("alice")
        self.end_all()
        self.registry = self.make(2)
        self.assertEqual(self.asked(identifier, "bob"), [EvaluationNotFound] * 6)
        with self.assertRaises(EvaluationExpired):
            self.registry.events.read_page_now(identifier, None, "alice")

    def test_requests_of_another_caller_do_not_keep_the_evaluation(self) -> None:
        identifier = self.begin("alice")
        self.world.clock.advance(899)
        self.asked(identifier, "bob")
        self.expire(1)
        with self.assertRaises(EvaluationExpired):
            self.registry.events.read_page_now(identifier, None, "alice")

    def test_idempotency_key_is_its_callers_own(self) -> None:
        first = self.begin("alice", "k", b"1")
        second = self.begin("bob", "k", b"2")
        self.assertNotEqual(first, second)
        self.assertEqual(self.begin("alice", "k", b"1"), first)
        self.assertEqual(self.begin("bob", "k", b"2"), second)
        self.assertRaises(IdempotencyKeyReused, self.begin, "bob", "k", b"1")


class ShareTests(RegistryTestCase):
    running, queued, own = 2, 3, (1, 1)

    def test_caller_over_its_share_is_refused_another_let_in(self) -> None:
        begin = self.registry.accept_form
        for _ in range(2):
            begin(self.upload(), "alice")
        error = self.assertRaises(CallerQuotaExceeded, begin, self.upload(), "alice")
        self.assertEqual(error.retry_after, 5)  # of two slots, each for 10 s as none has ended yet
        self.assertRaises(CallerQuotaExceeded, self.registry.check_admission, "alice")
        for caller in ("bob", "bob", "carol"):
            begin(self.upload(), caller)
        self.assertIs(type(self.assertRaises(ServerBusy, begin, self.upload(), "dave")), ServerBusy)
        states = [child.signals for child in self.world.spawn.children]
        self.assertEqual(states, [[], []])


class FetchTests(RegistryTestCase):
    queued = 1000

    def setUp(self) -> None:
        super().setUp()
        self.registry.context.fetch_slots = FairQueue(2, UNLIMITED_WAITERS, 1)
        repositories = self.world.repositories
        repositories.remote = repositories.gate.shut = True

    def begin(self, caller: str) -> None:
        self.registry.accept_form(self.upload(), caller)

    def test_slow_servers_of_a_caller_do_not_delay_other_callers(self) -> None:
        for caller in ("alice", "alice", "bob"):
            self.begin(caller)
        self.assertEqual(self.world.repositories.callers, ["alice", "bob"])

    def test_little_of_a_long_queue_is_fetched_ahead(self) -> None:
        for _ in range(500):
            self.begin("alice")
        self.world.repositories.gate.open()
        # Two run, for which each commit was looked for twice, and one waits.
        self.assertEqual(len(self.world.spawn.children), 2)
        self.assertEqual(len(self.world.repositories.asked), 5)
        self.assertEqual(self.world.repositories.users, 2)
        self.finish(self.world.spawn.children[0])
        self.assertEqual(len(self.world.spawn.children), 3)
        self.assertEqual(len(self.world.repositories.asked), 7)


class KeptShareTestCase(RegistryTestCase):
    """Callers who do not read, or by streams only."""

    def leave(self, caller: str, count: int = 1) -> list[str]:
        identifiers = []
        for _ in range(count):
            identifiers.append(self.registry.accept_form(self.upload(), caller))
            self.print()
            self.finish(self.world.child)
        return identifiers

    def print(self) -> None:
        """Let the newest evaluation print nothing."""


class KeptShareTests(KeptShareTestCase):
    configuration = Configuration(
        callers=CallerSettings(kept=2),
        evaluations=EvaluationSettings(kept=5, retain=600),
    )

    def check_over(self, caller: str) -> None:
        """Hold that nothing is accepted of this caller, who is told what to do."""
        for refused in (
            lambda: self.registry.check_admission(caller),
            lambda: self.registry.accept_form(self.upload(), caller),
        ):
            error = self.assertRaises(CallerQuotaExceeded, refused)
            self.assertEqual(error.retry_after, 30)
            self.assertIn("after=end", error.detail)

    def test_caller_with_an_unread_share_is_refused_and_others_are_not(self) -> None:
        self.leave("alice", 2)
        self.check_over("alice")
        self.leave("bob", 2)
        self.check_over("bob")
        self.leave("carol")
        refusal = self.assertRaises(ServerBusy, self.registry.accept_form, self.upload(), "carol")
        self.assertIs(type(refusal), ServerBusy)
        self.check_over("alice")

    def test_only_reading_to_the_end_makes_room(self) -> None:
        identifier, _ = self.leave("alice", 2)
        self.registry.events.read_page_now(identifier, None, "alice")
        self.check_over("alice")
        self.registry.events.read_page_now(identifier, END, "alice")
        self.leave("alice")
        self.check_over("alice")

    def test_own_evaluation_that_a_stream_has_sent_makes_room(self) -> None:
        (bobs,) = self.leave("bob")
        self.send_all(bobs, "bob")
        first, second = self.leave("alice", 2)
        self.check_over("alice")
        self.send_all(second, "alice")
        self.leave("alice")
        self.check_over("alice")
        for identifier, known in ((bobs, True), (first, True), (second, False)):
            self.assertEqual(identifier in self.registry.records, known)

    def test_refusal_looks_once_at_each_evaluation_that_a_stream_has_sent(self) -> None:
        looks: list[Evaluation] = []
        self.patch(Evaluation, "is_client_waiting", property(lambda one: not looks.append(one)))
        for caller in ("alice", "bob", "carol", "dave", "eve"):
            (identifier,) = self.leave(caller)
            self.send_all(identifier, caller)
        looks.clear()
        self.assertRaises(ServerBusy, self.registry.check_admission, "frank")
        self.assertEqual(len(looks), 5)

    def test_discarding_unread_events_makes_room(self) -> None:
        identifier, _ = self.leave("alice", 2)
        cancelled = Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier, "alice"))
        self.successResultOf(cancelled)
        self.check_over("alice")
        self.assertIsNone(self.registry.events.read_page_now(identifier, END, "alice").end_cursor)
        self.leave("alice")

    def test_cancelled_evaluation_counts(self) -> None:
        self.leave("alice")
        identifier = self.registry.accept_form(self.upload(), "alice")
        Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier, "alice"))
        self.registry.check_admission("alice")
        self.finish(self.world.child)
        self.check_over("alice")

    def test_expired_evaluation_makes_room(self) -> None:
        self.leave("alice", 2)
        self.expire(600)
        self.assertFalse(self.registry.records.ended_share.used)
        self.leave("alice", 2)
        self.check_over("alice")

    def test_waiting_and_running_evaluations_do_not_count(self) -> None:
        for _ in range(4):
            self.registry.accept_form(self.upload(), "alice")
        self.expire(900)
        for child in self.world.spawn.children:
            self.finish(child)
        self.leave("alice", 2)
        self.check_over("alice")


class NoKeptShareTests(KeptShareTestCase):
    def test_one_caller_may_leave_all_unread_without_a_share(self) -> None:
        for share in (0, 5, 6):
            self.configuration = Configuration(
                callers=CallerSettings(kept=share),
                evaluations=EvaluationSettings(kept=5),
            )
            self.setUp()
            self.leave("alice", 5)
            refusal = self.assertRaises(
                ServerBusy, self.registry.accept_form, self.upload(), "alice"
            )
            self.assertIs(type(refusal), ServerBusy)


class BytesShareTests(KeptShareTestCase):
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=600),
        buffers=EventBufferSettings(disk=4096),
    )

    def print(self) -> None:
        self.world.child.print(b"x" * 1024 + b"\n")

    def check_over(self, caller: str) -> None:
        """Hold that nothing is accepted of this caller, who is told what to do."""
        error = self.assertRaises(CallerQuotaExceeded, self.registry.check_admission, caller)
        self.assertEqual(error.retry_after, 30)
        self.assertIn("buffers.disk", error.detail)
        self.assertIn("after=end", error.detail)

    def test_caller_with_unread_bytes_gets_nothing_more_and_others_do(self) -> None:
        (first,) = self.leave("alice")
        self.registry.check_admission("alice")
        self.leave("alice")
        self.check_over("alice")
        self.leave("bob")
        self.registry.events.read_page_now(first, END, "alice")
        self.leave("alice")
        self.check_over("alice")

    def test_all_callers_together_fill_the_disk(self) -> None:
        for caller in ("alice", "bob", "carol", "dave"):
            self.leave(caller)
        refusal = self.assertRaises(ServerBusy, self.registry.check_admission, "eve")
        self.assertIs(type(refusal), ServerBusy)
        self.assertIn("buffers.disk", refusal.detail)

    def test_status_does_not_keep_unread_bytes(self) -> None:
        identifiers = self.leave("alice", 2)
        self.world.clock.advance(599)
        for identifier in identifiers:
            self.registry.get_status(identifier, "alice")
        self.check_over("alice")
        self.expire(1)
        self.registry.check_admission("alice")


class WaitForRoomTests(RegistryTestCase):
    """Alice uses up her part while her next evaluation is queued."""

    running, queued = 1, 2
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=600),
        buffers=EventBufferSettings(total=2**16, disk=4096),
    )

    def setUp(self) -> None:
        super().setUp()
        self.first, self.second, self.bobs = (
            self.registry.accept_form(self.upload(), caller) for caller in ("alice", "alice", "bob")
        )

    def check_wait(self, give_back: Callable[[], object]) -> None:
        """Hold that her evaluation waits until something is given back, and others do not."""
        self.finish(self.world.child)
        self.assertEqual(self.states(), ["finished", "queued", "running"])
        self.finish(self.world.child)
        self.assertEqual(self.states(), ["finished", "queued", "finished"])
        give_back()
        self.world.turn()
        self.assertEqual(self.registry.get_status(self.second, "alice")["state"], "running")

    def states(self) -> list[str]:
        """Return the states of the evaluations."""
        names = (self.first, "alice"), (self.second, "alice"), (self.bobs, "bob")
        return [self.registry.get_status(name, caller)["state"] for name, caller in names]

    def test_evaluation_waits_until_unread_events_are_read(self) -> None:
        self.world.child.print(b"x" * 2048)
        self.check_wait(lambda: self.registry.events.read_page_now(self.first, END, "alice"))

    def test_evaluation_waits_until_memory_of_newest_events_is_given_back(self) -> None:
        log = EventLog(self.world.memory, caller="alice")
        log.append_batch(encode_error_event("exit", "x" * 2**15), 0)
        self.check_wait(log.discard)
