"""`web`: uploads that are refused while they arrive, or given up."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.logger import LogLevel, capturedLogs, formatEvent

from tawebeval.config import Configuration, LimitSettings
from tawebeval.evaluations import service
from tawebeval.sandbox.workspace import derive_directory_name
from tawebeval.web.upload import WRITE_BATCH_BYTES
from tests.cases.web import RawTestCase
from tests.fakes.clients import MULTIPART, Connection, Part, form, head, parts

PER_FILE = 8192  # bytes that a file counts besides those received


class EarlyRefusalTests(RawTestCase):
    def assert_refused(self, connection: Connection, status: int) -> None:
        """Hold that the answer is there, and that the connection lingers before it is cut."""
        reactor = self.service.reactor
        answer = self.check_raw(connection.answer(), status)
        self.assertEqual(answer.headers["connection"], "close")
        self.assertFalse(connection.closed)
        for _ in range(10):
            connection.send(b"x" * 1000)
        self.assertEqual(connection.received, b"")
        reactor.advance(4.9)
        self.assertFalse(connection.transport.disconnected)
        reactor.advance(0.1)
        self.assertTrue(connection.transport.disconnected)
        connection.lose()
        self.assertEqual(self.service.leftovers(), [])
        self.assertEqual(self.service.world.spawn.children, [])
        self.assertEqual(reactor.getDelayedCalls(), [])

    def test_announced_length_over_the_limit_is_413_before_the_body(self) -> None:
        connection = self.begin_form(10**6)
        answer = connection.received
        for _ in range(20):
            connection.send(b"x" * 10_000)
        self.assertEqual(connection.received, answer)
        self.assert_refused(connection, 413)

    def test_chunked_body_over_the_limit_is_413_before_the_end_of_the_body(self) -> None:
        connection = self.begin_form(None)
        body = form(parts(source=b"x" * 200_000))[:110_000]
        connection.send(b"%x\r\n" % (10**6))
        for at in range(0, len(body), 1000):
            if not connection.received:
                connection.send(body[at : at + 1000])
        self.assert_refused(connection, 413)

    def test_wrong_headers_are_refused_before_the_body(self) -> None:
        good, length = ("Content-Type", MULTIPART), ("Content-Length", "100000")
        for headers, status in (
            ([], 415),
            ([("Content-Type", "application/json")], 415),
            *(([good, ("Content-Encoding", coding)], 415) for coding in ("gzip", "identity, br")),
            ([("Content-Type", "multipart/form-data")], 400),
            ([good, good], 400),
            ([good, ("Idempotency-Key", "k"), ("Idempotency-Key", "k")], 400),
        ):
            connection = self.connect()
            connection.send(head("POST /evaluate", [length, *headers]))
            self.assert_refused(connection, status)
        connection = self.begin_form(1000, Content_Encoding="Identity")
        self.assertEqual(connection.received, b"")
        connection.lose()

    def test_upload_that_does_not_fit_is_503_before_the_body(self) -> None:
        spool = self.service.registry.submissions.budget
        self.service.registry.submissions.budget.take_within_quota(spool.total - 1000, "")
        connection = self.begin_form(1001)
        answer = self.check_raw(connection.answer(), 503)
        self.assertGreater(int(answer.headers["retry-after"]), 0)
        connection.lose()
        connection = self.begin_form(1000)
        self.assertEqual(connection.received, b"")
        connection.lose()
        self.assertEqual(spool.used, spool.total - 1000)

    def test_upload_is_503_and_removed_once_the_spool_is_full(self) -> None:
        spool = self.service.registry.submissions.budget
        connection = self.begin_form(90_000)
        connection.send(form(parts(source=b"x" * 80_000))[:50_000])
        self.assertEqual((connection.received, spool.used), (b"", 50_000 + PER_FILE))
        others = spool.total - spool.used
        spool.take_within_quota(others, "")
        connection.send(b"x")
        self.assert_refused(connection, 503)
        self.assertEqual(spool.used, others)

    def test_upload_takes_spool_space_until_forgotten_or_refused(self) -> None:
        spool, body = self.service.registry.submissions.budget, form(parts())
        for status, sent in ((200, body), (400, form(parts(commit_oid=b"x")))):
            connection = self.begin_form(len(sent))
            connection.send(sent)
            self.assertEqual(connection.answer().status, status)
            self.assertEqual(spool.used, len(body) + PER_FILE)
        self.service.world.end()
        self.assertEqual(spool.used, len(body) + PER_FILE)
        (identifier,) = [
            one["evaluation_id"] for one in self.request("GET", "/evaluations").json()["data"]
        ]
        self.page(identifier, "?after=end")
        self.assertEqual(spool.used, 0)

    def test_broken_field_is_400_at_once_and_removed(self) -> None:
        connection = self.begin_form(90_000)
        body = form([*parts(), Part("submission[BAD]", b"x" * 50_000)])
        connection.send(body[:1500])
        self.assert_refused(connection, 400)

    def test_malformed_form_is_400_at_its_first_byte(self) -> None:
        connection = self.begin_form(90_000)
        connection.send(b"{}" * 100 + form([]))
        self.assert_refused(connection, 400)

    def test_expect_100_continue_is_answered_or_refused(self) -> None:
        connection = self.begin_form(len(form(parts())), Expect="100-continue")
        self.assertEqual(connection.received, b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.transport.clear()
        connection.send(form(parts()))
        self.assertEqual(connection.answer().status, 200)
        connection = self.begin_form(10**6, Expect="100-continue")
        self.check_raw(connection.answer(), 413)
        connection.lose()

    def test_no_100_continue_follows_a_refusal(self) -> None:
        for line, length in (("GET /nowhere", 0), ("POST /evaluate", 0), ("POST /nowhere", 10**6)):
            connection = self.connect()
            headers = {"Content-Length": str(length), "Expect": "100-continue"}
            connection.send(head(line, headers))
            self.assertNotIn(b"100 Continue", connection.received, line)

    def test_bytes_after_a_refused_body_are_not_read_as_a_request(self) -> None:
        connection = self.begin_form(1000, Content_Type="text/plain")
        self.check_raw(connection.answer(), 415)
        connection.send(b"x" * 1000 + head("GET /health", {}))
        self.assertEqual((connection.received, connection.closed), (b"", True))
        connection.lose()
        self.assertEqual(self.service.reactor.getDelayedCalls(), [])

    def test_full_disk_is_503_without_a_path(self) -> None:
        (self.root / "uploads").rename(self.root / "elsewhere")
        (self.root / "uploads").write_text("no directory")
        connection = self.begin_form(len(form(parts())))
        with capturedLogs() as events:
            connection.send(form(parts()))
        answer = self.check_raw(connection.answer(), 503)
        self.assertIn("retry-after", answer.headers)
        self.assertIn(b"the form cannot be stored: Not a directory", answer.body)
        self.assertNotIn(str(self.root).encode(), answer.body)
        (said,) = [formatEvent(event) for event in events if event["log_level"] == LogLevel.error]
        self.assertIn(str(self.root), said)
        (self.root / "uploads").unlink()
        (self.root / "uploads").mkdir()
        connection.lose()
        spool = self.service.registry.submissions.budget
        unwritten = self.service.context.form_receiver_factory.unwritten_uploads
        self.assertEqual((spool.used, unwritten.size_bytes), (0, 0))


class GivenUpTests(RawTestCase):
    configuration = Configuration(limits=LimitSettings(request_body=4 * WRITE_BATCH_BYTES))

    def test_disconnect_during_an_upload_leaves_nothing(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        body = form(parts(source=b"x" * 2 * WRITE_BATCH_BYTES))
        for length in (0, 1, 200, WRITE_BATCH_BYTES + 1000, len(body) - 1):
            connection = self.begin_form(len(body))
            connection.send(body[:length])
            if length > WRITE_BATCH_BYTES:
                self.assertEqual(len(self.service.leftovers()), 1)
                (upload,) = (self.root / "uploads").iterdir()
                self.assertTrue((upload / "submission" / "source" / "solution.py").exists())
            connection.lose()
            self.assertEqual(self.service.leftovers(), [])
            budget = self.service.registry.submissions.budget
            unwritten = self.service.context.form_receiver_factory.unwritten_uploads
            self.assertEqual((budget.used, unwritten.size_bytes), (0, 0))
            self.assertEqual(self.service.reactor.getDelayedCalls(), [])
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        self.assertEqual(self.service.world.spawn.children, [])

    def test_client_that_leaves_after_the_answer_keeps_its_evaluation(self) -> None:
        connection = self.connect()
        connection.request("POST /evaluate", form(parts()), Content_Type=MULTIPART)
        identifier = connection.answer().json()["evaluation_id"]
        connection.lose()
        self.assertEqual(
            self.service.leftovers(), [f"evaluations/{derive_directory_name(identifier)}"]
        )
        self.assertTrue(self.child.is_running)

    def test_upload_takes_spool_space_until_the_removal_succeeds(self) -> None:
        broken = [True, False]

        def fail_once(directory: Path) -> None:
            if broken.pop(0):
                raise OSError("no")

        spool, arrears = (
            self.service.registry.submissions.budget,
            self.service.registry.context.cleanup_queue,
        )
        self.patch(service, "remove_tree", fail_once)
        with capturedLogs() as events:
            self.post(400, form(parts(seed=b"x", source=b"x" * WRITE_BATCH_BYTES)))
        self.assertGreater(spool.used, 0)
        (said,) = [formatEvent(event) for event in events if event["log_level"] == LogLevel.error]
        self.assertIn("removal of an upload has failed", said)
        arrears.retry_next_calls()
        self.assertEqual((spool.used, broken), (0, []))
