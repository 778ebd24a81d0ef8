"""`evaluations.service`: the archive of evaluations that have ended, and a store that fails."""

from __future__ import annotations

import gc
from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred

from tawebeval.errors import EvaluationExpired, ServerBusy, StoreError
from tests.cases.evaluations import END, RegistryTestCase
from tests.fakes.archive import FakeArchive
from tests.fakes.callbacks import FakeCallbacks
from tests.fakes.files import FakeStore


class ArchiveTests(RegistryTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.world.archive = self.archive = FakeArchive()
        self.registry = self.make()

    def status(self, identifier: str) -> dict[str, object] | None:
        reading = Deferred.fromCoroutine(self.registry.archived.read_status(identifier, ""))
        reading.addErrback(lambda failure: failure.trap(EvaluationExpired) and None)
        return self.successResultOf(reading)

    def test_archived_evaluation_keeps_its_state_when_it_is_forgotten(self) -> None:
        for exit_status, state in ((0, "finished"), (3, "failed")):
            identifier, child = self.start(b"a\n")
            self.finish(child, exit_status)
            self.consume(identifier)
            self.assert_refused(EvaluationExpired, identifier)
            status = self.status(identifier)
            assert status is not None
            self.assertEqual((status["state"], status["archived"]), (state, True))
            self.assertEqual(self.archive.ended[-1].end_document["status"]["state"], state)
        self.assertEqual((len(self.world.store.rows), self.world.disk.used), (2, 0))

    def test_unread_evaluation_outlives_its_copy_in_the_archive(self) -> None:
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.assertIsNotNone(self.status(identifier))
        self.assertTrue(self.archive.release_copy(identifier))
        self.assertIsNone(self.status(identifier))
        (row,) = self.world.store.load_live()
        self.assertEqual((row.identifier, row.archived), (identifier, None))
        self.assertEqual(self.consume(identifier), ["a", "\n"])
        self.assertEqual(self.world.store.rows, {})
        self.assertFalse(self.archive.release_copy(identifier))

    def test_late_callback_brings_back_no_row_that_the_archive_has_removed(self) -> None:
        ends: list[Callable[[], object]] = []
        self.patch(FakeCallbacks, "start_delivery", lambda _, *arguments: ends.append(arguments[3]))
        identifier = self.accept(callback_url="https://receiver.example/hook")
        self.finish(self.world.child)
        self.consume(identifier)
        gc.collect()
        self.assertFalse(self.archive.release_copy(identifier))
        self.world.store.delete(identifier)
        (on_end,) = ends
        on_end()
        self.assertEqual(self.world.store.rows, {})

    def test_events_stay_on_the_disk_until_the_archive_has_them(self) -> None:
        self.archive.gate.shut = True
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.page(identifier, "2")
        record = self.registry.records[identifier]
        self.page(identifier, END)
        self.assertTrue(record.events.keeps_files)
        self.assertEqual((record.is_removed, self.world.disk.used), (False, 2))
        self.archive.gate.open()
        self.assertEqual((record.is_removed, self.world.disk.used), (True, 0))

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
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.consume(identifier)
        self.assertEqual([one["evaluation_id"] for one in self.list_all()], [identifier])
        reader = self.registry.archived
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

    def test_evaluation_whose_row_cannot_be_stored_is_not_archived(self) -> None:
        identifier, child = self.start(b"a\n")
        self.world.store.error = StoreError()
        self.finish(child)
        self.assertIsNone(self.status(identifier))
        self.assertEqual(self.consume(identifier), ["a", "\n"])
        self.assertEqual((self.world.store.rows, self.world.disk.used), ({}, 0))

    def test_defect_of_the_archive_keeps_nothing(self) -> None:
        self.archive.gate.error = ZeroDivisionError("oh")
        identifier, child = self.start(b"a\n")
        self.finish(child)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.consume(identifier)
        self.assertEqual((self.world.store.rows, self.world.disk.used), ({}, 0))


class StoreTests(RegistryTestCase):
    def wait(self, identifier: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self.registry.wait_until_stored(identifier))

    def test_accepted_evaluation_is_stored(self) -> None:
        identifier = self.accept()
        self.successResultOf(self.wait(identifier))
        self.assertIn(identifier, self.world.store.rows)

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
