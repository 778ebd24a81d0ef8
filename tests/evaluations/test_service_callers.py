"""`evaluations.service`: isolation and shares of callers, callbacks, the archive."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.config import (
    CallerSettings,
    Configuration,
    EvaluationSettings,
    EventBufferSettings,
    LimitSettings,
)
from tawebeval.core.events import (
    EventLog,
    encode_error_event,
)
from tawebeval.core.form import Repository
from tawebeval.deferreds import FairQueue
from tawebeval.errors import (
    CallerQuotaExceeded,
    EvaluationExpired,
    EvaluationNotFound,
    IdempotencyKeyReused,
    InvalidField,
    ServerBusy,
    StoreError,
)
from tawebeval.evaluations.lifecycle import Evaluation
from tawebeval.sandbox.workspace import derive_log_pseudonym
from tawebeval.webhooks.records import CallbackState
from tests.cases.evaluations import END, RegistryTestCase
from tests.cases.settings import with_constants
from tests.fakes.archive import FakeArchive
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.files import FakeStore
from tests.fakes.world import OID


class CallerTests(RegistryTestCase):
    def begin(self, caller: str, key: str | None = None, digest: bytes = b"") -> str:
        return self.registry.accept_form(self.upload(key, digest), caller)

    def test_requests_of_another_caller_do_not_delay_the_expiry(self) -> None:
        identifier = self.begin("alice")
        self.world.clock.advance(899)
        registry = self.registry
        read_page = partial(registry.events.read_page_now, after_cursor=None)
        for caller in ("bob", "", "alic", "alicee"):
            for ask in (registry.get_status, read_page):
                self.assertRaises(EvaluationNotFound, ask, identifier, caller=caller)
        self.expire(1)
        with self.assertRaises(EvaluationExpired):
            self.registry.events.read_page_now(identifier, None, "alice")

    def test_same_idempotency_key_of_two_callers_begins_two_evaluations(self) -> None:
        first = self.begin("alice", "k", b"1")
        second = self.begin("bob", "k", b"2")
        self.assertNotEqual(first, second)
        self.assertEqual(self.begin("alice", "k", b"1"), first)
        self.assertEqual(self.begin("bob", "k", b"2"), second)
        self.assertRaises(IdempotencyKeyReused, self.begin, "bob", "k", b"1")


class FetchTests(RegistryTestCase):
    queued = 1000

    def setUp(self) -> None:
        super().setUp()
        self.registry.context.fetch_slots = FairQueue(2, running_per_caller=1)
        repositories = self.world.repositories
        repositories.remote = repositories.gate.shut = True

    def begin(self, caller: str) -> None:
        self.registry.accept_form(self.upload(), caller)

    def test_slow_servers_of_a_caller_do_not_delay_other_callers(self) -> None:
        for caller in ("alice", "alice", "bob"):
            self.begin(caller)
        self.assertEqual(self.world.repositories.callers, ["alice", "bob"])

    def test_branch_is_resolved_for_the_caller_of_the_request(self) -> None:
        repositories = self.world.repositories
        repositories.branches["main"] = OID
        repository = Repository("https://example.org/problem.git", "main")
        self.registry.accept_form(self.upload(repository=repository, commit_oid=""), "alice")
        self.assertEqual(repositories.callers, ["alice", "alice"])

    def test_fetched_evaluation_in_the_queue_leaves_its_fetch_slot_to_other_callers(self) -> None:
        repositories = self.world.repositories
        repositories.gate.open()
        for caller in ("alice", "bob", "carol", "dave", "eve", "fay"):
            self.begin(caller)
        self.assertEqual(len(self.world.spawn.children), 2)
        self.assertEqual(repositories.callers[-4:], ["carol", "dave", "eve", "fay"])

    def test_only_one_queued_commit_is_fetched_before_it_has_a_run_slot(self) -> None:
        for _ in range(50):
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
            self.finish(self.world.child)
        return identifiers


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

    def test_caller_is_refused_if_its_unread_evaluations_fill_its_share(self) -> None:
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

    def test_evaluation_sent_by_a_stream_makes_room_for_its_caller(self) -> None:
        (bobs,) = self.leave("bob")
        self.send_all(bobs, "bob")
        first, second = self.leave("alice", 2)
        self.check_over("alice")
        self.send_all(second, "alice")
        self.leave("alice")
        self.check_over("alice")
        for identifier, known in ((bobs, True), (first, True), (second, False)):
            self.assertEqual(identifier in self.registry.records, known)

    def test_only_a_readers_stream_to_the_end_counts_as_sent(self) -> None:
        (identifier,) = self.leave("alice")
        events = self.registry.records[identifier].events
        for is_observer, is_cut in ((True, False), (False, True), (False, False)):
            subscription = self.subscribe(identifier, caller="alice", is_observer=is_observer)
            with contextlib.suppress(ServerBusy), subscription.reader_context:
                counts = events.reader_count, events.read_only_client_count
                self.assertEqual(counts, (int(not is_observer), int(is_observer)))
                self.read(subscription)
                if is_cut:
                    raise ServerBusy("a cut stream", 1)
            self.assertEqual(events.was_streamed_completely, not (is_observer or is_cut))
            self.assertEqual((events.reader_count, events.read_only_client_count), (0, 0))

    def test_refusal_checks_each_evaluation_sent_by_a_stream_once(self) -> None:
        looks: list[Evaluation] = []
        self.patch(Evaluation, "is_client_waiting", property(lambda one: not looks.append(one)))
        for caller in ("alice", "bob", "carol", "dave", "eve"):
            (identifier,) = self.leave(caller)
            self.send_all(identifier, caller)
        looks.clear()
        self.assertRaises(ServerBusy, self.registry.check_admission, "frank")
        self.assertEqual(len(looks), 5)

    def test_queued_and_running_evaluations_do_not_count_as_kept(self) -> None:
        for _ in range(4):
            self.registry.accept_form(self.upload(), "alice")
        self.expire(900)
        for child in self.world.spawn.children:
            self.finish(child)
        self.leave("alice", 2)
        self.check_over("alice")


class NoKeptShareTests(KeptShareTestCase):
    def test_without_a_share_one_caller_may_keep_all_evaluations_unread(self) -> None:
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


class WaitForRoomTests(RegistryTestCase):
    """Alice uses up her part while her next evaluation is queued."""

    running, queued = 1, 2
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=600),
        buffers=EventBufferSettings(total=2**16, disk=4096),
    )

    def test_evaluation_waits_until_its_caller_frees_memory_of_newest_events(self) -> None:
        callers = ("alice", "alice", "bob")
        names = [self.registry.accept_form(self.upload(), caller) for caller in callers]

        def states() -> list[str]:
            pairs = zip(names, callers, strict=True)
            return [self.registry.get_status(*pair)["state"] for pair in pairs]

        log = EventLog(self.world.memory, caller="alice")
        log.append_batch(encode_error_event("exit", "x" * 2**15), 0)
        for bobs in ("running", "finished"):
            self.finish(self.world.child)
            self.assertEqual(states(), ["finished", "queued", bobs])
        log.discard()
        self.world.turn()
        self.assertEqual(states(), ["finished", "running", "finished"])


class ShareTestCase(RegistryTestCase):
    """Alice is greedy, Bob is not."""

    running, queued = 3, 6

    def begin(self, caller: str) -> str:
        return self.registry.accept_form(self.upload(), caller)

    def state(self, identifier: str, caller: str) -> str:
        state: str = self.registry.get_status(identifier, caller)["state"]
        return state

    def discard(self, identifier: str, caller: str) -> None:
        self.registry.events.read_page_now(identifier, END, caller)


class UnreadEventTests(ShareTestCase):
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=900),
        buffers=with_constants(EventBufferSettings, max_page_bytes=4096)(disk=20_000),
        limits=LimitSettings(wall_clock=10**6),
    )

    def fill(self) -> list[str]:
        """Let three evaluations of Alice print 60 KB; return these, and two that are queued."""
        identifiers = [self.begin("alice") for _ in range(5)]
        for child in self.world.spawn.children:
            child.print(b"x" * 20_000 + b"\n")
        return identifiers

    def test_caller_with_too_many_unread_bytes_is_refused_and_others_are_not(self) -> None:
        self.fill()
        error = self.assertRaises(CallerQuotaExceeded, self.begin, "alice")
        self.assertIn("buffers.disk", str(error))
        self.finish(self.world.spawn.children[0])
        self.assertEqual(self.state(self.begin("bob"), "bob"), "running")

    def test_queued_evaluations_wait_until_their_caller_has_read(self) -> None:
        identifiers = self.fill()
        for child in self.world.spawn.children:
            self.finish(child)
        self.assertEqual([self.state(one, "alice") for one in identifiers[3:]], ["queued"] * 2)
        self.assertEqual(self.registry.run_queue.waiter_count, 2)
        for each in identifiers[:2]:
            self.discard(each, "alice")
            self.assertEqual(self.state(identifiers[3], "alice"), "queued")
        self.discard(identifiers[2], "alice")
        self.assertEqual([self.state(one, "alice") for one in identifiers[3:]], ["running"] * 2)
        self.assertEqual(self.world.disk.used, 0)


class FixedMemoryTests(ShareTestCase):
    configuration = Configuration(buffers=EventBufferSettings(total=20_000))

    def test_memory_of_unread_error_events_is_limited_for_each_caller(self) -> None:
        unread = [self.begin("alice") for _ in range(3)]
        for child in self.world.spawn.children:
            child.complain(b"\x01" * 8000)
            self.finish(child, 3)
        error = self.assertRaises(CallerQuotaExceeded, self.begin, "alice")
        self.assertIn("buffers.total", str(error))
        self.begin("bob")
        for each in unread:
            self.discard(each, "alice")
        self.begin("alice")


URL = "https://receiver.example/hook?key=s3cret"


class CallbackTests(RegistryTestCase):
    configuration = Configuration(
        evaluations=EvaluationSettings(retain=900),
        limits=LimitSettings(wall_clock=10**6),
    )

    def test_defect_in_a_callback_is_logged_and_the_evaluation_ends(self) -> None:
        def send(*_: object) -> None:
            raise ValueError("a defect")

        self.patch(self.callbacks, "start_delivery", send)
        identifier = self.accept(callback_url=URL)
        self.finish(self.world.child)
        self.assertEqual(self.registry.get_status(identifier)["state"], "finished")
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        closed = Deferred.fromCoroutine(self.registry.drain_and_close())
        self.successResultOf(closed)

    def test_callback_sends_the_final_status_once(self) -> None:
        identifier = self.accept(callback_url=URL)
        child = self.world.child
        child.print(b"one\n")
        self.assertEqual(self.callbacks.expected, [(URL, "")])
        waiting = {
            "url": "https://receiver.example/hook",
            "state": "waiting",
            "attempts": 0,
            "last_error": None,
        }
        self.assertEqual(self.registry.get_status(identifier)["callback"], waiting)
        self.assertEqual(self.callbacks.sent, [])
        self.finish(child, 3)
        ((evaluation, document),) = self.callbacks.sent
        self.assertEqual(evaluation, derive_log_pseudonym(identifier))
        self.assertEqual(document, self.registry.get_status(identifier))
        self.assertEqual((document["state"], document["exit"]["status"]), ("failed", 3))
        self.assertEqual(document["callback"], {**waiting, "state": "pending"})
        self.assertEqual(self.page(identifier)["data"], ["one", "\n"])

    def test_evaluation_with_a_callback_is_not_abandoned(self) -> None:
        first, second, third = (self.accept(callback_url=URL) for _ in range(3))
        for child in self.world.spawn.children:
            child.print(b"one\n")
        for _ in range(3):
            self.expire(901)
        for identifier in (first, second, third):
            self.finish(self.world.spawn.children[len(self.callbacks.sent)])
            self.assertEqual(self.callbacks.sent[-1][0], derive_log_pseudonym(identifier))
            self.assertEqual(self.callbacks.sent[-1][1]["state"], "finished")
        self.assertEqual(self.page(first)["data"], ["one", "\n"])

    def test_forbidden_callback_refuses_the_form(self) -> None:
        self.callbacks.refuse = True
        with self.assertRaises(InvalidField):
            self.accept(callback_url=URL)
        self.assertEqual(self.list_all(), [])

    def test_repeated_form_has_one_callback(self) -> None:
        one = self.accept(callback_url=URL, key="k")
        self.callbacks.refuse = True
        self.assertEqual(self.accept(callback_url=URL, key="k"), one)
        self.finish(self.world.child)
        self.assertEqual(len(self.callbacks.sent), 1)

    def test_ended_evaluation_with_a_callback_expires(self) -> None:
        identifier = self.accept(callback_url=URL)
        self.expire(2000)
        self.patch(self.callbacks, "start_delivery", lambda *_: None)
        self.finish(self.world.child)
        self.expire(self.configuration.evaluations.retain - 1)
        self.assertIn(identifier, self.registry.records)
        self.expire(1)
        self.assertNotIn(identifier, self.registry.records)


class ArchiveTests(RegistryTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.world.archive = self.archive = FakeArchive()
        self.registry = self.make()

    def status(self, identifier: str) -> dict[str, object] | None:
        reading = Deferred.fromCoroutine(self.registry.archive_reader.read_status(identifier, ""))
        reading.addErrback(lambda failure: failure.trap(EvaluationExpired) and None)
        return self.successResultOf(reading)

    def test_archived_evaluation_keeps_its_state_when_it_is_forgotten(self) -> None:
        for exit_status, state in ((0, "finished"), (3, "failed")):
            identifier = self.evaluate(b"a\n", exit_status)
            self.consume(identifier)
            self.assert_refused(EvaluationExpired, identifier)
            status = self.status(identifier)
            assert status is not None
            self.assertEqual((status["state"], status["archived"]), (state, True))
            self.assertEqual(self.archive.ended[-1].final_status["status"]["state"], state)
        self.assertEqual((len(self.world.store.rows), self.world.disk.used), (2, 0))

    def test_unread_evaluation_outlives_its_copy_in_the_archive(self) -> None:
        identifier = self.evaluate(b"a\n")
        self.assertIsNotNone(self.status(identifier))
        self.assertTrue(self.archive.on_removal(identifier))
        self.assertIsNone(self.status(identifier))
        (row,) = self.world.store.load_live_rows()
        self.assertEqual((row.identifier, row.archive_record), (identifier, None))
        self.assertEqual(self.consume(identifier), ["a", "\n"])
        self.assertEqual(self.world.store.rows, {})
        self.assertFalse(self.archive.on_removal(identifier))

    def test_late_callback_does_not_restore_a_row_removed_from_the_archive(self) -> None:
        ends: list[Callable[[], object]] = []
        self.patch(FakeCallbacks, "start_delivery", lambda _, *arguments: ends.append(arguments[2]))
        for is_delivered_first in (False, True):
            identifier = self.accept(callback_url="https://receiver.example/hook")
            self.finish(self.world.child)
            callback = self.registry.records[identifier].details.callback
            assert callback is not None
            self.consume(identifier)
            gc.collect()
            if is_delivered_first:
                callback.state = CallbackState.DELIVERED
            # The row stays until the callback is delivered.
            is_kept = self.archive.on_removal(identifier)
            self.assertEqual(is_kept, not is_delivered_first)
            if not is_kept:
                self.world.store.delete(identifier)
            self.assertEqual(identifier in self.world.store.rows, is_kept)
            callback.state = CallbackState.DELIVERED
            ends.pop()()
            self.assertEqual(self.world.store.rows, {})

    def test_submission_is_archived_though_all_events_were_received_before(self) -> None:
        self.archive.gate.shut = True
        identifier, child = self.start(b"a\n")
        details = self.registry.records[identifier].details
        details.has_kept_submission = True
        self.finish(child)
        self.consume(identifier)
        self.assertTrue(details.has_kept_submission)
        self.archive.gate.open()
        (ended,) = self.archive.ended
        self.assertIsNotNone(ended.workspace)
        self.assertFalse(details.has_kept_submission)

    def test_requests_wait_some_seconds_for_an_evaluation_to_be_archived(self) -> None:
        self.archive.gate.shut = True
        identifier = self.evaluate(b"a\n")
        self.consume(identifier)
        self.assertEqual([one["evaluation_id"] for one in self.list_all()], [identifier])
        reader = self.registry.archive_reader
        first = Deferred.fromCoroutine(reader.read_status(identifier, ""))
        self.world.clock.advance(4.999)
        second = Deferred.fromCoroutine(reader.subscribe(identifier, None, "", 0))
        self.assertNoResult(first)
        self.world.clock.advance(0.001)
        self.assertIn("not archived yet", str(self.failureResultOf(first, ServerBusy).value))
        other = Deferred.fromCoroutine(reader.read_status(identifier, "other"))
        self.failureResultOf(other, EvaluationExpired)
        self.archive.gate.open()
        self.assertEqual(self.archive.asked, [(identifier, "")])
        self.failureResultOf(second, EvaluationExpired)
        status = self.status(identifier)
        assert status is not None
        self.assertTrue(status["archived"])

    def test_evaluation_is_not_archived_if_its_row_cannot_be_stored(self) -> None:
        identifier, child = self.start(b"a\n")
        self.world.store.error = StoreError()
        self.finish(child)
        self.assertIsNone(self.status(identifier))
        self.assertEqual(self.consume(identifier), ["a", "\n"])
        self.assertEqual((self.world.store.rows, self.world.disk.used), ({}, 0))

    def test_evaluation_is_released_though_the_archive_raises(self) -> None:
        self.archive.gate.error = ZeroDivisionError("oh")
        identifier = self.evaluate(b"a\n")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.consume(identifier)
        self.assertEqual((self.world.store.rows, self.world.disk.used), ({}, 0))


class StoreTests(RegistryTestCase):
    def wait(self, identifier: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self.registry.wait_until_stored(identifier))

    def test_all_requests_with_a_key_wait_until_the_evaluation_is_stored(self) -> None:
        for error in (None, StoreError()):
            self.setUp()
            stored: Deferred[None] = Deferred()
            self.patch(FakeStore, "add", lambda store, row, stored=stored: stored)
            identifier = self.accept(key="key")
            gone, first, second = (self.wait(identifier) for _ in range(3))
            gone.cancel()  # its client has gone
            self.failureResultOf(gone, CancelledError)
            self.finish(self.world.child)
            third = self.wait(identifier)
            for waiting in (first, second, third):
                self.assertNoResult(waiting)
            if error is None:
                stored.callback(None)
            else:
                stored.errback(error)
            for waiting in (first, second, third):
                if error is None:
                    self.successResultOf(waiting)
                else:
                    self.failureResultOf(waiting, StoreError)

    def test_evaluation_that_cannot_be_stored_is_stopped_and_forgotten(self) -> None:
        self.world.store.error = StoreError()
        identifier = self.accept()
        self.failureResultOf(self.wait(identifier), StoreError)
        self.assertEqual(self.world.child.signals, [15])
        self.assert_refused(EvaluationExpired, identifier)
        self.finish(self.world.child)
        self.assertEqual((self.world.store.rows, self.list_all()), ({}, []))
