"""`evaluations.starting`: what another process of the daemon makes of the rows in the store."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any
from unittest import mock

import attrs
import msgspec
from twisted.internet.defer import Deferred, succeed

from tawebeval.config import Configuration, EvaluationSettings, LimitSettings
from tawebeval.core.evaluations import Checkout, Commit, EvaluationState
from tawebeval.core.events import StdoutChanged
from tawebeval.core.form import SubmissionFile
from tawebeval.errors import (
    DiscardedCursor,
    EvaluationExpired,
    InvalidCursor,
    ServerBusy,
    ServerStopping,
    StoreError,
    make_limit_failure,
)
from tawebeval.evaluations import eventlog, service
from tawebeval.evaluations.service import ReceivedForm
from tawebeval.evaluations.starting import InheritedResources, read_all_events
from tawebeval.evaluations.store import EvaluationDetails, format_rfc3339_time
from tawebeval.linux.filetree import remove_tree
from tawebeval.sandbox.workspace import derive_directory_name, derive_log_pseudonym
from tawebeval.webhooks.records import CallbackState
from tests.cases.evaluations import CANCELLED, RegistryTestCase
from tests.fakes.archive import FakeArchive
from tests.fakes.files import FakeStore, MemoryEventFiles
from tests.fakes.gates import Gate
from tests.fakes.sandbox import FakeSandboxedRun
from tests.fakes.world import EPOCH, IdleThreads, UntidyThreads, make_request

URL = "https://receiver.example/hook"


class TidyThreads(IdleThreads):
    """Threads that also clean up after evaluations."""

    async def run_in_thread(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        if call.__name__ == "remove_all":
            return call()
        return await super().run_in_thread(call, *args, **kwargs)


class RestoringTestCase(RegistryTestCase):
    """A registry whose process ends; another one goes on with its rows and files."""

    configuration = Configuration(
        evaluations=EvaluationSettings(retain=5),
        limits=LimitSettings(wall_clock=10),
    )

    uploads = Path("/uploads")

    def setUp(self) -> None:
        super().setUp()
        self.world.threads = TidyThreads()
        self.registry = self.make()

    def restart(
        self,
        change: Callable[[EvaluationDetails], EvaluationDetails] = lambda row: row,
        *,
        leaves: bool = False,
    ) -> None:
        """Kill the process, or let it leave its evaluations, and start another one."""
        if leaves:
            self.registry.hand_all_to_next_daemon()
        rows = [change(row) for row in self.world.kill_daemon()]
        self.registry = self.make(2)
        self.registry.restore_evaluations(rows, self.uploads, self.use_checkout_at)
        self.world.turn()

    def use_checkout_at(self, commit: Commit, path: Path) -> Checkout:
        self.world.repositories.users += 1
        return Checkout(commit, path, self.world.repositories._release)

    def files(self, identifier: str) -> MemoryEventFiles:
        name = derive_directory_name(identifier)
        return self.world.files[Path("/evaluations") / name / "output"]

    def states(self, *identifiers: str) -> list[str]:
        return [self.registry.get_status(identifier)["state"] for identifier in identifiers]

    def archived_events(self, identifier: str) -> list[str]:
        self.patch(eventlog, "EventFiles", self.world.open_files)
        found = []
        for ring in read_all_events(self.registry.records[identifier]):
            lines = ring.read_events(ring.begin_cursor, 10**6).lines.splitlines()
            found += [json.loads(line)["payload"] for line in lines]
        return [each if isinstance(each, str) else each["reason"] for each in found]

    def row(self, identifier: str) -> EvaluationDetails:
        return next(
            row for row in self.world.store.load_live_rows() if row.identifier == identifier
        )


class WaitingTests(RestoringTestCase):
    running, queued = 1, 5

    def test_restart_keeps_the_order_of_queued_evaluations(self) -> None:
        identifiers = [self.accept() for _ in range(4)]
        self.restart()
        self.assertEqual(self.states(*identifiers), ["running", "queued", "queued", "queued"])
        places = [self.registry.get_status(one)["queue_place"] for one in identifiers[1:]]
        self.assertEqual(places, [0, 1, 2])
        listed = [entry["evaluation_id"] for entry in self.list_all()]
        self.assertEqual(listed, identifiers)
        self.finish(self.world.child)
        self.assertEqual(self.states(*identifiers[:2]), ["finished", "running"])
        self.assertNotIn(self.accept(), identifiers)
        self.assertEqual(self.registry.records.last_sequence_number, 5)

    def test_evaluation_stopped_during_its_start_does_not_run_after_a_restart(self) -> None:
        identifier = self.accept()
        self.world.repositories.asked.clear()
        self.restart(lambda row: attrs.evolve(row, run=None, failure=CANCELLED))
        self.assertEqual(self.states(identifier), ["cancelled"])
        self.assertEqual(self.world.repositories.asked, [])
        self.assertEqual(self.consume(identifier), ["cancelled"])
        self.assertEqual(self.world.spawn.children, [])

    def test_submission_damaged_by_a_power_cut_is_not_evaluated(self) -> None:
        self.accept()  # takes the only place
        upload = Path(self.mktemp()).absolute()
        self.uploads = upload.parent
        file = upload / "submission" / "source" / "solution.py"
        file.parent.mkdir(parents=True)
        request = make_request(submission=(SubmissionFile("source", "solution.py", 7),))
        identifier = self.registry.accept_form(ReceivedForm(request, upload))
        for size in (7, 6):
            file.write_bytes(bytes(size))
            self.restart()
            self.assertEqual(self.states(identifier), ["queued" if size == 7 else "failed"])
        self.assertEqual(self.consume(identifier), ["lost"])

    def test_evaluation_is_restored_although_another_row_cannot_be_restored(self) -> None:
        broken, other = self.accept(), self.accept()

        def fail(identifier: str) -> Any:
            return derive_directory_name(identifier) if identifier != broken else 1 // 0

        self.patch(service, "derive_directory_name", fail)
        self.restart()
        self.assertEqual(self.states(other), ["running"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertRaises(EvaluationExpired, self.registry.get_status, broken)
        self.assertIn(broken, self.world.store.rows)

    def test_restart_repeats_an_interrupted_fetch(self) -> None:
        self.world.repositories.remote = self.world.repositories.gate.shut = True
        identifier = self.accept()
        self.assertEqual(self.states(identifier), ["fetching"])
        self.world.repositories.asked.clear()
        self.restart()
        self.assertEqual(self.states(identifier), ["fetching"])
        self.assertEqual(len(self.world.repositories.asked), 1)
        self.world.repositories.gate.open()
        self.assertEqual(self.states(identifier), ["running"])

    def test_evaluation_stopped_during_its_fetch_is_counted_in_its_last_state(self) -> None:
        self.accept()
        stopped = {"state": EvaluationState.FETCHING, "run": None, "failure": CANCELLED}
        self.restart(lambda row: attrs.evolve(row, **stopped))
        counts = self.registry.context.counters.counts_by_state
        found = {state: count for state, count in counts.items() if count}
        self.assertEqual(found, {EvaluationState.CANCELLED: 1})


class RunningTests(RestoringTestCase):
    def test_restart_resumes_the_parser_within_a_data_block(self) -> None:
        identifier, child = self.start()
        names = "EVALUATION_DATA_BEGIN", "EVALUATION_DATA_END"
        begin, end = (child.environment[name].encode() for name in names)
        printed = b"one\n" + begin + b'\n{"reason": "1'
        child.print(printed)
        row, before = self.row(identifier), self.page(identifier)
        assert row.run is not None
        self.restart()
        self.assertEqual(self.page(identifier), before)
        self.assertEqual(self.world.repositories.users, 1)
        found = (row.run.sandbox_description, child.pid, child.start_time_ticks, len(printed))
        self.assertEqual(self.world.sandbox.last.resumed_as, [found])
        self.assertEqual(self.registry.get_status(identifier)["buffered_bytes"], len(printed))
        self.world.child.print(b'2"}\n' + end + b"\ntwo\n")
        self.assertEqual(self.page(identifier)["data"], ["one", "12", "two"])
        self.finish(self.world.child)
        self.assertEqual(self.consume(identifier), ["one", "12", "two", "\n"])
        self.assertEqual((self.world.store.rows, self.world.repositories.users), ({}, 0))

    def test_event_times_do_not_go_back_if_the_clock_is_set_back_at_a_restart(self) -> None:
        identifier, child = self.start()
        self.world.clock.advance(5)
        child.print(b"one\n")
        with mock.patch("tests.fakes.world.EPOCH", EPOCH - 1000):
            self.restart()
            self.world.child.print(b"two\n")
            self.finish(self.world.child, 3)
        page = self.registry.events.read_page_now(identifier, None, includes_times=True)
        times = [json.loads(line)["time"] for line in page.events.lines.splitlines()]
        self.assertEqual(times, [format_rfc3339_time(EPOCH + 5)] * len(times))
        ended = self.registry.records[identifier].details.state_times["ended"]
        self.assertEqual(ended, EPOCH + 5)

    def test_first_event_is_delivered_only_after_the_row_of_the_run_is_committed(self) -> None:
        for error in (None, StoreError()):
            self.setUp()
            stored: Deferred[None] = Deferred()
            self.patch(FakeStore, "flush", lambda store, stored=stored: stored)
            identifier, child = self.start(b"one\n")
            self.world.turn()
            self.assertEqual(self.page(identifier)["data"], [])
            self.assertIsNotNone(self.row(identifier).run)
            # On a full disk the run goes on.
            stored.callback(None) if error is None else stored.errback(error)
            self.world.turn()
            self.finish(child)
            self.assertEqual(self.page(identifier)["data"], ["one", "\n"])

    def test_time_limit_includes_time_without_a_daemon_except_after_a_hand_over(self) -> None:
        for leaves, left in ((False, 3), (True, 7)):
            self.setUp()
            self.start()
            self.world.clock.advance(3)
            if leaves:
                self.registry.hand_all_to_next_daemon()
            self.world.clock.advance(4)
            self.restart()
            self.world.clock.advance(left - 1)
            self.assertEqual(self.world.child.signals, [])
            self.world.clock.advance(1)
            self.assertEqual(self.world.child.signals, [SIGTERM])
            self.world.child.end(signal=SIGTERM)

    def test_run_that_was_handed_over_is_stopped_only_by_the_next_process(self) -> None:
        identifier, child = self.start(b"one\n")
        run = self.registry.records[identifier].run
        assert run is not None
        self.registry.hand_all_to_next_daemon()
        asked = Deferred.fromCoroutine(self.registry.cancel_evaluation(identifier))
        run.stop(make_limit_failure("memory", "memory", "used over 1 MiB of memory", 2**20))
        self.world.turn()
        self.assertNoResult(asked)
        self.assertEqual(child.signals, [])
        self.restart()
        self.assertEqual(self.world.child.signals, [SIGTERM])
        self.finish(self.world.child, signal=SIGTERM)
        self.assertEqual(self.consume(identifier), ["one", "\n", "cancelled"])

    def test_end_of_a_run_that_was_handed_over_is_recorded_only_by_the_next_process(self) -> None:
        identifier, child = self.start(b"one\n")
        self.registry.hand_all_to_next_daemon()
        self.finish(child)
        self.assertEqual(self.states(identifier), ["running"])
        self.assertNotEqual(self.page(identifier)["end"], "end")
        self.restart()
        self.finish(self.world.child)
        self.assertEqual(self.states(identifier), ["finished"])
        self.assertEqual(self.consume(identifier), ["one", "\n"])

    def test_run_that_ends_after_the_stop_timeout_is_finished_by_the_next_process(self) -> None:
        identifier, child = self.start(b"one\n")
        closed = Deferred.fromCoroutine(self.registry.drain_and_close(end_seconds=5))
        self.world.clock.pump([2, 2.999])
        self.assertEqual(child.signals, [SIGTERM, SIGKILL])
        self.assertNoResult(closed)
        self.world.clock.advance(0.001)
        self.successResultOf(closed)
        self.assertEqual(self.states(identifier), ["running"])
        self.restart()
        self.world.child.print(b"two\n")
        self.finish(self.world.child, signal=SIGKILL)
        self.assertEqual(self.consume(identifier), ["one", "\n", "two", "\n", "shutdown"])

    def test_begin_cursor_is_saved_after_files_of_acknowledged_events_are_freed(self) -> None:
        identifier, _ = self.start(b"one\ntwo\n")
        self.page(identifier, "2")
        record = self.registry.records[identifier]
        self.assertEqual(self.row(identifier).begin_cursor, 0)
        self.files(identifier).freed = (-1, 0)  # there is something to give back
        record.events.free_discarded_files()
        self.assertEqual(self.row(identifier).begin_cursor, 2)
        self.restart()
        self.assert_refused(DiscardedCursor, identifier, None, "1")
        self.assertEqual(self.page(identifier, "2")["data"], ["two"])

    def test_restart_saves_no_row_without_the_data_of_the_run(self) -> None:
        identifier, _ = self.start(b"one\ntwo\n")
        self.page(identifier, "2")
        saved: list[EvaluationDetails] = []
        save = FakeStore.save

        def note(store: FakeStore, row: EvaluationDetails) -> None:
            saved.append(row)
            save(store, row)

        self.patch(FakeStore, "save", note)
        files = self.files(identifier)
        files.freed = (-1, 0)  # there is something to give back
        self.restart(lambda row: attrs.evolve(row, begin_cursor=2))
        self.assertEqual(files.freed, (0, 0))
        self.assertNotIn(None, [row.run for row in saved])

    def test_run_ends_as_lost_if_its_stdout_was_changed(self) -> None:
        identifier, _ = self.start(b"one\ntwo\n")
        del self.files(identifier).stdout[2:]
        self.restart()
        self.assertEqual(self.states(identifier), ["failed"])
        self.assertEqual(self.page(identifier)["data"][-1], "lost")
        self.assertEqual(self.registry.get_status(identifier)["error"]["reason"], "lost")
        self.assertEqual(self.world.sandbox.last.closed, 1)
        self.assertEqual(self.world.repositories.users, 0)
        before = self.registry.get_status(identifier)["error"], self.page(identifier)
        self.restart()
        after = self.registry.get_status(identifier)["error"], self.page(identifier)
        self.assertEqual(after, before)
        self.assertEqual(self.archived_events(identifier), ["lost"])

    def test_end_is_delivered_only_after_its_row_is_committed(self) -> None:
        for failed in (False, True):
            stored: Deferred[None] = Deferred()
            identifier, child = self.start(b"one\n")
            patch = self.patch(FakeStore, "flush", lambda store, stored=stored: stored)
            if failed:
                self.world.sandbox.last.run_limits.over = make_limit_failure(
                    "memory", "memory", "used over 1 MiB of memory", 2**20
                )
            self.finish(child, 9 if failed else 0)
            page = self.page(identifier)
            self.assertEqual((page["data"], page["end"]), (["one", "\n"], "2"))
            status = self.registry.get_status(identifier)
            shown = [status[name] for name in ("state", "ended", "exit", "error")]
            self.assertEqual(shown, ["running", None, None, None])
            patch.restore()
            stored.callback(None)
            self.assertEqual(self.consume(identifier), ["one", "\n", *["memory"] * failed])

    def test_stop_signal_is_sent_only_after_its_reason_is_committed(self) -> None:
        stored: Deferred[None] = Deferred()
        identifier, child = self.start(b"one\n")
        patch = self.patch(FakeStore, "flush", lambda store: stored)
        self.world.clock.advance(self.registry.get_status(identifier)["limits"]["wall_clock"])
        self.assertEqual(child.signals, [])
        patch.restore()
        stored.callback(None)
        self.assertEqual(child.signals, [SIGTERM])
        self.restart()
        self.finish(self.world.child, signal=SIGTERM)
        self.assertEqual(self.consume(identifier), ["one", "\n", "timeout"])

    def test_end_stored_before_a_kill_is_delivered_after_the_restart(self) -> None:
        identifier, child = self.start(b"one\n")
        self.patch(FakeStore, "flush", lambda store: Deferred())
        self.world.sandbox.last.run_limits.over = make_limit_failure(
            "memory", "memory", "used over 1 MiB of memory", 2**20
        )
        self.finish(child, 9)
        self.patch(FakeStore, "flush", lambda store: succeed(None))
        self.restart()
        self.assertEqual(self.states(identifier), ["failed"])
        self.assertEqual(self.consume(identifier), ["one", "\n", "memory"])

    def test_reader_gets_a_lost_event_and_the_end_if_a_power_cut_deleted_events(self) -> None:
        identifier, _ = self.start(b"one\ntwo\nthree\n")
        after = self.page(identifier)["end"]
        del self.files(identifier).marks[1:]
        del self.files(identifier).stdout[4:]
        self.world.sandbox.unable = OSError(2, "No such file or directory")
        for _ in range(2):
            self.restart()
            for each in (after, "3", "2", "3"):  # 3: where the log ends with the error now
                page = self.page(identifier, each)
                self.assertEqual((page["data"], page["end"]), (["lost"], "end"))
                subscription = self.subscribe(identifier, each)
                with subscription.reader_context:
                    self.assertFalse(subscription.has_ended)
                    self.assertEqual(self.read(subscription).count, 1)
                    self.assertTrue(subscription.has_ended)
        self.page(identifier, "end")
        self.assertEqual(self.world.store.rows, {})

    def test_error_of_a_lost_evaluation_is_delivered_once_after_a_restart(self) -> None:
        identifier, child = self.start(b"one\n")
        child.lost_reason = "the machine was restarted"
        self.finish(child, signal=SIGKILL)
        self.restart()
        for after, events in (("2", ["lost"]), ("3", [])):
            page = self.page(identifier, after)
            self.assertEqual((page["data"], page["end"]), (events, "end"))
        self.assertTrue(self.subscribe(identifier, "3").has_ended)

    def test_text_after_a_printed_file_is_kept_if_a_restart_cannot_read_the_file(self) -> None:
        identifier, child = self.start(b"one\n")
        names = "EVALUATION_FILE_BEGIN", "EVALUATION_FILE_END"
        begin, end = (child.environment[name].encode() for name in names)
        block = b"\n".join((begin, b"X-SEGI-As: path", b"", b"/tmp/file", end, b"two\n"))
        self.files(identifier).stdout += block + b"x\n" * 100_000
        self.world.sandbox.unable = OSError(2, "No such file or directory")
        self.restart()
        self.world.clock.pump([0] * 20)
        events = self.consume(identifier)
        self.assertEqual(events[:5], ["one", "protocol", "two", "\n", "x"])
        self.assertEqual((len(events), events[-1]), (200_005, "lost"))
        self.assertEqual(self.world.sandbox.last.closed, 1)

    def test_output_beyond_the_limit_is_not_parsed_after_a_restart(self) -> None:
        self.world.configuration = msgspec.structs.replace(
            self.configuration, limits=LimitSettings(wall_clock=10, output=1024)
        )
        self.registry = self.make()
        identifier, _ = self.start(b"x" * 1000)
        self.files(identifier).stdout += b"y" * 25
        self.restart()
        self.world.child.print(b"y")
        self.finish(self.world.child)
        self.assertEqual(self.consume(identifier), ["x" * 1000 + "y" * 24, "output"])

    def test_cursor_after_an_error_stays_valid_if_a_restart_resumes_the_run(self) -> None:
        identifier, child = self.start(b"one\n")
        row = self.row(identifier)
        self.finish(child, 3)
        self.assertEqual(self.page(identifier, "2")["data"], ["exit"])
        self.restart(lambda ended: attrs.evolve(row, failure=ended.failure))
        self.assertEqual(self.page(identifier, "3")["end"], "3")
        self.assert_refused(ServerBusy, identifier, "end")
        self.finish(self.world.child, 3)
        self.assertEqual(self.page(identifier, "3")["end"], "end")
        self.assert_refused(InvalidCursor, identifier, "4")

    def test_defect_in_resuming_ends_the_run_as_lost(self) -> None:
        identifier, _ = self.start()
        self.patch(FakeSandboxedRun, "resume_process", lambda *_: 1 // 0)
        self.restart()
        self.assertEqual(self.consume(identifier), ["lost"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_restart_ends_an_evaluation_on_a_cluster_as_lost(self) -> None:
        self.patch(FakeSandboxedRun, "make_resume_data", lambda _: {"group": None, "kind": "slurm"})
        identifier, _ = self.start(b"one\n")
        self.restart()
        self.assertEqual(self.consume(identifier), ["one", "\n", "lost"])

    def test_forgotten_run_is_removed_when_it_has_ended(self) -> None:
        identifier, _ = self.start(b"one\n")
        self.expire(5)
        self.assertTrue(self.row(identifier).is_forgotten)
        self.restart()
        self.assert_refused(EvaluationExpired, identifier)
        self.assertEqual(self.world.child.signals, [SIGTERM])
        self.finish(self.world.child)
        self.assertEqual((self.world.store.rows, self.world.disk.used), ({}, 0))


class EndedTests(RestoringTestCase):
    def test_unread_evaluation_is_unchanged_after_a_restart(self) -> None:
        for status in (0, 3, None):
            if status is None:
                self.world.repositories.fail("repository", "no")
                identifier = self.accept()
            else:
                identifier, child = self.start(b"one\ntwo")
                child.complain(b"careful")
                self.finish(child, status)
            before = self.page(identifier), self.registry.get_status(identifier), self.list_all()
            self.restart()
            after = self.page(identifier), self.registry.get_status(identifier), self.list_all()
            self.assertEqual(after, before)
            events = self.consume(identifier)[:3]
            self.assertEqual(events, ["repository"] if status is None else ["one", "\n", "two"])
            self.assertEqual(self.world.store.rows, {})

    def test_last_acknowledgement_is_refused_after_the_hand_over(self) -> None:
        identifier = self.evaluate(b"one\n")
        self.registry.hand_all_to_next_daemon()
        self.assertEqual(self.page(identifier)["end"], "end")
        self.assertRaises(ServerStopping, self.registry.events.read_page_now, identifier, "end")
        self.restart()
        self.assertEqual(self.consume(identifier), ["one", "\n"])
        self.assertEqual(self.world.store.rows, {})

    def test_restart_without_stored_events_gives_one_lost_event(self) -> None:
        identifier = self.evaluate(b"one\ntwo\n", 3)
        files = self.files(identifier)
        files.stdout.clear()
        files.segments.clear()
        self.restart()
        self.assertEqual(self.consume(identifier), ["lost"])
        self.assertEqual(self.world.store.rows, {})

    def test_restart_without_marks_of_stdout_ends_the_events_with_a_lost_event(self) -> None:
        for status, last in ((0, 4), (3, 5)):
            identifier, child = self.start(b"one\n")
            child.print(b"two\n")
            self.finish(child, status)
            files = self.files(identifier)
            files.segments.clear()
            del files.marks[1:]
            self.restart()
            self.assertEqual(self.page(identifier)["data"], ["one", "\n", "two", "lost"])
            self.assertRaises(StdoutChanged, self.archived_events, identifier)
            self.assertEqual(self.page(identifier, str(last))["data"], ["lost"])

    def test_restart_does_not_replace_the_lost_event_by_undelivered_output(self) -> None:
        identifier, child = self.start(b"one\ntwo\n")
        files = self.files(identifier)
        files.error = OSError(errno.ENOSPC, "No space left on device")
        child.print(b"three\nfour\n")
        self.finish(child, 9)
        files.error = None
        before = self.page(identifier)
        self.assertEqual(before["data"], ["one", "\n", "two", "lost"])
        marks = files.marks[:]
        for _ in range(2):
            self.restart()
            self.assertEqual(self.page(identifier), before)
            self.assertEqual(files.marks, marks)
        self.assertEqual(self.archived_events(identifier), before["data"])

    def test_evaluation_is_not_archived_if_its_acknowledged_events_are_gone(self) -> None:
        identifier = self.evaluate(b"one\ntwo\n")
        self.files(identifier).stdout[:4] = bytes(4)  # the punched part
        self.assertRaises(StdoutChanged, self.archived_events, identifier)
        self.restart(lambda row: attrs.evolve(row, begin_cursor=2))
        self.assertRaises(DiscardedCursor, self.archived_events, identifier)

    def test_unread_archived_evaluation_keeps_its_key_over_a_restart(self) -> None:
        self.world.archive = archive = FakeArchive()
        self.registry = self.make()
        identifier = self.accept(key="some key")
        self.world.child.print(b"a\n")
        self.finish(self.world.child)
        self.restart()
        self.assertEqual(self.accept(key="some key"), identifier)
        self.assertEqual([one["evaluation_id"] for one in self.list_all()], [identifier])
        self.assertEqual(self.consume(identifier), ["a", "\n"])
        self.assertEqual(len(archive.ended), 1)
        self.assertEqual(self.world.store.load_live_rows(), [])
        self.assertEqual(len(self.world.store.rows), 1)

    def test_forgotten_evaluation_keeps_its_row_until_the_commit_or_its_failure(self) -> None:
        identifier = self.evaluate(b"one\n")
        stored: Deferred[None] = Deferred()
        self.patch(FakeStore, "flush_soon", lambda store: stored)
        self.consume(identifier)
        self.assertTrue(self.row(identifier).is_forgotten)
        stored.errback(StoreError())  # a full disk
        self.world.turn()
        self.assertEqual(self.world.store.rows, {})

    def test_error_has_the_same_time_after_a_restart(self) -> None:
        identifier, child = self.start(b"one\n")
        evaluation = self.registry.records[identifier]
        ticks = count(5)
        self.patch(evaluation.context, "read_boot_clock", lambda: next(ticks) / 8)
        self.finish(child, 3)
        before = self.last_event(identifier)
        self.restart()
        self.assertEqual(self.last_event(identifier), before)

    def last_event(self, identifier: str) -> bytes:
        cursor = str(self.registry.records[identifier].events.event_log.end_cursor - 1)
        return self.registry.events.read_page_now(
            identifier, cursor, includes_times=True
        ).events.lines

    def test_next_process_cleans_up_with_the_path_of_the_upload_and_calls_back(self) -> None:
        self.world.threads = threads = UntidyThreads()
        self.registry = self.make()
        threads.tidied.shut = True
        self.world.repositories.fail("repository", "no")
        identifier = self.accept(callback_url=URL)
        self.assertFalse(self.row(identifier).is_cleaned_up)
        self.assertEqual(self.callbacks.sent, [])
        self.restart()
        upload = self.registry.records[identifier].details.upload_directory
        self.assertEqual(upload, Path("/uploads/some"))
        threads.tidied.open()
        self.world.turn()
        self.assertTrue(self.row(identifier).is_cleaned_up)
        self.assertEqual(len(self.callbacks.sent), 1)

    def test_ended_evaluation_expires_after_the_restart(self) -> None:
        identifier = self.evaluate(b"one\n")
        self.world.clock.advance(3)
        self.restart()
        self.expire(4)
        self.assertIn(identifier, self.registry.records)
        self.expire(1)
        self.assertEqual((self.world.store.rows, self.world.disk.used), ({}, 0))


class CallbackTests(RestoringTestCase):
    def start_callback(self) -> tuple[str, dict[str, Any]]:
        """Let an evaluation end whose callback is not delivered; return what was sent."""
        identifier = self.accept(callback_url=URL)
        self.finish(self.world.child)
        (sent,) = self.callbacks.sent
        self.assertEqual(sent[0], derive_log_pseudonym(identifier))
        return sent

    def test_callback_not_yet_delivered_is_sent_again_after_a_restart(self) -> None:
        sent = self.start_callback()
        self.restart()
        self.assertEqual(self.callbacks.sent, [sent])

    def test_callback_of_a_removed_evaluation_is_sent_again(self) -> None:
        sent = self.start_callback()
        self.consume(sent[1]["evaluation_id"])
        for _ in range(2):
            self.assertEqual(
                InheritedResources(self.world.store.load_live_rows()).directory_names, set()
            )
            self.restart()
            self.assertEqual(self.callbacks.sent, [sent])
            self.assertEqual(self.list_all(), [])

    def test_callback_of_an_archived_evaluation_is_sent_again(self) -> None:
        self.world.archive = FakeArchive()
        self.registry = self.make()
        sent = self.start_callback()
        identifier = sent[1]["evaluation_id"]
        self.consume(identifier)
        self.restart()
        self.assertEqual(self.callbacks.sent, [sent])
        # The row outlives the copy in the archive.
        self.assertTrue(self.world.archive.on_removal(identifier))
        self.restart()
        self.assertEqual(self.callbacks.sent, [sent])

    def test_restart_deletes_the_row_that_an_interrupted_removal_left(self) -> None:
        identifier = self.accept()
        self.finish(self.world.child)
        self.restart(lambda row: attrs.evolve(row, is_forgotten=True, is_directory_removed=True))
        self.assertEqual((self.world.store.rows, self.list_all()), ({}, []))
        self.assert_refused(EvaluationExpired, identifier)

    def test_callback_delivered_during_the_removal_is_not_sent_again(self) -> None:
        removal = Gate()
        removal.shut = True

        class Threads(TidyThreads):
            async def run_in_thread(self, call: Any, *args: Any, **kwargs: Any) -> Any:
                if call is remove_tree:
                    await removal.wait()
                return await super().run_in_thread(call, *args, **kwargs)

        self.world.threads = Threads()
        self.registry = self.make()
        ends: list[Callable[[], object]] = []
        self.patch(self.callbacks, "start_delivery", lambda *given: ends.append(given[2]))
        identifier = self.accept(callback_url=URL)
        self.finish(self.world.child)
        details = self.registry.records[identifier].details
        self.consume(identifier)
        assert details.callback is not None
        details.callback.state = CallbackState.DELIVERED
        ends[0]()
        self.restart()
        self.assertEqual((self.callbacks.sent, self.world.store.rows), ([], {}))


class InheritedResourcesTests(RestoringTestCase):
    running = 1

    def test_inherited_resources_name_directories_and_cgroups_of_live_evaluations(self) -> None:
        self.patch(FakeSandboxedRun, "make_resume_data", lambda _: {"group": "group"})
        running, queued = self.accept(), self.accept()
        left = InheritedResources(self.world.store.load_live_rows())
        both = {derive_directory_name(one) for one in (running, queued)}
        self.assertEqual(left.directory_names, both | {"some"})
        self.assertEqual(left.running_directory_names, {derive_directory_name(running)})
        self.assertEqual(left.cgroup_names, {"group"})
        self.assertEqual(InheritedResources().cgroup_names, set())
